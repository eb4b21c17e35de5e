"""``attnbench merge``: join the parts that the ranks of a sweep have written into one folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import Format, FormatOption, print_json, print_table, print_text

if TYPE_CHECKING:
    from ..harness.results.merge import Merged

__all__ = ["merge"]


def merge(
    out: Annotated[Path, typer.Argument(help="A new or empty folder for the joined results.")],
    parts: Annotated[
        list[Path],
        typer.Argument(help="Folders of sweeps, folders that hold part-*-of-* folders, or JSON Lines files."),
    ],
    partial: Annotated[
        bool, typer.Option("--partial", help="Join the parts that exist even if others are missing or unfinished.")
    ] = False,
    format: FormatOption = "table",
) -> None:
    """Join the parts of a sweep; refuse different machines, contradicting rows and missing parts.

    The table that backend="auto" reads does not change, because the parts may come from another machine.  `attnbench
    table build OUT` adds the joined results to it.
    """
    from ..harness.results.merge import merge as joined

    merged = joined(out, parts, partial=partial)
    _print(merged, format)
    measured = sum(row.measured for row in merged.rows)
    print(f"{measured} of {len(merged.rows)} rows measured, all in {out}", file=sys.stderr)
    if merged.gaps:
        print(f"incomplete; `attnbench sweep --resume --out {out}` measures what is missing", file=sys.stderr)


def _print(merged: Merged, format: Format) -> None:
    parts = [
        {
            "part": str(part.path),
            "rows": len(part.rows),
            "measured": sum(row.measured for row in part.rows),
            "gap": part.gap,
        }
        for part in merged.parts
    ]
    if format == "json":
        print_json(
            {
                "folder": str(merged.folder),
                "rows": len(merged.rows),
                "repeated": merged.repeated,
                "parts": parts,
                "gaps": merged.gaps,
                "notes": merged.notes,
            }
        )
        return
    print_table([{name: str(part[name]) for name in ("rows", "measured", "part")} for part in parts], format)
    repeated = [f"rows that another part has, too, with the same content: {merged.repeated}"] if merged.repeated else []
    if lines := merged.gaps + repeated + merged.notes:
        print_text("\n" + "\n".join(f"- {each}" for each in lines))
