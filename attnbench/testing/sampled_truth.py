"""Exact attention of a few queries and keys among very many, in little memory."""

from __future__ import annotations

from torch import Tensor, cat

from ..harness.cases.inputs import Drawn
from ..harness.measure.accuracy import TensorName
from ..problem.exact import probabilities, product, score_gradients
from ..problem.spec import AttentionSpec

__all__ = ["sampled", "sampled_truth"]

_SCORES = {"cpu": 2**20, "cuda": 2**27}  # alive at once, in FP64


def sampled(name: TensorName, value: Tensor, few: int) -> Tensor:
    """The part of out, dq, dk or dv (B, H, S, D) that ``sampled_truth`` computes: the last queries and the middle keys.

    With a causal mask the last queries see nearly all keys, and half of the queries see the keys in the middle, each
    with about the same weight; the first keys belong to the first queries.
    """
    length = value.shape[2]
    stop = length if name in ("out", "dq") else (length + min(few, length)) // 2
    return value[:, :, max(stop - few, 0) : stop]


def sampled_truth(spec: AttentionSpec, inputs: Drawn, few: int) -> dict[TensorName, Tensor]:
    """``sampled`` out, and in training dq, dk and dv, exact in FP64.

    Out and dq cost ``few`` queries times all keys; dk and dv cost a forward of all queries that see the keys, whose
    log-sum-exp and rowsum(P ∘ dP) they need.
    """
    parts: dict[TensorName, list[Tensor]] = {}
    for b in range(spec.batch):
        for g in range(spec.kv_heads):
            heads = slice(g * spec.group, (g + 1) * spec.group)
            k, v = (x[b, g : g + 1].double() for x in (inputs.k, inputs.v))
            do = None if inputs.grad_out is None else inputs.grad_out[b, heads].double()
            for name, value in _of_group(spec, inputs.q[b, heads].double(), k, v, do, few).items():
                parts.setdefault(name, []).append(value)
    return {name: cat(each).view(spec.batch, -1, *each[0].shape[1:]) for name, each in parts.items()}


def _of_group(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, few: int
) -> dict[TensorName, Tensor]:
    """Of the query heads q, do (G, Sq, D) of one key head k, v (1, Skv, D)."""
    last = slice(max(spec.seqlen_q - few, 0), spec.seqlen_q)
    p = _seen(spec, q, k, last)
    found: dict[TensorName, Tensor] = {"out": p.bmm(v).view(spec.group, -1, spec.head_dim_v)}
    if do is None:
        return found
    dp = _folded(do, last).bmm(v.mT)
    ds, _ = score_gradients(_folded(q, last), k, p, dp, (p * dp).sum(-1, keepdim=True), spec)
    found["dq"] = product(ds, k, spec.scale).view(spec.group, -1, spec.head_dim)
    del p, dp, ds
    own_k, own_v = (sampled("dk", x[None], few)[0] for x in (k, v))
    first = (spec.seqlen_kv - own_k.shape[1] + 1) // 2
    middle = slice(first, first + own_k.shape[1])
    assert own_k.data_ptr() == k[:, middle].data_ptr()
    dk, dv = own_k.new_zeros(own_k.shape), own_v.new_zeros(own_v.shape)
    step = max(1, _SCORES[q.device.type] // (spec.group * spec.seqlen_kv))
    for start in range(0, spec.seqlen_q, step):
        rows = slice(start, min(start + step, spec.seqlen_q))
        seen = spec.mask.span(rows.stop - 1, spec.seqlen_q, spec.seqlen_kv)[1]
        if seen <= middle.start:
            continue
        own_q, own_do = _folded(q, rows), _folded(do, rows)
        p = _seen(spec, q, k[:, :seen], rows)
        delta = (p.bmm(v[:, :seen]) * own_do).sum(-1, keepdim=True)
        p = p[:, :, middle]
        seen_k = own_k[:, : p.shape[2]]
        ds, _ = score_gradients(own_q, seen_k, p, own_do.bmm(own_v[:, : p.shape[2]].mT), delta, spec)
        dk[:, : p.shape[2]] += product(ds.mT, own_q, spec.scale)
        dv[:, : p.shape[2]] += p.mT.bmm(own_do)
    return found | {"dk": dk, "dv": dv}


def _seen(spec: AttentionSpec, q: Tensor, k: Tensor, rows: slice) -> Tensor:
    """P (1, G · rows, keys) of these queries and the first keys, which are all that any of them sees."""
    from torch import arange

    places = arange(rows.start, rows.stop, device=q.device).repeat(spec.group)
    hidden = spec.mask.hidden(places, arange(k.shape[1], device=q.device), spec.seqlen_q, spec.seqlen_kv)
    return probabilities(_folded(q, rows), k, hidden, spec)


def _folded(x: Tensor, rows: slice) -> Tensor:
    """(1, G · rows, D) of x (G, S, D): heads that share their keys as queries of one."""
    return x[:, rows].reshape(1, -1, x.shape[-1])
