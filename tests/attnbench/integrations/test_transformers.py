"""transformers models with our attention: the same results as SDPA, masks included, or a clear error."""

import sys
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import (
    DECODER,
    ENCODER,
    EXPERTS,
    GPT2,
    GREEDY,
    SOFTCAPPED,
    WINDOWED,
    decoders,
    error,
    step,
    tokens,
    worst,
)

from attnbench import Mask
from attnbench.errors import AttnbenchWarning, InputError, UnknownBackendError
from attnbench.integrations.transformers import register

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
EXACT = "reference"


@pytest.fixture
def calls():
    """The call counter of ``attnbench``, registered with the most accurate backend."""
    return register(backend=EXACT)


def padding(*spans, length=12):
    """(B, length) with 1 for tokens: each row has its range of positions."""
    positions = torch.arange(length)
    return torch.stack([((positions >= first) & (positions < last)).long() for first, last in spans])


@pytest.mark.parametrize(
    ("kind", "settings", "theirs", "auto"),
    [
        ("LlamaConfig", DECODER, "sdpa", "AutoModelForCausalLM"),
        ("MistralConfig", WINDOWED, "sdpa", "AutoModelForCausalLM"),
        ("Gemma2Config", SOFTCAPPED, "eager", "AutoModelForCausalLM"),
        ("Gemma3TextConfig", WINDOWED, "sdpa", "AutoModelForCausalLM"),
        ("GPT2Config", GPT2, "sdpa", "AutoModelForCausalLM"),
        ("GptOssConfig", {**WINDOWED, **EXPERTS}, "eager", "AutoModelForCausalLM"),
        ("BertConfig", {**ENCODER, "attention_probs_dropout_prob": 0.0}, "sdpa", "AutoModelForMaskedLM"),
        ("ModernBertConfig", {**ENCODER, "local_attention": 16, "global_attn_every_n_layers": 2}, "sdpa",
         "AutoModelForMaskedLM"),
    ],
)  # fmt: skip
def test_outputs_and_gradients_agree_with_transformers_own_attention(calls, kind, settings, theirs, auto):
    model, ours = decoders(kind, settings, theirs, auto=auto)
    x = tokens()
    wanted, found = step(model, x), step(ours, x)
    assert calls.served == 2
    assert error(found[0], wanted[0]) < 1e-5
    assert worst(found[1], wanted[1]) < 1e-4


def test_sinks_never_fall_back_to_transformers_sdpa():
    register("attnbench-sdpa", backend=EXACT, otherwise="sdpa")
    attend, q = transformers.AttentionInterface._global_mapping["attnbench-sdpa"], torch.randn(1, 2, 8, 16)
    with pytest.warns(AttnbenchWarning, match="dropout"), pytest.raises(InputError, match="Module has sinks"):
        attend(torch.nn.Module(), q, q, q, None, dropout=0.1, s_aux=torch.zeros(2))


def test_decoding_with_a_cache_and_chunked_prompts_agrees(calls):
    model, ours = decoders("MistralConfig", WINDOWED)
    x = tokens(length=12)
    found, wanted = (each.generate(x, max_new_tokens=20, **GREEDY) for each in (ours, model))
    assert torch.equal(found, wanted)
    x, outs = tokens(length=40), []
    for each in (model, ours):
        with torch.no_grad():
            first = each(x[:, :23], use_cache=True)
            outs.append(each(x[:, 23:], past_key_values=first.past_key_values).logits)
    assert error(outs[1], outs[0]) < 1e-5
    assert calls.served == 2 * (20 + 2)


def test_unsupported_calls_are_refused_in_one_sentence(calls):
    _, ours = decoders("LlamaConfig", DECODER)
    x = tokens(length=12)
    with pytest.raises(InputError, match="beyond the queries, as those of a static cache"):
        ours.generate(x, cache_implementation="static", max_new_tokens=3, pad_token_id=0)
    with pytest.raises(InputError, match="cu_seq_lens_q as a tensor"):
        ours(x, cu_seq_lens_k=[0, 24])
    with pytest.raises(InputError, match="cu_seq_lens_q beside an attention_mask that pads"):
        ours(x, cu_seq_lens_q=torch.tensor([0, 24]), attention_mask=padding((0, 12), (3, 12)))
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(InputError, match="dropout"):
        ours.train()(x)
    ours.eval()(x)
    chunked = {**DECODER, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 96}
    with pytest.raises(InputError, match="attention in chunks"):
        decoders("Llama4TextConfig", chunked)[1](x)
    assert not calls.handed_on
    attend = transformers.AttentionInterface._global_mapping["attnbench"]
    q = torch.randn(1, 2, 8, 16)
    for given_, message in [
        ({"sliding_window": 4}, "a sliding window of 4 keys, and no mask was made"),
        ({"output_attentions": True}, "wants probabilities"),
        ({"position_bias": torch.zeros(1, 2, 8, 8)}, "a bias of positions"),
        ({"cache": object()}, "wants cache"),
    ]:
        with pytest.raises(InputError, match=message):
            attend(torch.nn.Module(), q, q, q, None, **given_)
    with pytest.raises(InputError, match="a mask of the class dict"):
        attend(torch.nn.Module(), q, q, q, {})


def test_fallback_calls_agree_with_sdpa_are_counted_and_warn():
    calls = register(backend="emulated", dtype="fp8", otherwise="sdpa")
    model, ours = decoders("LlamaConfig", DECODER)
    x, blocks = tokens(length=12), torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
    blocks[:, :, 6:, :6] = False
    with pytest.warns(AttnbenchWarning, match="a mask tensor .*; such calls are handed on to sdpa"):
        found = step(ours, x, attention_mask=blocks)
    wanted = step(model, x, attention_mask=blocks)
    assert torch.equal(found[0], wanted[0])
    assert worst(found[1], wanted[1]) == 0
    assert (calls.served, calls.handed_on.total()) == (0, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttnbenchWarning)  # warned once
        ours(x, attention_mask=blocks)
        assert not torch.equal(ours(x)[0], model(x)[0])
    assert (calls.served, calls.handed_on.total()) == (2, 4)
    assert "2 calls served by attnbench, 4 handed on to sdpa\n  4 a mask tensor" in str(calls)
    options = {"max_new_tokens": 4, **GREEDY}
    with pytest.warns(AttnbenchWarning, match="a static cache"):
        generated = ours.generate(x, cache_implementation="static", **options)
    assert torch.equal(generated, model.generate(x, **options))
    # A window that could be served, in a layer that wants dropout.
    windowed = decoders("MistralConfig", {**WINDOWED, "sliding_window": 4})
    for each in windowed:
        for layer in each.model.layers:
            layer.self_attn.attention_dropout = 0.5
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AttnbenchWarning)
            each.outs = each.train()(x)[0]
    assert torch.equal(windowed[1].outs, windowed[0].outs)


def test_compiled_models_have_one_graph_and_read_masks_at_run_time():
    register(backend=EXACT)
    model, ours = decoders("MistralConfig", WINDOWED)
    x = tokens()
    wanted = step(model, x)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    everywhere = padding((0, 40), (0, 40), length=40)
    found = step(compiled, x, use_cache=False, attention_mask=everywhere)
    assert error(found[0], wanted[0]) < 1e-5
    assert max(error(each.grad, wanted[1][name]) for name, each in ours.named_parameters()) < 1e-4
    with pytest.raises(RuntimeError, match="the batch has padding, which attnbench cannot serve in compiled code"):
        compiled(x, use_cache=False, attention_mask=padding((0, 40), (3, 40), length=40))
    with pytest.raises(RuntimeError, match="transformers' mask is not plain: packed sequences"):
        compiled(x, use_cache=False, position_ids=torch.arange(20).repeat(2, 2))


def test_compiled_models_fall_back_when_a_mask_may_be_unsupported():
    calls = register(backend=EXACT, otherwise="sdpa")
    model, ours = decoders("LlamaConfig", DECODER)
    x, left = tokens(), padding((0, 40), (3, 40), length=40)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with pytest.warns(AttnbenchWarning, match="a padding mask in compiled code"):
        found = compiled(x, use_cache=False, attention_mask=left)[0]
    assert error(found, model(x, attention_mask=left)[0]) < 1e-5
    assert calls.handed_on.total() == 2


def test_compiled_layers_accept_masks_made_outside_the_graph(calls):
    model, ours = decoders("MistralConfig", WINDOWED)
    x = tokens()
    torch._dynamo.reset()
    for layer in ours.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert error(ours(x, use_cache=False)[0], model(x)[0]) < 1e-5
    left = padding((0, 40), (3, 40), length=40)
    for named in ({"attention_mask": left}, {"position_ids": torch.arange(20).repeat(2, 2)}):
        found, wanted = (step(each, x, use_cache=False, **named) for each in (ours, model))
        assert error(found[0][left.bool()], wanted[0][left.bool()]) < 1e-5
    assert calls.served == 0  # all within the graphs, which are not counted
    torch._dynamo.reset()
    for layer in ours.model.layers:
        layer.compile(backend="aot_eager")
    starts = torch.tensor([0, 20, 40, 60, 80])
    found = ours(x, use_cache=False, cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=starts.diff().max())[0]
    assert error(found, wanted[0]) < 1e-5
    assert calls.served == 2  # without a bound, outside of the graphs


def test_invalid_registrations_are_refused(monkeypatch):
    with pytest.raises(UnknownBackendError, match="sdpa-flash"):
        register(backend="sdpa-flesh")
    with pytest.raises(InputError, match="padding must be 'unpad' or 'right', not 'left'"):
        register(padding="left")
    with pytest.raises(InputError, match="otherwise must be 'raise' or 'sdpa', not 'torch'"):
        register(otherwise="torch")
    with pytest.raises(InputError, match="max_error must be"):
        register(max_error=-1)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'transformers>=4.53'"):
        register()


def expected_mask(mask, batch, seqlen_q, seqlen_kv):
    """(B, 1, Sq, Skv), true for visible keys by the sequences' positions and the mask within each."""
    visible, sequences = torch.zeros(batch, seqlen_q, seqlen_kv, dtype=torch.bool), mask.sequences
    queries = torch.arange(batch * seqlen_q) if sequences.queries is None else sequences.queries
    for number in range(batch):
        (first_q, last_q), (first, last) = (x[number : number + 2] for x in (sequences.starts_q, sequences.starts_kv))
        assert last_q - first_q <= sequences.longest_q
        assert last - first <= sequences.longest_kv
        shown = dense_mask(Mask(mask.left, mask.right, "bottom-right"), int(last_q - first_q), int(last - first))
        for row, place in enumerate(queries[first_q:last_q].tolist()):
            assert place // seqlen_q == number
            keys = sequences.keys[first:last][shown[row]]
            visible[number, place % seqlen_q, keys - number * seqlen_kv] = True
    return visible[:, None]


def dense_mask(mask, seqlen_q, seqlen_kv):
    """(Sq, Skv), true for visible keys by the mask's definition."""
    mask = mask or Mask()
    rows = [mask.span(row, seqlen_q, seqlen_kv) for row in range(seqlen_q)]
    keys = torch.arange(seqlen_kv)
    return torch.stack([(keys >= start) & (keys < stop) for start, stop in rows])


@given(
    batch=st.integers(1, 3),
    fresh=st.integers(1, 9),
    past=st.integers(0, 9),
    dropped=st.integers(0, 9),
    window=st.none() | st.integers(1, 12),
    causal=st.booleans(),
    ahead=st.sampled_from([0, 0, 0, 4]),
    pads=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 17)), max_size=2),
    hide=st.booleans(),
    right=st.booleans(),
)
def test_the_mask_given_to_layers_equals_the_tensor_given_to_sdpa(
    batch, fresh, past, dropped, window, causal, ahead, pads, hide, right
):
    """Any cache's geometry: ``past`` keys of which the first ``dropped`` are gone, ``ahead`` ones still empty."""
    masking = pytest.importorskip("transformers.masking_utils")
    if not hasattr(masking, "bidirectional_mask_function"):
        pytest.skip("this release of transformers makes causal masks alone")
    register(backend=EXACT, padding="right" if right else "unpad")
    ours = masking.ALL_MASK_ATTENTION_FUNCTIONS["attnbench"]
    dropped = min(dropped, past)
    kv_length = past - dropped + fresh + ahead
    if window is None:
        function = masking.causal_mask_function if causal else masking.bidirectional_mask_function
    elif causal:
        function = masking.sliding_window_causal_mask_function(window)
    else:
        function = masking.sliding_window_bidirectional_mask_function(window)
    real = torch.ones(batch, past + fresh + ahead, dtype=torch.bool)
    for row, place in pads:
        real[row % batch, place % real.shape[1]] = False
    sizes = {"batch_size": batch, "q_length": fresh, "kv_length": kv_length, "q_offset": past, "kv_offset": dropped}
    asked = {"mask_function": function, "attention_mask": real if hide else None, "local_size": window, "device": "cpu"}
    asked |= sizes
    # Neither is skipped: the tensor is always made.
    tensor = masking.sdpa_mask(**asked, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    shown = real[:, dropped : dropped + kv_length]
    padded = hide and not bool(shown.all())
    reaching = (causal or (window is not None and kv_length >= window)) and ahead > 0
    try:
        mask = ours(**asked, allow_is_causal_skip=causal, allow_is_bidirectional_skip=not causal)
    except InputError as refused:
        message = str(refused)
        assert ("beyond the queries" in message and reaching) or ("padding" in message and padded)
        return
    assert not reaching
    if mask is None:  # layers then do what SDPA does
        mask = Mask(right=0) if causal and fresh > 1 else Mask()
    if mask.__class__ is not Mask and mask.sequences is not None:
        assert padded
        assert torch.equal(mask.tensor(), tensor)  # for layers that need a tensor
        rows = shown[:, None, kv_length - fresh :, None] if causal else torch.tensor(True)
        assert torch.equal(expected_mask(mask, batch, fresh, kv_length), tensor & rows)
        return
    expected = dense_mask(mask, fresh, kv_length)[None, None].expand(batch, 1, -1, -1)
    if padded:  # left as it is at the right alone, where no token sees it
        assert right
        assert causal
        assert fresh == kv_length
        expected = expected & shown[:, None, None, :]
        rows = shown[:, None, :, None]
        assert torch.equal(expected & rows, tensor & rows)
    else:
        assert torch.equal(expected, tensor)
