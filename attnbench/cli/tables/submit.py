"""``attnbench submit``: check results offline and write the table that others may use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import AttnbenchError, MalformedFileError, MisuseError
from ..output import print_text

if TYPE_CHECKING:
    from ...harness.results.records import Measurement
    from ...tables.table import Table
    from ...testing.conformance.file import ReadReport

__all__ = ["submit"]

_SHOWN = 3  # of the rows that are left out


def submit(
    results: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            help="Folders of sweeps or their measurements.jsonl; or one table file, which is only checked.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", dir_okay=False, help="File to write [default: named after the device, here]"),
    ] = None,
    conformance: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of reports that `attnbench check NAME -o FILE` wrote."),
    ] = None,
) -> None:
    """Check measurements offline and write them as one table file to share.

    The same results give the same bytes.  Exits 1 with a line for each reason if a time is above the device's peak, a
    status contradicts an error, the environment is not known or mixed, a kernel is not known or its conformance report
    has a failure, a text holds a path, a host's or your name, or the shapes are too few.  Rows of which no two visits
    agree on the time are left out.  Nothing is sent anywhere; the last line says how to offer the file.
    """
    from ...harness.results.privacy import local_names
    from ...harness.results.submission import submission_of, table_faults
    from ...kernels.registry import registry

    faults: list[str] = []
    left_out: Sequence[Measurement] = ()
    rows = 0
    written = any(path.suffix == ".json" for path in results)
    if written:
        if len(results) > 1 or output is not None:
            raise MisuseError("pass either one table, which is checked and not written, or sweeps")
        table = _read_table(results[0], faults)
        faults += table_faults(table, registry(), local_names()) if table else []
    else:
        sweeps = _read_sweeps(results, faults)
        rows = sum(map(len, sweeps.values()))
        found = submission_of(sweeps, registry(), local_names())
        table, left_out = (found.table, found.left_out) if found else (None, ())
        faults += found.faults if found else [] if faults else ["there is no measurement in them"]
    reports = _read_reports(conformance, faults)
    if table is not None:
        from ...testing.conformance.file import report_faults

        faults += report_faults(table, reports)
    if faults or table is None:
        number = "1 reason" if len(faults) == 1 else f"{len(faults)} reasons"
        raise AttnbenchError("\n".join([f"not to be shared, for {number}:", *(f"- {each}" for each in faults)]))
    _tell_left_out(left_out, rows)
    _tell_what_is_open(table, reports, conformance)
    if written:
        print_text(f"{results[0]}: {_size(table)}; what a table alone can show is right, its rows show the rest")
        return
    _write(table, output)


def _write(table: Table, output: Path | None) -> None:
    from ...tables.shipped import file_name, shipped_table_path

    name = file_name(table.environment)
    path = Path(name) if output is None else output
    table.save(path)
    results = f"results/{name.removesuffix('.json')}"
    first = shipped_table_path(table.environment) is None
    place = f"attnbench/tables/{name}" if first else f"{results}/submitted/{table.environment.uuid_hash}.json"
    print_text(f"{path}: {_size(table)}; every check passed")
    print_text(
        f"to offer it, open a pull request with this file as {place} and its rows below {results}/; "
        "docs/tables.md has the steps"
    )


def _size(table: Table) -> str:
    return f"{len(table.entries)} plans at {len(list(table.specs))} shapes of {table.environment.device_name}"


def _read_table(path: Path, faults: list[str]) -> Table | None:
    """The table, or None with a fault.  A text that ``Table.save`` would not write is a fault too."""
    from ...tables.files import read_text
    from ...tables.table import Table

    try:
        table = Table.load(path)
        if table.condensed().file_text() != read_text(path):
            faults.append(f"{path} is not as `attnbench submit` writes it; build it from its results again")
    except MalformedFileError as error:
        faults.append(str(error))
        return None
    return table


def _read_sweeps(results: Sequence[Path], faults: list[str]) -> dict[str, list[Measurement]]:
    from ...harness.results.records import read_measurements
    from ...harness.results.store import measurements_file

    sweeps: dict[str, list[Measurement]] = {}
    for file in map(measurements_file, results):
        rows = sweeps.setdefault(str(file), [])
        if rows:
            continue  # named twice
        try:
            rows.extend(read_measurements(file))
        except MalformedFileError as error:
            faults.append(str(error))
    return sweeps


def _read_reports(folder: Path | None, faults: list[str]) -> list[ReadReport]:
    from ...testing.conformance.file import read_report

    reports: list[ReadReport] = []
    for path in sorted(folder.glob("*.md")) if folder else ():
        try:
            reports.append(read_report(path))
        except MalformedFileError as error:
            faults.append(str(error))
    if folder is not None and not reports:
        faults.append(f"{folder} holds no report of `attnbench check NAME -o FILE.md`")
    return reports


def _tell_left_out(left_out: Sequence[Measurement], rows: int) -> None:
    if left_out:
        named = [f"{row.spec} {row.plan}" for row in left_out[:_SHOWN]]
        more = ["..."] if len(left_out) > _SHOWN else []
        print_text(
            f"{len(left_out)} of {rows} rows are left out, no two of their visits agree: {', '.join(named + more)}"
        )


def _tell_what_is_open(table: Table, reports: Sequence[ReadReport], conformance: Path | None) -> None:
    """What no check has shown, and how the table relates to the one that ships."""
    from ...harness.results.submission import agreement
    from ...tables.shipped import shipped_table_path
    from ...tables.table import Table
    from ...testing.conformance.file import uncovered

    if conformance is None:
        print_text("conformance is not shown; `--conformance FOLDER` reads the reports of `attnbench check`")
    elif missing := uncovered(table, reports):
        print_text(f"no conformance report has checked {', '.join(missing)}")
    shipped = shipped_table_path(table.environment)
    if shipped is not None:
        found = agreement(Table.load(shipped), table)
        print_text(
            f"attnbench ships a table for this device; of {found.shared} plans in both, the times here are "
            f"{found.ratio:.3g} times as long in the median"
        )
