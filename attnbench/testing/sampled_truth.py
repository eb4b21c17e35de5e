"""Exact attention of a few queries and keys among very many, in little memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..harness.cases.inputs import Drawn
from ..harness.measure.accuracy import TensorName
from ..problem.exact import probabilities, product, score_gradients
from ..problem.spec import AttentionSpec

__all__ = ["sampled", "sampled_truth"]

_SCORES = {"cpu": 2**20, "cuda": 2**27}  # alive at once, in FP64


def sampled(name: TensorName, value: Tensor, few: int) -> Tensor:
    """The part of out, dq, dk or dv (B, H, S, D) that ``sampled_truth`` computes: the last queries and the middle keys.

    With a causal mask the last queries see nearly all keys, and half of the queries see the keys in the middle, each
    with about the same weight; the first keys are seen by the first queries above all.
    """
    last, middle = _last(value.shape[2], few), _middle(value.shape[2], few)
    return value[:, :, last if name in ("out", "dq") else middle]


def sampled_truth(spec: AttentionSpec, inputs: Drawn, few: int) -> dict[TensorName, Tensor]:
    """``sampled`` out, and in training dq, dk and dv, exact in FP64; each row must see a key.

    Out and dq cost ``few`` queries times all keys.  dk and dv cost a forward of all queries that see the keys, for
    their probabilities and rowsum(P ∘ dP).
    """
    parts: dict[TensorName, list[Tensor]] = {}
    for b in range(spec.batch):
        for g in range(spec.kv_heads):
            heads = slice(g * spec.group, (g + 1) * spec.group)
            q, k, v = (x.double() for x in (inputs.q[b, heads], inputs.k[b, g : g + 1], inputs.v[b, g : g + 1]))
            do = None if inputs.grad_out is None else inputs.grad_out[b, heads].double()
            for name, value in _of_group(spec, q, k, v, do, few).items():
                parts.setdefault(name, []).append(value)
    return {name: torch.cat(each).view(spec.batch, -1, *each[0].shape[1:]) for name, each in parts.items()}


def _of_group(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, few: int
) -> dict[TensorName, Tensor]:
    """Of the query heads q, do (G, Sq, D) of one key head k, v (1, Skv, D)."""
    last, middle = _last(spec.seqlen_q, few), _middle(spec.seqlen_kv, few)
    p = _probabilities(spec, q, k, last)
    found: dict[TensorName, Tensor] = {"out": p.bmm(v).view(spec.group, -1, spec.head_dim_v)}
    if do is None:
        return found
    dp = _folded(do, last).bmm(v.mT)
    ds, _ = score_gradients(_folded(q, last), k, p, dp, (p * dp).sum(-1, keepdim=True), spec)
    found["dq"] = product(ds, k, spec.scale).view(spec.group, -1, spec.head_dim)
    del p, dp, ds
    dk, dv = torch.zeros_like(k[:, middle]), torch.zeros_like(v[:, middle])
    step = max(1, _SCORES[q.device.type] // (spec.group * spec.seqlen_kv))
    for start in range(0, spec.seqlen_q, step):
        rows = slice(start, min(start + step, spec.seqlen_q))
        seen = spec.mask.span(rows.stop - 1, spec.seqlen_q, spec.seqlen_kv)[1]
        if seen <= middle.start:
            continue
        own_q, own_do = _folded(q, rows), _folded(do, rows)
        p = _probabilities(spec, q, k[:, :seen], rows)
        delta = (p.bmm(v[:, :seen]) * own_do).sum(-1, keepdim=True)
        keys = slice(middle.start, min(middle.stop, seen))
        p = p[:, :, keys]
        ds, _ = score_gradients(own_q, k[:, keys], p, own_do.bmm(v[:, keys].mT), delta, spec)
        dk[:, : p.shape[2]] += product(ds.mT, own_q, spec.scale)
        dv[:, : p.shape[2]] += p.mT.bmm(own_do)
    return found | {"dk": dk, "dv": dv}


def _last(length: int, few: int) -> slice:
    return slice(max(length - few, 0), length)


def _middle(length: int, few: int) -> slice:
    start = max(length - few, 0) // 2
    return slice(start, min(start + few, length))


def _probabilities(spec: AttentionSpec, q: Tensor, k: Tensor, rows: slice) -> Tensor:
    """P (1, G · rows, keys) of these queries and the first keys, which are all that any of them sees."""
    places = torch.arange(rows.start, rows.stop, device=q.device).repeat(spec.group)
    hidden = spec.mask.hidden(places, torch.arange(k.shape[1], device=q.device), spec.seqlen_q, spec.seqlen_kv)
    return probabilities(_folded(q, rows), k, hidden, spec)


def _folded(x: Tensor, rows: slice) -> Tensor:
    """(1, G · rows, D) of x (G, S, D): heads that share their keys as queries of one."""
    return x[:, rows].reshape(1, -1, x.shape[-1])
