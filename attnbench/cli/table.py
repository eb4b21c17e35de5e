"""``attnbench table``: condense measurements into the table that ``backend="auto"`` chooses by, and show it."""

from __future__ import annotations

from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import AttnbenchError, MisuseError
from .output import DeviceOption, print_text

if TYPE_CHECKING:
    from ..table import Table

__all__ = ["app"]

app = typer.Typer(help="Build and show the table that auto chooses by.", no_args_is_help=True)


@app.command()
def build(
    results: Annotated[Path, typer.Argument(exists=True, help="A sweep's folder, or its measurements.jsonl.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write this file instead of the table that auto reads.")
    ] = None,
) -> None:
    """Condense a sweep's measurements into a table.

    By default it is merged into your own table, the one that backend="auto" reads.
    """
    from ..user_table import update_user_table

    table = _condensed(results)
    if output is None:
        output = update_user_table(table)
    else:
        table.save(output)
    print(f"{output}: {len(table.entries)} entries from {results}")


@app.command()
def show(
    file: Annotated[
        Path | None, typer.Argument(exists=True, dir_okay=False, help="A table; your own if left out.")
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Show every measured plan by shape, fastest first."""
    from ..devices import find
    from ..environment import Environment
    from ..registry import registry
    from ..table import Table
    from ..user_table import user_table_path

    if file is None:
        file = user_table_path(Environment.detect(find(device), registry()))
        if not file.exists():
            raise AttnbenchError(f"there is no table for this device yet ({file}); `attnbench sweep` makes one")
    print_text(Table.load(file).to_text())


def _condensed(results: Path) -> Table:
    """One table of all that was measured.  Raises MisuseError where the records do not belong into one."""
    from ..environment import Environment
    from ..harness.condense import condense
    from ..harness.records import Measurement, read_measurements
    from ..harness.store import MEASUREMENTS
    from ..table import Table

    records = results / MEASUREMENTS if results.is_dir() else results
    taken_in: dict[Environment, list[Measurement]] = {}
    for row in read_measurements(records):
        taken_in.setdefault(row.environment, []).append(row)
    tables = [Table.from_entries(rows[0].environment, condense(rows)) for rows in taken_in.values()]
    if not tables:
        raise MisuseError(f"{records} holds no measurement")
    for before, after in combinations(tables, 2):
        if hard := before.environment.differences(after.environment)[0]:
            raise MisuseError(f"{records} holds measurements that must not be mixed: {'; '.join(hard)}")
    return reduce(Table.merged, tables)
