"""``attnbench table``: condense measurements into the table that ``backend="auto"`` chooses by, and show it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...errors import AttnbenchError
from ..output import DeviceOption, print_text
from .table_check import check

__all__ = ["app"]

app = typer.Typer(help="Build and show the table that auto chooses by.", no_args_is_help=True)


@app.command()
def build(
    results: Annotated[
        list[Path],
        typer.Argument(
            exists=True, help="Folders of sweeps or their measurements.jsonl; of equal rows the newest counts."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write this file instead of updating the table that auto reads."),
    ] = None,
) -> None:
    """Condense the measurements of one or more sweeps into a table.

    By default the result is merged into your own table, which backend="auto" reads.
    """
    from ...harness.results.condense import join_sweeps
    from ...harness.results.records import read_measurements
    from ...harness.results.store import measurements_file
    from ...tables.user_table import update_user_table

    records = [measurements_file(each) for each in results]
    table = join_sweeps({str(each): list(read_measurements(each)) for each in records}).condensed()
    if output is None:
        output = update_user_table(table)
    else:
        table.save(output)
    print_text(f"{output}: {len(table.entries)} entries from {', '.join(map(str, results))}")


@app.command()
def show(
    file: Annotated[
        Path | None,
        typer.Argument(exists=True, dir_okay=False, help="A table [default: the tables that auto reads here]"),
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Show every measured plan by shape, fastest first."""
    from ...kernels.devices import find
    from ...tables.table import Table
    from ...tables.user_table import known_tables

    if file is not None:
        print_text(Table.load(file).to_text())
        return
    known = known_tables(find(device))
    if not known.tables:
        reason = known.note or "nothing was measured on this device yet"
        raise AttnbenchError(f"there is no table for this device: {reason}; `attnbench sweep --preset table` makes one")
    print_text("\n\n".join([table.to_text() for table in known.tables] + ([known.note] if known.note else [])))


app.command()(check)
