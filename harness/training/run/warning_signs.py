"""Early warnings from attention's tensors: outliers in Q and K, gradients that FP8 would lose, gradients too long.

Kurtosis of activations rises long before FP8 training fails (FOG, arXiv 2505.20524); dS is the tensor of the backward
with the smallest entries and the dominating errors (SageBwd, arXiv 2603.02170).  Both are read in one extra forward and
backward of a step's own batch, outside the timed steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnbench.problem import exact
from attnbench.problem.exact import probabilities, product
from attnbench.problem.spec import AttentionSpec
from attnbench.problem.tensors import mask_of

from ..rows import WarningSign

__all__ = ["kurtosis", "score_gradients", "signs_of", "underflow"]

Format = Literal["e4m3", "e5m2"]
_DTYPES: dict[Format, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_ROWS = 32  # of the scores of a head, evenly spread over the queries
_HEADS = 4  # of those of all batches, evenly spread


def kurtosis(x: Tensor) -> Tensor:
    """E[x⁴] / E[x²]² of each head of ``x`` (B, H, S, D), as (B, H): 3 for normal numbers, S·D for a single spike."""
    squares = x.detach().float().square()
    squares = squares / squares.amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    mean = squares.mean(dim=(-2, -1))
    return squares.square().mean(dim=(-2, -1)) / mean.square().clamp_min(torch.finfo(torch.float32).tiny)


def score_gradients(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, rows: Tensor, spec: AttentionSpec) -> Tensor:
    """Scale · dS of some rows of one head in fp32, from exact attention.

    ``q``, ``grad_out`` (R, D) are the queries number ``rows`` (R,); ``k``, ``v`` (S, D).  Returns (R, S), zero where
    the mask hides a key.
    """
    q, k, v, grad_out = (x.detach().float()[None] for x in (q, k, v, grad_out))
    hidden = spec.mask.hidden(rows, torch.arange(spec.seqlen_kv, device=k.device), spec.seqlen_q, spec.seqlen_kv)
    p, dp = probabilities(q, k, hidden, spec), product(grad_out, v.mT, spec.scale)
    return exact.score_gradients(q, k, p, dp, (p * dp).sum(dim=-1, keepdim=True), spec)[0][0]


def underflow(x: Tensor, format: Format) -> float:
    """The share of the nonzero entries of ``x`` that become zero in the format, with one scale to its largest value.

    0 if all entries are zero.
    """
    visible = x != 0
    largest = x.abs().amax()
    if not visible.any() or not torch.isfinite(largest):
        return 0.0
    scaled = (x.double() * (torch.finfo(_DTYPES[format]).max / largest.double())).float()
    flushed = (scaled.to(_DTYPES[format]).float() == 0) & visible
    return float(flushed.sum() / visible.sum())


class _SampledHead(NamedTuple):
    """The inputs for dS of some rows of one head, except dO.  ``rows`` count from its first query, number ``first``."""

    batch: int
    head: int
    first: int
    rows: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec


@dataclass
class _ModuleSigns:
    """The signs of one module's pass."""

    kurtosis_q: float = 0.0
    kurtosis_k: float = 0.0
    forwards: int = 0
    picked: list[_SampledHead] = field(default_factory=list)
    underflow: dict[Format, float] = field(default_factory=lambda: dict.fromkeys(_DTYPES, 0.0))
    square: float = 0.0


def signs_of(step: int, modules: Sequence[nn.Module], work: Callable[[], None]) -> WarningSign | None:
    """The signs of one forward and backward, which ``work`` runs; None without attention modules.

    ``modules`` are called with q (B, H, S, D), k and v (B, Hkv, S, D) and return out in q's shape; ``is_causal`` is the
    fourth or a named argument, ``scale``, ``window`` and ``softcap`` are named.  Where ``starts`` (N + 1,) divide the
    queries into documents, dS is read of the longest.
    """
    if not modules:
        return None
    seen = [_ModuleSigns() for _ in modules]
    with _watched(modules, seen):
        work()
    return WarningSign(
        step=step,
        kurtosis_q=max(one.kurtosis_q for one in seen),
        kurtosis_k=max(one.kurtosis_k for one in seen),
        ds_underflow={name: max(one.underflow[name] for one in seen) for name in _DTYPES},
        gradient_norm=math.sqrt(sum(one.square for one in seen)),
    )


@contextmanager
def _watched(modules: Sequence[nn.Module], seen: Sequence[_ModuleSigns]) -> Iterator[None]:
    handles: list[Any] = []
    for module, own in zip(modules, seen, strict=True):
        handles += [
            module.register_forward_hook(_forward(own), with_kwargs=True),
            module.register_full_backward_pre_hook(_output_gradient(own)),
            module.register_full_backward_hook(_input_gradients(own)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _forward(own: _ModuleSigns) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], out: Tensor) -> None:
        own.forwards += 1
        if own.forwards > 1:
            return  # a recomputation for checkpointing
        q, k, v = args[:3]
        own.kurtosis_q, own.kurtosis_k = (float(kurtosis(x).amax()) for x in (q, k))
        batch, heads, queries, head_dim = q.shape
        first, keys = 0, slice(None)
        if options.get("starts") is not None:
            first, queries = _longest(options["starts"])
            keys = slice(first, first + queries)
        causal = options.get("is_causal", args[3] if len(args) > 3 else False)
        spec = AttentionSpec.make(
            batch=batch, heads=heads, kv_heads=k.shape[1], seqlen_q=queries, seqlen_kv=k[:, :, keys].shape[2],
            head_dim=head_dim, head_dim_v=v.shape[3], dtype="fp32", scale=options.get("scale"),
            softcap=options.get("softcap") or 0.0, mask=mask_of(causal, options.get("window"), "top-left"),
        )  # fmt: skip
        rows = torch.linspace(0, queries - 1, min(_ROWS, queries), device=q.device).long()
        for index in torch.linspace(0, batch * heads - 1, min(_HEADS, batch * heads)).long().tolist():
            b, h = divmod(index, heads)
            shared = h // spec.group
            with torch.no_grad():
                q_rows, own_k, own_v = q[b, h, first + rows], k[b, shared, keys].clone(), v[b, shared, keys].clone()
            own.picked.append(_SampledHead(b, h, first, rows, q_rows, own_k, own_v, spec))

    return hook


def _longest(starts: Tensor) -> tuple[int, int]:
    """Where the longest document begins, and its tokens."""
    lengths = starts.diff()
    document = int(lengths.argmax())
    return int(starts[document]), int(lengths[document])


def _output_gradient(own: _ModuleSigns) -> Callable[..., None]:
    def hook(module: nn.Module, grads: tuple[Tensor | None, ...]) -> None:
        if not grads or grads[0] is None:
            return
        for b, h, first, rows, q, k, v, spec in own.picked:
            scores = score_gradients(q, k, v, grads[0][b, h, first + rows], rows, spec)
            own.underflow = {name: max(own.underflow[name], underflow(scores, name)) for name in _DTYPES}

    return hook


def _input_gradients(own: _ModuleSigns) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]) -> None:
        own.square += sum(float(grad.detach().float().square().sum()) for grad in inputs[:3] if grad is not None)

    return hook
