"""``attnbench sweep``: measure every plan on every case of a preset or file, report, and keep the table."""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import MisuseError, OutputError
from ..text.printable import brief
from .output import Format, FormatOption, fresh_folder, print_json, print_table

if TYPE_CHECKING:
    import torch

    from ..harness.cases.case import Case
    from ..harness.measure.setup import DeviceSetup
    from ..harness.results.store import Store
    from ..harness.sweep.run import Task
    from ..kernels.registry import Registry

__all__ = ["sweep"]


# Fixed cost of a case (compiling, first runs), in units of the attention's operations.
_FIXED_FLOPS = 5e12
# Repeated from the harness, because importing it would import torch.
SweepDtype = Literal["fp8", "bf16", "fp16", "fp32"]


def sweep(
    dtype: Annotated[
        SweepDtype, typer.Option(help="fp8: bf16 tensors, FP8 and 16-bit kernels; other values: tensors of that type.")
    ] = "fp8",
    preset: Annotated[
        str,
        typer.Option(
            help="quick, inference, training, long, packed, padded, models, table, FILE.yaml, or captured tensors: "
            "FILE.safetensors."
        ),
    ] = "quick",
    case: Annotated[
        list[str] | None,
        typer.Option("--case", help="Measure only the case of the preset with this name; may be repeated."),
    ] = None,
    backends: Annotated[
        str | None,
        typer.Option(
            help="Measure only these, separated by commas: backends, kernels (fa3:fp8) or plans (a:fp8>b:bf16). A "
            "forward is then paired with every backward; by default with those of at most two other backends."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results [default: a new one, printed at the end]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the interrupted sweep in --out.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be measured and what refuses; measure nothing.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, or several GPUs: cuda:0,cuda:1.")] = "auto",
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print a line for every plan, including refused ones.")
    ] = False,
    format: FormatOption = "table",
    race: Annotated[
        bool | None,
        typer.Option(
            "--race/--no-race",
            help="Measure in full only the plans that may be the fastest after a first look at all; the others get a "
            "row with the status slower [default: with --preset table and --preset models]",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=1,
            help="Seconds that one step of a plan (compiling, some samples, judging) may take; longer is a hang.",
        ),
    ] = 300.0,
    max_error: Annotated[
        float | None, typer.Option(help="Error above which an FP8 plan is inaccurate [default: 0.12, in training 0.2]")
    ] = None,
    table: Annotated[
        bool, typer.Option("--table/--no-table", help="Add the measurements to the table that auto chooses by.")
    ] = True,
) -> None:
    """Measure time and error of every plan on this machine, and update the table that backend="auto" chooses by."""
    import torch

    from ..dispatch.context import check_budget
    from ..harness.measure.accuracy import LARGEST_ERROR
    from ..harness.results.shards import Shard
    from ..harness.results.store import Store
    from ..harness.sweep.contending import contending
    from ..harness.sweep.run import tasks_of
    from ..kernels.devices import describe
    from ..kernels.registry import registry
    from ..tables.entry import LONGEST_MS
    from ..tables.user_table import known_tables

    check_budget(max_error)
    if max_error is not None and max_error > LARGEST_ERROR:
        raise MisuseError(f"--max-error {max_error}: expected a relative error of at most {LARGEST_ERROR:g}")
    if not timeout <= LONGEST_MS / 1e3:
        raise MisuseError(f"--timeout {timeout}: expected at most {LONGEST_MS / 1e3:g} seconds")
    if max_error is not None and dtype != "fp8":
        raise MisuseError(f"--max-error applies to FP8 plans, and a sweep with --dtype {dtype} has none")
    if resume and out is None:
        raise MisuseError("--resume needs --out, the folder of the interrupted sweep")
    shard, known = Shard.detect(os.environ), registry()
    devices = _devices(shard.device(device, torch.cuda.device_count()))
    names = [name.strip() for name in backends.split(",") if name.strip()] if backends is not None else []
    if backends is not None and not names:
        raise MisuseError("--backends: no name given; expected a comma-separated list such as fa3,triton:fp8")
    if shard.count > 1 and out is None:
        raise MisuseError("a sweep in several processes needs --out, the folder where each process writes its part")
    wanted = _named_cases(_cases(preset, dtype, devices[0].type), case or [], preset)
    cases = shard.of(wanted, lambda each: _FIXED_FLOPS + each.flops)
    # A part without a case is written too, so that merge finds all parts.
    tasks = tasks_of(cases, known, devices[0], dtype, names) if cases else []
    if dry_run:
        _print_tasks(tasks, format)
        return
    race = preset in ("table", "models") if race is None else race
    if race:
        tasks = contending(tasks, known_tables(devices[0]), known, describe(devices[0]))
    setups = _setups(devices, known, device, max_error, timeout, race)
    folder = fresh_folder("sweeps") if out is None else shard.folder(out)
    with Store(folder, setups[0].environment, resume=resume) as store:
        for note in store.notes:
            print(f"{store.folder}: {note}", file=sys.stderr)
        measured = _measure(tasks, setups, store, format, update=table, verbose=verbose)
    if not measured and shard.count == 1:  # one rank may have nothing to measure; its failure would end the other ranks
        raise typer.Exit(1)


def _measure(
    tasks: list[Task], setups: list[DeviceSetup], store: Store, format: Format, *, update: bool, verbose: bool
) -> bool:
    """Measure, store, then print; returns whether anything could be measured."""
    from rich.console import Console

    from ..harness.report.text import report
    from ..harness.results.condense import table_of
    from ..harness.results.store import TABLE
    from ..harness.sweep.progress import show_progress
    from ..harness.sweep.run import run_sweep
    from ..tables.user_table import check_user_table, update_user_table

    environment = setups[0].environment
    later = f"`attnbench table build {shlex.quote(str(store.folder))}` puts these results into it"
    if update:
        try:
            check_user_table(environment)
        except OutputError as error:
            message = f"the table that auto chooses by will not be updated: {error}"
            print(f"{message}; the results are kept, and {later}, once it can be written", file=sys.stderr)
    try:
        rows = list(show_progress(run_sweep(tasks, setups, store), Console(stderr=True), verbose=verbose))
    except KeyboardInterrupt:
        print(
            f"stopped; {len(store.rows)} rows are in {store.folder}, continue with --resume --out {store.folder}",
            file=sys.stderr,
        )
        raise
    table = table_of(environment, store.rows)
    measured = sum(row.measured for row in rows)
    fault = None
    try:
        table.save(store.folder / TABLE)
    except OutputError as error:  # raised once the rows have been printed
        fault = OutputError(f"{error}; the rows are safe, --resume --out {store.folder} finishes the sweep")
    if not measured:
        message = "nothing could be measured; the rows say why"
    elif not update:
        message = f"the table that auto chooses by was not updated, as asked; {later}"
    else:
        try:
            message = f'backend="auto" now chooses by {update_user_table(table)}'
        except OutputError as error:
            message = f"the table that auto chooses by was not updated: {error}; {later}, once it can be written"
    if format == "json":
        print_json([row.to_dict() for row in rows])
    else:
        print(report(rows, "markdown" if format == "markdown" else "text"))
    others = f", {len(rows) - measured} not (each row says why)" if measured < len(rows) else ""
    print(f"{measured} plans measured{others}; the rows are in {store.folder}\n{message}", file=sys.stderr)
    if fault is not None:
        raise fault
    return measured > 0


def _setups(
    devices: list[torch.device], known: Registry, names: str, max_error: float | None, seconds: float, race: bool
) -> list[DeviceSetup]:
    """The setup of each device.  Raises MisuseError if the devices differ."""
    from ..harness.measure.setup import DeviceSetup
    from ..harness.measure.timing import Timer
    from ..tables.environment import Environment

    setups = [
        DeviceSetup(
            each,
            Environment.detect(each, known),
            Timer.for_device(each),
            max_error=max_error,
            seconds=seconds,
            race=race,
        )
        for each in devices
    ]
    for other in setups[1:]:
        if unlike := setups[0].environment.differences(other.environment)[0]:
            raise MisuseError(
                f"--device {names}: these devices differ, so sweep them one after the other: {'; '.join(unlike)}"
            )
    return setups


def _devices(names: str) -> list[torch.device]:
    from ..kernels.devices import find

    found = [find(name.strip()) for name in names.split(",")]
    if len(set(found)) < len(found):
        raise MisuseError(f"--device {names}: one device is given twice")
    if len({each.type for each in found}) > 1:
        raise MisuseError(f"--device {names}: GPUs and CPU have separate tables, so sweep them one after the other")
    return found


def _cases(preset: str, dtype: str, device_type: str) -> list[Case]:
    from ..harness.cases.file import read_captured_cases, read_cases
    from ..harness.cases.presets import PRESETS, preset_cases

    if preset in PRESETS:
        return preset_cases(preset, dtype, device_type)
    path = Path(preset)
    if path.suffix == ".safetensors":
        return read_captured_cases(path, dtype)
    if path.suffix not in (".yaml", ".yml"):
        raise MisuseError(f"--preset {brief(preset)}: expected {', '.join(PRESETS)}, a .yaml or a .safetensors file")
    return read_cases(path, dtype)


def _named_cases(cases: list[Case], names: list[str], preset: str) -> list[Case]:
    """The cases with these names, or all if there are no names.  Raises MisuseError with the nearest names."""
    from ..harness.cases.case import LONGEST_NAME

    known = {case.name: case for case in cases}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name[:LONGEST_NAME], known, n=2, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "--dry-run lists them"
            raise MisuseError(f"{preset} has no case {brief(name)}; {hint}")
    return [known[name] for name in dict.fromkeys(names)] if names else cases


def _print_tasks(tasks: list[Task], format: Format) -> None:
    if format == "json":
        print_json(
            [
                {
                    "case": task.case.name,
                    "spec": task.case.spec.to_dict(),
                    "plan": str(task.plan),
                    "status": task.status,
                    "reasons": list(task.reasons),
                }
                for task in tasks
            ]
        )
        return
    rows = [
        {
            "case": task.case.name,
            "plan": str(task.plan),
            "would be": "measured" if task.status == "ok" else task.status,
            "because": "; ".join(task.reasons),
        }
        for task in tasks
    ]
    print_table(rows, format)
