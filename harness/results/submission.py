"""What a table for others must fulfil, held against the table alone and against the rows that it was made from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median

from attnbench.choosing.budget import class_bound
from attnbench.errors import UnknownBackendError
from attnbench.kernels.plan import Plan, backend_of
from attnbench.kernels.registry import Registry
from attnbench.tables.environment import Environment
from attnbench.tables.table import Entry, Table

from ..measure.timing import Cost
from .condense import condense, join_sweeps
from .peaks import PEAK_TFLOPS, least_ms, peak_share
from .privacy import private_part
from .records import Measurement
from .visits import visit_medians

__all__ = ["LEAST_SHAPES", "Agreement", "Submission", "agreement", "submission_of", "table_faults", "visits_agree"]

LEAST_SHAPES = 10  # the preset quick has twelve, of which a noisy one may drop out
_FEWEST_PLANS = 2  # with one there is nothing to choose from
_APART = 0.1  # of the row's median, for two visits that agree on it
# Calls that wait for the host are noisy: on an H200 up to an eighth of a sweep's rows had no two visits that agree.
_MOST_LEFT_OUT = 0.2
_SHORTEST_CALL = 0.75  # of its kernels' own time; the least of all committed rows is 0.84
_PASSES: tuple[Cost, ...] = ("kernel", "backward")
_EMULATED = "its arithmetic is emulated, so its time says nothing"
_NEEDED = ("capability", "driver", "cuda", "uuid_hash", "clock_mhz", "power_cap_w", "memory_bytes")
_TEXTS = ("device_name", "capability", "driver", "cuda", "cudnn", "torch", "triton", "python", "platform", "cpu")


@dataclass(frozen=True)
class Agreement:
    """How a table's times relate to another's: ``shared`` plans that both measured at a spec, and the median ratio."""

    shared: int
    ratio: float

    @property
    def confirms(self) -> bool:
        """Whether the one table bears out the other: enough in common, and as fast to a tenth in the median."""
        return self.shared >= LEAST_SHAPES * _FEWEST_PLANS and abs(self.ratio - 1) <= _APART


@dataclass(frozen=True)
class Submission:
    """The table of some sweeps, condensed as ``attnbench table build`` does it, and why it may not be shared.

    ``faults`` has one sentence for each reason.  ``left_out`` are the rows that the table is without, because no two of
    their visits agree.
    """

    table: Table
    faults: tuple[str, ...]
    left_out: tuple[Measurement, ...] = ()


def submission_of(
    sweeps: Mapping[str, Sequence[Measurement]], known: Registry, names: Collection[str] = ()
) -> Submission | None:
    """The submission of sweeps, keyed by where each was read; the same for the same rows in any order.

    ``names`` are those of users and hosts that may not stand in it.  None if there is no row.
    """
    ordered = {place: sorted(rows, key=_order) for place, rows in sweeps.items() if rows}
    ordered = dict(sorted(ordered.items(), key=lambda item: [_order(row) for row in item[1]]))
    rows = [row for each in ordered.values() for row in each]
    if not rows:
        return None
    left_out = tuple(row for row in rows if row.measured and not visits_agree(row))
    unsure = {id(row) for row in left_out}
    kept = {place: [row for row in each if id(row) not in unsure] for place, each in ordered.items()}
    newest = max(rows, key=lambda row: row.started).environment
    mixed = _mixed(rows, newest)
    if mixed or len(unsure) == len(rows):
        table = Table.from_entries(newest, (entry for each in kept.values() for entry in condense(each)))
    else:
        table = join_sweeps(kept)
    table = table.condensed()
    faults = [*mixed, *_row_faults(rows, len(left_out)), *table_faults(table, known, names)]
    return Submission(table, tuple(dict.fromkeys(faults)), left_out)


def agreement(table: Table, other: Table) -> Agreement:
    """The other table's times over this one's, as on the host of this; a ratio of 1 where they share nothing."""
    other = other.on_host(table.launch_ms)
    both = table.entries.keys() & other.entries.keys()
    times = [(table.entries[key].time_ms, other.entries[key].time_ms) for key in both]
    ratios = [after / before for before, after in times if before and after]
    return Agreement(len(ratios), median(ratios) if ratios else 1.0)


def visits_agree(row: Measurement) -> bool:
    """Whether the medians of at least two visits lie within a tenth of the row's: no single visit made its time."""
    middle = row.median_ms()
    return sum(abs(each / middle - 1) <= _APART for each in visit_medians(row, "call")) >= 2


def table_faults(table: Table, known: Registry, names: Collection[str] = ()) -> list[str]:
    """Why the table may not be shared, one sentence for each reason, as far as it alone can show.

    Held against ``known``, whose names its kernels must have; the bounds on errors that a status means; the device's
    peak; and what no shared file may tell (``private_part``).
    """
    entries = sorted(table.entries.values(), key=lambda entry: (str(entry.spec), str(entry.plan)))
    own = [name for name in names if name.lower() not in {*known.backends, "torch"}]  # words of every table
    faults = list(_environment_faults(table, own))
    unknown: dict[Plan, str] = {}
    for plan in sorted({entry.plan for entry in entries}, key=str):
        try:
            known.check(str(plan))
        except UnknownBackendError as error:
            unknown[plan] = str(error)
    faults += dict.fromkeys(unknown.values())
    for entry in entries:
        reasons = list(_entry_faults(entry, table.environment.device_name, own))
        if entry.plan not in unknown and known.emulated(entry.plan, "cuda"):
            reasons.append(_EMULATED)
        faults += [f"{entry.spec}, {entry.plan}: {each}" for each in reasons]
    shapes = [
        spec
        for spec in table.specs
        if sum(each.usable or each.status == "slower" for each in table.at(spec).values()) >= _FEWEST_PLANS
    ]
    if len(shapes) < LEAST_SHAPES:
        faults.append(
            f"{len(shapes)} shapes with at least {_FEWEST_PLANS} plans to choose between; expected {LEAST_SHAPES}, "
            "measure more with `attnbench sweep`"
        )
    return faults


def _environment_faults(table: Table, names: Collection[str]) -> Iterator[str]:
    here = table.environment
    if here.device_type != "cuda":
        yield f"measured on {here.device_type} ({here.device_name}); only GPUs' tables are shared"
        return
    if here.device_name not in PEAK_TFLOPS:
        yield (
            f"the peak of {here.device_name} is not known, so no time can be held against it; add the datasheet's "
            "figures to harness/results/peaks.py"
        )
    if missing := [name for name in _NEEDED if getattr(here, name) is None]:
        yield f"the environment does not say {', '.join(missing)}; measure where nvidia-ml-py reaches the driver"
    if (here.commit or "").endswith("-dirty"):
        yield _changed(here.commit)
    used = {backend_of(kernel) for _, plan in table.entries for kernel in plan.kernels}
    if nameless := sorted(name for name in used if here.backends.get(name, "unknown") == "unknown"):
        yield f"the environment has no version of {', '.join(nameless)}"
    texts = {name: getattr(here, name) or "" for name in _TEXTS}
    texts |= {f"the version of {name}": version for name, version in here.backends.items()}
    texts |= {f"the origin of {name}": origin for name, origin in here.origins.items()}
    for name, text in texts.items():
        if found := private_part(text, names):
            yield f"{name} holds {found!r}, which identifies a machine or a person"


def _entry_faults(entry: Entry, device_name: str, names: Collection[str]) -> Iterator[str]:
    judged, timed = entry.status in ("ok", "inaccurate"), entry.status in ("ok", "inaccurate", "slower")
    if entry.spec.training != (entry.plan.backward is not None):
        yield f"a plan {'with' if entry.plan.backward else 'without'} a backward is none for {entry.spec.direction}"
    if timed != (entry.time_ms is not None):
        yield f"the status {entry.status} {'needs' if timed else 'must not carry'} a time"
    if judged != bool(entry.errors):
        yield f"the status {entry.status} {'needs' if judged else 'must not carry'} errors"
    if (entry.status == "ok") != (entry.reason is None) or (entry.status == "ok" and entry.check is not None):
        yield "every status but ok has a reason, and ok has neither reason nor check"
    if entry.status == "ok" and entry.errors:
        bound = class_bound(entry.plan, entry.spec)
        error, family = entry.worst
        if not error <= bound:
            yield f"named ok, and its error on {family} inputs is {error:.3g}, beyond {bound:g}"
    if entry.time_ms is not None and device_name in PEAK_TFLOPS:
        least = least_ms(entry.plan, entry.spec, device_name)
        if least is None:
            yield "no peak is known of a kernel's precision on this device"
        elif entry.time_ms < least:
            yield f"{entry.time_ms:g} ms is above the device's peak, which needs {least:.4g} ms"
    for text in (entry.reason, entry.check, *entry.errors):
        if found := private_part(text or "", names):
            yield f"its text holds {found!r}, which identifies a machine or a person; edit it in measurements.jsonl"


def _order(row: Measurement) -> tuple[datetime, str, str]:
    return row.started, row.case, str(row.plan)


def _mixed(rows: Sequence[Measurement], newest: Environment) -> list[str]:
    """What forbids to mix the rows, each as one sentence."""
    others = dict.fromkeys(row.environment for row in rows if row.environment != newest)
    found = dict.fromkeys(difference for each in others for difference in each.differences(newest)[0])
    return [f"measured in environments that must not be mixed: {difference}" for difference in found]


def _changed(commit: str | None) -> str:
    return f"measured with attnbench at {commit}, whose local changes are not in the repository"


def _row_faults(rows: Sequence[Measurement], left_out: int) -> Iterator[str]:
    commits = dict.fromkeys(row.environment.commit or "" for row in rows)
    yield from (_changed(commit) for commit in commits if commit.endswith("-dirty"))
    measured = [row for row in rows if row.measured]
    if left_out > _MOST_LEFT_OUT * len(measured):
        yield (
            f"no two visits agree on the time of {left_out} of {len(measured)} rows; expected at most a fifth of them, "
            "measure again on an idle GPU"
        )
    for row in measured:
        name = f"{row.spec}, {row.plan}"
        if row.emulated:
            yield f"{name}: {_EMULATED}"
        share = peak_share(row.plan, row.spec, row.performance.time_ms, row.environment.device_name, row.flops)
        if share is not None and share > 1:
            yield f"{name}: its kernels reach {share:.0%} of the device's peak"
        own = sum(median(row.time_ms[cost]) for cost in _PASSES if cost in row.time_ms)
        if row.median_ms() < _SHORTEST_CALL * own:
            yield f"{name}: its call takes {row.median_ms():.4g} ms, and its kernels alone {own:.4g} ms"
