"""Batches of transformers with padding or several sequences a row: each sequence as if computed alone.

Tolerances: fp32 rounds to 6e-8, and two layers of sums of up to 96 terms in another order stay below 1e-5 in the logits
and, with the sums over all tokens, 1e-4 in the gradients.
"""

import dataclasses

import pytest
import torch
from tiny_models import DECODER, GREEDY, SOFTCAPPED, WINDOWED, decoders, error, step, tokens, worst

from attnbench.errors import AttnbenchWarning, InputError
from attnbench.integrations.calls import Calls
from attnbench.integrations.transformers import register
from attnbench.integrations.transformers_sequences import Sequences

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
LENGTHS = (9, 1, 20)
SMALL_WINDOW = {"sliding_window": 6}
MODELS = {
    "Llama": ("LlamaConfig", DECODER, "sdpa"),
    "Qwen3": ("Qwen3Config", DECODER, "sdpa"),
    "Mistral": ("MistralConfig", {**WINDOWED, **SMALL_WINDOW}, "sdpa"),
    "Gemma2": ("Gemma2Config", {**SOFTCAPPED, **SMALL_WINDOW}, "eager"),
    "Gemma3": ("Gemma3TextConfig", {**WINDOWED, **SMALL_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
               "sdpa"),
}  # fmt: skip


@pytest.fixture
def calls():
    return register(backend="reference")


@pytest.fixture
def given(calls, monkeypatch):
    """The cumulative lengths of the queries of each call."""
    found, attend = [], Calls.attend

    def watched(*args, **named):
        found.append(named["cu_seqlens_q"])
        return attend(*args, **named)

    monkeypatch.setattr(Calls, "attend", watched)
    return found


def texts():
    return [tokens(batch=1, length=length, seed=length)[0] for length in LENGTHS]


def padded(side):
    """Padded ``input_ids``, ``attention_mask`` and ``labels`` like a tokenizer's, and which tokens are real."""
    rows = [torch.arange(20) < length if side == "right" else torch.arange(20) >= 20 - length for length in LENGTHS]
    real, x = torch.stack(rows), torch.full((len(LENGTHS), 20), 7)
    x[real] = torch.cat(texts())
    first = real & ~torch.nn.functional.pad(real, (1, 0))[:, :-1]
    labels = x.masked_fill(~real | first, -100)
    return {"input_ids": x, "attention_mask": real.long(), "labels": labels}, real


def packed(*named, **options):
    """The ``named`` entries of a batch by transformers' padding-free collator."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    made = collate([{"input_ids": each.tolist()} for each in texts()])
    return {name: made[name] for name in ("input_ids", "labels", *named)} | options


POSITIONS = {"position_ids"}
LENGTHS_NAMED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
BATCHES = {
    "left": lambda: padded("left"),
    "right": lambda: padded("right"),
    "positions": lambda: (packed(*POSITIONS, use_cache=False), torch.ones(1, sum(LENGTHS), dtype=torch.bool)),
    "positions-and-lengths": lambda: (packed(*POSITIONS, *LENGTHS_NAMED, use_cache=False), torch.ones(1, 30) > 0),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("model", MODELS)
def test_logits_and_gradients_agree_with_transformers_and_each_sequence_alone(calls, model, batch):
    model, ours = decoders(*MODELS[model])
    named, real = BATCHES[batch]()
    known = {name: each for name, each in named.items() if name not in LENGTHS_NAMED}
    wanted, found = step(model, **known), step(ours, **named)
    assert calls.served == 2
    assert error(found[0][real], wanted[0][real]) < 1e-5
    assert worst(found[1], wanted[1]) < 1e-4
    with torch.no_grad():
        alone = torch.cat([model(each[None]).logits[0] for each in texts()])
    assert error(found[0][real], alone) < 1e-5


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("named", [{"position_ids"}, LENGTHS_NAMED, {"cu_seq_lens_q"}])
def test_lengths_or_positions_alone_divide_a_batch_even_with_an_empty_cache(calls, named, dtype):
    """A model creates a cache by default.  Positions that do not restart would change the rotary embedding."""
    model, ours = decoders("MistralConfig", {**WINDOWED, **SMALL_WINDOW})
    wanted = step(model, **packed("position_ids", use_cache=False))
    given = packed(*named)
    given = {name: each.to(dtype) if name.startswith("cu_") else each for name, each in given.items()}
    if "max_length_q" in given and dtype == torch.int64:  # as transformers makes it of positions
        given["max_length_q"] = given["max_length_k"] = torch.tensor(20)
    found = step(ours, **given, use_cache=True)
    assert calls.served == 2
    assert error(found[0], wanted[0]) < 1e-5  # rotations are relative within a sequence
    assert worst(found[1], wanted[1]) < 1e-4


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model", ["Llama", "Gemma3"])
def test_sequence_offsets_are_computed_once_per_batch_and_kind_of_layer(given, model, side, monkeypatch):
    made, make = [], Sequences.of_padded
    monkeypatch.setattr(Sequences, "of_padded", lambda *args: made.append(args) or make(*args))
    layers = {"num_hidden_layers": 4}
    if model == "Gemma3":
        layers["layer_types"] = ["sliding_attention", "full_attention"] * 2
    _, ours = decoders(MODELS[model][0], {**MODELS[model][1], **layers})
    ours(**padded(side)[0])
    assert len(made) == (1 if model == "Llama" else 2)
    assert len(given) == 4
    assert len({id(each) for each in given}) == len(made)


def test_lengths_of_another_dtype_are_converted_once_until_they_change(given):
    model, ours = decoders("LlamaConfig", DECODER)
    x = tokens(batch=1, length=12)

    def agree(starts, place):
        starts[1] = place
        positions = torch.cat([torch.arange(place), torch.arange(12 - place)])[None]
        found = ours(x, cu_seq_lens_q=starts, use_cache=False).logits
        assert error(found, model(x, position_ids=positions, use_cache=False).logits) < 1e-5

    starts = torch.tensor([0, 5, 12])
    agree(starts, 5)
    agree(starts, 8)
    assert given[0] is given[1]
    assert given[2] is given[3]
    assert given[2] is not given[0]
    with torch.inference_mode():  # whose tensors count no changes
        starts = starts.clone()
        agree(starts, 8)
        agree(starts, 5)


def test_a_layer_with_another_batch_size_does_not_use_these_sequences(calls):
    """A mask of one row applies to all rows, as in torch; but packed sequences of one row do not fit more rows."""
    _, ours = decoders("LlamaConfig", DECODER)
    embedded = torch.zeros(1, 20, 64)
    mask = causal_mask(ours.config, embedded, padded("left")[1][:1])
    q = torch.randn(3, 4, 20, 16)
    attend = transformers.AttentionInterface._global_mapping["attnbench"]
    with pytest.raises(InputError, match="a mask tensor other than"):
        attend(torch.nn.Module(), q, q, q, mask)
    register(backend="reference", otherwise="sdpa")
    attend = transformers.AttentionInterface._global_mapping["attnbench"]
    with pytest.warns(AttnbenchWarning):
        found, _ = attend(torch.nn.Module(), q, q, q, mask)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, mask.tensor()).transpose(1, 2)
    assert error(found[:, 11:], wanted[:, 11:]) < 1e-6


def test_sequences_can_be_moved_to_another_device():
    """As accelerate does with the inputs of a layer on another device."""
    register(backend="reference")
    _, ours = decoders("LlamaConfig", DECODER)
    mask = causal_mask(ours.config, torch.zeros(3, 20, 64), padded("left")[1])
    moved = mask.to("meta")
    assert moved == dataclasses.replace(mask, device=torch.device("meta"))
    assert moved.sequences.starts_q is moved.sequences.starts_kv
    assert {x.device.type for x in vars(moved.sequences).values() if isinstance(x, torch.Tensor)} == {"meta"}
    assert moved.sequences.longest_q == 20


def causal_mask(config, embedded, attention_mask, **named):
    from transformers.masking_utils import create_causal_mask

    return create_causal_mask(config, embedded, attention_mask, past_key_values=None, **named)


@pytest.mark.parametrize("model", MODELS)
def test_decoding_after_padded_prompts_agrees(calls, model):
    model, ours = decoders(*MODELS[model])
    named, _ = padded("left")
    options = {"max_new_tokens": 12, **GREEDY}
    x, mask = named["input_ids"], named["attention_mask"]
    found, wanted = (each.generate(x, attention_mask=mask, **options) for each in (ours, model))
    assert torch.equal(found, wanted)
    assert calls.served == 2 * 12
    for row, text in zip(found, texts(), strict=True):
        assert torch.equal(row[20:], model.generate(text[None], **options)[0, len(text) :])


@pytest.mark.parametrize("side", ["left", "right"])
def test_chunked_prompts_with_rows_of_only_padding_agree(calls, side):
    """After a chunk with right padding there is padding between the keys."""
    model, ours = decoders("LlamaConfig", DECODER)
    named, real = padded(side)
    outs = []
    for each in (model, ours):
        cache, pieces = None, []
        for first, last in [(0, 4), (4, 15), (15, 20)]:
            mask = named["attention_mask"][:, :last]
            with torch.no_grad():
                answer = each(
                    named["input_ids"][:, first:last], attention_mask=mask, past_key_values=cache, use_cache=True
                )
            cache = answer.past_key_values
            pieces.append(answer.logits)
        outs.append(torch.cat(pieces, 1))
    assert error(outs[1][real], outs[0][real]) < 1e-5
    nothing = torch.zeros(3, 4, dtype=torch.long)
    with torch.no_grad():
        assert ours(named["input_ids"][:, :4], attention_mask=nothing).logits.isfinite().all()


def test_padding_between_tokens_is_refused_only_with_a_window(calls):
    real = torch.ones(1, 20, dtype=torch.long)
    real[0, 8] = 0
    x = tokens(batch=1, length=20)
    with pytest.raises(InputError, match="padding between the tokens of a row, beside a window"):
        decoders("MistralConfig", {**WINDOWED, **SMALL_WINDOW})[1](x, attention_mask=real)
    model, ours = decoders("LlamaConfig", DECODER)
    found, wanted = (each(x, attention_mask=real).logits[real > 0] for each in (ours, model))
    assert error(found, wanted) < 1e-5


@pytest.mark.parametrize("batch", ["left", "right", "positions", "lengths"])
@pytest.mark.parametrize("model", ["Mistral", "Gemma2"])
def test_the_sdpa_fallback_gets_the_same_sequences(model, batch):
    """Includes lengths that SDPA would ignore."""
    calls = register(backend="sdpa-efficient", otherwise="sdpa")
    model, ours = decoders(*MODELS[model])
    if batch == "lengths":
        named, real = packed(*LENGTHS_NAMED), torch.ones(1, sum(LENGTHS)) > 0
        known = packed("position_ids", use_cache=False)
    else:
        named, real = BATCHES[batch]()
        known = named
    wanted = step(model, **known)
    with pytest.warns(AttnbenchWarning, match="handed on to sdpa"):
        found = step(ours, **named)
    assert (calls.served, calls.handed_on.total()) == (0, 2)
    assert error(found[0][real], wanted[0][real]) < 1e-5
    assert worst(found[1], wanted[1]) < 1e-4


def test_other_divisions_of_rows_are_refused(calls):
    x, positions = tokens(length=12), torch.arange(6).repeat(2, 2)
    chunked = {**DECODER, "attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 96}
    with pytest.raises(InputError, match="packed into one, blocks or overlays"):
        decoders("Llama4TextConfig", chunked)[1](x, position_ids=positions, use_cache=False)
    _, ours = decoders("LlamaConfig", DECODER)
    embedded = ours.get_input_embeddings()(x)
    blocks = torch.full((2, 12), -1)
    blocks[:, [0, 2]] = 0  # which no token and the one before it show
    with pytest.raises(InputError, match="packed into one, blocks or overlays"):
        causal_mask(ours.config, embedded, None, position_ids=positions, block_sequence_ids=blocks)
    with torch.no_grad():
        cache = ours(x, use_cache=True).past_key_values
    with pytest.raises(InputError, match="packed sequences beside a cache"):
        ours(x, position_ids=positions, past_key_values=cache)
    with pytest.raises(InputError, match="packed sequences beside a cache"):
        ours(x, position_ids=torch.arange(12)[None] * 2)  # one sequence to transformers, if there is a cache


def test_padding_that_does_not_match_the_queries_is_refused_when_relevant(calls):
    from transformers.masking_utils import create_bidirectional_sliding_window_mask

    embedded, real = torch.zeros(3, 20, 64), padded("right")[1]
    _, ours = decoders("MistralConfig", {**WINDOWED, **SMALL_WINDOW})
    with pytest.raises(InputError, match="a padding mask of another batch"):
        causal_mask(ours.config, embedded, real[:1])
    with pytest.raises(InputError, match="padding beside a window of other tokens"):
        create_bidirectional_sliding_window_mask(ours.config, embedded, real, encoder_hidden_states=embedded)
    mask = create_bidirectional_sliding_window_mask(ours.config, embedded, real)
    assert mask.sequences.longest_q == 20
