"""Problems for an FP8 backward, tensors saved by an exact FP8 forward, and a comparison of gradients with FP64."""

from __future__ import annotations

import dense
import torch
from torch import Tensor

from attnbench import AttentionSpec, Mask
from attnbench.kernels.contract import BackwardKernel, Operands, Saved, gradient_dtype
from attnbench.problem.fp8 import Recipe, quantise

# Longer than every tile, so that there are skipped, full and partial blocks on both sides.
LONG = [
    (150, 260, Mask(right=0, alignment="bottom-right")),
    (260, 130, Mask(right=0, alignment="bottom-right")),
    (140, 200, Mask(left=70, right=0)),
    (200, 140, Mask(left=90, right=70)),
    (200, 128, Mask(left=20, alignment="bottom-right")),
    (129, 150, Mask(right=19)),
    (128, 192, Mask()),
]


def rounded_to_e4m3(x: Tensor) -> Tensor:
    """x (B, H, S, D) rounded to quarters up to 2, which e4m3 holds with any power of two for a scale."""
    return (x.float().clamp(-2, 2) * 4).round().div(4).to(x.dtype)


def make(seqlen_q: int, seqlen_kv: int, **more: object) -> tuple[AttentionSpec, tuple[Tensor, ...]]:
    """A spec, and q, k, v and the output's gradient in bf16, the last one rounded to numbers that e4m3 represents."""
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 32, "direction": "training", **more}
    spec = AttentionSpec.make(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, **sizes)
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, length: int, size: int) -> Tensor:
        return torch.randn(spec.batch, heads, length, size, generator=generator).to(torch.bfloat16)

    q = normal(spec.heads, seqlen_q, spec.head_dim)
    k = normal(spec.kv_heads, seqlen_kv, spec.head_dim)
    v = normal(spec.kv_heads, seqlen_kv, spec.head_dim_v)
    return spec, (q, k, v, rounded_to_e4m3(normal(spec.heads, seqlen_q, spec.head_dim_v)))


def saved(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, recipes: tuple[Recipe, ...]) -> Saved:
    """The saved tensors of an exact FP8 forward: quantised operands, and their exact out and log-sum-exp."""
    quantised = (
        quantise(q, recipes[0], rotate=True), quantise(k, recipes[1], rotate=True, smooth=True), quantise(v, recipes[2])
    )  # fmt: skip
    operands = Operands(spec, *quantised)
    out, lse = dense.dense_attention(*operands.tensors(torch.float64), spec)
    return Saved(operands, out.to(gradient_dtype(spec)), lse.float())


def check(kernel: BackwardKernel, given: Saved, grad_out: Tensor, allowed: float) -> None:
    """Asserts that gradients are within ``allowed`` (relative L2) of FP64 on the operands.

    Where terms cancel, the error is relative to a tenth of the norm without cancellation.
    """
    spec = given.spec
    tensors = given.operands.tensors(torch.float64)
    truth = dense.dense_gradients(*tensors, grad_out, spec)
    sizes = dense.gradient_sizes(*tensors, grad_out, spec)
    found = kernel.run(given, grad_out)
    for name, x, wanted, size in zip(("dq", "dk", "dv"), found, truth, sizes, strict=True):
        assert (x.shape, x.dtype) == (wanted.shape, gradient_dtype(spec)), name
        error = (x.double() - wanted).norm().item()
        assert error <= allowed * max(wanted.norm().item(), 0.1 * size, 1e-6), (name, error, wanted.norm(), size)


def misaligned(x: Tensor) -> Tensor:
    """A copy at an address that is not a multiple of 16 bytes, which TMA cannot read."""
    memory = torch.zeros(x.numel() + 16 // x.element_size() + 1, dtype=x.dtype)
    begin = -memory.data_ptr() % 16 // x.element_size() + 1
    there = memory[begin : begin + x.numel()].view(x.shape)
    assert there.data_ptr() % 16
    return there.copy_(x)


def interleaved_heads(x: Tensor) -> Tensor:
    """A copy in (B, S, H, D) memory layout."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def with_row_padding(x: Tensor) -> Tensor:
    """The same values as a view of wider rows."""
    return torch.cat([x, torch.ones_like(x)], 3)[..., : x.shape[3]]
