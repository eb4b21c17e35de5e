"""``attnbench compare``: find regressions between two sets of results, for a gate in CI."""

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

__all__ = [
    "PIPED_WIDTH",
    "CompareFormat",
    "CostOption",
    "FailOnHostOption",
    "FailOnOption",
    "ThresholdsOption",
    "compare",
    "make_terms",
    "print_comparison",
]

PIPED_WIDTH = 120  # columns where the output is not a terminal
CompareFormat = Literal["table", "markdown", "json", "junit"]
FailOnOption = Annotated[str, typer.Option("--fail-on", help="Smallest slow-down that counts as a regression.")]
FailOnHostOption = Annotated[
    str, typer.Option("--fail-on-host", help="The same for times that the host of a GPU determines; these vary more.")
]
CostOption = Annotated[
    str | None,
    typer.Option(
        "--cost", help="Compare only these costs, separated by commas: kernel, prepared, backward, call, host."
    ),
]
ThresholdsOption = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="YAML file with separate limits for cases and plans."),
]


def compare(
    base: Annotated[
        Path, typer.Argument(exists=True, help="The old results: a sweep's folder or its measurements.jsonl.")
    ],
    new: Annotated[Path, typer.Argument(exists=True, help="The new results, likewise.")],
    fail_on: FailOnOption = "3%",
    fail_on_host: FailOnHostOption = "100%",
    format: Annotated[CompareFormat, typer.Option("--format", help="Output format.")] = "table",
    cost: CostOption = None,
    relative_to: Annotated[
        list[str] | None,
        typer.Option(
            help="Divide all times of each side by this plan's time and compare the ratios, for different machines. "
            "May be repeated: the first plan that a case has is used."
        ),
    ] = None,
    allow_missing: Annotated[
        list[str] | None,
        typer.Option(
            help='A case, a plan or "CASE: PLAN" that may be missing on one side; * and ? match; may be repeated.'
        ),
    ] = None,
    thresholds: ThresholdsOption = None,
    every: Annotated[bool, typer.Option("--all", help="Also list rows that are the same or uncertain.")] = False,
) -> None:
    """List, case by case, what became faster, slower, larger, less accurate, failed or went missing from BASE to NEW.

    Exit codes: 0 nothing regressed, and every row would have shown a slow-down of the limit; 1 something regressed; 2
    misuse; 3 the two cannot be compared, for example because the machines differ; 4 not certain: no regression was
    found, but some rows are too noisy to show a slow-down of the limit.
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


def print_comparison(regression: Regression, comparison: dict[str, Any], format: CompareFormat, *, every: bool) -> None:
    """Print a comparison; ``comparison`` is its JSON.  With JSON and JUnit the conclusion goes to standard error."""
    from ..harness.compare.export import regression_junit
    from ..harness.compare.text import conclusion, regression_text

    if format in ("table", "markdown"):
        print(regression_text(regression, "markdown" if format == "markdown" else "text", _width(), every))
        return
    if format == "json":
        print_json(comparison)
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
    """The terms of a comparison from the options.  Raises MisuseError for an invalid one."""
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
        raise MisuseError(f"--cost {brief(unknown[0])}: expected one or more of {', '.join(GATED)}")
    return tuple(each for each in GATED if each in names)


def _width() -> int:
    return shutil.get_terminal_size((PIPED_WIDTH, 24)).columns if sys.stdout.isatty() else PIPED_WIDTH
