"""``attnbench check``: whether a backend's kernels keep the contract, with a report for their author."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import OutputError
from .output import DeviceOption, print_text

__all__ = ["check"]


def check(
    backend: Annotated[str, typer.Argument(help="A backend, one of its kernels or a plan.")],
    device: DeviceOption = "auto",
    seed: Annotated[int, typer.Option("--seed", help="Of the specs that are drawn.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", dir_okay=False, help="Write the report to this file, as Markdown.")
    ] = None,
) -> None:
    """Hold a backend's kernels to the contract.

    Refusals, numbers beside exact attention, strides, streams, threads, memory and more, on small specs drawn at
    random.  Exits 1 when a check fails, or when none could be made.
    """
    from ..testing import check_backend

    if output is not None:
        _write(output, "")  # a place that takes no report is better known before the checks than after them
    report = check_backend(backend, device, seed=seed, quiet=True)
    print_text(str(report))
    if output is not None:
        _write(output, report.to_markdown())
    if not report.ok:
        raise typer.Exit(1)


def _write(output: Path, text: str) -> None:
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write the report {output}: {error.strerror}") from None
