"""``attnbench compare``: whether a second set of results is worse than a first, for a gate in CI."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import MisuseError
from ..text.printable import brief
from .output import print_json

if TYPE_CHECKING:
    from ..harness.compare.regression import Regression
    from ..harness.compare.terms import Gated, Terms

__all__ = ["PIPED_WIDTH", "CompareFormat", "compare", "make_terms", "print_comparison"]

PIPED_WIDTH = 120  # columns of what no terminal bounds
CompareFormat = Literal["table", "markdown", "json", "junit"]


def compare(
    base: Annotated[Path, typer.Argument(exists=True, help="A sweep's folder, or its measurements.jsonl: before.")],
    new: Annotated[Path, typer.Argument(exists=True, help="The same: after.")],
    fail_on: Annotated[str, typer.Option("--fail-on", help="The slow-down that must be found.")] = "3%",
    fail_on_host: Annotated[
        str, typer.Option("--fail-on-host", help="The same of what a GPU's host decides, which varies more.")
    ] = "100%",
    format: Annotated[CompareFormat, typer.Option("--format", help="How to print.")] = "table",
    cost: Annotated[
        str | None, typer.Option("--cost", help="Only these, with commas: kernel, prepared, backward, call, host.")
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
    every: Annotated[bool, typer.Option("--all", help="Also list the rows that are the same or uncertain.")] = False,
) -> None:
    """Say case by case what became faster, slower, less accurate, failed or went missing from BASE to NEW.

    Exits 0 where nothing regressed and a slow-down of the limit would have been found in every row, 1 where something
    regressed, 2 on misuse, 3 where the two cannot be compared, as of unlike machines, and 4 where it is not certain:
    nothing is known to have regressed, and some rows could not have shown a slow-down of the limit.
    """
    from ..harness.compare.export import regression_dict
    from ..harness.compare.pairs import rows_of
    from ..harness.compare.regression import compare_results

    terms = make_terms(fail_on, fail_on_host, cost, relative_to or [], allow_missing or [], thresholds)
    before, after = rows_of(base), rows_of(new)
    regression = compare_results(before, after, terms)
    print_comparison(regression, regression_dict(regression, before, after), format, every=every)
    if regression.exit_code:
        raise typer.Exit(regression.exit_code)


def print_comparison(regression: Regression, told: dict[str, Any], format: CompareFormat, *, every: bool) -> None:
    """Print a comparison, ``told`` being its JSON; what programs read has the conclusion beside it, for people."""
    from ..harness.compare.export import regression_junit
    from ..harness.compare.text import conclusion, regression_text

    if format in ("table", "markdown"):
        print(regression_text(regression, "markdown" if format == "markdown" else "text", _width(), every))
        return
    if format == "json":
        print_json(told)
    else:
        print(regression_junit(regression))
    print(conclusion(regression), file=sys.stderr)


def make_terms(
    fail_on: str,
    fail_on_host: str,
    cost: str | None,
    relative_to: list[str],
    allowed: list[str],
    thresholds: Path | None,
) -> Terms:
    """The terms that the options say.  Raises MisuseError where one says what cannot be."""
    from ..harness.compare.terms import GATED, Limits, Terms, percentage, read_thresholds
    from ..kernels.plan import Plan

    return Terms(
        limits=Limits(time=percentage(fail_on), host=percentage(fail_on_host)),
        thresholds=() if thresholds is None else read_thresholds(thresholds),
        costs=GATED if cost is None else _costs(cost),
        relative_to=tuple(Plan.parse(name) for name in relative_to),
        allowed=tuple(allowed),
    )


def _costs(text: str) -> tuple[Gated, ...]:
    from ..harness.compare.terms import GATED

    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in GATED]:
        raise MisuseError(f"--cost is one or more of {', '.join(GATED)}, not {brief(unknown[0])}")
    return tuple(each for each in GATED if each in names)


def _width() -> int:
    return shutil.get_terminal_size((PIPED_WIDTH, 24)).columns if sys.stdout.isatty() else PIPED_WIDTH
