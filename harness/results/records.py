"""One record a plan and case: what was measured, or why nothing was.  Data, never code."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from attnbench.errors import AttnbenchWarning
from attnbench.kernels.plan import Plan
from attnbench.tables.entry import LONGEST_MS, SHORTEST_MS, STATUSES, Status
from attnbench.text.printable import brief

from ..cases.case import LONGEST_NAME as LONGEST_CASE
from ..json_lines import Form, TornLineError, read_lines
from ..measure.accuracy import LARGEST_ERROR, Detail, NonNegative, TensorName
from ..measure.clocks import Conditions
from ..measure.findings import Side
from ..measure.timing import Cost
from ..measure.trace import LONGEST_NAME as LONGEST_KERNEL
from ..measure.trace import MOST_NAMES
from ..record_fields import EnvironmentField, PlanField, SpecField, UtcTime
from .shards import Shard

__all__ = ["MEASUREMENTS", "SCHEMA", "STATUSES", "Measurement", "Status", "read_measurements"]

SCHEMA = "attnbench.measurement/1"
MEASUREMENTS = "measurements.jsonl"  # in the folder of a sweep
LONGEST_REASON = 2000
_FORM = Form(SCHEMA, "a measurement", "measurements", longest_line=2**20, largest_file=2**28)


_Milliseconds = Annotated[float, Field(ge=0, le=LONGEST_MS)]
_Sample = Annotated[float, Field(ge=SHORTEST_MS, le=LONGEST_MS)]
_Samples = Annotated[list[_Sample], Field(min_length=1, max_length=10_000)]
_Visits = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1, max_length=10_000)]
_Bound = Annotated[float, Field(gt=0, le=LARGEST_ERROR)]
_Bytes = Annotated[int, Field(ge=0, le=2**60)]
_Family = Annotated[str, Field(min_length=1, max_length=100)]
_Errors = dict[_Family, dict[TensorName, NonNegative]]
_Ran = Annotated[list[Annotated[str, Field(max_length=LONGEST_KERNEL)]], Field(max_length=MOST_NAMES)]
_Note = Annotated[str, Field(min_length=1, max_length=300)]


class Measurement(BaseModel):
    """One plan on one case in one environment.

    ``time_ms`` holds the raw samples of each cost (attnbench.harness.measure.timing names them).
    ``error`` and ``floor`` map input family and tensor (out, lse, dq, dk, dv) to relative L2
    against the truth; what was not finite has the error ``"Infinity"``; a kernel that
    quantises nothing has no floor, its floor is 0.  ``bound`` is the largest error that was
    accepted for the status ``ok``, ``declared_error`` what the kernels promise on normal
    inputs.  ``memory_bytes`` is the peak of device memory during one call beyond what lay
    there before, None on a CPU.  ``peak_share`` is how much of the device's peak the kernels
    reached (attnbench.harness.measure.peaks), None where the device is unknown.  ``ran`` names what
    the profiler saw in each pass.
    ``truth``, ``timer`` and ``drawn_on`` are the conditions: what errors were taken on, what
    a sample of time is, whose random numbers the inputs are.

    What follows is absent from records of version 0.1.  ``check`` names what made the plan
    inaccurate or wrong (attnbench.harness.measure.verdict).  ``detail`` says more of each error.
    ``deterministic``: two runs agreed bit by bit.  ``leak``: how far outputs changed, relative
    L2, with keys and queries that their mask hides from them; None where it hides none.
    ``visits`` says of each cost how many samples each visit took, in the order of ``time_ms``: plans are
    visited in turns, and the samples of one visit are more alike than those of two.
    ``host_ms`` is the host's part of each sample of the call, ``first_ms`` the first run,
    compiling and tuning included.  ``replayed`` names the costs whose samples are replays of
    a CUDA graph.  ``retained_bytes`` stay while the result of a forward is held.  ``gpu`` is
    how the GPU was while the samples were taken.  ``emulated``: other arithmetic stood in for a
    kernel of the plan here, so that its times are compared with no other plan's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)

    schema_: Annotated[Literal["attnbench.measurement/1"], Field(alias="schema")] = "attnbench.measurement/1"
    case: Annotated[str, Field(min_length=1, max_length=LONGEST_CASE)]
    spec: SpecField
    plan: PlanField
    status: Status
    reason: Annotated[str, Field(min_length=1, max_length=LONGEST_REASON)] | None = None
    time_ms: dict[Cost, _Samples] = {}
    error: _Errors = {}
    floor: _Errors = {}
    bound: _Bound | None = None
    declared_error: _Bound | None = None
    memory_bytes: _Bytes | None = None
    peak_share: Annotated[float, Field(gt=0, le=1)] | None = None
    ran: dict[Side, _Ran] = {}
    truth: _Note | None = None
    timer: _Note | None = None
    drawn_on: Literal["cpu", "cuda"] | None = None
    check: Annotated[str, Field(min_length=1, max_length=50)] | None = None
    detail: dict[_Family, dict[TensorName, Detail]] = {}
    deterministic: bool | None = None
    leak: NonNegative | None = None
    visits: dict[Cost, _Visits] = {}
    host_ms: _Samples | None = None
    first_ms: _Milliseconds | None = None
    replayed: list[Cost] = []
    retained_bytes: _Bytes | None = None
    gpu: Conditions | None = None
    emulated: bool = False
    started: UtcTime
    environment: EnvironmentField

    @property
    def measured(self) -> bool:
        """Whether it carries times and errors."""
        return self.status in ("ok", "inaccurate")

    @property
    def key(self) -> tuple[str, Plan]:
        """What is measured once in a sweep."""
        return self.case, self.plan

    @model_validator(mode="after")
    def _numbers_belong_to_what_ran(self) -> Measurement:
        if (self.status == "ok") != (self.reason is None):
            raise ValueError("every status but ok has a reason, and ok has none")
        numbers = {
            "time_ms": self.time_ms,
            "error": self.error,
            "bound": self.bound,
            "declared_error": self.declared_error,
            "truth": self.truth,
            "timer": self.timer,
            "drawn_on": self.drawn_on,
        }
        if self.measured:
            if missing := [name for name, value in numbers.items() if not value]:
                raise ValueError(f"the status {self.status} needs {', '.join(missing)}")
            if "call" not in self.time_ms:
                raise ValueError("time_ms needs the cost call")
            if any("out" not in errors for errors in self.error.values()):
                raise ValueError("error needs out in every family")
            if unknown := _places(self.detail) - _places(self.error):
                raise ValueError(f"detail has {brief(': '.join(min(unknown)))}, which error lacks")
            for cost, counts in self.visits.items():
                if sum(counts) != len(self.time_ms.get(cost, ())):
                    raise ValueError(f"visits counts {sum(counts)} samples of {cost}, time_ms has another number")
        else:
            names = ("floor", "memory_bytes", "peak_share", "detail", "deterministic", "leak", "host_ms", "first_ms")
            numbers |= {name: getattr(self, name) for name in (*names, "visits", "replayed", "retained_bytes", "gpu")}
            if present := [name for name, value in numbers.items() if value or value == 0]:
                raise ValueError(f"the status {self.status} must not carry {', '.join(present)}")
        return self

    def to_line(self) -> str:
        """One line of JSON, without its end."""
        return self.model_dump_json(by_alias=True)

    def to_dict(self) -> dict[str, Any]:
        """The same in plain JSON types."""
        return self.model_dump(mode="json", by_alias=True)


def _places(of: Mapping[str, Mapping[TensorName, Any]]) -> set[tuple[str, str]]:
    """The input families and tensors that something is said of."""
    return {(family, name) for family, tensors in of.items() for name in tensors}


def _warn(said: str) -> None:
    warnings.warn(said, AttnbenchWarning, stacklevel=4)


def read_measurements(path: Path, torn: Callable[[str], None] = _warn) -> Iterator[Measurement]:
    """The records of a JSON Lines file, compressed (``.gz``) or not, one at a time.

    The last line that a killed sweep has left half-written is no record: ``torn`` is given a sentence with its place
    and the command that completes it, a warning unless it does something else with that.

    Raises MalformedFileError with the line and what was expected there.
    """
    try:
        yield from read_lines(path, Measurement, _FORM)
    except TornLineError as error:
        torn(f"{error}, as a killed sweep leaves it; {_completed(path)}")


def _completed(path: Path) -> str:
    """How a file that ends in half a line becomes whole."""
    if path.name != MEASUREMENTS:
        return "the sweep that wrote it, run again in its own folder with --resume, completes it"
    part = Shard.named(path.absolute().parent.name) is not None
    folder = path.absolute().parent.parent if part else path.parent
    same = "with the same launcher and options" if part else "with the same options"
    return f"`attnbench sweep --resume --out {shlex.quote(str(folder))}`, {same}, completes it"
