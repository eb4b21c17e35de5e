"""What a conformance check works on: one plan on one device, the specs drawn for it, and exact results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...harness.cases.inputs import Drawn, draw
from ...harness.measure.accuracy import TensorName, judge_tensor
from ...harness.measure.truth import Truth
from ...kernels.capabilities import Capabilities, Device
from ...kernels.contract import BackwardKernel, ForwardKernel, Operands, Saved, gradient_dtype
from ...kernels.devices import describe
from ...kernels.plan import Plan
from ...kernels.registry import Registry
from ...problem.fp8 import Quantised
from ...problem.mask import Mask
from ...problem.spec import DTYPES, FP8_DTYPES, AttentionSpec
from ...tables.environment import Environment
from ...tables.table import Table

__all__ = ["FEATURES", "Subject", "Values", "exact_of", "inputs_of", "shrunk", "truth_of", "wide_inputs"]

# A relative L2 over few elements strays from the one over many, which a kernel declares.
_STRAY = 2.0
# The most that a row of out or LSE may be off: attnbench.harness.measure.verdict measured it on honest kernels.
_ROW, _LEAST_ROW, _MOST_ROW = 4.0, 0.15, 0.8
_HEAD_DIMS = (5, 8, 16, 24, 32, 40, 64, 80, 96, 128, 192, 256)
_TRIES = 60
_LONGEST = {"cpu": 70, "cuda": 200}
_TYPICAL = {"cpu": 64, "cuda": 512}
_SHRINKS = 60  # runs that making a failing spec smaller may take
_ALL = 1e18  # operations of a truth: every head of specs as small as these

Values = Mapping[TensorName, Tensor]
Change = Callable[[Random, dict[str, Any]], None]


def _lengths(random: Random, spec: dict[str, Any]) -> None:
    spec["seqlen_kv"] = random.choice([length for length in range(1, spec["longest"]) if length != spec["seqlen_q"]])


def _causal(random: Random, spec: dict[str, Any]) -> None:
    spec["mask"] = Mask(right=0)


def _alignment(random: Random, spec: dict[str, Any]) -> None:
    _lengths(random, spec)
    spec["mask"] = Mask(right=0, alignment=random.choice(["top-left", "bottom-right"]))


def _empty(random: Random, spec: dict[str, Any]) -> None:
    """The first queries stand before the first key."""
    spec["seqlen_kv"] = random.randint(1, spec["seqlen_q"] - 1)
    spec["mask"] = Mask(right=0, alignment="bottom-right")


def _window(random: Random, spec: dict[str, Any]) -> None:
    """Few keys on each side: one more or less is then far beyond any rounding."""
    sides = [(left, right) for left in (None, 0, 1, 3) for right in (None, 0, 2) if (left, right) != (None, None)]
    left, right = random.choice([each for each in sides if each != (None, 0)])
    spec["mask"] = Mask(left, right, random.choice(["top-left", "bottom-right"]))


def _grouping(random: Random, spec: dict[str, Any]) -> None:
    spec["kv_heads"] = random.choice([1, 2, 2, 3])
    spec["heads"] = spec["kv_heads"] * random.choice([2, 3, 4])


def _softcap(random: Random, spec: dict[str, Any]) -> None:
    spec["softcap"] = random.choice([0.5, 2.0])


def _scale(random: Random, spec: dict[str, Any]) -> None:
    spec["scale"] = spec["head_dim"] ** -0.5 * random.choice([-1.0, 0.0, 0.4, 1.6])


def _head_dim_v(random: Random, spec: dict[str, Any]) -> None:
    spec["head_dim_v"] = random.choice([size for size in spec["sizes"] if size != spec["head_dim"]] or spec["sizes"])


# What a spec may have beyond the plain one: square, no mask, a key head for each head, the usual scale.
FEATURES: dict[str, Change] = {
    "grouping": _grouping,
    "lengths": _lengths,
    "causal": _causal,
    "alignment": _alignment,
    "window": _window,
    "empty": _empty,
    "softcap": _softcap,
    "scale": _scale,
    "head_dim_v": _head_dim_v,
}


@dataclass
class Subject:
    """A plan on a device; ``broken`` are the features that a check has found wrong, which later ones avoid."""

    plan: Plan
    device: torch.device
    registry: Registry
    seed: int = 0
    broken: set[str] = field(default_factory=set)
    notes: dict[str, list[str]] = field(default_factory=dict)

    @cached_property
    def forward(self) -> ForwardKernel:
        """The forward kernel."""
        return self.registry.forward(self.plan.forward)

    @cached_property
    def backward(self) -> BackwardKernel | None:
        """The backward kernel, if the plan is one for training."""
        return None if self.plan.backward is None else self.registry.backward(self.plan.backward)

    @cached_property
    def facts(self) -> Device:
        """The device as refusals know it."""
        return describe(self.device)

    @cached_property
    def no_table(self) -> Table:
        """A table that knows nothing, so that no finding depends on what this machine's user has measured."""
        return Table.from_entries(Environment.detect(self.device, self.registry), [])

    @property
    def row(self) -> Capabilities | None:
        """The forward's row here."""
        return self.forward.rows.get(self.device.type)

    @property
    def tensors(self) -> tuple[TensorName, ...]:
        """What this plan is judged by: the answer of its last pass."""
        names: tuple[TensorName, ...] = ("dq", "dk", "dv") if self.backward else ("out", "lse")
        return tuple(name for name in names if name not in self.broken)

    def declared(self, spec: AttentionSpec) -> float:
        """The error that the plan declares for a spec here."""
        return self.registry.declared_error(self.plan, spec, self.facts)

    def note(self, check: str, text: str) -> None:
        """Something worth saying of a check that passes."""
        if text not in self.notes.setdefault(check, []):
            self.notes[check].append(text)

    def refusals(self, spec: AttentionSpec) -> list[str]:
        """Why the plan cannot serve the spec here."""
        return self.registry.reasons(self.plan, spec, self.facts)[1]

    def any_spec(self, random: Random, *features: str, dtypes: tuple[str, ...] | None = None) -> AttentionSpec:
        """A small spec with these features, which may be refused."""
        row = self.row or Capabilities(dtypes=("fp32",))
        least, most, multiple = row.head_dims
        fitting = [size for size in _HEAD_DIMS if least <= size <= most and size % multiple == 0]
        sizes = fitting or [-(-least // multiple) * multiple]
        longest = _LONGEST.get(self.device.type, 70)
        heads, length = random.randint(1, 3), random.randint(2, longest)
        shape: dict[str, Any] = {
            "batch": random.randint(1, 2),
            "heads": heads,
            "kv_heads": heads,
            "seqlen_q": length,
            "seqlen_kv": length,
            "head_dim": random.choice(sizes),
            "dtype": random.choice(dtypes or self._wide or row.dtypes),
            "direction": "forward" if self.backward is None else "training",
            "longest": longest,
            "sizes": sizes,
        }
        for feature in features:
            FEATURES[feature](random, shape)
        del shape["longest"], shape["sizes"]
        if shape["dtype"] in FP8_DTYPES:
            shape |= {"descale": random.choice(row.descales or ("tensor",)), "direction": "forward"}
        return AttentionSpec.make(**shape)

    def random_spec(self, random: Random) -> AttentionSpec:
        """A spec of any type, features and size, which may be refused or not."""
        features = [name for name in FEATURES if random.random() < 0.3]
        return self.any_spec(random, *features, dtypes=random.choice([None, DTYPES]))

    @property
    def _wide(self) -> tuple[str, ...]:
        """The types of tensors that come without descales."""
        both = [kernel.rows.get(self.device.type) for kernel in (self.forward, self.backward) if kernel is not None]
        rows = [row.dtypes for row in both if row is not None]
        return tuple(each for each in DTYPES if each not in FP8_DTYPES and all(each in dtypes for dtypes in rows))

    def specs(
        self, check: str, count: int, *features: str, dtypes: tuple[str, ...] | None = None
    ) -> list[AttentionSpec]:
        """Up to ``count`` different specs with these features that are not refused; the same for the same seed."""
        if self.broken.intersection(features) or not (dtypes or self._wide):
            return []
        random = Random(f"{self.seed} {self.plan} {check}")
        found = dict.fromkeys(
            spec
            for spec in (self.any_spec(random, *features, dtypes=dtypes) for _ in range(_TRIES))
            if not self.refusals(spec) and (spec.has_empty_rows == ("empty" in features))
        )
        return list(found)[:count]

    def typical(self, preferred: tuple[int, ...] = (64, 128)) -> list[AttentionSpec]:
        """For each dtype that is served a plain spec large enough for errors to vary little.

        It has the first head dimension that is served, of the ``preferred`` ones and then of others.
        """
        row = self.row or Capabilities(dtypes=())
        sizes = (*preferred, *_HEAD_DIMS, row.head_dims[0])
        length = _TYPICAL.get(self.device.type, 64)
        direction = "forward" if self.backward is None else "training"
        drawn = [
            [
                AttentionSpec.make(batch=2, heads=2, seqlen_q=length, head_dim=size, dtype=dtype, direction=direction)
                for size in sizes
            ]
            for dtype in self._wide
        ]
        served = (next((spec for spec in specs if not self.refusals(spec)), None) for specs in drawn)
        return [spec for spec in served if spec is not None]

    def mixed(self, check: str, count: int) -> list[AttentionSpec]:
        """The same with features mixed at random, without the broken ones."""
        random = Random(f"{self.seed} {self.plan} {check}")
        sound = [name for name in FEATURES if name not in self.broken] if self._wide else []
        drawn = (
            self.any_spec(random, *(name for name in sound if random.random() < 0.4))
            for _ in range(4 * _TRIES if self._wide else 0)
        )
        avoided = "empty" in self.broken
        served = (spec for spec in drawn if not self.refusals(spec) and not (avoided and spec.has_empty_rows))
        return list(dict.fromkeys(served))[:count]

    def answers(self, spec: AttentionSpec, inputs: Drawn) -> dict[TensorName, Tensor]:
        """Out and LSE, and the gradients of a training plan, each pass called as the contract has it."""
        return self.answers_of(self.forward.prepare(inputs.qkv, spec), inputs.grad_out)

    def answers_of(self, operands: Operands, grad_out: Tensor | None = None) -> dict[TensorName, Tensor]:
        """The same for operands that are prepared."""
        out, lse, state = self.forward.run(operands)
        found: dict[TensorName, Tensor] = {"out": out}
        if lse is not None:
            found["lse"] = lse
        if self.backward is not None and grad_out is not None:
            found["dq"], found["dk"], found["dv"] = self.backward.run(Saved(operands.kept(), out, lse, state), grad_out)
        return found

    def allowed(self, spec: AttentionSpec) -> float:
        """The error that the plan's results may have, relative L2."""
        return _STRAY * self.declared(spec) + torch.finfo(gradient_dtype(spec)).eps

    def wrong(self, spec: AttentionSpec, values: Values, truth: Truth) -> str | None:
        """What is wrong with the numbers of these values beside the truth, None where nothing is."""
        return next(self._wrong(spec, values, truth), None)

    def _wrong(self, spec: AttentionSpec, values: Values, truth: Truth) -> Iterator[str]:
        limit = _STRAY * self.declared(spec)
        least = min(max(_ROW * limit, _LEAST_ROW), _MOST_ROW)
        for name in self.tensors:
            if name not in values:
                continue
            value, exact = values[name], exact_of(truth, name)
            if value.shape != exact.shape:
                yield f"{name} has the shape {tuple(value.shape)}, not {tuple(exact.shape)}"
                continue
            # A result is rounded once more, to the type that it is returned in.
            allowed = limit + torch.finfo(torch.float32 if name == "lse" else gradient_dtype(spec)).eps
            if name in ("dq", "dk", "dv"):
                error = _gradient_error(name, value, exact, truth)
                if not error <= allowed:
                    yield f"{name} is off by {error:.3g}, {allowed:.3g} allowed"
                continue
            judgement = judge_tensor(name, value, exact)
            if not judgement.error <= allowed:
                yield f"{name} is off by {judgement.error:.3g}, {allowed:.3g} allowed"
            elif not judgement.detail.worst_row <= least:
                yield f"one row of {name} is off by {judgement.detail.worst_row:.3g}, {least:.3g} allowed"


def exact_of(truth: Truth, name: TensorName) -> Tensor:
    """A tensor of the truth as (B, H, ...), whose heads were all computed."""
    exact = truth.values[name]
    return exact.reshape(truth.spec.batch, -1, *exact.shape[2:])


def _gradient_error(name: TensorName, value: Tensor, exact: Tensor, truth: Truth) -> float:
    """Relative L2, where rows whose sums cancel (a query with one key) count as long as random ones."""
    spec = truth.spec
    unit = truth.units.get(name, 0.0)
    share = spec.seqlen_kv**-0.5 if name == "dq" else (spec.seqlen_q * spec.group) ** 0.5 / spec.seqlen_kv
    rows = exact.numel() // exact.shape[-1]
    difference = float(torch.linalg.vector_norm(value.double() - exact))
    if difference == 0:
        return 0.0
    size = max(float(torch.linalg.vector_norm(exact)), unit * share * math.sqrt(rows))
    error = difference / size if size else math.inf
    return error if math.isfinite(error) else math.inf


def inputs_of(spec: AttentionSpec, device: torch.device) -> Drawn:
    """The normal inputs of a spec; the same on every call."""
    return draw(spec, "normal", device)


def truth_of(subject: Subject, spec: AttentionSpec, inputs: Drawn) -> Truth:
    """Exact attention on all heads of these inputs."""
    return Truth.of(spec, inputs, subject.registry, largest=_ALL)


def wide_inputs(q: Quantised, k: Quantised, v: Quantised) -> Drawn:
    """What quantised tensors stand for, in FP64."""
    wide_q, wide_k, wide_v = (x.dequantised(torch.float64) for x in (q, k, v))
    return Drawn(wide_q, wide_k, wide_v, None, "cpu")


def shrunk(spec: AttentionSpec, fails: Callable[[AttentionSpec], bool]) -> AttentionSpec:
    """A small spec that still fails: sizes are halved and features removed as long as it fails."""
    runs = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(spec):
            runs += 1
            if runs > _SHRINKS:
                return spec
            if fails(candidate):
                spec, smaller = candidate, True
                break
    return spec


def _smaller(spec: AttentionSpec) -> Iterator[AttentionSpec]:
    changes: list[dict[str, Any]] = [
        {"batch": 1},
        {"heads": spec.group, "kv_heads": 1},
        {"heads": spec.kv_heads},
        {"heads": 2 * spec.kv_heads},
        {"seqlen_q": spec.seqlen_q // 2, "seqlen_kv": spec.seqlen_kv // 2},
        {"seqlen_q": spec.seqlen_q // 2},
        {"seqlen_kv": spec.seqlen_kv // 2},
        {"seqlen_kv": spec.seqlen_q},
        {"seqlen_q": spec.seqlen_q - 1, "seqlen_kv": spec.seqlen_kv - 1},
        {"softcap": 0.0},
        {"mask": Mask()},
        {"mask": Mask(right=0, alignment=spec.mask.alignment)},
        {"head_dim_v": spec.head_dim},
        {"scale": spec.head_dim**-0.5},
        *(
            {"head_dim": size, "head_dim_v": size, "scale": size**-0.5}
            for size in _HEAD_DIMS
            if size < max(spec.head_dim, spec.head_dim_v)
        ),
    ]
    for change in changes:
        try:
            candidate = spec.replace(**change)
        except InputError:
            continue
        if candidate != spec and _weight(candidate) < _weight(spec):
            yield candidate


def _weight(spec: AttentionSpec) -> tuple[int, ...]:
    """What makes one spec smaller than another: elements first, then how much about it is special."""
    queries, keys = spec.batch * spec.heads * spec.seqlen_q, spec.batch * spec.kv_heads * spec.seqlen_kv
    special = [spec.softcap != 0, spec.head_dim != spec.head_dim_v, spec.scale != spec.head_dim**-0.5]
    masks = ("none", "causal", "window")
    elements = queries * spec.head_dim + keys * (spec.head_dim + spec.head_dim_v)
    return elements, sum(special), masks.index(spec.mask.kind)
