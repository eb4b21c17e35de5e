"""``attnbench check``: test a backend's kernels against the contract and report to their author."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from .output import DeviceOption, output_draft

__all__ = ["check"]


def check(
    backend: Annotated[str, typer.Argument(help="A backend, one of its kernels or a plan.")],
    device: DeviceOption = "auto",
    seed: Annotated[int, typer.Option("--seed", help="Seed for drawing the specs.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", dir_okay=False, help="Write the report to this file as Markdown; - prints it."),
    ] = None,
) -> None:
    """Test a backend's kernels against the contract.

    Checks refusals, results against exact attention, strides, streams, threads, memory and more, on small random
    specs.  Exits 1 when a check fails or when no check could run.
    """
    from ..testing import check_backend

    # Open the file first, so that a path that cannot be written fails before the checks and not after them.
    with nullcontext() if output is None else output_draft(output) as draft:
        report = check_backend(backend, device, seed=seed, quiet=str(output) == "-")
        if draft is not None:
            draft.write(report.to_markdown().encode())
    if not report.ok:
        raise typer.Exit(1)
