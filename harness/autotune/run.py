"""``autotune``: measure the specs that a program uses, and add them to the user's table.

Nothing is measured inside a call of the program.  Its specs are recorded while the context is open and measured when it
closes (or at ``measure``), as in a sweep: in separate processes, on a sweep's input families, not on its tensors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from rich.console import Console

from attnbench.choosing.choice import Choice
from attnbench.dispatch.memory import ask_again, listening
from attnbench.errors import InputError, MisuseError, NoPlanError
from attnbench.kernels.devices import find
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry, registry
from attnbench.problem.spec import AttentionSpec
from attnbench.state import forget
from attnbench.tables.environment import Environment
from attnbench.tables.files import check_writable
from attnbench.tables.user_table import known_tables, update_user_table, user_table_path

from ..measure.setup import INSTALLED, DeviceSetup
from ..measure.timing import Timer
from ..results.condense import table_of
from ..results.records import Measurement
from ..sweep.progress import show_progress
from ..sweep.run import Event, Finished
from .deadline import measured_within
from .observed_specs import ObservedSpec, ObservedSpecs
from .tuning import TuningTask, alone, chosen, own_table, shortage, tuning_task

__all__ = ["Autotune", "Tuned", "autotune"]

# Limits on the seconds for one request to a worker.  Above the upper one a hanging plan would use up the time.
# Below the lower one a timeout may be a plan that is still compiling, so it counts as "not reached", not as a hang.
_LEAST_PATIENCE, _MOST_PATIENCE = 30.0, 300.0


@dataclass(frozen=True)
class Tuned:
    """A spec that was measured: what was chosen for it ``before``, and ``after``.

    ``calls`` is how often the program called it while autotune was open.  ``after`` is None if no measured plan is
    accurate enough.  ``lost`` maps plans that have no new entry in the table to the reason; the next autotune measures
    those that the table lacks.
    """

    spec: AttentionSpec
    device: str
    calls: int
    before: Choice
    after: Choice | None
    lost: dict[str, str]

    def __str__(self) -> str:
        found = f"{self.spec} on {self.device}: {self._timed(self.before)}"
        if self.after is None:
            found += " → nothing is accurate enough"
        else:
            found += ", as before" if self.after.plan == self.before.plan else f" → {self._timed(self.after)}"
        reasons: dict[str, list[str]] = {}
        for plan, reason in self.lost.items():
            reasons.setdefault(reason, []).append(plan)
        return "\n".join([found, *(f"  {', '.join(plans)}: {reason}" for reason, plans in reasons.items())])

    def _timed(self, choice: Choice) -> str:
        """The plan and its time, the new one if it was measured now."""
        known = {each.plan: each for each in (self.after or choice).candidates}
        candidate = known.get(choice.plan, choice.chosen)
        return str(choice.plan) if candidate.time_ms is None else f"{choice.plan} {candidate.time_ms:.3g} ms"


class Autotune:
    """What ``autotune`` returns: a context manager, and ``measure``.

    ``measured`` lists what was measured, ``skipped`` maps other specs to the reason, and ``tables`` are the files that
    were written, one for each device model.
    """

    def __init__(
        self, seconds: float, dtype: Literal["fp8"] | None, backends: Sequence[str] | str | None, again: bool
    ) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
            raise InputError(f"seconds must be a number of seconds, 0 or more, got {seconds!r}")
        if dtype not in (None, "fp8"):
            raise InputError(f'dtype must be "fp8" (measure FP8 plans, too) or None, not {dtype!r}')
        self._backends = (backends,) if isinstance(backends, str) else tuple(backends or ())
        for name in self._backends:
            registry().check(name)
        # Raises OutputError before anything is measured.
        check_writable(user_table_path(Environment.detect(torch.device("cpu"), Registry(()))))
        self.seconds, self._fp8, self._again = float(seconds), dtype == "fp8", again
        self.measured: list[Tuned] = []
        self.skipped: dict[AttentionSpec, str] = {}
        self.tables: list[Path] = []
        self._asked = ObservedSpecs()
        self._spent = 0.0
        self._done: set[tuple[Path, AttentionSpec, bool]] = set()
        self._outdated = False

    def __enter__(self) -> Autotune:
        with listening.lock:
            if listening.active is not None:
                raise MisuseError("another autotune is open; one at a time sees the program")
            listening.open(self._asked)
        ask_again()  # so that specs which the program has called before are seen, too
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        listening.close(self._asked)
        ask_again()  # so that calls are no longer counted
        if error is None:
            self.measure()

    def measure(self, specs: Iterable[AttentionSpec] = (), device: str = "auto") -> Autotune:
        """Measure the program's specs so far, and ``specs`` on ``device`` (auto, cpu, cuda, cuda:N).

        The specs that take most of the program's time come first; all measuring of this object takes at most
        ``seconds``.  A spec is in the table, and used by the next call, as soon as all its plans are measured; an
        interrupt removes nothing.  If time ends within a spec, its measured plans are in the table if the plans that
        ran before and one other are among them; ``lost`` names the rest.  While a CUDA graph is being captured, or code
        compiled, nothing is measured, and the specs are kept for the next time.

        Raises InputError for no such device, OutputError if the table cannot be written.
        """
        start = time.monotonic()
        deadline = start + self.seconds - self._spent
        for spec in specs:
            self._ask(spec, find(device))
        waiting = self._measurable()
        obstacle = _obstacle()
        if obstacle is not None:
            self.skipped |= dict.fromkeys((asked.spec for asked in waiting), obstacle)
            return self
        try:
            for setup, own in self._by_table(waiting):
                self._measure_on(setup, own, deadline)
        finally:
            self._spent += time.monotonic() - start
            if self._outdated:
                self._outdated = False
                forget()
        return self

    def __str__(self) -> str:
        where = ", ".join(map(str, self.tables))
        head = f"{len(self.measured)} measured in {self._spent:.1f} s" + (f", kept in {where}" if where else "")
        return "\n".join([head, *map(str, self.measured), *(f"{spec}: {why}" for spec, why in self.skipped.items())])

    def _ask(self, spec: AttentionSpec, device: torch.device) -> None:
        asked = self._asked.of(spec, device)
        try:
            asked.choices.setdefault((self._fp8, None), chosen(asked, (self._fp8, None), registry()))
        except NoPlanError as error:
            self.skipped[asked.spec] = str(error).partition("\n")[0]

    def _measurable(self) -> list[ObservedSpec]:
        """The specs that may be measured, heaviest first; records why others may not."""
        found = []
        for asked in self._asked.heaviest_first:
            if asked.choices:
                found.append(asked)
            elif asked.named:
                self.skipped[asked.spec] = f"there is nothing to choose: {asked.named}"
        return found

    def _by_table(self, waiting: Iterable[ObservedSpec]) -> Iterator[tuple[DeviceSetup, list[ObservedSpec]]]:
        """The specs of each table, with one device to measure each table's specs on."""
        places: dict[Path, tuple[torch.device, Environment, dict[AttentionSpec, ObservedSpec]]] = {}
        environments: dict[torch.device, Environment] = {}
        for asked in waiting:
            device = asked.device
            if device.type not in ("cpu", "cuda"):
                self.skipped[asked.spec] = f"attnbench measures on cpu and cuda, not on {device.type}"
                continue
            environment = environments.get(device) or Environment.detect(device, registry())
            environments[device] = environment
            place = places.setdefault(user_table_path(environment), (device, environment, {}))
            place[2].setdefault(asked.spec, asked)
        patience = min(_MOST_PATIENCE, (self.seconds - self._spent) / 2)
        for device, environment, own in places.values():
            timer = Timer.for_device(device)
            setup = DeviceSetup(device, environment, timer, source=INSTALLED, seconds=patience)
            yield setup, list(own.values())

    def _measure_on(self, setup: DeviceSetup, waiting: Sequence[ObservedSpec], deadline: float) -> None:
        with alone(user_table_path(setup.environment), deadline) as ours:
            work = self._work(setup, waiting)
            if not ours:
                late = "another process was measuring for this table all the time"
            elif self.seconds == 0:
                late = "no time was given"
            else:
                late = f"no time was left of {self.seconds:g} s"
            self.skipped |= dict.fromkeys((each.asked.spec for each in work), late)
            if ours and work and time.monotonic() < deadline:
                self._measure(setup, work, deadline)

    def _measure(self, setup: DeviceSetup, work: Sequence[TuningTask], deadline: float) -> None:
        left = {task.case.name: task for task in work}
        rows: dict[str, dict[Plan, Measurement]] = {name: {} for name in left}
        try:
            every = [(each.case, each.plans) for each in work]
            with closing(measured_within(setup, every, deadline)) as events:
                for row in _with_progress(events):
                    rows[row.case][row.plan] = row
                    if len(rows[row.case]) == len(left[row.case].plans):
                        self._keep(setup, left.pop(row.case), rows[row.case])
        except BaseException:
            self.skipped |= {each.asked.spec: "measuring was interrupted" for each in left.values()}
            raise
        if left:
            name, under_way = next(iter(left.items()))
            self._keep(setup, under_way, rows[name])

    def _work(self, setup: DeviceSetup, waiting: Iterable[ObservedSpec]) -> list[TuningTask]:
        """The tasks in order; records why the other specs are skipped."""
        path = user_table_path(setup.environment)
        own = own_table(setup.environment)
        work = []
        for asked in waiting:
            fp8 = self._fp8 or asked.fp8
            if (path, asked.spec, fp8) in self._done:
                continue
            found = tuning_task(asked, setup, fp8, self._backends, own, self._again)
            if isinstance(found, str):
                self.skipped[asked.spec] = found
                # Another process has written it since this one read the table.
                there = own.at(asked.spec).keys()
                self._outdated |= not known_tables(setup.device).at(asked.spec).keys() >= there
                continue
            lacking = shortage(asked.spec, found.plans, setup)
            if lacking is not None:
                self.skipped[asked.spec] = lacking
                continue
            work.append(found)
        return work

    def _keep(self, setup: DeviceSetup, task: TuningTask, rows: Mapping[Plan, Measurement]) -> None:
        """Add the rows of a spec to the table, or record why they are not added."""
        asked, plans = task.asked, task.plans
        hasty = setup.seconds < _LEAST_PATIENCE
        known = [row for row in rows.values() if not (hasty and row.status == "timeout")]
        lost = {str(row.plan): f"{row.status}: {row.reason}" for row in rows.values() if not row.measured}
        whole = len(known) == len(plans)
        if not (any(row.measured for row in known) if whole else task.settled_by(known)):
            cut_off = f"it was not measured whole when {self.seconds:g} s were over"
            reasons = [f"{plan}: {reason}" for plan, reason in lost.items()]
            self.skipped[asked.spec] = "; ".join([cut_off] * (len(rows) < len(plans)) + reasons)
            return
        lost |= {str(plan): f"not reached in {self.seconds:g} s" for plan in plans if plan not in rows}
        path = update_user_table(table_of(setup.environment, known))
        self._outdated = True
        if path not in self.tables:
            self.tables.append(path)
        if whole:
            self._done.add((path, asked.spec, self._fp8 or asked.fp8))
        self.skipped.pop(asked.spec, None)
        for terms, before in list(asked.choices.items()):
            after: Choice | None
            try:
                after = chosen(asked, terms, registry())
            except NoPlanError:
                after = None
            self.measured.append(Tuned(asked.spec, str(asked.device), asked.calls, before, after, lost))


def autotune(
    seconds: float = 60.0,
    *,
    dtype: Literal["fp8"] | None = None,
    backends: Sequence[str] | str | None = None,
    again: bool = False,
) -> Autotune:
    """Measure the specs that a program uses, within a time limit, so that ``attention`` chooses by measurement.

    The program runs unchanged within the block.  When the block ends, each spec that was used, forward and training, is
    measured with every plan that can serve it, unless the user's table has it already (``again=True``: even then).
    Calls that name a backend are not measured.

    ``dtype="fp8"`` measures FP8 plans too, as for calls that opt into FP8; calls still need their own opt-in.
    ``backends`` restricts the measured plans, as in a sweep; the plan that is chosen now is always included.

    Measuring needs memory beside the program's.  Of processes whose devices share a table (the ranks on one machine)
    one measures at a time, and the others find its results; ``attnbench.freeze`` guarantees that ranks agree.

    Raises InputError or UnknownBackendError for bad arguments, MisuseError for an autotune within an autotune,
    OutputError if the user's table cannot be written.

    >>> with attnbench.autotune(seconds=60) as tuned:
    ...     model(x)
    >>> print(tuned)
    >>> attnbench.autotune(seconds=10).measure([AttentionSpec.make(batch=1, heads=8, seqlen_q=4096, head_dim=128)])
    """
    return Autotune(seconds, dtype, backends, again)


def _obstacle() -> str | None:
    """Why nothing may be measured now; None if it may."""
    # Without a GPU torch lacks is_current_stream_capturing.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return "a CUDA graph is being captured; measure() after it measures what was asked"
    if torch.compiler.is_compiling():
        return "code is being compiled; measure() outside of it measures what was asked"
    return None


def _with_progress(events: Iterator[Event]) -> Iterator[Measurement]:
    """The rows of the events, with a line of progress on a terminal."""
    console = Console(stderr=True)
    if console.is_terminal:
        return show_progress(events, console)
    return (event.row for event in events if isinstance(event, Finished))
