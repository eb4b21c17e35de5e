"""The figures as Markdown, for a pull request or a README: the fastest plans, the plans over all cases, training."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from attnbench.problem.spec import Direction

from ...formatting import error, escape, heading
from .machines import Case
from .plan_summaries import PlanSummary
from .shapes import Grid, short

__all__ = ["summaries_markdown", "winners_markdown"]


def winners_markdown(grids: Sequence[Grid]) -> str:
    """A table for each grid; an FP8 plan is bold, with its speed relative to the fastest plan without FP8."""
    parts = []
    for grid in grids:
        rows = [
            [row, *("<br>".join(map(_cell, grid.cells.get((row, column), []))) for column in grid.columns)]
            for row in grid.rows
        ]
        table = tabulate(rows, ["shape", *grid.columns], tablefmt="github", disable_numparse=True)
        parts += [heading(grid.title, "markdown"), table]
    return "\n\n".join(parts)


def _cell(case: Case) -> str:
    plan = case.answer.plan
    if plan is None:
        return "none"
    name, speed = escape(short(plan), "markdown"), case.speed(plan)
    if not plan.fp8:
        return name
    return f"**{name}**{'' if speed is None else f' {speed:.2f}×'}"


def summaries_markdown(found: Sequence[tuple[Direction, Sequence[PlanSummary]]]) -> str:
    """A table for each direction."""
    parts = []
    for direction, summaries in found:
        rows = [
            {
                "plan": escape(short(each.plan), "markdown"),
                "wins": str(each.wins),
                "shapes": str(each.cases),
                "not accurate enough": str(each.inaccurate),
                "speed": "" if each.speed is None else f"{each.speed:.2f}×",
                "errors": f"{error(each.errors[0])} – {error(each.errors[1])}",
                "peak": "" if each.peak is None else f"{each.peak[0]:.0%}, at best {each.peak[1]:.0%}",
            }
            for each in summaries
        ]
        table = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)
        parts += [heading(direction.capitalize(), "markdown"), table]
    return "\n\n".join(parts)
