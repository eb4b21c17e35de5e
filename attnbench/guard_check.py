"""A few rows of a call beside exact attention on the same tensors: squared errors and squared sizes, head by head.

Out: some queries of some heads, over all the keys that they see.  Gradients: some queries' dq, and some keys' dk and
dv, of a few (batch, key head) groups.  A row of dq needs its own query alone; dk and dv sum over all queries of the
group, whose exact log-sum-exp and rowsum(dO∘O) are computed for that: exact attention, of those few groups only.

Everything is queued on the current stream; nothing waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .fp8 import Quantised
from .spec import FP8_DTYPES, AttentionSpec

__all__ = ["Group", "Part", "Pick", "Sums", "aside", "gradient_sums", "out_sums", "part", "pick_groups", "pick_rows"]

_HEADS, _ROWS = 8, 4  # of a check of out: a wrong head among 16 is met in two checks of five
_GROUPS, _LINES = 2, 8  # of a check of gradients: the groups, and the queries and keys of each
# Scores (or keys and values) alive at once, about three such tensors at a time: what is small is paid for in launches.
_SCORES = {"cpu": 2**21, "cuda": 2**25}
# A row of dq or dk is a sum that may cancel to nothing (a query that has one key): it counts as half as long as it
# would be if nothing cancelled, at the least.
_LEAST_SHARE = 0.5


@dataclass(frozen=True)
class Pick:
    """Queries ``rows`` of a query head."""

    batch: int
    head: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Queries (a head of the group, a row) and ``keys`` of a key head."""

    batch: int
    kv_head: int
    queries: tuple[tuple[int, int], ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """What a group reads: q (group, Sq, D), k (Skv, D), v (Skv, Dv), in memory of their own."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Sums:
    """What a check has found, still on its device; each tensor's name with (2, heads): squared errors, squared sizes.

    ``usable`` is whether what went in is finite, ``lost`` whether something of a tensor's whole is not: booleans.
    """

    usable: Tensor
    lost: Mapping[str, Tensor]
    values: Mapping[str, Tensor]

    @property
    def packed(self) -> Tensor:
        """All of it as one FP64 vector; ``unpacked`` reads it."""
        flags = torch.stack([self.usable, *self.lost.values()]).to(torch.float64)
        return torch.cat([flags, *(each.flatten() for each in self.values.values())])

    @staticmethod
    def unpacked(names: Sequence[str], packed: Tensor) -> tuple[bool, dict[str, tuple[list[float], list[float]]]]:
        """Whether the check is usable, and each tensor's (errors, sizes); something that is not finite is an error."""
        usable, *lost = (bool(each) for each in packed[: 1 + len(names)])
        pairs = packed[1 + len(names) :].view(len(names), 2, -1)
        found = {name: (errors.tolist(), sizes.tolist()) for name, (errors, sizes) in zip(names, pairs, strict=True)}
        for name, wrong in zip(names, lost, strict=True):
            if wrong:
                found[name][0][0] = math.inf
        return usable, found


def pick_rows(spec: AttentionSpec, random: Random) -> list[Pick]:
    """Queries for a check of out: all alike likely, drawn with replacement."""
    return [
        Pick(
            random.randrange(spec.batch),
            random.randrange(spec.heads),
            tuple(random.randrange(spec.seqlen_q) for _ in range(_ROWS)),
        )
        for _ in range(_HEADS)
    ]


def pick_groups(spec: AttentionSpec, random: Random) -> list[Group]:
    """Groups for a check of gradients: all alike likely, drawn with replacement."""
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
    """A block that the program does not see: no gradients, no autocast, none of the modes that watch operators."""
    block = ExitStack()
    block.enter_context(torch.no_grad())
    block.enter_context(torch.autocast(device.type, enabled=False))
    block.enter_context(torch._C.DisableTorchFunction())
    block.enter_context(_disable_current_modes())
    if device.type == "cuda":
        block.enter_context(torch.cuda.device(device))
    block.enter_context(torch.profiler.record_function("attnbench::guard"))
    return block


def part(group: Group, q: Tensor, k: Tensor, v: Tensor) -> Part:
    """A copy of what a group reads of q, k, v, so that they may be changed or freed before the backward runs."""
    size = q.shape[1] // k.shape[1]
    heads = slice(group.kv_head * size, (group.kv_head + 1) * size)
    return Part(*(x[group.batch, at].clone() for x, at in ((q, heads), (k, group.kv_head), (v, group.kv_head))))


def out_sums(
    q: Tensor | Quantised, k: Tensor | Quantised, v: Tensor | Quantised, out: Tensor, spec: AttentionSpec,
    picks: Sequence[Pick],
) -> Sums:  # fmt: skip
    """Of out (B, H, Sq, Dv), as a kernel returned it, beside exact attention."""
    wide = _wide(spec, out.device)
    batch, head, row = _on(
        out.device, *zip(*((pick.batch, pick.head, row) for pick in picks for row in pick.rows), strict=True)
    )
    queries = _rows(q, batch, head, row, wide).view(len(picks), -1, spec.head_dim)
    start, stop, batches, heads = (each.view(len(picks), -1) for each in (*_seen(row, spec), batch, head))
    together = max(1, _SCORES[out.device.type] // (spec.seqlen_kv * (spec.head_dim + spec.head_dim_v)))
    truth = []
    for begin in range(0, len(picks), together):
        some = slice(begin, begin + together)
        first, last = _reach([row for pick in picks[some] for row in pick.rows], spec)
        places = batches[some, 0], heads[some, 0] // spec.group
        keys, values = (_slices(x, *places, first, last, wide) for x in (k, v))
        scores, _ = _scores(queries[some], keys, _hidden(start[some], stop[some], first, last, spec), spec)
        truth.append(_probabilities(scores, scores.logsumexp(-1)) @ values)
    exact = torch.cat(truth)
    found = out[batch, head, row].view(exact.shape)
    return Sums(
        usable=_finite(q) & _finite(k) & _finite(v),
        lost={"out": ~_finite(out)},
        values={"out": _compared(found, exact, None)},
    )


def gradient_sums(
    parts: Sequence[Part], groups: Sequence[Group], grad_out: Tensor, gradients: tuple[Tensor, Tensor, Tensor],
    spec: AttentionSpec,
) -> Sums:  # fmt: skip
    """Of dq (B, H, Sq, D), dk (B, Hkv, Skv, D) and dv (B, Hkv, Skv, Dv), as a kernel returned them."""
    pairs: dict[str, list[Tensor]] = {"dq": [], "dk": [], "dv": []}
    usable = _finite(grad_out)
    for own, group in zip(parts, groups, strict=True):
        usable = usable & _finite(own.q) & _finite(own.k) & _finite(own.v)
        heads = slice(group.kv_head * spec.group, (group.kv_head + 1) * spec.group)
        do, dq = grad_out[group.batch, heads], gradients[0][group.batch, heads]
        dk, dv = (x[group.batch, group.kv_head] for x in gradients[1:])
        head, row = _on(do.device, *zip(*group.queries, strict=True))
        (keys,) = _on(do.device, group.keys)
        exact, size = _query_gradients(own, do, head, row, group, spec)
        pairs["dq"].append(_compared(dq[head, row], exact, size))
        exact_dk, size, exact_dv = _key_gradients(own, do, keys, spec)
        pairs["dk"].append(_compared(dk[keys], exact_dk, size))
        pairs["dv"].append(_compared(dv[keys], exact_dv, None))
    finite = {name: _finite(x) for name, x in zip(pairs, gradients, strict=True)}
    if gradients[0].dtype == torch.float16:  # which exact gradients may leave, as those who scale their loss expect
        usable = usable & finite["dq"] & finite["dk"] & finite["dv"]
    values = {name: torch.stack(each, dim=1) for name, each in pairs.items()}
    return Sums(usable, {name: ~each for name, each in finite.items()}, values)


def _query_gradients(
    own: Part, do: Tensor, head: Tensor, row: Tensor, group: Group, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """dq of the group's picked queries (queries, D), and its squared sizes if nothing cancelled."""
    wide = _wide(spec, do.device)
    first, last = _reach([row for _, row in group.queries], spec)
    q, k, v, do = (x.to(wide) for x in (own.q[head, row], own.k[first:last], own.v[first:last], do[head, row]))
    scores, slope = _scores(q, k, _hidden(*_seen(row, spec), first, last, spec), spec)
    p = _probabilities(scores, scores.logsumexp(-1))
    dp = do @ v.mT
    delta = (p * dp).sum(-1, keepdim=True)
    weight = p * slope * spec.scale
    size = (weight * (dp.abs() + delta.abs())).square() @ k.square().sum(-1)
    return (weight * (dp - delta)) @ k, size


def _key_gradients(own: Part, do: Tensor, keys: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """dk of the picked keys (keys, D), its squared sizes if nothing cancelled, and dv (keys, Dv)."""
    wide = _wide(spec, do.device)
    all_k, all_v = own.k.to(wide), own.v.to(wide)
    picked_k, picked_v = all_k[keys], all_v[keys]
    dk, dv, size = torch.zeros_like(picked_k), torch.zeros_like(picked_v), picked_k.new_zeros(len(keys))
    step = max(1, _SCORES[do.device.type] // (spec.group * spec.seqlen_kv))
    for begin in range(0, spec.seqlen_q, step):
        end = min(begin + step, spec.seqlen_q)
        first, last = _reach((begin, end - 1), spec)
        start, stop = _seen(torch.arange(begin, end, device=do.device), spec)
        q, grad = own.q[:, begin:end].to(wide), do[:, begin:end].to(wide)
        scores, _ = _scores(q, all_k[first:last], _hidden(start, stop, first, last, spec), spec)
        lse = scores.logsumexp(-1)
        delta = ((_probabilities(scores, lse) @ all_v[first:last]) * grad).sum(-1, keepdim=True)
        scores, slope = _scores(q, picked_k, (keys < start[:, None]) | (keys >= stop[:, None]), spec)
        p, dp = _probabilities(scores, lse), grad @ picked_v.mT
        weight = p * slope * spec.scale
        dv += torch.einsum("hik,hid->kd", p, grad)
        dk += torch.einsum("hik,hid->kd", weight * (dp - delta), q)
        size += torch.einsum("hik,hi->k", (weight * (dp.abs() + delta.abs())).square(), q.square().sum(-1))
    return dk, size, dv


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None, spec: AttentionSpec) -> tuple[Tensor, Tensor | float]:
    """Scaled, capped and masked q·k (..., queries, keys), and what the cap makes of its derivative."""
    scores, slope = (q @ k.mT).mul_(spec.scale), 1.0
    if spec.softcap:
        bent = torch.tanh(scores / spec.softcap)
        return _masked(spec.softcap * bent, hidden), 1 - bent.square()
    return _masked(scores, hidden), slope


def _masked(scores: Tensor, hidden: Tensor | None) -> Tensor:
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse) in the memory of the scores; 0 where a query sees no key."""
    return scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()


def _seen(row: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """``Mask.span`` of many rows: the first key that each sees and one past the last, not clipped to the keys."""
    mask, centre = spec.mask, row + spec.mask.offset(spec.seqlen_q, spec.seqlen_kv)
    start = torch.zeros_like(row) if mask.left is None else centre - mask.left
    stop = torch.full_like(row, spec.seqlen_kv) if mask.right is None else centre + mask.right + 1
    return start, stop


def _reach(rows: Sequence[int], spec: AttentionSpec) -> tuple[int, int]:
    """From the first key that any of the rows sees to the last; one key that is hidden where they see none."""
    spans = [spec.mask.span(row, spec.seqlen_q, spec.seqlen_kv) for row in rows]
    first, last = min(start for start, _ in spans), max(stop for _, stop in spans)
    return (first, last) if first < last else (0, 1)


def _hidden(start: Tensor, stop: Tensor, first: int, last: int, spec: AttentionSpec) -> Tensor | None:
    """(..., rows, last - first): which keys the rows do not see."""
    if spec.mask.kind == "none":
        return None
    keys = torch.arange(first, last, device=start.device)
    return (keys < start[..., None]) | (keys >= stop[..., None])


def _compared(found: Tensor, exact: Tensor, uncancelled: Tensor | None) -> Tensor:
    """(2, ...): squared errors and squared sizes of rows (..., rows, D), summed over the rows of a head.

    A row is as long as a few of the type's smallest normal numbers at the least: below those no kernel can be right.
    """
    exact = exact.to(torch.float64)
    error = (found.to(torch.float64) - exact).square().sum(-1)
    size = exact.square().sum(-1).clamp_min(exact.shape[-1] * torch.finfo(found.dtype).smallest_normal ** 2)
    if uncancelled is not None:
        size = torch.maximum(size, uncancelled.to(torch.float64) * _LEAST_SHARE**2)
    return torch.stack([error.sum(-1), size.sum(-1)])


def _wide(spec: AttentionSpec, device: torch.device) -> torch.dtype:
    """What a check computes in.

    On a GPU, tensors of 16 and 8 bits are checked in FP32, which moves half of FP64's bytes: their products it (and
    TF32, if the program allows it) holds exactly, and P alone is rounded, in TF32 by 3e-4.
    """
    narrow = spec.dtype in ("bf16", "fp16", *FP8_DTYPES)
    return torch.float32 if device.type == "cuda" and narrow else torch.float64


def _on(device: torch.device, *places: Sequence[int]) -> Tensor:
    """(len(places), n) indices on the device, without waiting for it."""
    index = torch.tensor(places, dtype=torch.int64, device="cpu")
    return index if device.type == "cpu" else index.pin_memory().to(device, non_blocking=True)


def _rows(x: Tensor | Quantised, batch: Tensor, head: Tensor, row: Tensor, wide: torch.dtype) -> Tensor:
    """(rows, D) of x (B, H, S, D)."""
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


def _finite(x: Tensor | Quantised) -> Tensor:
    """Whether all of it is: a boolean on the device, by one sum, which needs no memory."""
    if isinstance(x, Quantised):
        return _finite(x.data.to(torch.bfloat16)) & _finite(x.descale)
    return torch.isfinite(x.sum(dtype=torch.float64))
