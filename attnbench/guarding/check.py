"""Compare a few rows of a call with exact attention on the same tensors: squared errors and sizes, head by head.

Out: some queries of some heads, over the keys they see.  Gradients: dq of some queries, dk and dv of some keys, of a
few (batch, key head) groups.  dk and dv need P and rowsum(dO∘O) of all queries of the group.  Everything is queued on
the current stream without waiting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from random import Random

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..problem.exact import exact_out
from ..problem.fp8 import Quantised
from ..problem.spec import AttentionSpec
from ..problem.visible_keys import VisibleKeys
from .gradients import Hide, key_gradients, query_gradients, reach, stretches, together, wide_dtype

__all__ = ["Group", "Part", "Pick", "Sums", "aside", "gradient_sums", "out_sums", "part", "pick_groups", "pick_rows"]

_HEADS, _ROWS = 8, 4  # in a check of out: one wrong head among 16 is drawn in two checks of five
_GROUPS, _LINES = 2, 8  # in a check of gradients: the groups, and the queries and keys of each
# A row of dq or dk is a sum that may cancel to nothing (a query that has one key): it counts as half as long as it
# would be if nothing cancelled, at the least.
_CANCELLING = ("dq", "dk")
_LEAST_SHARE = 0.5


@dataclass(frozen=True)
class Pick:
    """Queries ``rows`` of a query head."""

    batch: int
    head: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Queries (head of the group, row) and as many ``keys`` of a key head."""

    batch: int
    kv_head: int
    queries: tuple[tuple[int, int], ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Copies of what the groups read: q (G, group · Sq, D), head after head, k (G, Skv, D), v (G, Skv, Dv)."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Sums:
    """The result of a check: one FP64 vector ``packed``, and how to read it.

    First the largest magnitudes of the ``given`` inputs and of each checked tensor.  Then, head by head, lengths for
    each of its ``rows``: of each tensor's errors, of the exact rows, and for dq and dk without cancellation.  ``least``
    maps each tensor to the least square of a row.
    """

    packed: Tensor
    given: int
    rows: int
    least: Mapping[str, float]

    def read(self) -> tuple[bool, dict[str, tuple[list[float], list[float]]]]:
        """Whether the inputs are finite, and each tensor's squared errors and sizes by head; errors are infinite if it
        is not.
        """
        begin = self.given + len(self.least)
        finite = [math.isfinite(each) for each in self.packed[:begin].tolist()]
        lengths = sum(3 if name in _CANCELLING else 2 for name in self.least)
        found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in self.least}
        for head in self.packed[begin:].view(-1, lengths, self.rows).tolist():
            columns = iter(head)
            for name, least in self.least.items():
                errors, sizes = next(columns), next(columns)
                if name in _CANCELLING:
                    sizes = [max(pair) for pair in zip(sizes, (_LEAST_SHARE * x for x in next(columns)), strict=True)]
                found[name][0].append(sum(x * x for x in errors))
                found[name][1].append(sum(max(x * x, least) for x in sizes))
        for name, whole in zip(self.least, finite[self.given :], strict=True):
            if not whole:
                found[name][0][0] = math.inf
        return all(finite[: self.given]), found


def pick_rows(spec: AttentionSpec, random: Random) -> list[Pick]:
    """Queries for a check of out, drawn uniformly with replacement."""
    return [
        Pick(
            random.randrange(spec.batch),
            random.randrange(spec.heads),
            tuple(random.randrange(spec.seqlen_q) for _ in range(_ROWS)),
        )
        for _ in range(_HEADS)
    ]


def pick_groups(spec: AttentionSpec, random: Random) -> list[Group]:
    """Groups for a check of gradients, drawn uniformly with replacement."""
    return [
        Group(
            random.randrange(spec.batch),
            random.randrange(spec.kv_heads),
            tuple((random.randrange(spec.group), random.randrange(spec.seqlen_q)) for _ in range(_LINES)),
            tuple(random.randrange(spec.seqlen_kv) for _ in range(_LINES)),
        )
        for _ in range(_GROUPS)
    ]


def aside(device: torch.device) -> ExitStack:
    """A block without effect on the program: no gradients, no autocast, no modes that intercept operators."""
    block = ExitStack()
    block.enter_context(torch.no_grad())
    block.enter_context(torch.autocast(device.type, enabled=False))
    block.enter_context(torch._C.DisableTorchFunction())
    block.enter_context(_disable_current_modes())
    if device.type == "cuda":
        block.enter_context(torch.cuda.device(device))
    block.enter_context(torch.profiler.record_function("attnbench::guard"))
    return block


def part(groups: Sequence[Group], q: Tensor, k: Tensor, v: Tensor) -> Part:
    """A copy of what the groups read, so that q, k, v may be changed or freed before the backward runs."""
    at = tuple(_on(q.device, [(group.batch, group.kv_head) for group in groups]).unbind(1))
    return Part(_by_group(q, k.shape[1])[at].flatten(1, 2), k[at], v[at])


def out_sums(
    q: Tensor | Quantised, k: Tensor | Quantised, v: Tensor | Quantised, out: Tensor, spec: AttentionSpec,
    picks: Sequence[Pick], seen: VisibleKeys | None = None,
) -> Sums:  # fmt: skip
    """The sums of out (B, H, Sq, Dv), as a kernel returned it, against exact attention.

    ``seen`` are the keys of each query where sequences have lengths of their own, and the spec that of ``Rows``.
    """
    wide, count = wide_dtype(spec, out.device), together(spec, out.device)
    places = [
        (pick.batch, pick.head, pick.head // spec.group, row, *spec.mask.span(row, spec.seqlen_q, spec.seqlen_kv))
        for pick in picks
        for row in pick.rows
    ]
    rows = len(places) // len(picks)
    index = _on(out.device, places).view(len(picks), rows, -1)
    batch, head, kv_head, row = index[..., :4].unbind(-1)
    start, stop, hide = *index[..., 4:].split_with_sizes([1, 1], -1), _hide(spec, seen)
    if seen is not None:
        start, stop = seen.first[batch, row].unsqueeze(-1), seen.stop[batch, row].unsqueeze(-1)
    queries, found = _rows(q, batch, head, row, wide), out[batch, head, row]
    lengths = []
    for begin in range(0, len(picks), count):
        some = slice(begin, begin + count)
        spans = [place[4:] for place in places[begin * rows : (begin + count) * rows]]
        first, last = reach(spans) if seen is None else (0, spec.seqlen_kv)
        keys, values = (_slices(x, batch[some, 0], kv_head[some, 0], first, last, wide) for x in (k, v))
        hidden = hide(torch.arange(first, last, device=out.device), start[some], stop[some])
        lengths.append(_compared(found[some], exact_out(queries[some], keys, values, hidden, spec)))
    given = [number for x in (q, k, v) for number in _largest(x)]
    return Sums(_packed([*given, *_largest(out)], lengths), len(given), rows, {"out": _least(out)})


def gradient_sums(
    whole: Part, groups: Sequence[Group], grad_out: Tensor, gradients: tuple[Tensor, Tensor, Tensor],
    spec: AttentionSpec, seen: VisibleKeys | None = None,
) -> Sums:  # fmt: skip
    """The sums of dq (B, H, Sq, D), dk (B, Hkv, Skv, D) and dv (B, Hkv, Skv, Dv), as a kernel returned them.

    ``seen`` is that of ``out_sums``.
    """
    count, lengths = together(spec, grad_out.device), []
    for begin in range(0, len(groups), count):
        some = slice(begin, begin + count)
        own = Part(whole.q[some], whole.k[some], whole.v[some])
        lengths.append(_gradient_lengths(own, groups[some], grad_out, gradients, spec, seen))
    given = [number for x in (grad_out, whole.q, whole.k, whole.v) for number in _largest(x)]
    found = [number for x in gradients for number in _largest(x)]
    if gradients[0].dtype == torch.float16:  # programs that scale their loss expect gradients beyond fp16's range
        given += found
    least = dict(zip(("dq", "dk", "dv"), map(_least, gradients), strict=True))
    return Sums(_packed([*given, *found], lengths), len(given), len(groups[0].keys), least)


def _gradient_lengths(
    own: Part, groups: Sequence[Group], grad_out: Tensor, gradients: tuple[Tensor, Tensor, Tensor],
    spec: AttentionSpec, seen: VisibleKeys | None,
) -> Tensor:  # fmt: skip
    """(G, lengths, rows), as ``Sums`` has them."""
    device = grad_out.device
    places = [
        (group.batch, group.kv_head, number, group.kv_head * spec.group + head, row, head * spec.seqlen_q + row, key,
         *spec.mask.span(row, spec.seqlen_q, spec.seqlen_kv))
        for number, group in enumerate(groups)
        for (head, row), key in zip(group.queries, group.keys, strict=True)
    ]  # fmt: skip
    parts = stretches(len(groups), spec, device)
    nearest = [
        [min(max(place[6], piece.first), piece.last - 1) - piece.first for place in places]
        for pieces in parts
        for piece in pieces
    ]
    index = _on(device, [*zip(*places, strict=True), *nearest]).view(-1, len(groups), len(places) // len(groups))
    batch, kv_head, number, head, row, line, key = index[:7].unbind()
    start, stop, *near = index[7:].unsqueeze(2).unbind()
    every = torch.arange(spec.seqlen_q, device=device).expand(spec.group, -1).reshape(-1, 1)
    edges, hide = spec.mask.edges(every, spec.seqlen_q, spec.seqlen_kv), _hide(spec, seen)
    if seen is not None:
        start, stop = (x[batch, row].unsqueeze(1) for x in (seen.first, seen.stop))
        first_key, stop_key = (x[batch[:, 0]].repeat(1, spec.group).unsqueeze(-1) for x in (seen.first, seen.stop))
        edges = first_key, stop_key
    k, v = (x.to(wide_dtype(spec, device)) for x in (own.k, own.v))
    first, last = reach([place[7:] for place in places]) if seen is None else (0, spec.seqlen_kv)
    q_rows, do_rows = own.q[number, line].to(k.dtype), grad_out[batch, head, row].to(k.dtype)
    keys = torch.arange(spec.seqlen_kv, device=device)
    hidden = hide(keys[first:last], start.mT, stop.mT)
    dq, dq_length = query_gradients(q_rows, do_rows, k[:, first:last], v[:, first:last], hidden, spec)
    do = partial(_lines, _by_group(grad_out, spec.kv_heads), batch[:, 0], kv_head[:, 0])
    dk, dv, dk_length = key_gradients(own.q, do, k, v, keys, key, near, parts, edges, hide, spec)
    lengths = [
        _compared(gradients[0][batch, head, row], dq), dq_length.unsqueeze(1),
        _compared(gradients[1][batch, kv_head, key], dk), dk_length.unsqueeze(1),
        _compared(gradients[2][batch, kv_head, key], dv),
    ]  # fmt: skip
    return torch.cat(lengths, dim=1)


def _hide(spec: AttentionSpec, seen: VisibleKeys | None) -> Hide:
    return spec.mask.outside if seen is None else seen.outside


def _compared(found: Tensor, exact: Tensor) -> Tensor:
    """The lengths of errors and of exact rows, (G, 2, rows), from rows (G, rows, D)."""
    both = torch.stack([found - exact, exact], dim=1)
    lengths: Tensor = torch.linalg.vector_norm(both, dim=-1, dtype=torch.float64)
    return lengths


def _packed(largest: list[Tensor], lengths: list[Tensor]) -> Tensor:
    return torch.cat([torch.stack(largest).to(torch.float64), *(each.flatten() for each in lengths)])


def _least(found: Tensor) -> float:
    """The least square of a row: below a few of the type's smallest normal numbers no kernel is accurate."""
    return found.shape[-1] * float(torch.finfo(found.dtype).smallest_normal) ** 2


def _on(device: torch.device, places: Sequence[Sequence[int]]) -> Tensor:
    """(len(places), n) indices on the device, without waiting for it."""
    index = torch.tensor(places, dtype=torch.int64, device="cpu")
    return (index.pin_memory() if device.type == "cuda" else index).to(device, non_blocking=True)


def _by_group(x: Tensor, kv_heads: int) -> Tensor:
    """(B, Hkv, group, S, D) of x (B, H, S, D)."""
    return x.view(x.shape[0], kv_heads, -1, *x.shape[2:])


def _lines(x: Tensor, batch: Tensor, kv_head: Tensor, begin: int, end: int) -> Tensor:
    """(groups, end - begin, D) of x (B, Hkv, group, S, D): heads as a whole, one after the other, or rows of one."""
    (first, row), (last, other) = divmod(begin, x.shape[3]), divmod(end - 1, x.shape[3])
    return x[batch, kv_head, first : last + 1, row : other + 1].flatten(1, 2)


def _rows(x: Tensor | Quantised, batch: Tensor, head: Tensor, row: Tensor, wide: torch.dtype) -> Tensor:
    """(heads, rows, D) of x (B, H, S, D)."""
    if isinstance(x, Quantised):
        stored = x.data.view(torch.uint8)[batch, head, row].view(x.data.dtype)  # float8 cannot be indexed everywhere
        return stored.to(wide) * _descale(x)[batch, head, row].to(wide)
    return x[batch, head, row].to(wide)


def _slices(x: Tensor | Quantised, batch: Tensor, head: Tensor, first: int, last: int, wide: torch.dtype) -> Tensor:
    """(heads, last - first, D) of x (B, H, S, D)."""
    if isinstance(x, Quantised):
        stored = x.data.view(torch.uint8)[batch, head, first:last].view(x.data.dtype)
        return stored.to(wide) * _descale(x)[batch, head, first:last].to(wide)
    return x[batch, head, first:last].to(wide)


def _descale(x: Quantised) -> Tensor:
    return x.descale.expand(*x.data.shape[:3], 1)


def _largest(x: Tensor | Quantised) -> list[Tensor]:
    """Its largest magnitude, in its own type: a sum in a wider one would write all of it out in that first."""
    if isinstance(x, Quantised):
        return [*_largest(x.data.to(torch.bfloat16)), *_largest(x.descale)]
    return [torch.linalg.vector_norm(x, torch.inf)]
