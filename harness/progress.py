"""How far a sweep is: a bar on a terminal, one line a row in a log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .condense import worst_errors
from .records import Measurement
from .sweep import Finished, Started

__all__ = ["followed"]


def followed(events: Iterable[Started | Finished], console: Console) -> Iterator[Measurement]:
    """The rows of the events, shown on the console as they come."""
    return _with_bar(events, console) if console.is_terminal else _with_lines(events, console)


def _with_bar(events: Iterable[Started | Finished], console: Console) -> Iterator[Measurement]:
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=None)
        for event in events:
            if isinstance(event, Started):
                doing = f"{event.task.case.name}: {event.task.plan}"
                progress.update(bar, total=event.total, description=escape(doing))
            else:
                progress.update(bar, total=event.total, completed=event.index)
                yield event.row


def _with_lines(events: Iterable[Started | Finished], console: Console) -> Iterator[Measurement]:
    for event in events:
        if isinstance(event, Finished):
            said = "there already" if event.resumed else _outcome(event.row)
            line = f"[{event.index}/{event.total}] {event.row.case}: {event.row.plan}: {said}"
            console.out("".join(char if char.isprintable() else " " for char in line), highlight=False)
            yield event.row


def _outcome(row: Measurement) -> str:
    if not row.measured:
        return f"{row.status}: {row.reason}"
    errors = ", ".join(f"{family} {error:.2g}" for family, error in worst_errors(row).items())
    return f"{row.status}, {np.median(row.time_ms['call']):.3g} ms a call, error {errors}"
