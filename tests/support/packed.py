"""Batches of sequences of different lengths, packed or padded, and the result of each sequence alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from attnbench import AttentionSpec, Mask
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.problem.lengths import Lengths
from attnbench.problem.lengths_kind import LengthsKind

__all__ = ["Answer", "Documents", "answers", "documents", "starts"]

Answer = tuple[Tensor, ...]  # out, lse and, of a backward, dq, dk, dv


def starts(lengths: Iterable[int]) -> Tensor:
    """Cumulative lengths (N + 1,) of sequences of these lengths."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@dataclass(frozen=True)
class Documents:
    """Sequences of (queries, keys) with one mask and one set of sizes; ``padding`` lays them out as padded rows."""

    lengths: tuple[tuple[int, int], ...]
    mask: Mask = field(default_factory=Mask)
    softcap: float = 0.0
    heads: tuple[int, int] = (2, 1)
    head_dim: int = 32
    head_dim_v: int = 32
    seed: int = 0
    padding: str | None = None
    device: str = "cpu"

    def make(self, queries: int, keys: int, lengths: LengthsKind | None = None, batch: int = 1) -> AttentionSpec:
        return AttentionSpec.make(
            batch=batch, heads=self.heads[0], kv_heads=self.heads[1], seqlen_q=max(1, queries), seqlen_kv=max(1, keys),
            head_dim=self.head_dim, head_dim_v=self.head_dim_v, mask=self.mask, softcap=self.softcap,
            direction="training", lengths=lengths,
        )  # fmt: skip

    def parts(self) -> list[list[Tensor]]:
        """q, k, v and grad_out of each sequence, (1, H, S, D), in bf16; each of another magnitude."""
        random = torch.Generator().manual_seed(self.seed)

        def normal(index: int, heads: int, length: int, size: int) -> Tensor:
            return (
                (torch.randn(1, heads, length, size, generator=random) * 2.0 ** (index % 3)).bfloat16().to(self.device)
            )

        (h, kv), d, dv = self.heads, self.head_dim, self.head_dim_v
        return [
            [normal(i, h, a, d), normal(i, kv, b, d), normal(i, kv, b, dv), normal(i, h, a, dv)]
            for i, (a, b) in enumerate(self.lengths)
        ]

    def batched(self, parts: list[list[Tensor]]) -> tuple[list[Tensor], Lengths, AttentionSpec]:
        """The parts as one batch, its lengths and its spec."""
        queries, keys = zip(*self.lengths, strict=True)
        longest, most = max(1, *queries), max(1, *keys)
        if self.padding is None:
            kind = LengthsKind(batch="packed", total_q=max(1, sum(queries)), total_kv=max(1, sum(keys)))
            # (T, H, D) in memory, as callers pass them.
            whole = [
                torch.cat([x[0].transpose(0, 1) for x in each]).transpose(0, 1)[None]
                for each in zip(*parts, strict=True)
            ]
            of_q, of_kv = (starts(each).to(self.device) for each in (queries, keys))
            lengths = Lengths("packed", of_q, of_kv, longest, most)
            return whole, lengths, self.make(longest, most, kind, len(parts))
        kind = LengthsKind(batch="padded" if self.padding == "right" else "left-padded")
        counts = [torch.tensor(each, dtype=torch.int32, device=self.device) for each in (queries, keys)]
        lengths = Lengths(kind.batch, counts[0], counts[1], longest + 1, most + 3)
        sizes = (longest + 1, most + 3, most + 3, longest + 1)
        whole = [
            torch.cat([self._row(x, size) for x in each])
            for each, size in zip(zip(*parts, strict=True), sizes, strict=True)
        ]
        return whole, lengths, self.make(longest + 1, most + 3, kind, len(parts))

    def _row(self, x: Tensor, size: int) -> Tensor:
        row = x.new_full((1, x.shape[1], size, x.shape[3]), torch.nan)
        row[:, :, self._place(x.shape[2], size)] = x
        return row

    def _place(self, length: int, size: int) -> slice:
        return slice(size - length, size) if self.padding == "left" else slice(0, length)

    def split(self, whole: Answer) -> list[Answer]:
        """Each sequence's part of a result; asserts that the padding holds zeros, and minus infinity in the lse."""
        found = []
        at_q = at_kv = 0
        for i, (a, b) in enumerate(self.lengths):
            rows = []
            for place, x in enumerate(whole):
                length, at = (a, at_q) if place < 3 else (b, at_kv)
                if self.padding is None:
                    rows.append(x[:, :, at : at + length])
                    continue
                own = self._place(length, x.shape[2])
                rest = x[i].clone()
                rest[:, own] = -torch.inf if place == 1 else 0
                assert bool((rest == (-torch.inf if place == 1 else 0)).all()), "something was written to the padding"
                rows.append(x[i : i + 1, :, own])
            found.append(tuple(rows))
            at_q, at_kv = at_q + a, at_kv + b
        return found

    def run_alone(self, forward: ForwardKernel, backward: BackwardKernel | None = None) -> list[Answer]:
        """The kernels' results for each sequence alone; 0 and minus infinity if it has no queries or no keys."""
        found = []
        for (a, b), (q, k, v, do) in zip(self.lengths, self.parts(), strict=True):
            if a and b:
                found.append(_run(forward, backward, Inputs(q, k, v), self.make(a, b), do))
                continue
            lse = do.new_full(do.shape[:3], -torch.inf, dtype=torch.float32)
            gradients = () if backward is None else tuple(torch.zeros_like(x) for x in (q, k, v))
            found.append((torch.zeros_like(do), lse, *gradients))
        return found


def answers(
    batch: Documents, forward: ForwardKernel, backward: BackwardKernel | None = None,
    parts: list[list[Tensor]] | None = None,
) -> list[Answer]:  # fmt: skip
    """out, lse and, with a backward, dq, dk, dv of each sequence, computed together."""
    whole, lengths, spec = batch.batched(batch.parts() if parts is None else parts)
    return batch.split(_run(forward, backward, Inputs(*whole[:3], lengths), spec, whole[3]))


def _run(
    forward: ForwardKernel, backward: BackwardKernel | None, inputs: Inputs, spec: AttentionSpec, grad_out: Tensor
) -> Answer:
    operands = forward.prepare(inputs, spec)
    result = forward.run(operands)
    assert result.lse is not None
    if backward is None:
        return result.out, result.lse
    return result.out, result.lse, *backward.run(Saved(operands.kept(), result.out, result.lse, result.state), grad_out)


def documents(most: int, masks: st.SearchStrategy[Mask], **fixed: object) -> st.SearchStrategy[Documents]:
    """A few sequences of up to ``most`` queries and keys, including empty ones and ones of one token."""
    length = st.one_of(st.sampled_from([0, 1, most]), st.integers(0, most))
    pairs = st.lists(st.one_of(length.map(lambda n: (n, n)), st.tuples(length, length)), min_size=1, max_size=4)
    filled = pairs.filter(lambda found: any(a for a, _ in found) and any(b for _, b in found))
    return st.builds(Documents, lengths=filled.map(tuple), mask=masks, seed=st.integers(0, 99), **{  # type: ignore[arg-type]
        name: st.just(x) if not isinstance(x, st.SearchStrategy) else x for name, x in fixed.items()
    })  # fmt: skip
