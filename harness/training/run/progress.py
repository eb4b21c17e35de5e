"""Progress of training: a bar with loss and throughput on a terminal, a line now and then in a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnbench.text.printable import printable

from ..rows import TrainingRun

__all__ = ["ProgressCallback", "show_training_progress"]

_LINES_A_RUN = 5


class ProgressCallback(Protocol):
    """Called after every step."""

    def __call__(self, row: TrainingRun) -> None:
        """``row`` is the run so far."""


@contextmanager
def show_training_progress(console: Console, runs: int, *, silent: bool = False) -> Iterator[ProgressCallback]:
    """Show ``runs`` runs on the console as they go; nothing if ``silent``, as on all ranks but one."""
    if silent:
        yield lambda row: None
    elif not console.is_terminal:
        yield lambda row: _line(row, console)
    else:
        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("building the model", total=None)
            seen: set[str] = set()

            def show(row: TrainingRun) -> None:
                seen.add(row.key)
                description = f"[{len(seen)}/{runs}] {_sentence(row)}"
                total = row.settings["steps"]
                progress.update(bar, total=float(total or 0), completed=len(row.loss), description=escape(description))

            yield show


def _line(row: TrainingRun, console: Console) -> None:
    steps = int(row.settings["steps"] or 1)
    if len(row.loss) % max(1, steps // _LINES_A_RUN) == 0 or len(row.loss) == steps:
        console.out(f"{_sentence(row)}, step {len(row.loss)} of {steps}", highlight=False)


def _sentence(row: TrainingRun) -> str:
    rate = row.units_per_step / row.step_ms[-1] * 1e3
    name = printable(str(row.settings["attention"]))
    return f"{name}, seed {row.seed}: loss {row.loss[-1]:.4f}, {rate:,.0f} {row.units}/s"
