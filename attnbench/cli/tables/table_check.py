"""``attnbench table check``: how good the choices by a table are on shapes that it does not know."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import MisuseError
from ..output import DeviceOption, Format, FormatOption, fresh_folder, print_json, print_table

if TYPE_CHECKING:
    from ...choosing.fresh_regret import FreshScore, FreshSummary
    from ...choosing.regret import Score, Summary
    from ...choosing.regret_fixed import Fixed
    from ...tables.table import Table
    from ...tables.user_table import Known

__all__ = ["check"]


def check(
    tables: Annotated[
        list[Path] | None,
        typer.Argument(
            exists=True,
            help="A table, or folders of sweeps, or their measurements.jsonl; "
            "with --fresh and --on by default all that auto reads on the device of the measurements.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed for drawing the random halves, or the fresh shapes.")] = 0,
    fresh: Annotated[
        int | None, typer.Option(min=1, help="Draw so many shapes of published models, measure and score them.")
    ] = None,
    on: Annotated[
        Path | None, typer.Option(exists=True, help="Score the choices on the shapes of these results: a folder.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for what --fresh measures [default: a new one, printed at the end]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the interrupted --fresh in --out.")] = False,
    backends: Annotated[
        str | None, typer.Option(help="Measure only these with --fresh, as in `attnbench sweep`.")
    ] = None,
    device: DeviceOption = "auto",
    format: FormatOption = "table",
) -> None:
    """Measure the regret of choices on shapes that the table does not know.

    With --fresh N, N attention layers of published models are drawn with batch, length and direction; a fifth of the
    causal ones have packed sequences.  The plans race on them, and what the tables choose without knowing these shapes
    is compared with the fastest accurate plan.  --on FOLDER repeats the comparison on the results of an earlier
    --fresh, or of any sweep, without measuring.
    A named TABLE of another GPU of the same generation is scaled to the GPU of the results, as auto does.  Only choices
    whose times scatter by at most 20 % (half the interquartile range over the median) are scored.
    Exits 1 if the regret exceeds 2 % in the geometric mean (3 % with FP8), 8 % at the 90th percentile or 20 % at worst,
    if a rule decides more than 2 % of the choices, or if a chosen plan exceeds its budget.

    Without both, the table is held against itself.  In several random splits, one half of the specs chooses plans for
    the other half, and vice versa; then auto with the whole table is compared with always using one backend.  Regret is
    the time of the chosen plan divided by that of the best eligible plan, minus one.  Caution is the additional cost of
    excluding FP8 plans that were accurate enough but about which too little is known.  Only steady times are compared.
    Exits 1 if, in either direction, the geometric mean of the regret exceeds 2 % or its 95th percentile 15 %, or if
    more than 1 % of the choices exceed their budget.
    """
    if fresh is not None or on is not None:
        _check_fresh(tables or [], seed, fresh, on, out, resume, backends, device, format)
        return
    if not tables:
        raise MisuseError("name a table or results, or ask for fresh shapes with --fresh N")
    from ...choosing.regret import GEOMETRIC_MEAN, PERCENTILE_95, VIOLATIONS, Asked, held_out, summarised
    from ...choosing.regret_fixed import against_fixed
    from ...choosing.similarity import class_of
    from ...kernels.registry import registry

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
    violated = sum(score.violated for score in made)
    passed = all(each.passes for each in directions) and violated <= VIOLATIONS * len(made)
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
        print(f"{violated} of {len(made)} choices exceed their budget.")
        bounds = f"{GEOMETRIC_MEAN:.0%} in the geometric mean, {PERCENTILE_95:.0%} at the 95th percentile"
        print(
            f"{'passed' if passed else 'failed'}: at most {bounds}, {VIOLATIONS:.0%} of the choices beyond their budget"
        )
    if not passed:
        raise typer.Exit(1)


def _check_fresh(
    tables: list[Path],
    seed: int,
    fresh: int | None,
    on: Path | None,
    out: Path | None,
    resume: bool,
    backends: str | None,
    device: str,
    format: Format,
) -> None:
    from ...choosing.fresh_regret import STEADY, fresh_scores, summary_of
    from ...kernels.devices import find
    from ...kernels.registry import registry
    from ...tables.environment import Environment
    from ...tables.scaling import scaled
    from ...tables.user_table import Known, known_tables, tables_for

    if fresh is not None and on is not None:
        raise MisuseError("--fresh measures and --on reads what was measured; give one of them")
    if fresh is None and (out is not None or resume or backends is not None):
        raise MisuseError("--out, --resume and --backends belong to --fresh")
    if resume and out is None:
        raise MisuseError("--resume needs --out, the folder of the interrupted --fresh")
    truth = _table([on]) if on is not None else None
    if tables:
        given = _table(tables)
        moved = scaled(given, Environment.detect(find(device), registry()) if truth is None else truth.environment)
        known_by = Known.of(moved or given)
    else:
        known_by = known_tables(find(device)) if truth is None else tables_for(truth.environment)
    if truth is None:
        truth = _measured(fresh or 0, seed, known_by, out, resume, backends, device)
    scores = list(fresh_scores(truth, known_by, registry()))
    if not scores:
        raise MisuseError("no plan served within the budget at any of these shapes, so there is nothing to compare")
    summaries = summary_of(scores)
    if not summaries:
        raise MisuseError(f"every time scatters by more than {STEADY:.0%}; measure again while the machine is idle")
    passed = all(each.passes for each in summaries)
    if format == "json":
        print_json(
            {
                "passed": passed,
                "fresh": [{**asdict(each), "asked": str(each.asked)} for each in summaries],
                "choices": [_choice(each) for each in scores],
            }
        )
    else:
        print_table([_fresh(each) for each in summaries], format)
        print()
        if lost := [_lost(each) for each in _worst_first(scores)]:
            print_table(lost, format)
        if unsteady := sum(not each.steady for each in scores):
            print(f"{unsteady} of {len(scores)} choices are not scored; their times scatter by more than {STEADY:.0%}.")
        print(f"{'passed' if passed else 'failed'}: {len({each.spec for each in scores})} shapes")
    if not passed:
        raise typer.Exit(1)


def _measured(
    count: int, seed: int, known_by: Known, out: Path | None, resume: bool, backends: str | None, device: str
) -> Table:
    """Race the plans on the drawn shapes, what the tables choose measured in full; the user's table stays as it is."""
    from rich.console import Console

    from ...harness.cases.models import drawn_cases
    from ...harness.measure.setup import DeviceSetup
    from ...harness.measure.timing import Timer
    from ...harness.results.condense import table_of
    from ...harness.results.store import TABLE, Store
    from ...harness.sweep.contending import contending
    from ...harness.sweep.progress import show_progress
    from ...harness.sweep.run import run_sweep, tasks_of
    from ...kernels.devices import describe, find
    from ...kernels.registry import registry
    from ...tables.environment import Environment

    place, known = find(device), registry()
    names = [name.strip() for name in (backends or "").split(",") if name.strip()]
    drawn = tasks_of(drawn_cases(count, seed, place.type, packed=True), known, place, "fp8", names)
    tasks = contending(drawn, known_by, known, describe(place), fresh=True)
    setup = DeviceSetup(place, Environment.detect(place, known), Timer.for_device(place), race=True)
    with Store(fresh_folder("fresh") if out is None else out, setup.environment, resume=resume) as store:
        try:
            for _ in show_progress(run_sweep(tasks, [setup], store), Console(stderr=True), verbose=False):
                pass
        except KeyboardInterrupt:
            print(f"stopped; continue with --resume --out {shlex.quote(str(store.folder))}", file=sys.stderr)
            raise
        table = table_of(setup.environment, store.rows)
        table.save(store.folder / TABLE)
        print(f"the measurements are in {store.folder}", file=sys.stderr)
    return table


def _table(paths: list[Path]) -> Table:
    """The table file, or one table built from all sweeps.  Raises MisuseError for a mixture of both."""
    from ...harness.results.condense import join_sweeps
    from ...harness.results.records import read_measurements
    from ...harness.results.store import measurements_file
    from ...tables.table import Table

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


def _fresh(summary: FreshSummary) -> dict[str, str]:
    return {
        "asked for": str(summary.asked),
        "choices": str(summary.choices),
        "geometric mean": f"{summary.geometric_mean:.1%}",
        "90th percentile": f"{summary.percentile_90:.1%}",
        "worst": f"{summary.worst:.1%}",
        "by a rule": str(summary.rules),
        "over budget": str(summary.violations),
    }


def _worst_first(scores: Iterable[FreshScore]) -> list[FreshScore]:
    """The choices that cost more than 10 %, by steady times, or exceed their budget."""
    lost = (each for each in scores if (each.steady and each.regret > 0.1) or each.violated)
    return sorted(lost, key=lambda each: -each.regret)


def _lost(score: FreshScore) -> dict[str, str]:
    return {
        "shape": str(score.spec),
        "asked for": str(score.asked),
        "chosen": str(score.plan),
        "basis": score.basis,
        "best": str(score.best),
        "regret": f"{score.regret:.1%}",
        "error": "" if score.error is None else f"{score.error:.2g}" + (" over budget" if score.violated else ""),
    }


def _choice(score: FreshScore) -> dict[str, Any]:
    return {
        "spec": score.spec.to_dict(),
        "asked": str(score.asked),
        "plan": str(score.plan),
        "basis": score.basis,
        "best": str(score.best),
        "regret": score.regret,
        "steady": score.steady,
        "error": score.error,
        "budget": score.budget,
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
