"""``attnbench table check``: how good the choices by a table are on shapes that are not in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import MisuseError
from .output import FormatOption, print_json, print_table

if TYPE_CHECKING:
    from ..choosing.regret import Score, Summary
    from ..choosing.regret_fixed import Fixed
    from ..tables.table import Table

__all__ = ["check"]


def check(
    tables: Annotated[
        list[Path],
        typer.Argument(exists=True, help="A table, or folders of sweeps, or their measurements.jsonl."),
    ],
    seed: Annotated[int, typer.Option("--seed", help="Seed for drawing the random halves.")] = 0,
    format: FormatOption = "table",
) -> None:
    """Measure the regret of choices on held-out shapes.

    In several random splits, one half of the specs chooses plans for the other half, and vice versa; then auto with the
    whole table is compared with always using one backend.  Regret is the time of the chosen plan divided by that of the
    best eligible plan, minus one.  Caution is the additional cost of excluding FP8 plans that were accurate enough but
    about which too little is known.  Only steady times are compared.  Exits 1 if, in either direction, the geometric
    mean of the regret exceeds 2 % or the worst regret 15 %, or if a chosen plan exceeds its budget.
    """
    from ..choosing.regret import GEOMETRIC_MEAN, WORST, Asked, held_out, summarised
    from ..choosing.regret_fixed import against_fixed
    from ..choosing.similarity import class_of
    from ..kernels.registry import registry

    table = _table(tables)
    known = registry()
    made = list(held_out(table, known, seed=seed))
    if not made:
        raise MisuseError(f"{tables[0]} has no class with two measured shapes, so no shape can choose for another")
    scores = [score for score in made if score.steady]
    if not scores:
        raise MisuseError(f"{tables[0]} has no two steady times to compare; measure again")
    directions = summarised(scores)
    groups = {
        "direction": directions,
        "asked for": summarised(scores, lambda score: f"{score.spec.direction}, {score.asked}"),
        "basis": summarised(scores, lambda score: score.basis),
        "class": summarised(scores, lambda score: str(class_of(score.spec))),
    }
    fixed = {str(asked): against_fixed(table, known, asked) for asked in (Asked(False), Asked(True))}
    passed = all(each.passes for each in directions) and not any(score.violated for score in made)
    if format == "json":
        print_json(_data(groups, fixed, made, passed))
    else:
        for title, summaries in groups.items():
            print_table([_regret(each, title) for each in summaries], format)
            print()
        for asked, rows in fixed.items():
            print_table([_slow_down(row, asked) for row in rows], format)
            print()
        print(f"{len(scores)} of {len(made)} choices are scored; the times of the others scatter too much.")
        print(f"{'passed' if passed else 'failed'}: {GEOMETRIC_MEAN:.0%} in the geometric mean, {WORST:.0%} at worst")
    if not passed:
        raise typer.Exit(1)


def _table(paths: list[Path]) -> Table:
    """The table file, or one table built from all sweeps.  Raises MisuseError for a mixture of both."""
    from ..harness.results.condense import join_sweeps
    from ..harness.results.records import read_measurements
    from ..harness.results.store import measurements_file
    from ..tables.table import Table

    files = [measurements_file(path) for path in paths]
    if all(file.suffix != ".json" for file in files):
        return join_sweeps({str(file): list(read_measurements(file)) for file in files})
    if len(files) > 1:
        raise MisuseError("pass either one table or sweeps, not both")
    return Table.load(files[0])


def _regret(summary: Summary, title: str) -> dict[str, str]:
    return {
        title: summary.name,
        "specs": str(summary.specs),
        "choices": str(summary.choices),
        "geometric mean": f"{summary.geometric_mean:.1%}",
        "95th percentile": f"{summary.percentile_95:.1%}",
        "worst": f"{summary.worst:.1%}",
        "caution on top": f"{summary.caution:.1%}",
        "over budget": str(summary.violations),
    }


def _slow_down(row: Fixed, asked: str) -> dict[str, str]:
    return {
        f"always, asked for {asked}": row.backend,
        "direction": row.direction,
        "serves": f"{row.serves} of {row.specs}",
        "time over auto's": f"{1 + row.slow_down:.2f}",
        "worst": f"{1 + row.worst:.2f}",
    }


def _data(
    groups: dict[str, list[Summary]], fixed: dict[str, list[Fixed]], scores: Iterable[Score], passed: bool
) -> dict[str, Any]:
    return {
        "passed": passed,
        "regret": {title: [asdict(each) for each in summaries] for title, summaries in groups.items()},
        "fixed": {asked: [asdict(row) for row in rows] for asked, rows in fixed.items()},
        "choices": [
            {
                "spec": score.spec.to_dict(),
                "asked": {"fp8": score.asked.fp8, "max_error": score.asked.max_error},
                "plan": str(score.plan),
                "basis": score.basis,
                "best": str(score.best),
                "regret": score.regret,
                "caution": score.caution,
                "violated": score.violated,
                "steady": score.steady,
            }
            for score in scores
        ],
    }
