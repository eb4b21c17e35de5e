"""Forwards that quantise, by libraries of others, on a Hopper GPU: dense FP64, descales, lifted refusals.

Each skips where its library is not installed.  The first call of a head dimension of FlashInfer compiles for a minute
or two, unless the library was compiled beforehand.  Where ``flash_attn_interface`` is not installed and ``sgl_kernel``
is, the latter's FlashAttention-3 stands in under the name ``flash_attn_3::fwd``: torch's own code and the same kernel
then run, from another build.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import standins_fa
import torch
from gpu_checks import (
    DEVICE,
    assert_descales_are_used,
    assert_many_elements_agree,
    assert_quantising_forward_agrees,
    assert_wrong_at_a_negative_scale,
)
from torch import Tensor
from torch.nn import attention

from attnbench import AttentionSpec, Mask
from attnbench.backends import flashinfer, sage, torch_fp8
from attnbench.backends.common.installed import installed
from attnbench.kernels.contract import ForwardKernel, Inputs
from attnbench.kernels.registry import registry

END = "bottom-right"
LENGTHS = [(256, 256), (257, 257), (130, 333), (333, 130), (1, 200), (77, 1)]


class Case(NamedTuple):
    """A kernel, the axes of its specs, and how far it is from exact attention on what it quantised."""

    kernel: ForwardKernel
    heads: list[tuple[int, int, int]]  # of Q and K, of V, and query heads to a key head
    lengths: list[tuple[int, int]]
    masks: list[Mask]
    floor: float = 0.05  # beside Q, K and V only P in e4m3 and the accumulator are left


_SAGE = [(64, 64, 1), (80, 80, 4), (96, 96, 1), (128, 128, 8), (128, 64, 2), (5, 7, 1)]
_SAGE_LENGTHS = [(256, 256), (257, 257), (64, 64), (130, 384), (333, 64), (1, 200), (63, 63)]
CASES = {
    "flashinfer": Case(
        flashinfer.FlashInferForward(),
        [(64, 64, 1), (80, 80, 4), (96, 96, 1), (128, 128, 8), (128, 64, 2), (192, 192, 2), (256, 256, 1), (5, 7, 1)],
        [*LENGTHS, (700, 2)],
        [Mask(), Mask(right=0), Mask(right=0, alignment=END)],  # causal ones are what 0.6 got wrong
    ),
    "torch-fp8": Case(
        torch_fp8.TorchFp8Forward(),
        [(64, 64, 1), (80, 80, 4), (96, 96, 1), (128, 128, 8), (192, 128, 1), (192, 192, 2), (256, 256, 1), (5, 7, 1)],
        LENGTHS,
        [
            Mask(),
            Mask(right=0),
            Mask(right=0, alignment=END),
            Mask(left=37, right=0),
            Mask(150, 11, END),
            Mask(left=37),
        ],
    ),
    "sage:int8": Case(sage.SageInt8Forward(), _SAGE, _SAGE_LENGTHS, [Mask(), Mask(right=0)], floor=0.01),
    "sage:int8-fp8": Case(sage.SageFp8Forward(), _SAGE, _SAGE_LENGTHS, [Mask(), Mask(right=0)]),
}
with_descales = pytest.mark.parametrize("name", ["flashinfer", "torch-fp8"])


@pytest.fixture
def kernel(name: str) -> Iterator[ForwardKernel]:
    found = registry().availability(name.partition(":")[0])
    if name == "torch-fp8" and not found.ok and torch_fp8._declared() and installed("sgl_kernel") is not None:
        library = torch.library.Library("flash_attn_3", "FRAGMENT")
        library.define(f"fwd({standins_fa.FWD['flash_attn_3']}) -> Tensor[]")
        library.define(f"bwd({standins_fa.BWD}) -> Tensor[]")  # torch asks that it is there; nothing here calls it
        library.impl("fwd", _by_sglang, "CUDA")
        with standins_fa.modules(flash_attn_interface={}):
            torch_fp8._forward.cache_clear()
            torch_fp8._forward()
            yield CASES[name].kernel
            torch_fp8._forward.cache_clear()
        return
    if not found.ok:
        pytest.skip(str(found.reason))
    yield CASES[name].kernel


def _by_sglang(*values: object) -> list[Tensor]:
    from sgl_kernel import flash_ops  # noqa: F401

    arguments = torch.ops.flash_attn_3.fwd.default._schema.arguments
    given = [*values, *(each.default_value for each in arguments[len(values) :])]
    found = torch.ops.sgl_kernel.fwd.default(*given, None)
    return [torch.empty(0) if x is None else x for x in found]  # what it did not need, a list of tensors cannot hold


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_each_kernel_refuses_or_agrees_with_dense_fp64(name: str, kernel: ForwardKernel, dtype: str) -> None:
    case = CASES[name]
    if name.startswith("sage") and (registry().availability("sage").version == "1.0.6") != (name == "sage:int8"):
        pytest.skip("a kernel of the other version of sageattention")
    made = [
        AttentionSpec.make(
            batch=2, heads=8, kv_heads=8 // group, seqlen_q=sq, seqlen_kv=skv, head_dim=d, head_dim_v=dv,
            dtype=dtype, mask=mask, scale=d**-0.5 * (1.0 if i % 5 else 0.7),
        )
        for i, ((sq, skv), mask, (d, dv, group)) in enumerate(itertools.product(case.lengths, case.masks, case.heads))
    ]  # fmt: skip
    few = 1 if dtype == "bf16" or name.startswith("sage") else 4
    assert_quantising_forward_agrees(kernel, list(dict.fromkeys(made))[::few], case.floor, print)


@with_descales
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_descales_of_random_size_are_used(kernel: ForwardKernel, kv_heads: int) -> None:
    assert_descales_are_used(kernel, kv_heads, lengths=(300, 300), mask=Mask(right=0))


@with_descales
def test_a_refused_nonpositive_scale_gives_a_wrong_result(kernel: ForwardKernel) -> None:
    assert_wrong_at_a_negative_scale(kernel)


@pytest.mark.parametrize("name", ["flashinfer"])
def test_more_than_2_to_the_31_elements_agree_with_fp64(kernel: ForwardKernel) -> None:
    assert_many_elements_agree([kernel])


@pytest.mark.parametrize("name", ["flashinfer"])
@pytest.mark.usefixtures("kernel")
def test_refused_windows_and_unequal_head_dimensions_fail_an_assertion() -> None:
    x = torch.zeros(64, 2, 64, device=DEVICE).to(torch.float8_e4m3fn)
    with pytest.raises(AssertionError):
        flashinfer._prefill()(x, x, x, o_dtype=torch.bfloat16, window_left=5, backend="fa3")
    wide = torch.zeros(64, 2, 128, device=DEVICE).to(torch.float8_e4m3fn)
    with pytest.raises(AssertionError):
        flashinfer._prefill()(x, x, wide, o_dtype=torch.bfloat16, backend="fa3")


@pytest.mark.parametrize("mask", [Mask(), Mask(right=0)])
@pytest.mark.parametrize("name", ["torch-fp8"])
def test_the_kernel_equals_torchs_activated_implementation_without_activating_it(
    kernel: ForwardKernel, mask: Mask
) -> None:
    spec = AttentionSpec.make(batch=4, heads=16, seqlen_q=4096, head_dim=128, mask=mask)
    q, k, v = (torch.randn(4, 4096, 16, 128, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    operands = kernel.prepare(Inputs(q, k, v), spec)
    ours = kernel.run(operands)
    assert attention.current_flash_attention_impl() is None
    given = operands.native
    attention.activate_flash_attention_impl("FA3")
    try:
        theirs = torch.ops.aten._scaled_dot_product_flash_attention.quantized(
            *(x.transpose(1, 2) for x in (given.q, given.k, given.v)), *given.descales, 0.0, mask.kind == "causal",
            False, scale=spec.scale,
        )  # fmt: skip
    finally:
        attention.restore_flash_attention_impl()
    assert torch.equal(ours.out, theirs[0])
    assert torch.equal(ours.lse, theirs[1])
