"""Models of transformers that treat masks, windows or the name of their attention in their own way."""

import copy
import dataclasses

import pytest
import torch
from tiny_models import DECODER, GREEDY, SOFTCAPPED, TOKENS, WINDOWED, decoders, error, tokens

from attnbench.errors import AttnbenchWarning, InputError
from attnbench.integrations.transformers import register
from attnbench.problem.mask import Mask

transformers = pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::attnbench.errors.AttnbenchWarning")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TABLES = {
    "FalconConfig": {"vocab_size": TOKENS, **SMALL, "bos_token_id": 1, "eos_token_id": 2},
    "Data2VecVisionConfig": {"image_size": 32, "patch_size": 8, **SMALL},
    "SamConfig": {
        "vision_config": {
            "hidden_size": 32, "output_channels": 32, "num_pos_feats": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 32, "patch_size": 8, "mlp_dim": 32,
        },
        "prompt_encoder_config": {"hidden_size": 32, "image_size": 32, "patch_size": 8},
        "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 32},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
def test_a_model_with_its_own_attention_table_is_named_and_may_fall_back(kind):
    register(backend="reference")
    config = getattr(transformers, kind)(**TABLES[kind])
    with pytest.raises(InputError, match=r"takes its attention from \w+ATTENTION_CLASSES, .* within .*replaced\(\)"):
        transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation="attnbench")
    calls = register(backend="reference", otherwise="sdpa")
    with pytest.warns(AttnbenchWarning, match=r"ATTENTION_CLASSES, which has no 'attnbench'; such calls are handed on"):
        model = transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation="attnbench")
    assert model.config._attn_implementation == "sdpa"
    assert calls.served == 0
    transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation="eager")


def test_a_submodel_with_another_attention_may_have_its_own_table():
    calls = register(backend="reference")
    config = transformers.SamConfig(**TABLES["SamConfig"])
    parts = {"": "attnbench", "vision_config": "sdpa", "mask_decoder_config": "attnbench"}
    model = transformers.SamModel._from_config(config, attn_implementation=parts).eval()
    with torch.no_grad():
        model(pixel_values=torch.randn(1, 3, 32, 32), input_points=torch.zeros(1, 1, 1, 2))
    assert calls.served > 0


def test_a_model_that_computes_attention_itself_is_named_and_keeps_its_masks():
    """It would add a boolean mask to its scores, which hides no key."""
    register(backend="reference")
    config = transformers.RemBertConfig(vocab_size=TOKENS, input_embedding_size=32, **SMALL)
    with pytest.raises(InputError, match=r"RemBertModel computes attention itself, .* within .*replaced\(\)"):
        transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation="attnbench")
    calls = register(backend="reference", otherwise="sdpa")
    with pytest.warns(AttnbenchWarning, match="RemBertModel computes attention itself"):
        ours = transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation="attnbench").eval()
    assert ours.config._attn_implementation == "eager"
    model = transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    model.load_state_dict(ours.state_dict())
    x, mask = tokens(length=12), torch.ones(2, 12, dtype=torch.long)
    mask[0, 7:] = 0
    assert error(ours(x, attention_mask=mask)[0], model(x, attention_mask=mask)[0]) < 1e-6
    assert calls.served == 0


def test_a_window_of_zero_means_no_window_for_full_attention_layers():
    calls = register(backend="reference")
    experts = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    model, ours = decoders("Qwen2MoeConfig", {**DECODER, **experts})
    assert ours.config.sliding_window == 0
    x = tokens()
    assert error(ours(x).logits, model(x).logits) < 1e-5
    assert calls.served == 2


@pytest.mark.parametrize(("kind", "length"), [("MistralConfig", 12), ("Gemma3TextConfig", 12), ("MistralConfig", 20)])
def test_an_unsupported_window_with_a_static_cache_falls_back(kind, length):
    """``generate`` makes the masks before the forward, and makes them contiguous."""
    calls = register(backend="reference", otherwise="sdpa")
    model, ours = decoders(kind, WINDOWED)
    x = tokens(length=length)
    options = {"cache_implementation": "static", "max_new_tokens": 8, **GREEDY}
    assert torch.equal(ours.generate(x, **options), model.generate(x, **options))
    assert calls.handed_on.total() > 0
    assert (calls.served > 0) == (length >= 16)  # a prompt that fills the window is served


def test_an_unsupported_softcap_falls_back_to_eager_attention():
    calls = register(backend="reference", otherwise="sdpa")
    model, ours = decoders("Gemma2Config", SOFTCAPPED, "eager")
    x, blocks = tokens(length=12), torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
    blocks[:, :, 6:, :6] = False
    added = torch.zeros(blocks.shape).masked_fill(~blocks, torch.finfo(torch.float32).min)
    assert error(ours(x, attention_mask=blocks).logits, model(x, attention_mask=added).logits) < 1e-5
    assert (calls.served, calls.handed_on.total()) == (0, 2)
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.5
    torch.manual_seed(0)
    dropped = ours.train()(x).logits  # causal, with no mask tensor
    ours.set_attn_implementation("eager")
    torch.manual_seed(0)
    assert error(dropped, ours(x).logits) < 1e-5


def test_a_layer_mask_behaves_as_its_mask_tensor():
    from attnbench.integrations.transformers_mask import LayerMask

    mask = LayerMask(1, 0, "bottom-right", 2, 3, 5, torch.device("cpu"))
    assert isinstance(mask, Mask)
    rows = [mask.span(row, 3, 5) for row in range(3)]
    wanted = torch.tensor([[start <= key < stop for key in range(5)] for start, stop in rows]).expand(2, 1, 3, 5)
    assert mask.contiguous() is mask
    assert mask.shape == wanted.shape
    assert torch.equal(mask[:, :, :, :4], wanted[..., :4])
    assert torch.equal(torch.cat([mask, wanted], dim=-1), torch.cat([wanted, wanted], dim=-1))
    assert torch.equal(mask.to(torch.float32), wanted.float())
    assert copy.deepcopy(mask) == mask
    assert mask.to("meta", non_blocking=True) == dataclasses.replace(mask, device=torch.device("meta"))
