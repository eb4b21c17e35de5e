"""Exact attention by its definition, in the type of the given tensors: scores, P and dS.

Heads are in the first axis; queries that share keys may follow one another.  Each function takes few operators and
works in place: on a GPU, a check of a few rows costs what launching them costs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import AttentionSpec

__all__ = ["exact_out", "probabilities", "product", "score_gradients", "scores"]


def scores(q: Tensor, k: Tensor, hidden: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Scaled and capped q·k (G, queries, keys) of q (G, queries, D) and k (G, keys, D), minus infinity where hidden."""
    found = _uncapped(q, k, spec)
    if spec.softcap:
        found.mul_(spec.softcap)
    return found if hidden is None else found.masked_fill_(hidden, -torch.inf)


def probabilities(q: Tensor, k: Tensor, hidden: Tensor | None, spec: AttentionSpec) -> Tensor:
    """P (G, queries, keys), the softmax of the scores; 0 in rows that see no key."""
    p = scores(q, k, hidden, spec).softmax(-1)
    return p if hidden is None or not spec.has_empty_rows else p.masked_fill_(hidden.all(-1, keepdim=True), 0.0)


def exact_out(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Out (G, queries, Dv) of q (G, queries, D), k (G, keys, D) and v (G, keys, Dv)."""
    return probabilities(q, k, hidden, spec).bmm(v)


def score_gradients(
    q: Tensor, k: Tensor, p: Tensor, dp: Tensor, delta: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """dS = P ∘ cap' ∘ (dP - delta), and its weight P ∘ cap', both (G, queries, keys).

    dP is dO Vᵀ, delta its rowsum(P ∘ dP) = rowsum(O ∘ dO) (G, queries, 1): FlashAttention-2, arXiv 2307.08691, section
    2.2.  A factor common to dP and delta carries over to dS.
    """
    weight = p * (1 - _uncapped(q, k, spec).square_()) if spec.softcap else p
    return (dp - delta).mul_(weight), weight


def product(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """factor · a b, (G, M, N) of a (G, M, K) and b (G, K, N); the factor costs no operator."""
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2]).baddbmm_(a, b, beta=0, alpha=factor)


def _uncapped(q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    """Scaled q·k; with a cap, the tanh that it is multiplied by."""
    if spec.softcap:
        return product(q, k.mT, spec.scale / spec.softcap).tanh_()
    return product(q, k.mT, spec.scale)
