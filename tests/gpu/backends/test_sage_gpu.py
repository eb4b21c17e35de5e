"""SageAttention on a GPU, whichever of its two libraries is installed: dense FP64, and the library itself."""

from __future__ import annotations

from importlib import import_module

import dense
import pytest
import torch
from agreement_sweep import Truth
from gpu_checks import DEVICE
from torch import Tensor

from attnbench import AttentionSpec, Mask
from attnbench.backends import sage
from attnbench.kernels.contract import Inputs
from attnbench.kernels.devices import describe

_FOUND = sage.BACKEND.availability()
pytestmark = pytest.mark.skipif(not _FOUND.ok, reason=str(_FOUND.reason))
OLD = _FOUND.version == "1.0.6"
KERNEL = sage.SageInt8Forward() if OLD else sage.SageFp8Forward()


def _inputs(spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    shape = (spec.batch, spec.heads, spec.seqlen_q, spec.head_dim)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    return q, k, v


def _whole(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """The library's own top-level function, which quantises and computes; 1.0.6 changes K."""
    core = import_module("sageattention.core")
    causal = spec.mask.kind == "causal"
    if OLD:
        return core.sageattn(q, k.clone(), v, is_causal=causal, sm_scale=spec.scale)
    return core.sageattn_qk_int8_pv_fp8_cuda_sm90(q, k, v, is_causal=causal, sm_scale=spec.scale)


@pytest.mark.parametrize("mask", [Mask(), Mask(right=0)])
def test_the_kernel_equals_the_librarys_own_function(mask: Mask) -> None:
    spec = AttentionSpec.make(batch=2, heads=8, seqlen_q=1024, head_dim=128, mask=mask)
    q, k, v = _inputs(spec)
    ours = KERNEL.run(KERNEL.prepare(Inputs(q, k, v), spec)).out
    assert torch.equal(ours, _whole(q, k, v, spec))


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_zero_inputs_give_finite_results(where: str) -> None:
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=192, head_dim=64, mask=Mask(right=0))
    q, k, v = _inputs(spec)
    {"q": q, "k": k, "v": v}[where][..., 5 if where == "v" else slice(None)] = 0
    out = KERNEL.run(KERNEL.prepare(Inputs(q, k, v), spec)).out
    truth, _ = dense.dense_attention(q, k, v, spec)
    assert dense.relative_l2(out, truth) < KERNEL.declared_error


def test_refused_specs_fail_or_give_wrong_results() -> None:
    base = AttentionSpec.make(batch=1, heads=2, seqlen_q=256, head_dim=64)
    unequal = base.replace(seqlen_q=128, mask=Mask(right=0, alignment="bottom-right"))
    wrong = [base.replace(seqlen_kv=200)] if OLD else [unequal, base.replace(scale=-40.0, mask=Mask(right=0))]
    for spec in (unequal, *wrong):
        assert KERNEL.refusals(spec, describe(DEVICE))
    for spec in wrong:
        truth = Truth.of(spec, 0, DEVICE)
        out = KERNEL.run(KERNEL.prepare(Inputs.of(truth.inputs[:3]), spec)).out
        assert not dense.relative_l2(out, truth.out) < KERNEL.declared_error, spec
    if OLD:
        with pytest.raises(AssertionError, match="must be equal"):
            KERNEL.run(KERNEL.prepare(Inputs.of(Truth.of(unequal, 0, DEVICE).inputs[:3]), unequal))
