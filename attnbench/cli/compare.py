"""``attnbench compare``: whether a second set of results is worse than a first, for a gate in CI."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from ..errors import MisuseError
from ..printable import brief, printable
from .output import print_json

if TYPE_CHECKING:
    from ..harness.regression_terms import Terms
    from ..harness.timing import Cost

__all__ = ["compare"]

_PIPED_WIDTH = 120
CompareFormat = Literal["table", "markdown", "json", "junit"]


def compare(
    base: Annotated[Path, typer.Argument(exists=True, help="A sweep's folder, or its measurements.jsonl: before.")],
    new: Annotated[Path, typer.Argument(exists=True, help="The same: after.")],
    fail_on: Annotated[str, typer.Option("--fail-on", help="The slow-down that must be found.")] = "3%",
    format: Annotated[CompareFormat, typer.Option("--format", help="How to print.")] = "table",
    cost: Annotated[
        str | None, typer.Option("--cost", help="Only these, with commas: kernel, prepared, backward, call.")
    ] = None,
    relative_to: Annotated[
        list[str] | None,
        typer.Option(
            help="Compare the ratios of times to this plan's on each side, for unlike machines; of several, the first "
            "that a case has."
        ),
    ] = None,
    allow_missing: Annotated[
        list[str] | None,
        typer.Option(help='A case, a plan or "CASE: PLAN" that one side may lack, with * and ?; again for another.'),
    ] = None,
    thresholds: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="YAML: limits of their own for cases and plans."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Also list the rows that are the same or ambiguous.")] = False,
    rerun: Annotated[
        bool, typer.Option("--rerun", help="Measure again, both sides in turns, what is ambiguous or slower.")
    ] = False,
    base_python: Annotated[
        Path | None, typer.Option(help="The Python of the environment where BASE is installed, for --rerun.")
    ] = None,
    new_python: Annotated[
        Path | None, typer.Option(help="The same for NEW, for --rerun [default: the one that runs this]")
    ] = None,
    rerun_seconds: Annotated[
        float, typer.Option(min=1, help="When --rerun begins no more, and ends what is under way.")
    ] = 600.0,
) -> None:
    """Say case by case what became faster, slower, less accurate, failed or went missing from BASE to NEW.

    Exits 0 where nothing regressed, 1 where something did, 2 on misuse, and 3 where the two cannot be compared,
    because their machines are unlike.
    """
    from ..harness.regression import compare_results
    from ..harness.regression_export import regression_dict, regression_junit
    from ..harness.regression_pairs import rows_of
    from ..harness.regression_text import conclusion, regression_text
    from ..table_entry import LONGEST_MS

    if not rerun_seconds <= LONGEST_MS / 1e3:
        raise MisuseError(f"--rerun-seconds is at most {LONGEST_MS / 1e3:g}, not {rerun_seconds}")
    terms = _terms(fail_on, cost, relative_to or [], allow_missing or [], thresholds)
    if not rerun and (base_python or new_python):
        raise MisuseError("--base-python and --new-python are for --rerun")
    if rerun and base_python is None:
        raise MisuseError("--rerun needs --base-python, the Python of the environment where BASE is installed")
    if rerun and terms.relative_to:
        raise MisuseError("--rerun measures both sides on this machine, where no time has to be relative to another")
    before, after = rows_of(base), rows_of(new)
    regression = compare_results(before, after, terms)
    if rerun and base_python is not None:
        from ..harness.rerun import Rerun

        pythons = base_python, new_python or Path(sys.executable)
        with Rerun(pythons, time.monotonic() + rerun_seconds, terms, _say) as again:
            rows = again.measured(regression, before)
        regression = compare_results(before, after, terms, rows)
    if format in ("table", "markdown"):
        print(regression_text(regression, "markdown" if format == "markdown" else "text", _width(), every))
    else:
        if format == "json":
            print_json(regression_dict(regression, before, after))
        else:
            print(regression_junit(regression))
        print(conclusion(regression), file=sys.stderr)
    if regression.exit_code:
        raise typer.Exit(regression.exit_code)


def _terms(
    fail_on: str, cost: str | None, relative_to: list[str], allowed: list[str], thresholds: Path | None
) -> Terms:
    """Raises MisuseError where an option says what cannot be."""
    from ..harness.regression_terms import Limits, Terms, percentage, read_thresholds
    from ..harness.timing import COSTS
    from ..plan import Plan

    return Terms(
        limits=Limits(time=percentage(fail_on)),
        thresholds=() if thresholds is None else read_thresholds(thresholds),
        costs=COSTS if cost is None else _costs(cost),
        relative_to=tuple(Plan.parse(name) for name in relative_to),
        allowed=tuple(allowed),
    )


def _costs(text: str) -> tuple[Cost, ...]:
    from ..harness.timing import COSTS, Cost

    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in get_args(Cost)]:
        raise MisuseError(f"--cost is one or more of {', '.join(COSTS)}, not {brief(unknown[0])}")
    return tuple(each for each in COSTS if each in names)


def _width() -> int:
    return shutil.get_terminal_size((_PIPED_WIDTH, 24)).columns if sys.stdout.isatty() else _PIPED_WIDTH


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr)
