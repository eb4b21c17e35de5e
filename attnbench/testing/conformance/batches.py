"""Conformance on sequences of unequal length: each is answered as if it were alone, whatever the others hold."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from ...dispatch.sequences import sizes_of
from ...harness.cases.inputs import Drawn
from ...harness.measure.accuracy import TensorName
from ...kernels.contract import Inputs
from ...problem.lengths import Lengths, Sequence, packed, padded
from ...problem.lengths_kind import Batch
from ...problem.spec import AttentionSpec
from .subject import Subject, inputs_of, truth_of

__all__ = ["check_batch", "serves_batch"]

_FILLING = 3  # tokens of padding beside the longest row
_LOUD = 1000.0  # times the other sequences: a scale that they share would cost this one all its bits


def serves_batch(subject: Subject, spec: AttentionSpec, batch: Batch) -> bool:
    """Whether the plan takes such a batch of sequences like this spec's."""
    return not subject.refusals(_draw(spec, batch, torch.device("cpu"))[2])


def check_batch(subject: Subject, spec: AttentionSpec, batch: Batch) -> str | None:
    """Out, LSE and gradients of each sequence beside exact attention on it alone, and what padding and empty rows get.

    Again after the first sequence was filled with NaN, and after the others were and were made a thousand times larger:
    no scale, no value and no gradient crosses a border.  NaN may where a row says so.
    """
    isolates = all(
        kernel.rows[subject.device.type].isolates for kernel in (subject.forward, subject.backward) if kernel
    )
    drawn, lengths, whole = _draw(spec, batch, subject.device, isolates)
    sequences = list(lengths.sequences(whole, drawn.q, drawn.k))
    first, others = sequences[:1], sequences[1:]
    turns: tuple[tuple[str, Collection[Sequence], float], ...] = (
        ("", (), 1.0),
        ("beside a sequence of NaN ", first, torch.nan),
        ("beside others of NaN ", others, torch.nan),
        ("beside others a thousand times as large ", others, _LOUD),
    )
    if not isolates:
        subject.note(f"{batch} batch", "what is not finite may reach the neighbours of a sequence, as its row says")
    for prefix, changed, factor in turns:
        if math.isnan(factor) and not isolates:
            continue
        given = _scaled(drawn, changed, factor)
        inputs = Inputs(given.q, given.k, given.v, lengths)
        found = subject.answers_of(subject.forward.prepare(inputs, whole), given.grad_out)
        for own in sequences:
            if own in changed:
                continue
            alone = _alone(given, own)
            parts = {name: _part(own, name, value) for name, value in found.items()}
            if problem := subject.wrong(own.spec, parts, truth_of(subject, own.spec, alone)):
                return f"{prefix}the sequence of {own.spec.seqlen_q} queries and {own.spec.seqlen_kv} keys: {problem}"
        if not changed and (problem := _unused(found, sequences)):
            return problem
    return None


def _draw(
    spec: AttentionSpec, batch: Batch, device: torch.device, isolates: bool = True
) -> tuple[Drawn, Lengths, AttentionSpec]:
    """Tensors of such a batch, their lengths and spec: sequences like this spec's, shorter, of length 1 and empty.

    Padding is NaN, and so is, for kernels that isolate sequences, what has no queries or no keys.
    """
    half = max(1, spec.seqlen_q // 2), max(1, spec.seqlen_kv // 2)
    pairs = [(spec.seqlen_q, spec.seqlen_kv), (1, 1), (0, 0), half]
    if spec.seqlen_q != spec.seqlen_kv:
        pairs += [(1, spec.seqlen_kv), (0, 1), (spec.seqlen_q, 0)]
    queries, keys = zip(*pairs, strict=True)
    if batch == "packed":
        drawn = inputs_of(spec.replace(batch=1, seqlen_q=sum(queries), seqlen_kv=sum(keys)), device)
        starts_q, starts_kv = (torch.tensor([0, *side]).cumsum(0).to(device, torch.int32) for side in (queries, keys))
        same = starts_q if queries == keys else starts_kv
        lengths = packed(drawn.q, drawn.k, starts_q, same, max(queries), max(keys))
    else:
        rows = (max(queries) + _FILLING, max(keys) + _FILLING)
        drawn = inputs_of(spec.replace(batch=len(pairs), seqlen_q=rows[0], seqlen_kv=rows[1]), device)
        used_q, used_kv = (torch.tensor(side, dtype=torch.int32, device=device) for side in (queries, keys))
        same = used_q if queries == keys else used_kv
        lengths = padded(drawn.q, drawn.k, used_q, same, "left" if batch == "left-padded" else "right")
    whole = spec.replace(**sizes_of(lengths, drawn.q.shape[0], drawn.q.shape[2], drawn.k.shape[2]))
    if batch != "packed":
        kept = list(lengths.sequences(whole, drawn.q, drawn.k))
        if not isolates:
            places = zip(_places(queries, rows[0], batch), _places(keys, rows[1], batch), strict=True)
            kept = [Sequence(row, asks, seen, whole) for row, (asks, seen) in enumerate(places)]
        drawn = _only(drawn, kept)
    return drawn, lengths, whole


def _places(counts: tuple[int, ...], size: int, batch: Batch) -> list[slice]:
    """Where the used tokens of each row of this size lie."""
    return [slice(size - each, size) if batch == "left-padded" else slice(0, each) for each in counts]


def _only(drawn: Drawn, sequences: Collection[Sequence]) -> Drawn:
    """The same with NaN in all that belongs to none of the sequences."""
    q, k, v = (torch.full_like(x, torch.nan) for x in (drawn.q, drawn.k, drawn.v))
    grad_out = None if drawn.grad_out is None else torch.full_like(drawn.grad_out, torch.nan)
    for own in sequences:
        alone = _alone(drawn, own)
        for place, value in ((own.q(q), alone.q), (own.kv(k), alone.k), (own.kv(v), alone.v)):
            place.copy_(value)
        if grad_out is not None and alone.grad_out is not None:
            own.q(grad_out).copy_(alone.grad_out)
    return Drawn(q, k, v, grad_out, drawn.drawn_on)


def _scaled(drawn: Drawn, changed: Collection[Sequence], factor: float) -> Drawn:
    """Copies in which these sequences are so many times as large, or NaN."""
    if not changed:
        return drawn
    q, k, v = (x.clone() for x in (drawn.q, drawn.k, drawn.v))
    grad_out = None if drawn.grad_out is None else drawn.grad_out.clone()
    for own in changed:
        for x in (own.q(q), own.kv(k), own.kv(v), *(() if grad_out is None else (own.q(grad_out),))):
            x.mul_(factor)
    return Drawn(q, k, v, grad_out, drawn.drawn_on)


def _alone(drawn: Drawn, own: Sequence) -> Drawn:
    """The tensors of one sequence."""
    grad_out = None if drawn.grad_out is None else own.q(drawn.grad_out)
    return Drawn(own.q(drawn.q), own.kv(drawn.k), own.kv(drawn.v), grad_out, drawn.drawn_on)


def _part(own: Sequence, name: TensorName, value: Tensor) -> Tensor:
    """One sequence's part of a result."""
    return own.kv(value) if name in ("dk", "dv") else own.q(value)


def _unused(found: dict[TensorName, Tensor], sequences: Collection[Sequence]) -> str | None:
    """What is wrong with tokens that see no key or belong to no sequence: they get 0, and the LSE minus infinity."""
    for name, value in found.items():
        rest = value.clone()
        nothing = -torch.inf if name == "lse" else 0.0
        for own in sequences:
            _part(own, name, rest).fill_(nothing)
        if not bool((rest == nothing).all()):
            return f"{name} of tokens without a sequence, or without keys, is not {nothing:g}"
    return None
