"""The page: one file that loads nothing from the network and runs no script but its own."""

from __future__ import annotations

import hashlib
import math
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from importlib import resources
from typing import Any

from attnbench import __version__
from attnbench.choosing.budget import default_budget
from attnbench.choosing.regret import QUESTIONS, held_out, summarised
from attnbench.errors import MisuseError
from attnbench.kernels.plan import Plan, backend_of
from attnbench.kernels.registry import Registry
from attnbench.tables.environment import Environment

from ...formatting import error, escape, number, size
from ...measure.timing import Cost
from ...results.records import Measurement
from ...training.judge.arms import Arm, arms_of, compare_arms, kinds_of, title_of
from ...training.judge.learning import RULES
from ...training.rows import TrainingRun
from ..alternatives import alternatives
from ..flags import FLAGS, MEANINGS, highest_clock
from .case_view import CaseView, asked_text, view
from .colours import OTHERS, THEMES, hues_of, style_variables
from .commands import train_command
from .figures import bytes_of, loss_figure, speed_error_figure
from .headlines import fixed_of, headlines
from .machines import DEFAULT, DIRECTIONS, Machine, machines_of
from .plan_summaries import plan_summaries, points_of
from .results import Results
from .shapes import grids_of, short
from .vector import Sheet, inline

__all__ = ["page"]

_MOST_CASES = 1_000
_MOST_HELD_OUT = 250  # specs; the choices to score grow faster than these


def page(results: Results, known: Registry) -> str:
    """The whole page as HTML.  Raises MisuseError if the results have more cases than a page can show."""
    from jinja2 import Environment as Templates
    from jinja2 import StrictUndefined
    from markupsafe import Markup

    machines = machines_of(results.sweeps, known)
    total = sum(len(machine.cases) for machine in machines)
    if total > _MOST_CASES:
        raise MisuseError(f"a page is on at most {_MOST_CASES} shapes, and these results hold {total}; name fewer")
    hues = hues_of([plan for machine in machines for plan in machine.winners()])
    sheet = Sheet()
    shown_machines = [_machine(machine, place, hues, sheet, known) for place, machine in enumerate(machines)]
    training = _training(results, sheet)
    script = _part("page.js")
    light, dark = (f"color-scheme:{theme};{style_variables(theme)}" for theme in THEMES)
    style = "\n".join(
        [
            f":root{{{light}}}",
            f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}",
            f":root[data-theme=dark]{{{dark}}}",
            _part("page.css"),
            sheet.text,
            f"@media print{{:root:root:root{{{light}}}}}",
        ]
    )
    templates = Templates(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    templates.finalize = _printable
    templates.filters |= {"number": number, "error": error, "size": size, "hue": partial(_hue, hues)}
    return templates.from_string(_part("page.html")).render(
        machines=shown_machines,
        training=training,
        title=_title(machines, results),
        policy=(
            f"default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
            f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
        ),
        style=Markup(style),
        script=Markup(script),
        questions=[(place, asked_text(asked)) for place, asked in enumerate(QUESTIONS)],
        default=QUESTIONS.index(DEFAULT),
        total=total,
        dims=sorted({case.spec.head_dim for machine in machines for case in machine.cases}),
        masks=sorted({case.spec.mask.kind for machine in machines for case in machine.cases}),
        version=__version__,
        made=f"{datetime.now(timezone.utc):%Y-%m-%d}",
        short=short,
        meanings=[(flag, MEANINGS[flag]) for flag in FLAGS],
        rules=RULES,
        median=_median,
        is_finite=math.isfinite,
    )


def _printable(value: Any) -> Any:
    """Makes every text of the template printable before it is escaped."""
    if value is None:
        return ""
    return escape(value, "text") if isinstance(value, str) and not hasattr(value, "__html__") else value


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _hue(hues: Mapping[str, int], plan: Plan) -> int:
    return hues.get(backend_of(plan.forward), OTHERS)


def _median(row: Measurement, cost: Cost) -> float | None:
    return row.median_ms(cost) if cost in row.time_ms else None


def _title(machines: Sequence[Machine], results: Results) -> str:
    names = [machine.name for machine in machines] or [run.environment.device_name for run in results.runs]
    return f"{'Attention' if machines else 'Training'} on {' and '.join(dict.fromkeys(names))}"


def _machine(machine: Machine, place: int, hues: Mapping[str, int], sheet: Sheet, known: Registry) -> dict[str, Any]:
    rows = [row for rows in machine.sweeps.values() for row in rows]
    highest = highest_clock(rows)
    beside = alternatives(row for rows in machine.sweeps.values() for row in rows)
    views: list[CaseView] = [view(case, highest, beside) for case in machine.cases]
    fixed = fixed_of(machine, known)
    used = {backend_of(plan.forward) for plan in machine.winners()}
    scores = [each for each in held_out(machine.table, known) if each.steady] if len(views) <= _MOST_HELD_OUT else []
    environments = list(machine.environments.items())
    first = environments[0][0]
    return {
        "number": place,
        "name": machine.name,
        "cases": views,
        "measured": sum(row.measured for row in rows),
        "rows": len(rows),
        "from": min(row.started for row in rows).date(),
        "until": max(row.started for row in rows).date(),
        "headlines": headlines(machine, fixed),
        "grids": grids_of(machine),
        "hues": [
            (hue, [each for each in hues if hues[each] == hue and each in used])
            for hue in sorted({hues[each] for each in used})
        ],
        "scatters": _scatters(machine, place, hues, sheet),
        "summaries": [
            (direction, found) for direction in DIRECTIONS if (found := plan_summaries(machine.of(direction)))
        ],
        "fixed": [(direction, [row for row in fixed if row.direction == direction]) for direction in DIRECTIONS],
        "held_out": summarised(scores) if scores else [],
        "environment": first,
        "sweeps": [(name, len(rows), _commits(rows)) for name, rows in machine.sweeps.items()],
        "differences": [
            (names, [*hard, *soft])
            for other, names in environments[1:]
            for hard, soft in [first.differences(other)]
            if hard or soft
        ],
    }


def _commits(rows: Sequence[Measurement]) -> str:
    return ", ".join(dict.fromkeys(row.environment.commit or "a release" for row in rows))


def _scatters(machine: Machine, place: int, hues: Mapping[str, int], sheet: Sheet) -> list[dict[str, Any]]:
    found = []
    for direction in DIRECTIONS:
        points = points_of(machine.of(direction))
        if not points:
            continue
        figure = speed_error_figure(points, hues, QUESTIONS)
        plans = list(dict.fromkeys(point.plan for point in points))
        cases = {
            f"dots-{place}": [point.case.number for point in points if point.plan == plan]
            for place, plan in enumerate(plans)
        }
        label = f"Speed against error of {len(plans)} plans, {direction}. The table of plans below holds the numbers."
        key = f"m{place}-{direction}"
        svg = inline(bytes_of(figure, "svg"), key, label, sheet, cases)
        budget = default_budget(points[0].case.spec, True)
        found.append({"direction": direction, "svg": svg, "plans": plans, "budget": budget})
    return found


def _training(results: Results, sheet: Sheet) -> dict[str, Any] | None:
    if not results.runs:
        return None
    return {
        "kinds": [_kind(runs, place, sheet) for place, runs in enumerate(kinds_of(results.runs))],
        "environments": _environments(run.environment for run in results.runs),
    }


def _environments(found: Iterable[Environment]) -> list[tuple[Environment, list[list[str]]]]:
    """The first environment of each device, and how each other one of that device differs from it."""
    groups: dict[str, list[Environment]] = {}
    for each in dict.fromkeys(found):
        groups.setdefault(each.device_name, []).append(each)
    apart = (
        (first, [[*hard, *soft] for hard, soft in map(first.differences, others)]) for first, *others in groups.values()
    )
    return [(first, [each for each in sentences if each]) for first, sentences in apart]


def _kind(runs: Sequence[TrainingRun], place: int, sheet: Sheet) -> dict[str, Any]:
    """Runs that are compared with one another."""
    arms = arms_of(runs)
    found = compare_arms(arms)
    rivals: dict[int, tuple[Arm, Any]] = {id(arm): (baseline, learning) for arm, baseline, learning in found}
    title = escape(title_of(arms), "text")
    label = (
        f"{title}: loss by step of every run; below, each candidate's gap to its baseline. The table holds the ends."
    )
    rows = []
    for arm in arms:
        baseline, learning = rivals.get(id(arm), (None, None))
        before = baseline.units_per_second if baseline is not None else None
        gain = arm.units_per_second / before if arm.units_per_second and before else None
        rows.append(
            {
                "arm": arm,
                "baseline": baseline,
                "learning": learning,
                "gain": gain,
                "command": train_command(arm, baseline),
            }
        )
    drawn = any(run.loss for run in runs)
    figure = inline(bytes_of(loss_figure(arms), "svg"), f"loss{place}", label, sheet, {}) if drawn else None
    return {"title": title, "rows": rows, "svg": figure}
