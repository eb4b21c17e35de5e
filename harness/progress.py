"""How far a sweep is: a bar on a terminal, one line a row in a log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .condense import worst_errors
from .records import Measurement
from .sweep import Ended, Event, Finished, Started

__all__ = ["followed"]


def followed(events: Iterable[Event], console: Console) -> Iterator[Measurement]:
    """The rows of the events, shown on the console as they come."""
    return _with_bar(events, console) if console.is_terminal else _with_lines(events, console)


def _with_bar(events: Iterable[Event], console: Console) -> Iterator[Measurement]:
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=None)
        for event in events:
            if isinstance(event, Started):
                case, phase = event.doing.case, event.doing.phase
                said = phase if case is None else f"{case.name}: {phase}"
                progress.update(bar, total=event.total, description=escape(said))
            elif isinstance(event, Finished):
                progress.update(bar, total=event.total, completed=event.index)
                yield event.row
            else:
                _say(_summary(event), progress.console)


def _with_lines(events: Iterable[Event], console: Console) -> Iterator[Measurement]:
    for event in events:
        if isinstance(event, Finished):
            said = "there already" if event.resumed else _outcome(event.row)
            _say([f"[{event.index}/{event.total}] {event.row.case}: {event.row.plan}: {said}"], console)
            yield event.row
        elif isinstance(event, Ended):
            _say(_summary(event), console)


def _say(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.out("".join(char if char.isprintable() else " " for char in line), highlight=False)


def _summary(ended: Ended) -> list[str]:
    """Where the time went; what is neither measured nor made ready for it is the harness's own."""
    if not ended.spent:
        return []
    rest = ended.seconds - sum(ended.spent.values())
    phases = ", ".join(f"{seconds:.1f} s {phase}" for phase, seconds in ended.spent.items())
    measuring = ended.spent.get("timing", 0.0) + ended.spent.get("judging", 0.0)
    share = f", {rest / measuring:.0%} of timing and judging" if measuring else ""
    return [*ended.notes, f"{ended.seconds:.1f} s: {phases}, {rest:.1f} s everything else{share}"]


def _outcome(row: Measurement) -> str:
    if not row.measured:
        return f"{row.status}: {row.reason}"
    errors = ", ".join(f"{family} {error:.2g}" for family, error in worst_errors(row).items())
    return f"{row.status}, {np.median(row.time_ms['call']):.3g} ms a call, error {errors}"
