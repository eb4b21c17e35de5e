"""Loss curves and gaps as a picture, and a self-contained page with the picture and the tables."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnbench.files.atomic import replace_file

from ...formatting import shown
from ..judge.arms import Arm, arms_of, compare_arms
from ..judge.curves import gap_curve, smooth, window_of
from ..judge.learning import TOLERANCE
from ..rows import TrainingRun
from .summary import report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PAGE", "PICTURE", "legend", "write_plots"]

PICTURE, PAGE = "loss.png", "training.html"
_MOST_INSIDE = 6  # names of curves
_LINE = 0.24  # inches, of two names
_COLOURS = ("#3b6ea5", "#c8553d", "#4f8a4b", "#8a5fa0", "#b8860b", "#4a4a4a", "#2a9d8f", "#a0527d")
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "pre{overflow-x:auto;font-size:13px}svg{max-width:100%;height:auto}"
)


def write_plots(runs: Sequence[TrainingRun], folder: Path) -> None:
    """Write ``loss.png`` and ``training.html``.  Raises OutputError."""
    figure, picture = _figure(arms_of(runs)), io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    replace_file(folder / PICTURE, picture.getvalue())
    replace_file(folder / PAGE, _page(runs, figure).encode())


def _figure(arms: Sequence[Arm]) -> Figure:
    """Above, every run's loss; below, each candidate's gap to its baseline."""
    from matplotlib.figure import Figure

    found = [each for each in compare_arms(arms) if any(run.loss for run in each[0].runs)]
    figure = Figure(figsize=(10, 7.5 if found else 4.5), layout="constrained")
    panels: Any = figure.subplots(
        2 if found else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 2][: 1 + bool(found)]
    )
    colours = {id(arm): _COLOURS[index % len(_COLOURS)] for index, arm in enumerate(arms)}
    losses = panels[0][0]
    for arm in arms:
        for index, run in enumerate(run for run in arm.runs if run.loss):
            losses.plot(run.loss, color=colours[id(arm)], alpha=0.2, linewidth=0.6)
            curve = smooth(run.loss, window_of(len(run.loss)))
            label = _plain(arm.label) if index == 0 else None
            style = "--" if arm.baseline else "-"
            losses.plot(curve, color=colours[id(arm)], linewidth=1.3, linestyle=style, label=label)
    losses.set_ylabel("loss")
    losses.set_yscale("log")
    legend(figure, losses)
    if found:
        gaps = panels[1][0]
        for arm, baseline, learning in found:
            _draw_gaps(gaps, arm, baseline, colours[id(arm)])
            if learning.band is not None:
                gaps.axhspan(100 * learning.band[0], 100 * learning.band[1], color="#000000", alpha=0.05, linewidth=0)
        for side in (-1, 1):
            gaps.axhline(100 * side * TOLERANCE, color="#888888", linestyle=":", linewidth=1)
        gaps.set_ylabel("gap to the baseline, %")
    panels[-1][0].set_xlabel("step")
    return figure


def legend(figure: Figure, panel: Any) -> None:
    """Name the panel's curves: few inside the panel, many below a figure that grows for them.

    The figure's layout is ``constrained``.
    """
    from matplotlib.ticker import MaxNLocator

    panel.xaxis.set_major_locator(MaxNLocator(integer=True))  # steps
    curves, names = panel.get_legend_handles_labels()
    if 0 < len(names) <= _MOST_INSIDE:
        panel.legend(frameon=False)
    elif names:
        figure.set_figheight(figure.get_figheight() + _LINE * math.ceil(len(names) / 2))
        figure.legend(curves, names, loc="outside lower center", ncols=2, frameon=False, fontsize="small")


def _draw_gaps(panel: Any, arm: Arm, baseline: Arm, colour: str) -> None:
    rivals = {run.seed: run for run in baseline.runs}
    curves = []
    for run in arm.runs:
        rival = rivals.get(run.seed)
        steps = min(len(run.loss), len(rival.loss)) if rival is not None else 0
        if rival is not None and steps:
            curves.append(100 * gap_curve(run.loss, rival.loss, window_of(steps)))
            panel.plot(curves[-1], color=colour, alpha=0.3, linewidth=0.8)
    if curves:
        shortest = min(curve.size for curve in curves)
        middle = np.mean([curve[:shortest] for curve in curves], axis=0)
        panel.plot(middle, color=colour, linewidth=1.6)


def _plain(text: str) -> str:
    """The text without mathematics for matplotlib and without unprintable characters."""
    return shown(text, "text").replace("$", r"\$")


def _page(runs: Sequence[TrainingRun], figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    picture = f"<svg{buffer.getvalue().partition('<svg')[2]}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>attnbench train</title>'
        f"<style>{_STYLE}</style></head><body><h1>attnbench train</h1>\n{picture}\n"
        f"<pre>{html.escape(report(runs, 'text'))}</pre>\n</body></html>\n"
    )
