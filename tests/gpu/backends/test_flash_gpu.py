"""FlashAttention-3, vLLM's too, and FlashAttention-4 on a Hopper GPU: descales, many elements, lifted refusals.

Each family skips, and says so, where its library is not installed.
"""

from __future__ import annotations

import dense
import pytest
from agreement_sweep import Truth
from gpu_checks import DEVICE, assert_descales_are_used, assert_many_elements_agree
from torch import Tensor

from attnbench import AttentionSpec, Mask
from attnbench.backends.flash_attention import fa3, fa3_origins, fa3_vllm, fa4
from attnbench.backends.flash_attention.fa3_operands import native
from attnbench.kernels.contract import Backend, BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.kernels.devices import describe

FAMILIES = (fa3.BACKEND, fa3_vllm.BACKEND, fa4.BACKEND)
FORWARDS = {k.name: k for family in FAMILIES for k in family.kernels if isinstance(k, ForwardKernel)}
BACKWARDS = {k.name: k for family in FAMILIES for k in family.kernels if isinstance(k, BackwardKernel)}


def available_kernel(family: Backend) -> None:
    reason = family.availability().reason
    if reason is not None:
        pytest.skip(f"{family.name}: {reason}")


@pytest.mark.parametrize("name", ["fa3:fp8", "fa3-vllm:fp8"])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_descales_of_random_size_are_used(name: str, kv_heads: int) -> None:
    available_kernel(FAMILIES[name.startswith("fa3-vllm")])
    assert_descales_are_used(FORWARDS[name], kv_heads, lengths=(200, 300), mask=Mask())


def test_more_than_2_to_the_31_elements_agree_with_fp64() -> None:
    available_kernel(fa3.BACKEND)
    assert_many_elements_agree(FORWARDS[name] for name in ("fa3:bf16", "fa3:fp8"))


def _called(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    given = native(q, k, v, spec)
    return fa3_origins.library().forward(
        given.q, given.k, given.v, *given.descales, spec.scale, given.window.causal, *given.window[1:], spec.softcap,
        *given.starts,
    )[0].transpose(1, 2)  # fmt: skip


def test_a_refused_nonpositive_scale_gives_a_wrong_result() -> None:
    available_kernel(fa3.BACKEND)
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=256, head_dim=64, mask=Mask(right=0), scale=-40.0)
    assert "positive scale" in FORWARDS["fa3:bf16"].refusals(spec, describe(DEVICE))[0]
    q, k, v, _ = Truth.of(spec, 0, DEVICE).inputs
    assert not dense.relative_l2(_called(q, k, v, spec), dense.dense_attention(q, k, v, spec)[0]) < 0.01


def test_a_refused_window_that_ends_before_the_keys_would_be_unlimited() -> None:
    available_kernel(fa3.BACKEND)
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=9, seqlen_kv=4, head_dim=64, mask=Mask(left=1, right=0))
    assert "last key" in FORWARDS["fa3:bf16"].refusals(spec, describe(DEVICE))[0]
    q, k, v, _ = Truth.of(spec, 0, DEVICE).inputs
    args = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out = fa3_origins.library().forward(*args, None, None, None, spec.scale, False, 1 + 4 - 9, 5, 0.0, *(None,) * 4)[0]
    assert not dense.relative_l2(out.transpose(1, 2), dense.dense_attention(q, k, v, spec)[0]) < 0.01


@pytest.mark.parametrize("head_dim", [128, 256])
def test_fa4s_refused_fp8_fails(head_dim: int) -> None:
    available_kernel(fa4.BACKEND)
    spec = AttentionSpec.make(batch=1, heads=4, seqlen_q=256, head_dim=head_dim)
    assert FORWARDS["fa4:fp8"].refusals(spec, describe(DEVICE))
    operands = FORWARDS["fa4:fp8"].prepare(Inputs.of(Truth.of(spec, 0, DEVICE).inputs[:3]), spec)
    with pytest.raises(AssertionError, match="SM100"):
        FORWARDS["fa4:fp8"].run(operands)


def test_fa4s_backward_needs_a_padded_head_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, the library has been mended, and its step can be smaller."""
    available_kernel(fa4.BACKEND)
    spec = AttentionSpec.make(batch=1, heads=4, seqlen_q=256, head_dim=80, direction="training")
    truth = Truth.of(spec, 0, DEVICE)
    forward, backward = FORWARDS["fa4:bf16"], BACKWARDS["fa4:bf16"]
    operands = forward.prepare(Inputs.of(truth.inputs[:3]), spec)
    saved = Saved(operands, *forward.run(operands))
    assert dense.relative_l2(backward.run(saved, truth.inputs[3])[0], truth.gradients[0]) < 0.02
    monkeypatch.setattr(fa4, "_BACKWARD_STEP", 8)
    assert dense.relative_l2(backward.run(saved, truth.inputs[3])[0], truth.gradients[0]) > 0.5
