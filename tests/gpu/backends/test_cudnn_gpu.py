"""cuDNN's graphs on a Hopper GPU: the assumptions of the FP8 scales, refusals lifted."""

from __future__ import annotations

import pytest
import torch
from agreement_sweep import Truth

from attnbench import AttentionSpec, Mask
from attnbench.backends.cudnn import backend as cudnn
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.kernels.devices import describe

pytestmark = pytest.mark.skipif(not cudnn.BACKEND.availability().ok, reason=str(cudnn.BACKEND.availability().reason))
FORWARDS = {k.name: k for k in cudnn.BACKEND.kernels if isinstance(k, ForwardKernel)}
BACKWARDS = {k.name: k for k in cudnn.BACKEND.kernels if isinstance(k, BackwardKernel)}


def test_maxima_reported_by_cudnn_are_below_those_assumed_by_the_scales() -> None:
    spec = AttentionSpec.make(batch=1, heads=8, seqlen_q=4096, head_dim=128, mask=Mask(right=0))
    q, k, v, _ = Truth.of(spec.replace(seqlen_q=512, seqlen_kv=512), 0, torch.device("cuda", 0)).inputs
    q, k, v = (x.repeat(1, 1, 8, 1) for x in (q, k, v))
    operands = FORWARDS["cudnn:fp8"].prepare(Inputs(q, k, v), spec)
    graph, inputs = operands.native
    found = graph.run(inputs)
    print(f"amax of P {found['amax_s'].item()}, of O {found['amax_o'].item()}, of V {v.abs().max().item()}")
    assert found["amax_s"].item() <= 1.01
    assert found["amax_o"].item() <= 1.07 * v.abs().max().item()


@pytest.mark.parametrize("size", [192, 256])
def test_the_fp8_backward_supports_only_head_dimension_128(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller ones are padded to it; what is larger would have to be a kernel of its own."""
    spec = AttentionSpec.make(batch=1, heads=4, seqlen_q=256, head_dim=size, direction="training")
    assert BACKWARDS["cudnn:fp8"].refusals(spec, describe(torch.device("cuda", 0)))
    monkeypatch.setattr(cudnn, "BACKWARD_SIZE", size)
    truth = Truth.of(spec, 0, torch.device("cuda", 0))
    operands = FORWARDS["cudnn:fp8"].prepare(Inputs.of(truth.inputs[:3]), spec)
    saved = Saved(operands, *FORWARDS["cudnn:fp8"].run(operands))
    with pytest.raises(Exception, match="hidden_dim"):
        BACKWARDS["cudnn:fp8"].run(saved, truth.inputs[3])
