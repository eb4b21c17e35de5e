"""Checkpointing and compilation change what is kept and how it is run, and no gradient."""

from types import SimpleNamespace

import pytest
import torch
from small_training import gradients
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from attnbench.harness.training.config import TrainConfig
from attnbench.harness.training.models.blocks import checkpoint_blocks, compile_blocks
from attnbench.harness.training.run.trainable import Trainable, build

CONFIG = TrainConfig.make(seqlen=48, batch=2, policy="fp32")


def test_a_config_decides_whether_blocks_are_compiled() -> None:
    for asked in (False, True):
        made = build(CONFIG.replace(compile=asked, checkpointing=True), "cpu")
        assert all((block._compiled_call_impl is not None) == asked for block in made.blocks)


def kept(trainable: Trainable) -> int:
    """Bytes that autograd keeps for the backward."""
    sizes = {}

    def note(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        trainable.loss(trainable.batch(0))
    return sum(sizes.values())


@pytest.mark.parametrize("attention", ["sdpa", "emulated:fp8"])
def test_checkpointing_gives_the_same_gradients_and_keeps_less(attention: str) -> None:
    plain = build(CONFIG.replace(attention=attention), "cpu")
    checkpointed = build(CONFIG.replace(attention=attention, checkpointing=True), "cpu")
    after = gradients(checkpointed)
    torch.testing.assert_close(after, gradients(plain), rtol=1e-5, atol=1e-7)
    assert kept(checkpointed) < 0.6 * kept(plain)
    offloaded = build(CONFIG.replace(attention=attention, checkpointing=True, offload=True), "cpu")
    torch.testing.assert_close(gradients(offloaded), after, rtol=0, atol=0)
    inputs = len(offloaded.blocks) * CONFIG.batch * CONFIG.seqlen * 128 * 4  # of the blocks, fp32, 128 wide
    assert kept(checkpointed) - kept(offloaded) >= inputs


@pytest.mark.parametrize("checkpointing", ["none", "torch's", "TransformerEngine's"])
def test_blocks_are_compiled_whole_and_once(monkeypatch: pytest.MonkeyPatch, checkpointing: str) -> None:
    """TransformerEngine's function switches the compiler off, as this one does."""
    te = SimpleNamespace(checkpoint=torch._disable_dynamo(checkpoint))
    monkeypatch.setattr("attnbench.harness.training.models.blocks.transformer_engine", lambda: te)
    attention, within = "reference" if checkpointing == "torch's" else "sdpa", checkpointing == "TransformerEngine's"
    plain, compiled = (build(CONFIG.replace(attention=attention), "cpu") for _ in range(2))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    if checkpointing == "torch's":
        checkpoint_blocks(compiled.blocks, te=False)
    compile_blocks(compiled.blocks, backend=counter, within=within)  # type: ignore[arg-type]
    if within:
        checkpoint_blocks(compiled.blocks, te=True)
    torch.testing.assert_close(gradients(compiled), gradients(plain), rtol=1e-4, atol=1e-6)
    assert counter.frame_count == 1  # two blocks alike, no graph break
    assert checkpointing == "none" or kept(compiled) < 0.6 * kept(plain)
