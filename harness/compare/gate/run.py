"""One run of the gate: a first look at every row, then visits until each is decided, then the verdict."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from attnbench.errors import AttnbenchError, MisuseError
from attnbench.kernels.registry import Registry
from attnbench.tables.environment import Environment

from ...measure.setup import INSTALLED, DeviceSetup, registry_of
from ...results.records import Measurement
from ...results.store import Store
from ...sweep.run import Finished, run_sweep
from ..pairs import machine_differences, rows_of
from ..regression import Regression
from ..terms import Gated, Key, Terms
from .gate import Gate
from .outcome import minutes_needed, outcomes
from .rounds import ROUNDS, Rounds, read_rounds, rounds_of
from .rows import brief_timer, choose_rows, gate_rows, repeatable, tasks
from .series import GateRow
from .sides import SECONDS, Sides

__all__ = ["GateRun", "UnlikeMachinesError", "run_gate"]

_Recorded = Mapping[tuple[Key, Gated], list[list[float]]]


class UnlikeMachinesError(AttnbenchError):
    """BASE was measured on another machine, so its times cannot be compared with this one's."""

    exit_code = 3


@dataclass(frozen=True)
class GateRun:
    """The verdict, the gated rows of BASE and NEW, their rounds, and a sentence on how much was measured."""

    regression: Regression
    base: Mapping[Key, Measurement]
    new: Mapping[Key, Measurement]
    rounds: list[Rounds]
    summary: str


def run_gate(
    base: Path,
    folder: Path,
    terms: Terms,
    device: torch.device,
    base_python: Path | None,
    minutes: float,
    *,
    costs: Sequence[Gated] | None = None,
    cases: Collection[str] = (),
    every: bool = False,
    say: Callable[[str], object] = print,
    source: str = INSTALLED,
) -> GateRun:
    """Gate rows of BASE within so many minutes: those that ``auto`` chooses and their runners-up, or ``every`` one.

    BASE is visited in the environment of ``base_python``; without one, the rounds that an earlier gate left in BASE's
    folder are used.  NEW's rows are written to ``folder``.  ``say`` receives lines of progress, ``source`` names the
    registry's function, for tests.

    Raises MisuseError if there is nothing to gate or BASE's environment cannot take part; UnlikeMachinesError;
    MalformedFileError if BASE is damaged; OutputError if the folder cannot be written.
    """
    start = time.monotonic()
    registry = registry_of(source)
    environment = Environment.detect(device, registry)
    known = _known(rows_of(base), cases, base)
    wanted = known if every else {row.key: row for row in choose_rows(known)}
    if not wanted:
        raise MisuseError(f"{base} has no row to gate: none has numbers and inputs that can be drawn again")
    recorded = None if base_python is not None else _recorded(base, wanted, environment)
    setup = DeviceSetup(device, environment, brief_timer(device), source, seconds=SECONDS)
    same_gpu = all(row.environment.uuid_hash == environment.uuid_hash for row in wanted.values())
    rows = gate_rows(list(wanted.values()), terms, device, costs, recorded, same_gpu=same_gpu)
    with Sides(device, base_python, source) as sides:
        sides.start([row.question for row in rows])
        sides.introduce(rows[0].question, say)
        new = _first_look(list(wanted.values()), registry, setup, folder, say)
        running = [row for row in rows if row.question.key in new and new[row.question.key].measured]
        Gate(sides, start + minutes * 60, say).run(running)
    regression = outcomes(wanted, new, running, terms)
    regression = replace(regression, advice=_advice(running, minutes, recorded))
    left = len(known) - len(wanted)
    summary = f"{len(wanted)} rows gated in {(time.monotonic() - start) / 60:.1f} minutes"
    summary += f", {left} others of BASE not" if left else ""
    return GateRun(regression, wanted, new, rounds_of(running), summary)


def _known(rows: Mapping[Key, Measurement], cases: Collection[str], base: Path) -> dict[Key, Measurement]:
    """The rows that can be measured again, of these cases if any are named."""
    if unknown := sorted(set(cases) - {case for case, _ in rows}):
        raise MisuseError(f"{base} has no case {unknown[0][:100]!r}")
    return {key: row for key, row in rows.items() if repeatable(row) and (not cases or key[0] in cases)}


def _recorded(base: Path, wanted: Mapping[Key, Measurement], environment: Environment) -> _Recorded:
    """BASE's recorded rounds.  Raises UnlikeMachinesError: an anchor cannot compensate for another machine."""
    for row in wanted.values():
        if unlike := machine_differences(row.environment, environment):
            raise UnlikeMachinesError(
                f"{base} was measured on another machine ({'; '.join(unlike)}); "
                "--base-python measures the old code on this one"
            )
    return read_rounds(base / ROUNDS) if base.is_dir() else {}


def _first_look(
    rows: Sequence[Measurement],
    registry: Registry,
    setup: DeviceSetup,
    folder: Path,
    say: Callable[[str], object],
) -> dict[Key, Measurement]:
    """NEW's row for each: errors, memory, the first run, and whether it runs at all."""
    say(f"a first look at {len(rows)} rows")
    asked = list(tasks(rows, registry, setup.device))
    with Store(folder, setup.environment) as store:
        events = run_sweep(asked, [setup], store)
        return {event.row.key: event.row for event in events if isinstance(event, Finished)}


def _advice(rows: Sequence[GateRow], minutes: float, recorded: _Recorded | None) -> str:
    """What would make the result certain."""
    if recorded is not None and not recorded:
        return "BASE has no rounds of an earlier gate: --base-python measures the old code, or make this run the base"
    if any(row.lost is None and not row.known for row in rows):
        return f"the time was over before each row had been visited: --minutes {2 * minutes:g}, or fewer rows"
    needed = minutes_needed(rows)
    if needed is not None:
        more = math.ceil(needed)
        return f"about {more} more minute{'s' * (more > 1)} would settle it (--minutes {minutes + more:g})"
    if recorded is not None:
        return "beside the anchor no time would settle it: --base-python measures the old code itself"
    return "more time would not settle it: processes of the same code lie too far apart"
