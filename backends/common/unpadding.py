"""Kernels for packed batches on padded rows: their tokens are laid end to end, and results are put back into rows.

Nothing is read from the device: packed tensors have room for as many tokens as the rows.  Where fewer are used, the
last one of all stands in the rest, which belongs to no sequence, so that kernels whose last tile reads on read nothing
but what that sequence holds itself.  Where tokens lie is found once for a tensor of lengths.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import partial, wraps
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attnbench.graph_pools import current_stream, outside_pools, recording
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Operands, Result, Saved
from attnbench.problem.fp8 import Quantised
from attnbench.problem.lengths import Lengths
from attnbench.problem.lengths_kind import packed_sizes
from attnbench.problem.spec import AttentionSpec

__all__ = ["unpads_backward", "unpads_forward"]

_Forward = TypeVar("_Forward", bound=ForwardKernel)
_Backward = TypeVar("_Backward", bound=BackwardKernel)
_KEPT = 8  # sizes of rows for one tensor of lengths


def unpads_forward(*natively: str) -> Callable[[type[_Forward]], type[_Forward]]:
    """A forward of packed batches serves padded ones too; on device types ``natively`` it does so itself."""

    def decorate(kind: type[_Forward]) -> type[_Forward]:
        prepare, run = kind.prepare, kind.run

        @wraps(prepare)
        def prepare_unpadded(self: ForwardKernel, inputs: Inputs, spec: AttentionSpec) -> Operands:
            if inputs.lengths is None or not _padded(inputs.lengths, inputs.device, natively):
                return prepare(self, inputs, spec)
            q, k, v = inputs.unquantised()
            batch = _Batch.of(inputs.lengths, spec, q, k)
            tokens = Inputs(batch.q.packed(q), batch.kv.packed(k), batch.kv.packed(v), batch.lengths)
            inner = prepare(self, tokens, batch.spec)
            kept = Operands(spec, q, k, v, _Unpadded(inner, batch), inputs.lengths)
            if isinstance(inner.q, Quantised):
                kept.q, kept.k, kept.v = (
                    _quantised_rows(side, x)
                    for side, x in ((batch.q, inner.q), (batch.kv, inner.k), (batch.kv, inner.v))
                )
            return kept

        @wraps(run)
        def run_unpadded(self: ForwardKernel, operands: Operands) -> Result:
            if not isinstance(operands.native, _Unpadded):
                return run(self, operands)
            inner, batch = operands.native
            out, lse, state = run(self, inner)
            return Result(batch.q.rows(out, 0.0), None if lse is None else batch.q.rows(lse, -torch.inf), state)

        kind.prepare, kind.run = prepare_unpadded, run_unpadded  # type: ignore[method-assign]
        return kind

    return decorate


def unpads_backward(*natively: str) -> Callable[[type[_Backward]], type[_Backward]]:
    """A backward of packed batches serves padded ones too, after any forward; see ``unpads_forward``."""

    def decorate(kind: type[_Backward]) -> type[_Backward]:
        run = kind.run

        @wraps(run)
        def run_unpadded(self: BackwardKernel, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            lengths = saved.operands.lengths
            if lengths is None or not _padded(lengths, grad_out.device, natively):
                return run(self, saved, grad_out)
            q, k, v = saved.operands.tensors()
            batch = _Batch.of(lengths, saved.spec, q, k)
            packed, lse = batch.q.packed, saved.lse
            tokens = Operands(batch.spec, packed(q), batch.kv.packed(k), batch.kv.packed(v), lengths=batch.lengths)
            inner = Saved(tokens, packed(saved.out), None if lse is None else packed(lse), saved.state)
            dq, dk, dv = run(self, inner, packed(grad_out))
            return batch.q.rows(dq, 0.0), batch.kv.rows(dk, 0.0), batch.kv.rows(dv, 0.0)

        kind.run = run_unpadded  # type: ignore[method-assign]
        return kind

    return decorate


def _padded(lengths: Lengths, device: torch.device, natively: tuple[str, ...]) -> bool:
    return lengths.batch != "packed" and device.type not in natively


class _Side(NamedTuple):
    """Rows (B, S) of queries or keys; ``row`` and ``place`` (T,) are None where all of them are used.

    ``starts`` (B + 1,) int32: where each row begins among the packed tokens.  ``row`` and ``place``: where each packed
    token lies.  ``back`` (B · S,): which packed token stands at each place, any one at the ``unused`` (B, S).
    """

    sizes: tuple[int, int]
    starts: Tensor
    row: Tensor | None = None
    place: Tensor | None = None
    back: Tensor | None = None
    unused: Tensor | None = None

    def packed(self, x: Tensor) -> Tensor:
        """(1, H, T, ...) of x (B, H, S, ...)."""
        if self.row is None:
            return x.detach().transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]
        return x.detach()[self.row, :, self.place].transpose(0, 1)[None]

    def rows(self, x: Tensor, filling: float) -> Tensor:
        """(B, H, S, ...) of x (1, H, T, ...), with ``filling`` at what is not used."""
        tokens = x[0].transpose(0, 1)
        if self.back is None or self.unused is None:
            return tokens.view(*self.sizes, *tokens.shape[1:]).transpose(1, 2)
        found = tokens.index_select(0, self.back).view(*self.sizes, *tokens.shape[1:])
        return found.masked_fill_(self.unused.view(*self.sizes, *[1] * (found.ndim - 2)), filling).transpose(1, 2)


class _Batch(NamedTuple):
    """A padded batch as a packed one."""

    q: _Side
    kv: _Side
    lengths: Lengths
    spec: AttentionSpec

    @classmethod
    def of(cls, lengths: Lengths, spec: AttentionSpec, q: Tensor, k: Tensor) -> _Batch:
        """The batch of q (B, H, Sq, D) and k (B, Hkv, Skv, D)."""
        rows, queries, keys = q.shape[0], q.shape[2], k.shape[2]
        left = lengths.batch == "left-padded"
        own = _side(lengths.q, rows, queries, left, q.device)
        other = own if lengths.square and queries == keys else _side(lengths.kv, rows, keys, left, q.device)
        sizes = packed_sizes(rows, queries, keys, rows * queries, rows * keys, other is own)
        return cls(own, other, Lengths("packed", own.starts, other.starts, queries, keys), spec.replace(**sizes))


class _Unpadded(NamedTuple):
    """What ``run`` reads: the operands of the packed batch, and where its tokens lie."""

    inner: Operands
    batch: _Batch


class _Kept(NamedTuple):
    version: int
    side: _Side


_sides: MutableMapping[Tensor, dict[tuple[object, ...], _Kept]] = WeakTensorKeyDictionary()


def _side(lengths: Tensor | None, rows: int, size: int, left: bool, device: torch.device) -> _Side:
    """One side, known already where the lengths are the same tensor, unchanged."""
    if lengths is None:
        starts = torch.arange(0, (rows + 1) * size, size, dtype=torch.int32, device=device)
        return _Side((rows, size), starts)
    if recording() or lengths.is_inference():  # no version tells of a change
        return _side_of(lengths, size, left)
    known, key = _sides.setdefault(lengths, {}), (size, left, current_stream(device))
    found = known.get(key)
    if found is None or found.version != lengths._version:
        if len(known) >= _KEPT:
            known.pop(next(iter(known)), None)
        side = outside_pools(partial(_side_of, lengths, size, left), device)
        found = known[key] = _Kept(lengths._version, side)
    return found.side


def _side_of(lengths: Tensor, size: int, left: bool) -> _Side:
    rows = lengths.shape[0]
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    first = size - lengths if left else torch.zeros_like(lengths)
    token = torch.arange(rows * size, device=lengths.device)
    token = torch.minimum(token, starts[-1] - 1).clamp_min_(0)
    row = torch.bucketize(token, starts[1:].contiguous(), right=True).clamp_max_(rows - 1)
    place = (first[row] + token - starts[row]).clamp_max_(size - 1)
    column = torch.arange(size, device=lengths.device)
    own = column - first[:, None]
    unused = (own < 0) | (own >= lengths[:, None])
    back = (starts[:-1, None] + own).clamp_(0, rows * size - 1).flatten()
    return _Side((rows, size), starts.to(torch.int32), row, place, back, unused)


def _quantised_rows(side: _Side, x: Tensor | Quantised) -> Quantised:
    """x (1, H, T, D), with a descale for each token, in rows; the unused ones are 0."""
    assert isinstance(x, Quantised), "all three or none"
    stored = side.rows(x.data.view(torch.uint8), 0).view(x.data.dtype)  # float8 has few operators
    return Quantised(stored, side.rows(x.descale, 1.0), x.granularity, x.rotated)
