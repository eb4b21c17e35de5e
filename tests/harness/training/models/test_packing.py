"""Packed documents: their loss and gradients are those of each alone, and nothing passes from one to the next."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import gradients
from tiny_models import DECODER
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from attnbench.errors import InputError
from attnbench.harness.training.config import TrainConfig
from attnbench.harness.training.models.blocks import checkpoint_blocks, compile_blocks
from attnbench.harness.training.run.trainable import Trainable, build
from attnbench.harness.training.run.warning_signs import signs_of

MODELS = {"gpt": {}, "LlamaConfig": DECODER, "MistralConfig": {**DECODER, "sliding_window": 8}}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Files of 1 to 40 bytes, and one that is cut into pieces of 32."""
    folder = tmp_path / "texts"
    folder.mkdir()
    random = torch.Generator().manual_seed(0)
    for number, size in enumerate([1, 2, 3, 5, 8, 13, 20, 30, 40, 90]):
        data = torch.randint(65, 91, (size,), generator=random).tolist()
        (folder / f"{number}.txt").write_bytes(bytes(data))
    return folder


def trainable(texts: Path, model: str = "gpt", **settings: Any) -> Trainable:
    name = model
    if model != "gpt":
        transformers = pytest.importorskip("transformers")
        name = f"hf:{texts.parent / model}"
        getattr(transformers, model)(**MODELS[model]).save_pretrained(name[3:])
    given = {"seqlen": 32, "batch": 4, "policy": "fp32", "attention": "sdpa-flash", "packing": "packed", **settings}
    made = build(TrainConfig.make(name, data=str(texts), **given), "cpu")
    with torch.no_grad():  # random weights attend to all keys alike, whatever their scores
        for each, parameter in made.module.named_parameters():
            if each.endswith(("q_proj.weight", "k_proj.weight", "query.weight", "key.weight")):
                parameter *= 8
    return made


def alone(made: Trainable) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the first batch and its gradients, one document after the other, each a sample without lengths."""
    tokens, targets, _, starts = made.batch(0)
    assert len(starts) > 5
    total = torch.zeros(())
    made.module.zero_grad()
    for first, last in pairwise(starts.tolist()):
        one = torch.tensor([0, last - first], dtype=torch.int32)
        positions = torch.arange(last - first)[None]
        loss = made.loss((tokens[:, first:last], targets[:, first:last], positions, one))
        loss = loss * (last - first) / tokens.numel()
        loss.backward()
        total += loss.detach()
    return total, {name: each.grad.clone() for name, each in made.module.named_parameters() if each.grad is not None}


def off(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


@pytest.mark.parametrize("model", list(MODELS))
def test_a_packed_step_is_that_of_each_document_alone(texts: Path, model: str) -> None:
    made = trainable(texts, model)
    loss, wanted = alone(made)
    assert float(made.loss(made.batch(0))) == pytest.approx(float(loss), rel=1e-6)
    assert off(gradients(made), wanted) < 1e-5
    if model != "MistralConfig":  # whose windows torch's SDPA has not
        other = trainable(texts, model, packing="padded", attention="sdpa")
        assert off(gradients(other), wanted) < 1e-5
        assert other.flops_per_step == made.flops_per_step


@pytest.mark.exhaustive
def test_steps_of_other_documents_need_one_graph_a_block(texts: Path) -> None:
    plain, compiled = trainable(texts), trainable(texts)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    checkpoint_blocks(compiled.blocks, te=False)
    compile_blocks(compiled.blocks, backend=counter)  # type: ignore[arg-type]
    assert off(gradients(compiled), gradients(plain)) < 1e-5
    for step in range(1, 5):
        torch.testing.assert_close(compiled.loss(compiled.batch(step)), plain.loss(plain.batch(step)))
    assert len({len(plain.batch(step)[3]) for step in range(5)}) > 2
    assert counter.frame_count <= 2  # the first number of documents, and any


def test_warning_signs_are_read_of_documents(texts: Path) -> None:
    made = trainable(texts, attention="reference")
    sign = signs_of(0, made.attention_modules, lambda: made.loss(made.batch(0)).backward())
    assert sign is not None
    assert 1 < sign.kurtosis_q < 100
    assert sign.gradient_norm > 0


def test_models_that_mix_documents_are_refused(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    layer = transformers.models.llama.modeling_llama.LlamaMLP
    forward = layer.forward
    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", lambda self, x: forward(self, x) + x.roll(1, 1))
        with pytest.raises(InputError, match="reach the next outside of attention"):
            trainable(texts, "LlamaConfig")
    attention = transformers.models.llama.modeling_llama.LlamaAttention
    called = attention.forward
    monkeypatch.setattr(
        attention,
        "forward",
        lambda self, *x, cu_seq_lens_q=None, cu_seq_lens_k=None, **named: called(self, *x, **named),
    )
    with pytest.raises(InputError, match="LlamaAttention is not told where packed documents begin"):
        trainable(texts, "LlamaConfig")
