"""Models of transformers by config: what they compute is theirs, what cannot be served is refused in a sentence."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import DECODER, EXPERTS, GPT2, SOFTCAPPED, WINDOWED
from torch import Tensor

from attnbench.errors import InputError
from attnbench.harness.training.config import TrainConfig
from attnbench.harness.training.models import huggingface
from attnbench.harness.training.models.blocks import compile_blocks
from attnbench.harness.training.run.trainable import build

transformers = pytest.importorskip("transformers")


def config(folder: Path, kind: str, settings: dict[str, Any], **others: Any) -> TrainConfig:
    getattr(transformers, kind)(**settings).save_pretrained(folder)
    return TrainConfig.make(f"hf:{folder}", seqlen=40, batch=2, policy="fp32", **{"attention": "reference", **others})


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Gemma2Config", SOFTCAPPED),
        ("Gemma3TextConfig", WINDOWED),
        ("GPT2Config", GPT2),
        ("MixtralConfig", {**DECODER, **EXPERTS}),
    ],
)
def test_the_loss_is_that_of_transformers_own_attention(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    trainable = build(config(tmp_path, kind, settings), "cpu")
    assert len(trainable.blocks) == len(trainable.attention_modules) == 2
    model = trainable.module.model
    with torch.no_grad():  # random weights attend to all keys alike, whatever their scores
        for name, each in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "c_attn.weight")):
                each *= 8
    eager = transformers.AutoModelForCausalLM.from_config(deepcopy(model.config), attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    tokens, targets = trainable.batch(0)
    logits = eager(input_ids=tokens, use_cache=False).logits.float()
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss = trainable.loss((tokens, targets))
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    loss.backward()
    wanted.backward()
    mine, theirs = ({name: each.grad for name, each in one.named_parameters()} for one in (model, eager))
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            "BloomConfig",
            {"vocab_size": 300, "hidden_size": 64, "n_layer": 2, "n_head": 4},
            "computes its attention itself",
        ),
        (
            "Llama4TextConfig",
            {**DECODER, "attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 96},
            "it asks for attention in chunks",
        ),
        ("T5Config", {"vocab_size": 300, "d_model": 64}, "makes no causal language model"),
        (
            "FalconConfig",
            {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
            "knows no attention but its own",
        ),
        ("LlamaConfig", {**DECODER, "vocab_size": 200}, "a vocabulary of 200, and bytes need 257"),
        ("LlamaConfig", {**DECODER, "max_position_embeddings": 32}, "positions for 32 tokens, not 40"),
        ("Gemma2Config", SOFTCAPPED, "asks for a softcap, which torch's SDPA has not"),
        ("Gemma2Config", {**SOFTCAPPED, "attn_logit_softcapping": None}, "asks for a sliding window, which torch's"),
    ],
)
def test_what_cannot_be_served_is_reported(tmp_path: Path, kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(config(tmp_path, kind, settings, attention="sdpa"), "cpu")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sinks", "wants sinks, which attnbench does not know"),
        ("indices", "wants indices"),
        ("cu_seq_lens_q", "wants cu_seq_lens_q"),
        ("position_bias", "asks for a bias of positions"),
        ("attention_mask", "asks for a mask tensor"),
    ],
)
def test_what_a_layer_asks_for_beside_its_mask_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, message: str
) -> None:
    """On building, and in a step, where a layer asks for it then."""
    layer = transformers.models.llama.modeling_llama.LlamaAttention
    forward, new = layer.forward, {given: torch.ones(2)}
    served = build(config(tmp_path / "served", "LlamaConfig", DECODER), "cpu")
    monkeypatch.setattr(layer, "forward", lambda self, *args, **named: forward(self, *args, **{**named, **new}))
    with pytest.raises(InputError, match=f"cannot be served: (its )?LlamaAttention {message}"):
        build(config(tmp_path / "new", "LlamaConfig", DECODER), "cpu")
    with pytest.raises(InputError, match=f"LlamaAttention {message}"):
        served.loss(served.batch(0))
    new.clear()
    assert served.loss(served.batch(0)).isfinite()


def test_masks_are_asked_for_once_and_layers_are_handed_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainable = build(config(tmp_path, "MistralConfig", WINDOWED), "cpu")
    monkeypatch.delattr(huggingface, "layer_mask")
    attention, handed = transformers.models.mistral.modeling_mistral.MistralAttention, []
    for module in trainable.module.modules():
        if isinstance(module, attention):
            module.register_forward_pre_hook(lambda _, args, named: handed.append(named), with_kwargs=True)
    loss = trainable.loss(trainable.batch(0))
    assert [each["attention_mask"] for each in handed] == [None, None]
    torch._dynamo.reset()
    compile_blocks(trainable.blocks, backend="aot_eager")
    torch.testing.assert_close(trainable.loss(trainable.batch(0)), loss)


def test_a_missing_config_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="transformers finds no config there"):
        build(TrainConfig.make(f"hf:{tmp_path}"), "cpu")


def test_weights_are_the_seeds_and_dropout_is_off(tmp_path: Path) -> None:
    base = config(tmp_path, "GPT2Config", GPT2)
    one, other, reseeded = (
        build(base.replace(**changes), "cpu") for changes in ({}, {"attention": "sdpa", "compile": True}, {"seed": 1})
    )
    mine, its, new = (dict(each.module.named_parameters()) for each in (one, other, reseeded))
    torch.testing.assert_close(mine, its, rtol=0, atol=0)
    assert not torch.equal(mine["model.transformer.wte.weight"], new["model.transformer.wte.weight"])
    assert all(each.training for each in one.module.modules())
    assert torch.equal(one.loss(one.batch(0)), one.loss(one.batch(0)))


def test_autocast_and_bf16_reach_the_attention(tmp_path: Path) -> None:
    seen: set[torch.dtype] = set()

    def noting(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, *, scale: float) -> Tensor:
        seen.update(x.dtype for x in (q, k, v))
        assert is_causal
        assert scale == 0.25
        return q

    base = config(tmp_path, "LlamaConfig", DECODER)
    for policy in ("autocast", "bf16"):
        seen.clear()
        trainable = build(base.replace(policy=policy), "cpu", attend=noting)
        trainable.loss(trainable.batch(0)).backward()
        assert seen == {torch.bfloat16}


def test_work_is_counted_for_the_experts_that_a_token_sees(tmp_path: Path) -> None:
    def flops(kind: str, settings: dict[str, Any]) -> float:
        return build(config(tmp_path / kind, kind, settings), "cpu").flops_per_step

    tokens = 2 * 40
    attention = 2 * 3 * 2 * 2 * 4 * (40 * 41 / 2) * 32
    matrices = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96) + 64 * 300
    rotation = 2 * 3 * 16 * 40  # transformers multiplies positions with frequencies as matrices; once a batch counted
    dense = flops("LlamaConfig", DECODER)
    assert dense == pytest.approx(6 * tokens * matrices + attention, abs=10 * rotation)
    routed = flops("MixtralConfig", {**DECODER, **EXPERTS})
    assert routed - dense == pytest.approx(6 * tokens * 2 * (3 * 64 * 96 + 64 * 4))
