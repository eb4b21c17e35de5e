"""``attnbench report``: one page of sweeps and training runs for people to read, or one figure of it."""

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
        typer.Argument(exists=True, help="Folders or files of sweeps and training runs, or folders of these."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            dir_okay=False,
            help="Write this file, - for standard output [default: report.html; Markdown is printed]",
        ),
    ] = None,
    format: Annotated[Format, typer.Option("--format", help="html is the page, the others one figure.")] = "html",
    figure: Annotated[
        Figure | None, typer.Option("--figure", help="Which figure [default: winners, of training runs alone loss]")
    ] = None,
    direction: Annotated[
        Literal["forward", "training"] | None, typer.Option("--direction", help="Of a figure [default: all there is]")
    ] = None,
) -> None:
    """Write one self-contained page: which plan wins where, speed against error, every case, training.

    It asks the network for nothing.  Several machines may be in it; a figure is of one.
    """
    if format == "html" and (figure or direction):
        raise MisuseError("--figure and --direction are for --format png, svg and markdown; the page has every figure")
    # A pipe or a device may have any name.
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
    from ..harness.report.page.standings import points_of, standings

    machine = _machine(results)
    directions = [each for each in DIRECTIONS if machine.of(each) and direction in (None, each)]
    if not directions:
        raise MisuseError(f"there is no case of the direction {direction}")
    hues = hues_of(machine.winners())
    if chosen == "winners":
        grids = [grid for grid in shapes.grids_of(machine) if grid.direction in directions]
        if format == "markdown":
            return markdown.winners_markdown(grids).encode()
        return figures.bytes_of(figures.winners_figure(grids, hues), format)
    if format == "markdown":
        return markdown.standings_markdown([(each, standings(machine.of(each))) for each in directions]).encode()
    if len(directions) > 1:
        raise MisuseError("speed-error is a figure of one direction: --direction forward or training")
    points = points_of(machine.of(directions[0]))
    if not points:
        raise MisuseError(f"there is no plan without FP8 to hold the others against, {directions[0]}")
    return figures.bytes_of(figures.speed_error_figure(points, hues), format)


def _loss(results: Results, format: Literal["png", "svg", "markdown"]) -> bytes:
    from ..harness.report.page import figures
    from ..harness.training.judge.arms import arms_of
    from ..harness.training.report.summary import report as training_report

    if not any(run.loss for run in results.runs):
        raise MisuseError("there is no training run with a loss among the results")
    if format == "markdown":
        return training_report(results.runs, "markdown").encode()
    return figures.bytes_of(figures.loss_figure(arms_of(results.runs)), format)


def _machine(results: Results) -> Machine:
    from ..harness.report.page.machines import machines_of
    from ..kernels.registry import registry

    machines = machines_of(results.sweeps, registry())
    if len(machines) != 1:
        named = ", ".join(machine.name for machine in machines) or "none"
        raise MisuseError(f"a figure is of one machine's sweeps, and these results are of {named}; name fewer")
    return machines[0]
