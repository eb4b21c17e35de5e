"""The truth of a case, exact attention in FP64 on its inputs, and the floor, the same on a kernel's operands."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from attnbench.errors import AttnbenchError
from attnbench.kernels.contract import Inputs, Operands, Saved
from attnbench.kernels.registry import Registry
from attnbench.problem.fp8 import Quantised
from attnbench.problem.lengths import Lengths, Sequence
from attnbench.problem.spec import AttentionSpec

from ..cases.inputs import Drawn
from .accuracy import Judgement, TensorName, judge_tensor

__all__ = ["LARGEST_TRUTH", "Floor", "Truth"]

Precision = Literal["fp64", "fp32"]
_GRADIENTS: tuple[TensorName, ...] = ("dq", "dk", "dv")
_OF_KEYS: tuple[TensorName, ...] = ("dk", "dv")
_EXACT = {"fp64": "reference:fp64", "fp32": "reference:fp32"}
_WIDE = {"fp64": torch.float64, "fp32": torch.float32}
# The compute capabilities whose FP64 rate is at least half of the FP32 rate; elsewhere it is 1/32 or 1/64.
_FAST_FP64 = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))
# Operations that one truth or floor may cost.  In FP64 the reference does about 8e12 a second on an
# H200 and 10e9 on a CPU core, and every backend's process computes a truth and a floor for each family.
LARGEST_TRUTH = {"cpu": 6e9, "cuda": 1e11}


@dataclass(frozen=True)
class _Groups:
    """The part of a call that is compared.

    A group is one (batch, key head) with the query heads that read it: the smallest part whose outputs and gradients
    depend on nothing else.  Where sequences have ``lengths`` of their own it is a key head with the tokens of all of
    them, end to end.  ``indices`` lists the groups compared, out of ``count``; ``shapes`` are those of whole answers.
    """

    spec: AttentionSpec
    shapes: Mapping[TensorName, torch.Size]
    indices: tuple[int, ...]
    lengths: Lengths | None
    sequences: tuple[Sequence, ...]

    @classmethod
    def of(cls, spec: AttentionSpec, inputs: Drawn, share: float) -> _Groups:
        """At least one group, and at most this share of them, spread evenly over batch and heads.

        The first one depends on the spec, so that a sweep covers every head.
        """
        lengths = inputs.lengths
        sequences = () if lengths is None else tuple(lengths.sequences(spec, inputs.q, inputs.k))
        out = torch.Size((*inputs.q.shape[:3], spec.head_dim_v))
        shapes: dict[TensorName, torch.Size] = {"out": out, "lse": out[:3], "dq": inputs.q.shape}
        whole = cls(spec, shapes | {"dk": inputs.k.shape, "dv": inputs.v.shape}, (), lengths, sequences)
        afford = min(whole.count, max(1, int(share * whole.count)))
        first = zlib.crc32(str(spec).encode())
        indices = sorted((first + index * whole.count // afford) % whole.count for index in range(afford))
        return replace(whole, indices=tuple(indices))

    @property
    def batch(self) -> int:
        """The rows of the batch of what ``joined`` returns."""
        return self.spec.batch if self.lengths is None else 1

    @property
    def count(self) -> int:
        """How many groups there are."""
        return self.batch * self.spec.kv_heads

    def joined(self, x: Tensor, keys: bool = False) -> Tensor:
        """x (B, H, S, ...) of queries or keys; of padded rows the tokens alone, (1, H, T, ...)."""
        if self.lengths is None or self.lengths.batch == "packed":
            return x
        return torch.cat([own.kv(x) if keys else own.q(x) for own in self.sequences], dim=2)

    def part(self, x: Tensor, keys: bool = False) -> Tensor:
        """(B, H, S, ...) to (groups, H / kv_heads, S, ...), copying only what is needed."""
        x = self.joined(x, keys)
        grouped = x.reshape(self.batch, self.spec.kv_heads, -1, *x.shape[2:])
        if len(self.indices) == self.count:
            return grouped.flatten(0, 1)
        index = torch.tensor(self.indices, device=x.device)
        return grouped[index // self.spec.kv_heads, index % self.spec.kv_heads]

    def beyond(self, name: TensorName, value: Tensor) -> int:
        """How many values of padding are not what it gets: 0, and minus infinity as log-sum-exp."""
        if self.lengths is None or self.lengths.batch == "packed":
            return 0
        nothing = -torch.inf if name == "lse" else 0.0
        rest = value.clone()
        for own in self.sequences:
            (own.kv(rest) if name in _OF_KEYS else own.q(rest)).fill_(nothing)
        return int((rest != nothing).sum())

    def exact(
        self, qkv: list[Tensor], grad_out: Tensor | None, registry: Registry, precision: Precision
    ) -> dict[TensorName, Tensor]:
        """Out, LSE and gradients of these parts as FP64 tensors, computed in ``precision``."""
        wide, name = _WIDE[precision], _EXACT[precision]
        q, k, v = (x.to(wide) for x in qkv)
        groups, lengths, spec = len(self.indices), None, self.spec.replace(dtype=precision)
        if self.lengths is None:
            part = spec.replace(batch=groups, heads=spec.group, kv_heads=1)
        else:
            part = spec.replace(heads=groups * spec.group, kv_heads=groups)
            q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
            grad_out = None if grad_out is None else grad_out.flatten(0, 1)[None]
            lengths = self._packed()
        with torch.no_grad():
            operands = registry.forward(name).prepare(Inputs(q, k, v, lengths), part)
            out, lse, state = registry.forward(name).run(operands)
            if lse is None:
                raise AttnbenchError(f"{name} returned no log-sum-exp")
            values: dict[TensorName, Tensor] = {"out": out, "lse": lse}
            if grad_out is not None:
                saved = Saved(operands.kept(), out, lse, state)
                gradients = registry.backward(name).run(saved, grad_out.to(wide))
                values.update(zip(_GRADIENTS, gradients, strict=True))
        if lengths is not None:
            values = {name: value[0].reshape(groups, -1, *value.shape[2:]) for name, value in values.items()}
        return {name: value.to(torch.float64) for name, value in values.items()}

    def _packed(self) -> Lengths:
        """The lengths of what ``joined`` returns."""
        assert self.lengths is not None, "asked where there are lengths"
        if self.lengths.batch == "packed":
            return self.lengths
        ranges = ([own.queries for own in self.sequences], [own.keys for own in self.sequences])
        device = next(x.device for x in (self.lengths.q, self.lengths.kv) if x is not None)
        starts = (torch.tensor([0, *(each.stop - each.start for each in side)]).cumsum(0) for side in ranges)
        q, kv = (each.to(torch.int32).to(device) for each in starts)
        return Lengths("packed", q, kv, self.lengths.longest_q, self.lengths.longest_kv)


@dataclass(frozen=True)
class Truth:
    """Exact out, lse (and dq, dk, dv) of a spec on some inputs, or of some of its heads if all cost too much.

    ``compared`` says which part that is; ``values`` holds FP64 tensors (groups, heads per group, S, D).  ``units`` are
    the row lengths to assume for dq and dk that are all 0.
    """

    spec: AttentionSpec
    compared: _Groups
    values: Mapping[TensorName, Tensor]
    grad_out: Tensor | None
    units: Mapping[TensorName, float]
    registry: Registry
    precision: Precision = "fp64"

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        inputs: Drawn,
        registry: Registry,
        largest: float | None = None,
        precision: Precision | None = None,
        flops: float | None = None,
    ) -> Truth:
        """Compute the truth with at most ``largest`` operations, by default the device's LARGEST_TRUTH.

        All of it takes ``flops``, by default those of the spec.  It is computed in FP64; in FP32 without TF32 for
        16-bit tensors on a GPU whose FP64 is slow, or where the smallest part costs more than ``largest``: the softmax
        of such a part in FP64 takes seconds, and FP32 is a thousand times as exact as the tensors.
        """
        limit = LARGEST_TRUTH[inputs.q.device.type] if largest is None else largest
        whole = max(spec.flops if flops is None else flops, 1.0)
        groups = _Groups.of(spec, inputs, limit / whole)
        parts = [groups.part(inputs.q), *(groups.part(x, keys=True) for x in (inputs.k, inputs.v))]
        # A copy: exact_on needs it later, when the input buffers may hold other numbers.
        grad_out = None if inputs.grad_out is None else groups.part(inputs.grad_out).clone()
        units = {} if grad_out is None else _units(spec, parts, grad_out)
        precision = precision or _precision(spec, inputs.q.device, whole / groups.count <= limit)
        values = groups.exact(parts, grad_out, registry, precision)
        return cls(spec, groups, values, grad_out, units, registry, precision)

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups computed, as indices into batch × kv_heads, or into the key heads of unequal sequences."""
        return self.compared.indices

    @property
    def note(self) -> str:
        """How the truth was computed and on which part, for the record."""
        computed, count = len(self.compared.indices), self.compared.count
        what = "(batch, key head) groups" if self.compared.lengths is None else "key heads, each sequence alone"
        return f"exact attention in {self.precision.upper()} on {computed} of {count} {what}"

    def judge(self, values: Mapping[TensorName, Tensor]) -> dict[TensorName, Judgement]:
        """Judge each named tensor as the kernel returned it.

        Raises AttnbenchError on a wrong shape, and where padding holds anything.
        """
        return _judge(self.compared, values, self.values, self.units)

    def exact_on(self, operands: Operands) -> Floor | None:
        """Exact attention, forward and backward, on the quantised operands; None if none is quantised.

        Raises AttnbenchError if operands have another shape than the inputs.
        """
        if not any(isinstance(x, Quantised) for x in (operands.q, operands.k, operands.v)):
            return None
        used = operands.tensors(torch.float64)
        shapes = (self.compared.shapes[name] for name in _GRADIENTS)
        for name, x, shape in zip("qkv", used, shapes, strict=True):
            if x.shape != shape:
                raise AttnbenchError(f"the operand {name} has the shape {tuple(x.shape)}, not {tuple(shape)}")
        parts = [self.compared.part(used[0]), *(self.compared.part(x, keys=True) for x in used[1:])]
        exact = self.compared.exact(parts, self.grad_out, self.registry, self.precision)
        judgements = {
            name: judge_tensor(name, exact[name], truth, self.units.get(name, 0.0))
            for name, truth in self.values.items()
        }
        return Floor(self.compared, exact, self.units, judgements)


@dataclass(frozen=True)
class Floor:
    """Exact out, lse (and dq, dk, dv) on the operands that a kernel quantised, for the groups of the truth.

    ``judgements`` compares these ``values`` with the truth: the error of quantising alone.
    """

    compared: _Groups
    values: Mapping[TensorName, Tensor]
    units: Mapping[TensorName, float]
    judgements: Mapping[TensorName, Judgement]

    def judge(self, values: Mapping[TensorName, Tensor]) -> dict[TensorName, Judgement]:
        """Compare the kernel with exact attention on its own operands.  Raises AttnbenchError on a wrong shape.

        What is left is the rounding of P, of the sums and of the output.
        """
        return _judge(self.compared, values, self.values, self.units)


def _judge(
    groups: _Groups,
    values: Mapping[TensorName, Tensor],
    exact: Mapping[TensorName, Tensor],
    units: Mapping[TensorName, float],
) -> dict[TensorName, Judgement]:
    found: dict[TensorName, Judgement] = {}
    for name, value in values.items():
        expected = groups.shapes[name]
        if value.shape != expected:
            raise AttnbenchError(f"{name} has the shape {tuple(value.shape)}, not {tuple(expected)}")
        if wrong := groups.beyond(name, value):
            raise AttnbenchError(f"{name} holds {wrong} values beyond the sequences that are not what padding gets")
        judgement = judge_tensor(name, groups.part(value, name in _OF_KEYS), exact[name], units.get(name, 0.0))
        # The truth may cover few heads, but all heads can be checked for non-finite values, except in the LSE, which
        # is infinite for a row without keys.
        lost = int((~torch.isfinite(value)).sum()) if name != "lse" else 0
        if lost > judgement.detail.nonfinite:
            detail = replace(judgement.detail, sqnr_db=None, worst_head=math.inf, bias=math.inf, nonfinite=lost)
            judgement = replace(judgement, error=math.inf, detail=detail)
        found[name] = judgement
    return found


def _units(spec: AttentionSpec, qkv: list[Tensor], grad_out: Tensor) -> dict[TensorName, float]:
    """The usual length of rows of dq and dk, for specs in which they cancel to 0 (a query with one key).

    Only the order of magnitude matters: scale · |dO·v| · |k| with random directions, and the same with |q|.
    """
    q_row, k_row, v_row, do_row = (
        float(torch.linalg.vector_norm(x, dtype=torch.float64)) / math.sqrt(x.numel() // x.shape[-1])
        for x in (*qkv, grad_out)
    )
    slope = abs(spec.scale) * do_row * v_row / math.sqrt(spec.head_dim_v)
    return {"dq": slope * k_row, "dk": slope * q_row}


def _precision(spec: AttentionSpec, device: torch.device, small: bool) -> Precision:
    if device.type != "cuda" or spec.dtype in ("fp32", "fp64"):
        return "fp64"
    return "fp64" if small and torch.cuda.get_device_capability(device) in _FAST_FP64 else "fp32"
