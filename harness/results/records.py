"""One record for each plan and case: what was measured, or why nothing was.  Records are data, never code."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from attnbench.errors import AttnbenchWarning, InputError
from attnbench.kernels.plan import Plan
from attnbench.tables.entry import LONGEST_MS, SHORTEST_MS, STATUSES, Status
from attnbench.tables.environment import Environment
from attnbench.tables.record_fields import PlanField, SpecField, UtcTime
from attnbench.text.printable import brief

from ..cases.case import LONGEST_NAME as LONGEST_CASE
from ..json_lines import Form, TornLineError, read_lines
from ..measure.accuracy import LARGEST_ERROR, Detail, NonNegative, TensorName
from ..measure.clocks import Conditions
from ..measure.findings import Side
from ..measure.timing import Cost
from ..measure.trace import LONGEST_NAME as LONGEST_KERNEL
from ..measure.trace import MOST_NAMES
from ..sequence_lengths import SequenceLengths, check_lengths
from .shards import Shard

__all__ = [
    "MEASUREMENTS",
    "SCHEMA",
    "STATUSES",
    "Correctness",
    "Measurement",
    "Performance",
    "Status",
    "read_measurements",
]

SCHEMA = "attnbench.measurement/2"
_FLAT_SCHEMA = "attnbench.measurement/1"
MEASUREMENTS = "measurements.jsonl"  # in the folder of a sweep
LONGEST_REASON = 2000


_Milliseconds = Annotated[float, Field(ge=0, le=LONGEST_MS)]
_Sample = Annotated[float, Field(ge=SHORTEST_MS, le=LONGEST_MS)]
_Samples = Annotated[list[_Sample], Field(min_length=1, max_length=10_000)]
_Visits = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1, max_length=10_000)]
_Scales = Annotated[list[Annotated[float, Field(gt=0, le=1e6)]], Field(max_length=10_000)]
_Bound = Annotated[float, Field(gt=0, le=LARGEST_ERROR)]
_Bytes = Annotated[int, Field(ge=0, le=2**60)]
_Family = Annotated[str, Field(min_length=1, max_length=100)]
_Errors = dict[_Family, dict[TensorName, NonNegative]]
_Note = Annotated[str, Field(min_length=1, max_length=300)]
_Ran = Annotated[list[Annotated[str, Field(max_length=LONGEST_KERNEL)]], Field(max_length=MOST_NAMES)]


class Correctness(BaseModel):
    """How far a plan's answers are from the truth.

    ``error`` and ``floor`` map input family and tensor (out, lse, dq, dk, dv) to relative L2 against the truth; a value
    that is not finite has the error ``"Infinity"``; a kernel that quantises nothing has no floor.  ``detail`` divides
    each error into parts.  ``bound`` is the largest error accepted for the status ``ok``, ``declared_error`` what the
    kernels declare for normal inputs.  ``truth`` says how the truth was computed, ``drawn_on`` which device type drew
    the inputs.

    ``deterministic``: two runs agreed bit by bit.  ``leak``: how far outputs changed, relative L2, with keys and
    queries that their mask hides from them; None if it hides none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    error: Annotated[_Errors, Field(min_length=1)]
    floor: _Errors = {}
    detail: dict[_Family, dict[TensorName, Detail]] = {}
    bound: _Bound
    declared_error: _Bound
    truth: _Note
    drawn_on: Literal["cpu", "cuda"]
    deterministic: bool | None = None
    leak: NonNegative | None = None

    @model_validator(mode="after")
    def _has_out_and_details_of_errors(self) -> Correctness:
        if any("out" not in errors for errors in self.error.values()):
            raise ValueError("error needs out in every family")
        places = ((family, name) for family, tensors in self.detail.items() for name in tensors)
        for family, name in places:
            if name not in self.error.get(family, {}):
                raise ValueError(f"detail has {brief(f'{family}: {name}')}, which error lacks")
        return self


class Performance(BaseModel):
    """What a plan's calls cost.

    ``time_ms`` holds the raw samples of each cost (attnbench.harness.measure.timing), ``timer`` says what a sample is.
    ``memory_bytes`` is the peak of device memory during one call beyond what was allocated before, None on a CPU;
    ``retained_bytes`` stay allocated while the result of a forward is held.  ``peak_share`` is the share of the
    device's peak that the kernels reached (attnbench.harness.results.peaks), None for an unknown device.

    ``visits`` counts the samples of each visit of each cost, in the order of ``time_ms``: plans are visited in turns,
    and samples of one visit are more alike than those of two.  ``host_ms`` is the host's part of each sample of the
    call, multiplied by its visit's ``host_scale`` (empty: by 1), because the host was faster or slower than usual then;
    ``launch_ms`` is what it needed in each visit to start a small kernel (empty: not known).
    ``first_ms`` is the first run, compiling and tuning included.  ``replayed`` names the costs whose samples are
    replays of a CUDA graph.  ``gpu`` is the GPU's state while the samples were taken.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    time_ms: dict[Cost, _Samples]
    visits: dict[Cost, _Visits] = {}
    host_ms: _Samples | None = None
    host_scale: _Scales = []
    launch_ms: _Scales = []
    first_ms: _Milliseconds | None = None
    replayed: list[Cost] = []
    timer: _Note
    memory_bytes: _Bytes | None = None
    retained_bytes: _Bytes | None = None
    peak_share: Annotated[float, Field(gt=0, le=1)] | None = None
    gpu: Conditions | None = None

    @model_validator(mode="after")
    def _counts_all_samples(self) -> Performance:
        for cost, counts in self.visits.items():
            if sum(counts) != len(self.time_ms.get(cost, ())):
                raise ValueError(f"visits counts {sum(counts)} samples of {cost}, time_ms has another number")
        return self


class Measurement(BaseModel):
    """One plan on one case in one environment.

    A row with the status ``ok`` or ``inaccurate`` has ``correctness`` and ``performance``.  A plan that lost a race
    (``slower``) has no ``correctness``, and as ``performance`` the times of a first look, or those of its passes in
    other plans.  Any other row has neither.  Every status but ``ok`` has a ``reason``.

    ``lengths`` are those of the sequences of a packed or padded case, or of one that such a case is compared with; rows
    of other cases have no such entry.

    ``check`` names the check that made the plan inaccurate or wrong (attnbench.harness.measure.verdict), ``ran`` the
    kernels that the profiler saw in each pass.  ``emulated``: other arithmetic replaced a kernel of the plan here, so
    its times are not compared with other plans'.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)

    schema_: Annotated[Literal["attnbench.measurement/2"], Field(alias="schema")] = "attnbench.measurement/2"
    case: Annotated[str, Field(min_length=1, max_length=LONGEST_CASE)]
    spec: SpecField
    lengths: SequenceLengths | None = None
    plan: PlanField
    status: Status
    reason: Annotated[str, Field(min_length=1, max_length=LONGEST_REASON)] | None = None
    check: Annotated[str, Field(min_length=1, max_length=50)] | None = None
    emulated: bool = False
    ran: dict[Side, _Ran] = {}
    correctness_: Annotated[Correctness | None, Field(alias="correctness")] = None
    performance_: Annotated[Performance | None, Field(alias="performance")] = None
    started: UtcTime
    environment: Environment

    @property
    def measured(self) -> bool:
        """Whether it has times and errors."""
        return self.status in ("ok", "inaccurate")

    @property
    def key(self) -> tuple[str, Plan]:
        """The case and plan; each pair is measured once in a sweep."""
        return self.case, self.plan

    @property
    def correctness(self) -> Correctness:
        """The errors of a measured row."""
        assert self.correctness_ is not None, f"a row with the status {self.status} has none"
        return self.correctness_

    @property
    def performance(self) -> Performance:
        """The times and memory of a measured row, or the times of a first look."""
        assert self.performance_ is not None, f"a row with the status {self.status} has none"
        return self.performance_

    @property
    def time_ms(self) -> Mapping[Cost, Sequence[float]]:
        """The raw samples of each cost; empty for a row without times."""
        return {} if self.performance_ is None else self.performance_.time_ms

    @property
    def flops(self) -> float:
        """The operations of exact attention over the pairs that the case's sequences see."""
        return self.spec.flops if self.lengths is None else self.lengths.flops(self.spec)

    def median_ms(self, cost: Cost = "call") -> float:
        """The median of a cost's samples.  Raises KeyError if the cost was not measured."""
        return median(self.time_ms[cost])

    @property
    def error(self) -> Mapping[str, Mapping[TensorName, float]]:
        """Relative L2 against the truth by input family and tensor; empty for a row that was not measured."""
        return self.correctness.error if self.measured else {}

    @model_validator(mode="after")
    def _has_numbers_where_it_ran(self) -> Measurement:
        if (self.status == "ok") != (self.reason is None):
            raise ValueError("every status but ok has a reason, and ok has none")
        timed = self.measured or self.status == "slower"
        for name, part, needed in (
            ("correctness", self.correctness_, self.measured),
            ("performance", self.performance_, timed),
        ):
            if (part is not None) != needed:
                raise ValueError(f"the status {self.status} {'needs' if needed else 'must not carry'} {name}")
        if self.measured and "call" not in self.time_ms:
            raise ValueError("time_ms needs the cost call")
        try:
            check_lengths(self.spec, self.lengths)
        except InputError as error:
            raise ValueError(str(error)) from None
        return self

    def to_line(self) -> str:
        """One line of JSON, without its end."""
        return self.model_dump_json(by_alias=True, exclude=self._absent)

    def to_dict(self) -> dict[str, Any]:
        """The record in plain JSON types."""
        return self.model_dump(mode="json", by_alias=True, exclude=self._absent)

    @property
    def _absent(self) -> dict[str, Any]:
        """A row without lengths, or without its host's speed, is written as it was before there were any."""
        absent: dict[str, Any] = {"lengths": True} if self.lengths is None else {}
        if self.performance_ is not None:
            absent["performance_"] = {
                name for name in ("host_scale", "launch_ms") if not getattr(self.performance_, name)
            }
        return absent


def _nest(flat: dict[str, Any]) -> dict[str, Any]:
    """Convert a row of the first schema, which has no nested records, to this schema."""
    row = flat | {"schema": SCHEMA}
    for name, part in (("correctness", Correctness), ("performance", Performance)):
        found = {field: row.pop(field) for field in part.model_fields if field in row}
        if any(value not in (None, {}, []) for value in found.values()):
            row[name] = found
    return row


_FORM = Form(
    SCHEMA, "a measurement", "measurements", longest_line=2**20, largest_file=2**28, older={_FLAT_SCHEMA: _nest}
)


def _warn(message: str) -> None:
    warnings.warn(message, AttnbenchWarning, stacklevel=4)


def read_measurements(path: Path, torn: Callable[[str], None] = _warn) -> Iterator[Measurement]:
    """The records of a JSON Lines file, compressed (``.gz``) or not, one at a time.

    A half-written last line of a killed sweep is not a record: ``torn`` receives a sentence with its place and the
    command that completes it, and warns by default.

    Raises MalformedFileError with the line and what was expected there.
    """
    try:
        yield from read_lines(path, Measurement, _FORM)
    except TornLineError as error:
        torn(f"{error}, as a killed sweep leaves it; {_completed(path)}")


def _completed(path: Path) -> str:
    """How to complete a file that ends in half a line."""
    if path.name != MEASUREMENTS:
        return "the sweep that wrote it, run again in its own folder with --resume, completes it"
    part = Shard.named(path.absolute().parent.name) is not None
    folder = path.absolute().parent.parent if part else path.parent
    same = "with the same launcher and options" if part else "with the same options"
    return f"`attnbench sweep --resume --out {shlex.quote(str(folder))}`, {same}, completes it"
