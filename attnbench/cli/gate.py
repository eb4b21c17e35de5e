"""``attnbench gate``: measure old and new code until each plan is known to be slower or not; exit accordingly."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import MisuseError, OutputError
from ..files.atomic import replace_file
from ..text.printable import printable
from .compare import (
    PIPED_WIDTH,
    CompareFormat,
    CostOption,
    FailOnHostOption,
    FailOnOption,
    ThresholdsOption,
    make_terms,
    print_comparison,
)
from .output import DeviceOption, fresh_folder

if TYPE_CHECKING:
    from ..harness.compare.gate.run import GateRun

__all__ = ["gate"]


def gate(
    base: Annotated[
        Path, typer.Option(exists=True, help="Results of the old code: the folder of a sweep or of an earlier gate.")
    ],
    base_python: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="The Python of an environment with the old code; old and new code are then measured in turns.",
        ),
    ] = None,
    fail_on: FailOnOption = "3%",
    fail_on_host: FailOnHostOption = "50%",
    minutes: Annotated[float, typer.Option(min=0.1, help="Time limit in minutes.")] = 5.0,
    case: Annotated[
        list[str] | None, typer.Option("--case", help="Measure only the case of BASE with this name; may be repeated.")
    ] = None,
    every: Annotated[
        bool,
        typer.Option(
            "--all", help="Measure every row of BASE, not only the plans that auto chooses and the runners-up."
        ),
    ] = False,
    cost: CostOption = None,
    allow_missing: Annotated[
        list[str] | None,
        typer.Option(help='A case, a plan or "CASE: PLAN" that may be missing; * and ? match; may be repeated.'),
    ] = None,
    thresholds: ThresholdsOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for measurements and verdict [default: a new one, printed at the end]")
    ] = None,
    device: DeviceOption = "auto",
    format: Annotated[CompareFormat, typer.Option("--format", help="Output format.")] = "table",
) -> None:
    """Measure the rows of BASE on this machine until each is known to be slower or not, or the time limit is reached.

    Exit codes: 0 every row would have shown a slow-down of the limit, and none did; 1 a row became slower, less
    accurate or larger in memory, fails or is missing; 2 misuse; 3 BASE comes from another machine and --base-python is
    not given; 4 not certain.  The folder holds the measurements and the verdict as gate.md, gate.xml (JUnit) and
    gate.json.
    """
    from ..harness.compare.export import regression_dict
    from ..harness.compare.gate.run import run_gate
    from ..kernels.devices import find
    from ..tables.entry import LONGEST_MS

    if not minutes * 60 <= LONGEST_MS / 1e3:
        raise MisuseError(f"--minutes {minutes}: expected at most {LONGEST_MS / 60e3:g}")
    terms = make_terms(fail_on, fail_on_host, cost, [], allow_missing or [], thresholds)
    folder = fresh_folder("gates") if out is None else out
    found = run_gate(
        base,
        folder,
        terms,
        find(device),
        # Not resolved: an environment is identified by the path of its link.
        None if base_python is None else base_python.absolute(),
        minutes,
        costs=None if cost is None else terms.costs,
        cases=case or [],
        every=every,
        say=_say,
    )
    regression = found.regression
    comparison = regression_dict(regression, found.base, found.new)
    lost = _write(folder, found, comparison)
    print_comparison(regression, comparison, format, every=True)
    if lost is not None:
        raise lost
    print(f"{found.summary}; all of it is in {folder}", file=sys.stderr)
    if regression.exit_code:
        raise typer.Exit(regression.exit_code)


def _write(folder: Path, found: GateRun, comparison: dict[str, Any]) -> OutputError | None:
    """Write the files of the verdict; returns an error instead of raising it, so that the result is printed first."""
    from ..harness.compare.export import regression_junit
    from ..harness.compare.gate.rounds import ROUNDS, rounds_text
    from ..harness.compare.text import regression_text

    files = {
        ROUNDS: rounds_text(found.rounds),
        "gate.json": json.dumps(comparison, indent=2, allow_nan=False) + "\n",
        "gate.md": regression_text(found.regression, "markdown", PIPED_WIDTH, every=True) + "\n",
        "gate.xml": regression_junit(found.regression, "attnbench gate") + "\n",
    }
    lost = None
    for name, content in files.items():
        try:
            replace_file(folder / name, content.encode())
        except OutputError as error:
            lost = error
    return lost


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)
