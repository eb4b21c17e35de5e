"""torch's quantised attention on a Hopper GPU: dense FP64, the activated operator, direct calls, lifted refusals.

Where ``flash_attn_interface`` is not installed and ``sgl_kernel`` is, the latter's FlashAttention-3 stands in under
the name ``flash_attn_3::fwd``: torch's own code and the same kernel then run, from another build.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import standins_fa
import torch
from on_gpu import DEVICE, descales_are_used, is_wrong_at_a_scale_below_zero, quantising_forward_agrees
from torch import Tensor
from torch.nn import attention

from attnbench import AttentionSpec, Mask
from attnbench.backends import torch_fp8
from attnbench.backends.common.installed import installed
from attnbench.kernels.contract import Inputs, Operands

KERNEL = torch_fp8.TorchFp8Forward()
FLOOR = 0.05  # beside Q, K and V only P in e4m3 and the accumulator are left
END = "bottom-right"
HEADS = [(64, 64, 1), (80, 80, 4), (96, 96, 1), (128, 128, 8), (192, 128, 1), (192, 192, 2), (256, 256, 1), (5, 7, 1)]
LENGTHS = [(256, 256), (257, 257), (130, 333), (333, 130), (1, 200), (77, 1)]
MASKS = [Mask(), Mask(right=0), Mask(right=0, alignment=END), Mask(left=37, right=0), Mask(left=150, right=11,
         alignment=END), Mask(left=37)]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def flash_attn_interface() -> Iterator[None]:
    if torch_fp8.BACKEND.availability().ok:
        yield
        return
    if not torch_fp8._declared() or installed("sgl_kernel") is None:
        pytest.skip(str(torch_fp8.BACKEND.availability().reason))
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    library.define(f"fwd({standins_fa.FWD['flash_attn_3']}) -> Tensor[]")
    library.define(f"bwd({standins_fa.BWD}) -> Tensor[]")  # torch asks that it is there; nothing here calls it
    library.impl("fwd", _by_sglang, "CUDA")
    with standins_fa.modules(flash_attn_interface={}):
        torch_fp8._forward.cache_clear()
        torch_fp8._forward()
        yield
        torch_fp8._forward.cache_clear()


def _by_sglang(*values: object) -> list[Tensor]:
    from sgl_kernel import flash_ops  # noqa: F401

    arguments = torch.ops.flash_attn_3.fwd.default._schema.arguments
    given = [*values, *(each.default_value for each in arguments[len(values) :])]
    found = torch.ops.sgl_kernel.fwd.default(*given, None)
    return [torch.empty(0) if x is None else x for x in found]  # what it did not need, a list of tensors cannot hold


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_it_refuses_or_agrees_with_dense_fp64(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = [
        AttentionSpec.make(batch=2, heads=8, kv_heads=8 // group, seqlen_q=sq, seqlen_kv=skv, head_dim=d, head_dim_v=dv,
                           dtype=dtype, mask=mask, scale=d**-0.5 * (1.0 if i % 5 else 0.7))
        for i, ((sq, skv), mask, (d, dv, group)) in enumerate(itertools.product(LENGTHS, MASKS, HEADS))
    ]  # fmt: skip
    with capsys.disabled():
        quantising_forward_agrees(KERNEL, list(dict.fromkeys(made))[:: 1 if dtype == "bf16" else 4], FLOOR, print)


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_descales_of_random_size_are_used(kv_heads: int) -> None:
    descales_are_used(KERNEL, kv_heads, lengths=(200, 300), mask=Mask())


def _operands(length: int, mask: Mask) -> tuple[AttentionSpec, Operands]:
    spec = AttentionSpec.make(batch=16384 // length, heads=16, seqlen_q=length, head_dim=128, mask=mask)
    q, k, v = (
        torch.randn(spec.batch, length, 16, 128, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)
    )
    return spec, KERNEL.prepare(Inputs(q, k, v), spec)


@pytest.mark.parametrize("mask", [Mask(), Mask(right=0)])
def test_it_is_what_activating_registers_and_nothing_is_activated(mask: Mask) -> None:
    spec, operands = _operands(4096, mask)
    ours = KERNEL.run(operands)
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


def test_a_scale_that_is_not_positive_is_refused_because_the_answer_is_wrong() -> None:
    is_wrong_at_a_scale_below_zero(KERNEL)
