"""The figures, drawn by matplotlib: the fastest plan of each shape, speed against error, loss curves.

Colours of the light theme are replaced for another theme (``attnbench.harness.report.page.vector``).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from attnbench.choosing.regret import Asked
from attnbench.kernels.plan import Plan, backend_of

from ...formatting import escape
from ...training.judge.arms import Arm, compare_arms
from ...training.judge.curves import gap_curve, smooth, window_of
from ...training.judge.learning import TOLERANCE
from .colours import OTHERS, THEMES
from .machines import DEFAULT, Case
from .plan_summaries import Point
from .shapes import Grid, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["bytes_of", "loss_figure", "speed_error_figure", "winners_figure"]

_LIGHT = THEMES["light"]
_MOST_NAMED = 9
_LINES = 28  # of names that fit one below the other
_ERRORS, _SPEEDS = (1e-9, 10.0), (1 / 16, 64.0)  # values beyond are drawn at the edge
_LONGEST_LABEL = 60
_LARGEST = 1e6  # of a loss
_MOST_POINTS = 400  # of a curve: no screen shows more
_MOST_INSIDE = 6  # names of curves inside a panel
_NAME_LINE = 0.24  # inches, of two names


def bytes_of(figure: Figure, form: Literal["svg", "png"]) -> bytes:
    """The contents of the picture's file, the same for the same figure; text in an SVG stays text."""
    buffer = BytesIO()
    with _settings():
        if form == "svg":
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        else:
            figure.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
    return buffer.getvalue()


@contextmanager
def _settings() -> Iterator[None]:
    """Settings under which labels are never read as mathematics and the user's matplotlibrc has no effect."""
    import matplotlib as mpl

    chosen: dict[Any, Any] = {
        "text.parse_math": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "attnbench",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": _LIGHT["line"],
        "axes.labelcolor": _LIGHT["soft"],
        "xtick.color": _LIGHT["soft"],
        "ytick.color": _LIGHT["soft"],
        "text.color": _LIGHT["ink"],
        "grid.color": _LIGHT["line"],
        "grid.linewidth": 0.5,
        "figure.facecolor": _LIGHT["ground"],
        "axes.facecolor": _LIGHT["ground"],
    }
    with mpl.rc_context(), warnings.catch_warnings(), np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        mpl.rcdefaults()
        mpl.rcParams.update(chosen)
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a label may be in any script
        yield


def winners_figure(grids: Sequence[Grid], hues: Mapping[str, int]) -> Figure:
    """A cell for each shape and length: the plan chosen with FP8 plans within the default budget."""
    with _settings():
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle

        heights = [len(grid.rows) for grid in grids]
        widest = max(len(grid.columns) for grid in grids)
        figure = Figure(figsize=(2.2 + 1.5 * widest, 0.34 * sum(heights) + 0.7 * len(grids)), layout="constrained")
        panels = figure.subplots(len(grids), 1, squeeze=False, height_ratios=heights)
        for panel, grid in zip(panels[:, 0], grids, strict=True):
            for y, row in enumerate(grid.rows):
                for x, column in enumerate(grid.columns):
                    for place, case in enumerate(cases := grid.cells.get((row, column), [])):
                        plan, height = case.answer.plan, 0.94 / len(cases)
                        colour = _LIGHT["panel"] if plan is None else _LIGHT[f"t{_hue(plan, hues)}"]
                        bottom = y - 0.47 + place * height
                        panel.add_patch(Rectangle((x - 0.48, bottom), 0.96, height, color=colour, linewidth=0))
                        size = 7 if len(cases) == 1 else 7 / len(cases)
                        panel.text(x, bottom + height / 2, _cell(case), ha="center", va="center", size=size)
            panel.set_xlim(-0.5, widest - 0.5)
            panel.set_ylim(len(grid.rows) - 0.5, -0.5)
            panel.set_xticks(range(len(grid.columns)), grid.columns)
            panel.set_yticks(range(len(grid.rows)), grid.rows, size=8)
            panel.xaxis.tick_top()
            panel.tick_params(length=0)
            panel.spines[:].set_visible(False)
            panel.set_title(grid.title, loc="left", size=11, weight="bold")
        return figure


def _cell(case: Case) -> str:
    plan = case.answer.plan
    if plan is None:
        return "none"
    speed = case.speed(plan)
    gain = f" {speed:.2f}×" if plan.fp8 and speed is not None else ""
    return f"{short(plan).replace('>', '>' + chr(10))}{gain}"


def speed_error_figure(
    points: Sequence[Point], hues: Mapping[str, int], questions: Sequence[Asked] = (DEFAULT,)
) -> Figure:
    """A dot for each plan and case, a large mark for the median of each plan, a line for each question's budget.

    Groups have names for the page's script: ``dots-N`` and ``mark-N`` of the Nth plan in the order of the points,
    ``budget-N`` of the Nth question, ``name-N`` of some mark.
    """
    with _settings():
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, NullFormatter

        figure = Figure(figsize=(5.2, 4.8), layout="constrained")
        panel = figure.subplots()
        panel.set_xscale("log")
        panel.set_yscale("log", base=2)
        by_plan: dict[Plan, list[Point]] = {}
        for point in points:
            by_plan.setdefault(point.plan, []).append(point)
        panel.axhline(1, color=_LIGHT["soft"], linewidth=0.8, zorder=1)
        marks = []
        for number, (plan, own) in enumerate(by_plan.items()):
            x, y = (np.clip([each.error for each in own], *_ERRORS), np.clip([each.speed for each in own], *_SPEEDS))
            colour = _LIGHT[f"h{_hue(plan, hues)}"]
            dots = panel.scatter(x, y, s=7, color=colour, alpha=0.35, linewidths=0, zorder=2)
            dots.set_gid(f"dots-{number}")
            marks.append(_Mark(plan, float(np.median(x)), float(np.median(y)), colour))
            mark = panel.scatter(
                [marks[-1].error], [marks[-1].speed], s=46, color=colour, marker="D" if plan.fp8 else "o", zorder=4,
                edgecolors=_LIGHT["ground"], linewidths=1,
            )  # fmt: skip
            mark.set_gid(f"mark-{number}")
        for number, asked in enumerate(questions):
            bound = max(asked.budget(each.case.spec) for each in points)
            line = panel.axvline(bound, color=_LIGHT["bad"], linewidth=1.2, linestyle="--", zorder=3)
            line.set_gid(f"budget-{number}")
        panel.grid(True, which="major", zorder=0)
        panel.set_axisbelow(True)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_major_formatter(FuncFormatter(_times))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_xlabel("worst error (relative L2), log scale")
        panel.set_ylabel("speed beside the fastest plan without FP8")
        _name_marks(panel, marks)
        return figure


def _times(value: float, _: int) -> str:
    return f"{value:g}×" if value >= 1 else f"1/{1 / value:g}"


class _Mark(NamedTuple):
    plan: Plan
    error: float
    speed: float
    colour: str


def _name_marks(panel: Any, marks: Sequence[_Mark]) -> None:
    """The names of the fastest plan of each backend with and without FP8, moved apart where they are close."""
    best: dict[tuple[str, bool], _Mark] = {}
    for mark in sorted(marks, key=lambda mark: (-mark.speed, str(mark.plan))):
        best.setdefault((backend_of(mark.plan.forward), mark.plan.fp8), mark)
    low, high = np.log2(panel.get_ylim())
    middle = math.sqrt(math.prod(panel.get_xlim()))
    line = (high - low) / _LINES
    for fp8 in (False, True):
        above = math.inf
        for place, mark in enumerate([mark for (_, kind), mark in best.items() if kind == fp8][:_MOST_NAMED]):
            height = min(math.log2(mark.speed), above - line)
            if height < low:
                break
            above = height
            right = mark.error > middle  # where there is no room for a name behind it
            panel.annotate(
                short(mark.plan), (mark.error, 2**height), xytext=(-8 if right else 8, 0), textcoords="offset points",
                ha="right" if right else "left", va="center", size=8, color=mark.colour, zorder=5,
                gid=f"name-{2 * place + fp8}",
            )  # fmt: skip


def loss_figure(arms: Sequence[Arm]) -> Figure:
    """Above, every run's loss; below, each candidate's gap to its baseline.  The baseline's lines are dashed."""
    with _settings():
        from matplotlib.figure import Figure

        found = [each for each in compare_arms(arms) if any(run.loss for run in each[0].runs)]
        heights = [3, 2] if found else [3]
        figure = Figure(figsize=(7, 5.4 if found else 3.4), layout="constrained")
        panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        colours = {id(arm): _LIGHT[f"h{place % OTHERS}"] for place, arm in enumerate(arms)}
        for arm in arms:
            label: str | None = escape(arm.label, "text")[:_LONGEST_LABEL]
            for run in arm.runs:
                if finite := [value for value in run.loss if np.isfinite(value)]:
                    line = "--" if arm.baseline else "-"
                    _curve(panels[0], smooth(finite, window_of(len(finite))), colours[id(arm)], line, label)
                    label = None
        panels[0].set_ylabel("loss (nats)")
        _legend(figure, panels[0])
        for arm, baseline, _ in found:
            for gap in _gaps(arm, baseline):
                _curve(panels[1], 100 * gap, colours[id(arm)], "-", None)
        if found:
            for side in (-1, 1):
                panels[1].axhline(100 * side * TOLERANCE, color=_LIGHT["soft"], linestyle=":", linewidth=1)
            panels[1].set_ylabel("gap to baseline (%)")
        for panel in panels:
            panel.grid(True)
            panel.set_axisbelow(True)
        panels[-1].set_xlabel("step")
        return figure


def _legend(figure: Figure, panel: Any) -> None:
    """Name the panel's curves: few inside the panel, many below a figure that grows for them.

    The figure's layout is ``constrained``.
    """
    from matplotlib.ticker import MaxNLocator

    panel.xaxis.set_major_locator(MaxNLocator(integer=True))  # steps
    curves, names = panel.get_legend_handles_labels()
    if 0 < len(names) <= _MOST_INSIDE:
        panel.legend(frameon=False)
    elif names:
        figure.set_figheight(figure.get_figheight() + _NAME_LINE * math.ceil(len(names) / 2))
        figure.legend(curves, names, loc="outside lower center", ncols=2, frameon=False, fontsize="small")


def _curve(panel: Any, values: Any, colour: str, line: str, label: str | None) -> None:
    values = np.clip(values[np.isfinite(values)], -_LARGEST, _LARGEST)
    every = max(1, -(-len(values) // _MOST_POINTS))
    panel.plot(range(0, len(values), every), values[::every], color=colour, linestyle=line, linewidth=1.2, label=label)


def _gaps(arm: Arm, baseline: Arm) -> Iterator[Any]:
    rivals = {run.seed: run.loss for run in baseline.runs}
    for run in arm.runs:
        steps = min(len(run.loss), len(rivals.get(run.seed, ())))
        if steps:
            yield gap_curve(run.loss[:steps], rivals[run.seed][:steps], window_of(steps))


def _hue(plan: Plan, hues: Mapping[str, int]) -> int:
    return hues.get(backend_of(plan.forward), OTHERS)
