"""``attnbench report``: write one page about sweeps and training runs, or one of its figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import MisuseError
from .output import output_draft, print_text

if TYPE_CHECKING:
    from ..harness.report.page.machines import Machine
    from ..harness.report.page.results import Results

__all__ = ["report"]

Format = Literal["html", "png", "svg", "markdown"]
Figure = Literal["winners", "speed-error", "loss"]
_ENDINGS: dict[Format, tuple[str, ...]] = {
    "html": (".html", ".htm"),
    "png": (".png",),
    "svg": (".svg",),
    "markdown": (".md", ".markdown"),
}


def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            exists=True, help="Sweeps and training runs: folders, files, or folders that hold such folders."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            dir_okay=False,
            help="File to write, - for standard output [default: report.html; Markdown is printed]",
        ),
    ] = None,
    format: Annotated[
        Format, typer.Option("--format", help="html writes the page, the others write one figure.")
    ] = "html",
    figure: Annotated[
        Figure | None,
        typer.Option("--figure", help="Which figure [default: winners; loss if there are only training runs]"),
    ] = None,
    direction: Annotated[
        Literal["forward", "training"] | None,
        typer.Option("--direction", help="Direction of the figure [default: all]"),
    ] = None,
) -> None:
    """Write one self-contained page: which plan wins where, speed against error, every case, training.

    The page makes no network request.  It may hold several machines; a figure shows one.
    """
    if format == "html" and (figure or direction):
        raise MisuseError("--figure and --direction are for --format png, svg and markdown; the page has every figure")
    # A pipe or a device may have any suffix.
    is_file = output is not None and str(output) != "-" and (output.is_file() or not output.exists())
    if output is not None and is_file and output.suffix.lower() not in _ENDINGS[format]:
        raise MisuseError(f"--format {format} writes a file that ends in {' or '.join(_ENDINGS[format])}, not {output}")
    from ..harness.report.page.results import read_results

    found = read_results(results)
    if format == "html":
        from ..harness.report.page.render import page
        from ..kernels.registry import registry

        content = page(found, registry()).encode()
    else:
        content = _figure(found, figure, format, direction)
    if output is None and format == "markdown":
        print_text(content.decode())
        return
    output = output or Path(f"report.{format}")
    with output_draft(output) as draft:
        draft.write(content)
    print(f"{output}: {len(content):,} bytes", file=sys.stderr)


def _figure(
    results: Results,
    figure: Figure | None,
    format: Literal["png", "svg", "markdown"],
    direction: Literal["forward", "training"] | None,
) -> bytes:
    chosen: Figure = figure or ("winners" if results.sweeps else "loss")
    if chosen == "loss":
        return _loss(results, format)
    from ..harness.report.page import figures, markdown, shapes
    from ..harness.report.page.colours import hues_of
    from ..harness.report.page.machines import DIRECTIONS
    from ..harness.report.page.plan_summaries import plan_summaries, points_of

    machine = _machine(results)
    directions = [each for each in DIRECTIONS if machine.of(each) and direction in (None, each)]
    if not directions:
        raise MisuseError(f"--direction {direction}: the results have no such case")
    hues = hues_of(machine.winners())
    if chosen == "winners":
        grids = [grid for grid in shapes.grids_of(machine) if grid.direction in directions]
        if format == "markdown":
            return markdown.winners_markdown(grids).encode()
        return figures.bytes_of(figures.winners_figure(grids, hues), format)
    if format == "markdown":
        return markdown.summaries_markdown([(each, plan_summaries(machine.of(each))) for each in directions]).encode()
    if len(directions) > 1:
        raise MisuseError("speed-error shows one direction; add --direction forward or --direction training")
    points = points_of(machine.of(directions[0]))
    if not points:
        raise MisuseError(
            f"speed-error needs a {directions[0]} plan without FP8 to compare with, and the results have none"
        )
    return figures.bytes_of(figures.speed_error_figure(points, hues), format)


def _loss(results: Results, format: Literal["png", "svg", "markdown"]) -> bytes:
    from ..harness.report.page import figures
    from ..harness.training.judge.arms import arms_of
    from ..harness.training.report.summary import report as training_report

    if not any(run.loss for run in results.runs):
        raise MisuseError("the results have no training run with a loss")
    if format == "markdown":
        return training_report(results.runs, "markdown").encode()
    return figures.bytes_of(figures.loss_figure(arms_of(results.runs)), format)


def _machine(results: Results) -> Machine:
    from ..harness.report.page.machines import machines_of
    from ..kernels.registry import registry

    machines = machines_of(results.sweeps, registry())
    if len(machines) != 1:
        named = ", ".join(machine.name for machine in machines) or "none"
        raise MisuseError(
            f"a figure shows one machine, and these results come from {named}; pass the results of one machine"
        )
    return machines[0]
