"""``attnbench gate``: measure what matters until it is known whether it became slower, and end with that code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import MisuseError, OutputError
from ..files.atomic import replace_file
from ..text.printable import printable
from .compare import PIPED_WIDTH, CompareFormat, make_terms, print_comparison
from .output import DeviceOption, fresh_folder

__all__ = ["gate"]


def gate(
    base: Annotated[
        Path, typer.Option(exists=True, help="Results of the old code: a folder of a sweep or of an earlier gate.")
    ],
    base_python: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="The Python of an environment that holds the old code, to be measured beside the new one.",
        ),
    ] = None,
    fail_on: Annotated[str, typer.Option("--fail-on", help="The slow-down that must be found.")] = "3%",
    fail_on_host: Annotated[
        str, typer.Option("--fail-on-host", help="The same of the host's part of a call on a GPU, which varies more.")
    ] = "50%",
    minutes: Annotated[float, typer.Option(min=0.1, help="When it ends at the latest.")] = 5.0,
    case: Annotated[
        list[str] | None, typer.Option("--case", help="Only this case of BASE, by its name; may be repeated.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Gate every row of BASE, not what auto chooses and the runners-up alone.")
    ] = False,
    cost: Annotated[
        str | None, typer.Option("--cost", help="Only these, with commas: kernel, prepared, backward, call, host.")
    ] = None,
    allow_missing: Annotated[
        list[str] | None,
        typer.Option(help='A case, a plan or "CASE: PLAN" that may be missing, with * and ?; again for another.'),
    ] = None,
    thresholds: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="YAML: limits of their own for cases and plans."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for what is measured and found [default: a fresh one, named at the end]")
    ] = None,
    device: DeviceOption = "auto",
    format: Annotated[CompareFormat, typer.Option("--format", help="How to print.")] = "table",
) -> None:
    """Measure the rows of BASE on this machine until each is known to be slower or not, or the time is over.

    Exits 0 where a slow-down of the limit would have been found in every row and was not, 1 where something became
    slower, less accurate, fails or is missing, 2 on misuse, 3 where BASE is another machine's and no --base-python
    measures it here, 4 where it is not certain.  The folder has what was measured, and the verdict as gate.md,
    gate.xml (JUnit) and gate.json.
    """
    from ..harness.compare.export import regression_dict, regression_junit
    from ..harness.compare.gate.rounds import ROUNDS, rounds_text
    from ..harness.compare.gate.run import run_gate
    from ..harness.compare.text import regression_text
    from ..kernels.devices import find
    from ..tables.entry import LONGEST_MS

    if not minutes * 60 <= LONGEST_MS / 1e3:
        raise MisuseError(f"--minutes is at most {LONGEST_MS / 60e3:g}, not {minutes}")
    terms = make_terms(fail_on, fail_on_host, cost, [], allow_missing or [], thresholds)
    folder = fresh_folder("gates") if out is None else out
    found = run_gate(
        base,
        folder,
        terms,
        find(device),
        None if base_python is None else base_python.absolute(),  # not resolved: an environment is known by its link
        minutes,
        costs=None if cost is None else terms.costs,
        cases=case or [],
        every=every,
        say=_say,
    )
    regression = found.regression
    told = regression_dict(regression, found.base, found.new)
    files = {
        ROUNDS: rounds_text(found.rounds),
        "gate.json": json.dumps(told, indent=2, allow_nan=False) + "\n",
        "gate.md": regression_text(regression, "markdown", PIPED_WIDTH, every=True) + "\n",
        "gate.xml": regression_junit(regression, "attnbench gate") + "\n",
    }
    lost = None
    for name, content in files.items():
        try:
            replace_file(folder / name, content.encode())
        except OutputError as error:  # minutes were measured: what was found is said all the same
            lost = error
    print_comparison(regression, told, format, every=True)
    if lost is not None:
        raise lost
    print(f"{found.said}; all of it is in {folder}", file=sys.stderr)
    if regression.exit_code:
        raise typer.Exit(regression.exit_code)


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)
