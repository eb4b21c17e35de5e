"""``attnbench table check``: how good the choices by a table are on shapes that it does not hold."""

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
        typer.Argument(exists=True, help="A table, or sweeps' folders, or their measurements.jsonl."),
    ],
    seed: Annotated[int, typer.Option("--seed", help="Of the random halves.")] = 0,
    format: FormatOption = "table",
) -> None:
    """Measure the regret of choices on shapes that were held out.

    Half of the specs choose for the other half, and the other way round, in several random splits; then auto with
    all of them is held against always taking one backend.  Regret is the time of the chosen plan over that of the
    best eligible one, minus one; caution is what it costs on top that FP8 plans of which too little is known are not
    eligible, though they would have been accurate enough.  Only steady times are held against one another.  Exits 1
    where the geometric mean of the regret exceeds 2 % or its worst 15 % in either direction, or a chosen plan exceeds
    its budget.
    """
    from ..choosing.regret import GEOMETRIC_MEAN, WORST, Asked, held_out, summarised
    from ..choosing.regret_fixed import against_fixed
    from ..choosing.similarity import class_of
    from ..kernels.registry import registry

    table = _table(tables)
    known = registry()
    made = list(held_out(table, known, seed=seed))
    if not made:
        raise MisuseError(f"{tables[0]} holds no class with two measured shapes, so none can choose for another")
    scores = [score for score in made if score.steady]
    if not scores:
        raise MisuseError(f"{tables[0]} holds no two steady times to hold against one another; measure again")
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
        print(f"{len(scores)} of {len(made)} choices are scored: the rest stand between times that scatter too much.")
        print(f"{'passed' if passed else 'failed'}: {GEOMETRIC_MEAN:.0%} in the geometric mean, {WORST:.0%} at worst")
    if not passed:
        raise typer.Exit(1)


def _table(paths: list[Path]) -> Table:
    """The table file, or one table of all that was measured.  Raises MisuseError on a mixture."""
    from ..harness.results.condense import joined
    from ..harness.results.records import read_measurements
    from ..harness.results.store import recorded
    from ..tables.table import Table

    files = [recorded(path) for path in paths]
    if all(file.suffix != ".json" for file in files):
        return joined({str(file): list(read_measurements(file)) for file in files})
    if len(files) > 1:
        raise MisuseError("give one table, or sweeps alone")
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
