"""How the commands print: a table for a terminal, Markdown for a pull request, JSON for a program."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..files.atomic import Draft
from ..text.printable import printable

__all__ = [
    "DeviceOption",
    "Format",
    "FormatOption",
    "fresh_folder",
    "output_draft",
    "print_json",
    "print_table",
    "print_text",
]

_PIPED_WIDTH = 160  # columns of a table where the output is not a terminal
_LEAST_LAST = 24  # columns; a narrower last column is harder to read than a line wrapped by the terminal


Format = Literal["table", "json", "markdown"]
FormatOption = Annotated[Format, typer.Option("--format", help="Output format.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]


def output_draft(path: Path) -> Draft:
    """A draft of the file given by --output; ``-`` is standard output.  Raises OutputError."""
    sys.stdout.flush()  # keep earlier output before what is written to /dev/stdout
    return Draft(Path("/dev/stdout") if str(path) == "-" else path)


def fresh_folder(kind: str) -> Path:
    """A new folder for results of a kind, named by the time.  Raises OutputError if the user has no data folder."""
    from ..files.user_folders import data_folder

    return data_folder() / kind / f"{datetime.now(timezone.utc):%Y-%m-%dT%H-%M-%S.%f}"


def print_json(data: Any) -> None:
    """Print one JSON document, indented.  Raises ValueError for a number that JSON cannot hold, such as infinity."""
    print(json.dumps(data, indent=2, allow_nan=False))


def print_table(rows: Sequence[Mapping[str, str]], format: Format) -> None:
    """Print rows with the same keys, as a table for a terminal, whose last column is wrapped, or as Markdown."""
    from tabulate import tabulate  # not needed by `attnbench --help`

    cells = [{name: _cell(text, format) for name, text in row.items()} for row in rows]
    if format == "markdown":
        print(tabulate(cells, headers="keys", tablefmt="github", disable_numparse=True))
        return
    others = list(rows[0])[:-1]
    taken = sum(2 + max(len(name), *(len(row[name]) for row in cells)) for name in others)
    width = shutil.get_terminal_size((_PIPED_WIDTH, 24)).columns if sys.stdout.isatty() else _PIPED_WIDTH
    widths = [None] * len(others) + [max(_LEAST_LAST, width - taken)]
    print(tabulate(cells, headers="keys", tablefmt="simple", maxcolwidths=widths, disable_numparse=True))


def print_text(text: str) -> None:
    """Lines as they are, without what would steer a terminal: files and plug-ins write some of them."""
    print("\n".join(printable(line) for line in text.split("\n")))


def _cell(text: str, format: Format) -> str:
    return printable(text).replace("|", "\\|") if format == "markdown" else printable(text)
