"""FlashAttention-4 on a Hopper GPU: dense FP64, and refusals lifted."""

from __future__ import annotations

import dense
import pytest
import torch
from sweep import Truth

from attnbench import AttentionSpec
from attnbench.backends.flash_attention import fa4
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.kernels.devices import describe

pytestmark = pytest.mark.skipif(not fa4.BACKEND.availability().ok, reason=str(fa4.BACKEND.availability().reason))
FORWARDS = {k.name: k for k in fa4.BACKEND.kernels if isinstance(k, ForwardKernel)}
BACKWARDS = {k.name: k for k in fa4.BACKEND.kernels if isinstance(k, BackwardKernel)}


@pytest.mark.parametrize("head_dim", [128, 256])
def test_fp8_really_fails_here(head_dim: int) -> None:
    device = torch.device("cuda", 0)
    spec = AttentionSpec.make(batch=1, heads=4, seqlen_q=256, head_dim=head_dim)
    assert FORWARDS["fa4:fp8"].refusals(spec, describe(device))
    operands = FORWARDS["fa4:fp8"].prepare(Inputs.of(Truth.of(spec, 0, device).inputs[:3]), spec)
    with pytest.raises(AssertionError, match="SM100"):
        FORWARDS["fa4:fp8"].run(operands)


def test_the_backward_needs_the_padding_of_its_head_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, the library has been mended, and its step can be smaller."""
    spec = AttentionSpec.make(batch=1, heads=4, seqlen_q=256, head_dim=80, direction="training")
    truth = Truth.of(spec, 0, torch.device("cuda", 0))
    forward, backward = FORWARDS["fa4:bf16"], BACKWARDS["fa4:bf16"]
    operands = forward.prepare(Inputs.of(truth.inputs[:3]), spec)
    saved = Saved(operands, *forward.run(operands))
    assert dense.relative_l2(backward.run(saved, truth.inputs[3])[0], truth.gradients[0]) < 0.02
    monkeypatch.setattr(fa4, "_BACKWARD_STEP", 8)
    assert dense.relative_l2(backward.run(saved, truth.inputs[3])[0], truth.gradients[0]) > 0.5
