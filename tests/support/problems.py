"""Random attention problems: a spec, and tensors for it, some with unusual strides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from attnbench import AttentionSpec, Mask
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.mask import ALIGNMENTS


@dataclass(frozen=True)
class Problem:
    """A spec and the memory layout of its tensors."""

    spec: AttentionSpec
    layout: str
    strided: bool
    seed: int

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the output's gradient, standard normal, in ``layout``."""
        spec, generator = self.spec, torch.Generator().manual_seed(self.seed)
        sizes = [
            (spec.heads, spec.seqlen_q, spec.head_dim),
            (spec.kv_heads, spec.seqlen_kv, spec.head_dim),
            (spec.kv_heads, spec.seqlen_kv, spec.head_dim_v),
            (spec.heads, spec.seqlen_q, spec.head_dim_v),
        ]
        return tuple(self._tensor(*size, generator) for size in sizes)

    def _tensor(self, heads: int, length: int, size: int, generator: torch.Generator) -> Tensor:
        shape = (
            (self.spec.batch, heads, length, size) if self.layout == "bhsd" else (self.spec.batch, length, heads, size)
        )
        dtype = TO_TORCH[self.spec.dtype]
        if not self.strided:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        # Every second element of a tensor whose axes are stored in another order.
        wide = torch.randn(shape[3] * 2, shape[2], shape[0], shape[1], generator=generator, dtype=torch.float64).to(
            dtype
        )
        return wide.permute(2, 3, 1, 0)[..., ::2]


def tensors_of(problem: Problem) -> list[Tensor]:
    """q, k, v and the output's gradient as (B, H, S, D) views of tensors in the problem's layout."""
    return [x.transpose(1, 2) if problem.layout == "bshd" else x for x in problem.tensors()]


def masks() -> st.SearchStrategy[Mask]:
    """No mask, causal and windows, in both alignments."""
    side = st.one_of(st.none(), st.integers(0, 40))
    alignment = st.sampled_from(["top-left", "bottom-right"])
    return st.one_of(
        st.just(Mask()),
        st.builds(lambda where: Mask(None, 0, where), alignment),
        st.builds(Mask, side, side, alignment),
    )


def every_mask() -> Iterator[tuple[Mask, int, int]]:
    """Every mask over a few queries and keys, in canonical form, with its lengths."""
    sides = [None, *range(7)]
    for sq, skv, left, right, alignment in itertools.product(range(1, 7), range(1, 7), sides, sides, ALIGNMENTS):
        yield Mask(left, right, alignment).canonical(sq, skv), sq, skv


@st.composite
def problems(draw: st.DrawFn, dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16", "fp64")) -> Problem:
    """Small problems with unusual shapes: odd lengths, Sq ≠ Skv, groups, windows, empty rows."""
    kv_heads = draw(st.integers(1, 3))
    seqlen_q = draw(st.integers(1, 70))
    head_dim = draw(st.sampled_from([8, 16, 32, 64, 24, 5]))
    spec = AttentionSpec.make(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.sampled_from([1, 1, 2, 3])),
        kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        seqlen_kv=draw(st.one_of(st.just(seqlen_q), st.integers(1, 70))),
        head_dim=head_dim,
        head_dim_v=draw(st.sampled_from([head_dim] * 4 + [16])),
        dtype=draw(st.sampled_from(dtypes)),
        mask=draw(masks()),
        softcap=draw(st.sampled_from([0.0] * 4 + [3.0])),
        scale=draw(st.sampled_from([None, None, None, 0.3, -0.2])),
        direction="training",
    )
    return Problem(spec, draw(st.sampled_from(["bhsd", "bshd"])), draw(st.booleans()), draw(st.integers(0, 2**31)))


@st.composite
def same_program_problems(draw: st.DrawFn) -> Problem:
    """Problems that differ only in lengths, masks and strides, which do not need another compiled kernel.

    Sizes differ from one another, because a compiler treats equal sizes as one symbol.
    """
    spec = AttentionSpec.make(
        batch=2,
        heads=6,
        kv_heads=3,
        seqlen_q=draw(st.integers(20, 40)),
        seqlen_kv=draw(st.one_of(st.integers(9, 15), st.integers(41, 70))),
        head_dim=16,
        mask=draw(masks()),
        dtype=draw(st.sampled_from(["bf16"] * 3 + ["fp16"])),
    )
    return Problem(spec, draw(st.sampled_from(["bhsd", "bshd"])), draw(st.booleans()), draw(st.integers(0, 2**31)))


def tensors(
    batch=2, heads=4, kv_heads=2, sq=40, skv=56, d=16, dtype=torch.bfloat16, seed=0, grad=False
) -> tuple[Tensor, ...]:
    """q, k, v (B, H, S, D), standard normal."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, sq, d), (batch, kv_heads, skv, d), (batch, kv_heads, skv, d)]
    return tuple(torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in shapes)
