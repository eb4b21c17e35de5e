"""Scale the times of a table to another GPU of the same generation, for choices until it has a table of its own."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ..kernels.plan import Plan, precision_of
from ..problem.spec import FORWARDS_IN_TRAINING, AttentionSpec
from .entry import Entry
from .environment import Environment
from .gpu_models import GPU_MODELS, GpuModel
from .table import Table

__all__ = ["Rates", "impossible", "scaled", "scaled_ms"]

# The standard error that scaling adds to the logarithm of a time: between two GPUs of equal rates, and for each unit of
# the logarithm of the rates' largest ratio.  Of what the H200's table gives when scaled, six calls on an H100 were
# within 4 %, and their ratios within 2 %.  On an H20, whose bf16 rate is 1/6.7 of the H200's, kernels made for Hopper
# were within 8 %, FlashAttention-2 27 % off (flash-attention issue 1310); FP8 kernels were 17 % off on an H100 PCIe
# (flash-attention pull request 1075).
_EQUAL, _PER_RATIO = 0.05, 0.1
_ABOVE_BOOST = 1.1  # by how much a GPU may exceed the published peak: 1980 MHz for the 1830 that it is given at
_ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


class Rates(NamedTuple):
    """The rates of a GPU at the clock that its power allows."""

    model: GpuModel
    clock: float = 1.0

    def operations(self, precision: str) -> float:
        """In 1e12 a second, for a kernel's precision."""
        return self.model.rate(precision) * self.clock

    @property
    def others(self) -> float:
        """Of what tensor cores do not do (exponentials, addresses): as that of FP32, multiprocessors times clock."""
        return self.operations("fp32")


def scaled(table: Table, here: Environment) -> Table | None:
    """The table with its times scaled to this GPU, and this GPU's facts in its environment.

    Versions stay those of the measurement, so that ``Binding`` drops the backends that differ.  Errors stay too: the
    same kernels compute the same.  None if both are the same model, have another compute capability, or if the
    published rates of either are not known (``gpu_models``).
    """
    there = table.environment
    source, target = _rates(there), _rates(here)
    same = there.device_name == here.device_name or None in (there.capability, here.capability)
    if source is None or target is None or same or there.capability != here.capability:
        return None
    launches = _launches(table, source)

    def moved(entry: Entry) -> Entry:
        if entry.time_ms is None:
            return entry
        device = entry.device_ms or entry.time_ms
        device = scaled_ms(entry.plan, entry.spec, device, launches[_series(entry)], source, target)
        known = None if entry.device_ms is None else device
        return entry.timed(max(device, entry.host_ms or 0.0), entry.host_ms, known)

    facts = ("device_name", "device_count", "driver", "uuid_hash", "clock_mhz", "power_cap_w", "memory_bytes")
    ratios = [_ratio(source, target, precision) for precision in ("bf16", "fp8", "fp32")]
    ratios.append(source.model.bandwidth / target.model.bandwidth)
    return Table(
        replace(there, **{name: getattr(here, name) for name in facts}),
        {key: moved(entry) for key, entry in table.entries.items()},
        launch_ms=table.launch_ms,
        scaled_from=there.device_name,
        time_error=math.hypot(_EQUAL, _PER_RATIO * max(abs(math.log(ratio)) for ratio in ratios)),
    )


def scaled_ms(plan: Plan, spec: AttentionSpec, time_ms: float, launch_ms: float, source: Rates, target: Rates) -> float:
    """A measured time of ``source`` on ``target``, of which ``launch_ms`` stay.

    The rest is split: what its operations take at the source's peak scales with that rate, what its bytes take at the
    peak bandwidth with the bandwidth, and all else with multiprocessors times clock.  The factor is a mean of the
    three ratios, weighted by these shares; if the ideal times overlap, their shares are reduced in proportion.
    """
    body = time_ms - launch_ms
    if body <= 0:
        return time_ms
    ideal = [(work, _ratio(source, target, precision)) for work, precision in _operations(plan, spec, source)]
    ideal.append((_memory(plan, spec, source), source.model.bandwidth / target.model.bandwidth))
    rest = source.others / target.others
    whole = max(body, sum(time for time, _ in ideal))
    factor = rest + sum(time / whole * (ratio - rest) for time, ratio in ideal)
    return launch_ms + body * factor


def impossible(table: Table) -> str | None:
    """Why the table cannot be true, one sentence: a plan is faster than the peak of the table's GPU; None if it can."""
    model = GPU_MODELS.get(table.environment.device_name)
    if model is None or table.environment.device_type != "cuda":
        return None
    for entry in table.entries.values():
        if entry.time_ms is None:
            continue
        least = sum(time for time, _ in _operations(entry.plan, entry.spec, Rates(model, _ABOVE_BOOST), least=True))
        if entry.time_ms < least:
            return f"{entry.plan} at {entry.spec} in {entry.time_ms:g} ms is faster than the GPU's peak"
    return None


def _rates(environment: Environment) -> Rates | None:
    model = GPU_MODELS.get(environment.device_name) if environment.device_type == "cuda" else None
    return None if model is None else Rates(model, model.clock(environment.power_cap_w))


def _ratio(source: Rates, target: Rates, precision: str) -> float:
    return source.operations(precision) / target.operations(precision)


def _launches(table: Table, source: Rates) -> dict[tuple[object, ...], float]:
    """For each plan what its device needs to begin, in ms: the shortest time, less what the work of that call would
    take if it came as near to the peaks as the plan ever does.
    """
    calls: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for entry in table.entries.values():
        if entry.time_ms is not None:
            work = sum(time for time, _ in _operations(entry.plan, entry.spec, source))
            calls[_series(entry)].append(
                (entry.device_ms or entry.time_ms, work + _memory(entry.plan, entry.spec, source))
            )
    launches = {}
    for series, each in calls.items():
        shortest, work = min(each)
        launches[series] = max(0.0, shortest - work / max(ideal / time for time, ideal in each))
    return launches


def _series(entry: Entry) -> tuple[object, ...]:
    return entry.plan, entry.spec.direction, entry.spec.dtype


def _operations(plan: Plan, spec: AttentionSpec, rates: Rates, least: bool = False) -> Iterator[tuple[float, str]]:
    """(ms at the peak, precision) of each pass; ``least``: of the fewest operations that the spec may have."""
    whole = spec.least_flops if least else spec.flops
    forward = whole / FORWARDS_IN_TRAINING if spec.training else whole
    for kernel, flops in zip(plan.kernels, (forward, whole - forward), strict=False):
        yield flops / rates.operations(precision_of(kernel)) / 1e9, precision_of(kernel)


def _memory(plan: Plan, spec: AttentionSpec, rates: Rates) -> float:
    """Milliseconds for its bytes: inputs read and results written once, in training three times.

    A plan in 8 bits also writes Q, K and V in 8 bits and reads them.
    """
    queries, keys = spec.tokens
    inputs = spec.heads * queries * spec.head_dim + spec.kv_heads * keys * (spec.head_dim + spec.head_dim_v)
    size = _ELEMENT_BYTES.get(spec.dtype, 1)
    moved = (inputs + spec.heads * queries * spec.head_dim_v) * size * (3 if spec.training else 1)
    if plan.fp8 and size > 1:
        moved += 2 * inputs
    return moved / rates.model.bandwidth / 1e9
