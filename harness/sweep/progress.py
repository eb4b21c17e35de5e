"""Progress of a sweep: one live line on a terminal, a line for each case in a log, or a line for each row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from attnbench.text.printable import printable

from ..formatting import number
from ..results.condense import worst_errors
from ..results.records import Measurement, Status
from .run import Ended, Event, Finished, Started

__all__ = ["show_progress"]

_FAILURES: tuple[Status, ...] = ("oom", "timeout", "crashed", "error")
_WHOLE_SWEEP = 86_400.0  # seconds over which the speed is averaged: rows come in bursts at the end of a case


def show_progress(events: Iterable[Event], console: Console, *, verbose: bool = False) -> Iterator[Measurement]:
    """The rows of the events, shown on the console as they come.

    A terminal shows one line while the sweep runs; a log gets a line when a case begins and a line for each plan that
    fails.  ``verbose`` prints a line for every row, refusals included, in both.
    """
    if verbose:
        return _with_rows(events, console)
    return _with_bar(events, console) if console.is_terminal else _with_cases(events, console)


def _with_bar(events: Iterable[Event], console: Console) -> Iterator[Measurement]:
    columns = (
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
    )
    with Progress(*columns, console=console, transient=True, speed_estimate_period=_WHOLE_SWEEP) as progress:
        bar = progress.add_task("starting", total=None)
        for event in events:
            if isinstance(event, Started):
                case, phase = event.doing.case, event.doing.phase
                description = phase if case is None else f"{phase} {case.name}"
                progress.update(bar, total=event.total, description=escape(description))
            elif isinstance(event, Finished):
                progress.update(bar, total=event.total, completed=event.index)
                yield event.row
            else:
                _print(_summary(event), progress.console)


def _with_cases(events: Iterable[Event], console: Console) -> Iterator[Measurement]:
    begun: set[str | None] = set()
    for event in events:
        if isinstance(event, Started):
            name = None if event.doing.case is None else event.doing.case.name
            if name not in begun:
                begun.add(name)
                doing = event.doing.phase if name is None else name
                _print([f"[{event.index} of {event.total} plans measured] {doing}"], console)
        elif isinstance(event, Finished):
            if event.row.status in _FAILURES:
                _print([_line(event)], console)
            yield event.row
        else:
            _print(_summary(event), console)


def _with_rows(events: Iterable[Event], console: Console) -> Iterator[Measurement]:
    for event in events:
        if isinstance(event, Finished):
            _print([_line(event)], console)
            yield event.row
        elif isinstance(event, Ended):
            _print(_summary(event), console)


def _line(event: Finished) -> str:
    outcome = "there already" if event.resumed else _outcome(event.row)
    return f"[{event.index}/{event.total}] {event.row.case}: {event.row.plan}: {outcome}"


def _print(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.out(printable(line), highlight=False)


def _summary(ended: Ended) -> list[str]:
    """Where the time went; what remains beside the phases is the harness's own work."""
    if not ended.spent:
        return []
    rest = ended.seconds - sum(ended.spent.values())
    phases = ", ".join(f"{phase} {number(seconds)} s" for phase, seconds in ended.spent.items())
    measuring = ended.spent.get("timing", 0.0) + ended.spent.get("judging", 0.0)
    share = f" ({rest / measuring:.0%} of timing and judging together)" if measuring else ""
    return [*ended.notes, f"{number(ended.seconds)} s in all: {phases}, attnbench's own work {number(rest)} s{share}"]


def _outcome(row: Measurement) -> str:
    if not row.measured:
        return f"{row.status}: {row.reason}"
    errors = ", ".join(f"{family} {error:.2g}" for family, error in worst_errors(row).items())
    time = "emulated" if row.emulated else f"{number(row.median_ms())} ms a call"
    return f"{row.status}, {time}, error {errors}"
