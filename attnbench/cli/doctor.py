"""``attnbench doctor``: what this machine has, what is missing, which command adds it, and a verdict."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import typer

from ..errors import AttnbenchError
from ..tables.environment import own_commit
from ..tables.nvml import Nvml
from .output import FormatOption, print_json, print_table
from .usable import command_for, obstacle

__all__ = ["doctor"]

Status = Literal["ok", "missing", "note"]
_GPU, _TABLE = "GPU", "table"
_NEED = {
    "cpu": "need an NVIDIA GPU and a torch built for CUDA; on a CPU FP8 is emulated, to show its errors",
    "cuda": "have no kernel for a GPU",
}


@dataclass(frozen=True)
class Diagnosis:
    """One result: ``missing`` cannot be used, ``note`` is information; ``install`` is the command that adds it."""

    name: str
    status: Status
    detail: str
    install: str | None = None


def doctor(format: FormatOption = "table") -> None:
    """List what is installed, what is missing and which command adds it.

    The last line is the verdict.  Exits 1 when no backend can run on this machine.
    """
    findings, usable = _examine()
    verdict = _verdict(findings, usable)
    if format == "json":
        print_json({"findings": [asdict(each) for each in findings], "usable": usable, "verdict": verdict})
    else:
        rows = [
            {
                "what": each.name,
                "status": each.status,
                "detail": each.detail + (f"; add it with: {each.install}" if each.install else ""),
            }
            for each in findings
        ]
        print_table(rows, format)
        print(f"\n{verdict}")
    if not usable:
        raise typer.Exit(1)


def _examine() -> tuple[list[Diagnosis], list[str]]:
    """What was found, and the names of the backends that can compute something here."""
    commit = own_commit()
    findings = [
        Diagnosis("python", "ok", f"{platform.python_version()} ({sys.executable})"),
        Diagnosis("attnbench", "ok", version("attnbench") + (f", commit {commit}" if commit else "")),
    ]
    try:
        importlib.import_module("torch")
    except Exception as error:  # with a broken CUDA library the import may raise any exception
        reason = f"cannot be imported: {type(error).__name__}: {error}"
        return [*findings, Diagnosis("torch", "missing", reason, "pip install torch")], []
    findings += _torch_findings() + _gpu_findings() + [_compiler()]
    try:
        backends, usable = _backend_findings()
    except AttnbenchError as error:
        return [*findings, Diagnosis("backends", "missing", str(error))], []
    return findings + backends + [_table()], usable


def _torch_findings() -> list[Diagnosis]:
    import torch

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    found = [Diagnosis("torch", "ok", f"{torch.__version__}, {built}")]
    try:
        found.append(Diagnosis("triton", "ok", version("triton")))
    except PackageNotFoundError:
        if torch.version.cuda:
            found.append(
                Diagnosis("triton", "missing", "torch.compile has no GPU code without it", "pip install triton")
            )
        else:
            found.append(Diagnosis("triton", "note", "not installed; nothing needs it on a CPU"))
    return found


def _gpu_findings() -> list[Diagnosis]:
    """The driver, each GPU as torch sees it, and the cuDNN that torch has loaded."""
    import torch

    from ..kernels.devices import find
    from ..kernels.registry import Registry
    from ..tables.environment import Environment

    with Nvml() as nvml:
        driver, names = nvml.driver(), nvml.names()
    if driver is None:
        return [Diagnosis("NVIDIA driver", "note", f"none that answers ({nvml.reason}); the GPU backends need one")]
    found = [Diagnosis("NVIDIA driver", "ok", driver)]
    if not torch.cuda.is_available():
        fault = "torch is built for the CPU" if not torch.version.cuda else f"CUDA {torch.version.cuda} does not start"
        command = "pip install --force-reinstall torch" if not torch.version.cuda else None
        return [*found, Diagnosis(_GPU, "missing", f"{', '.join(names)} cannot be used: {fault}", command)]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        here = Environment.detect(torch.device("cuda", index), Registry(()))
        detail = f"{facts.name}, compute capability {facts.major}.{facts.minor}, {facts.total_memory / 2**30:.0f} GiB"
        detail += f", up to {here.clock_mhz} MHz" if here.clock_mhz else ""
        detail += f", power cap {here.power_cap_w} W" if here.power_cap_w else ""
        found.append(Diagnosis(f"cuda:{index}", "ok", detail))
    cudnn = Environment.detect(find("auto"), Registry(())).cudnn
    reason = "torch was built without it, or cannot load it"
    found.append(Diagnosis("cuDNN", "ok", cudnn) if cudnn else Diagnosis("cuDNN", "missing", reason))
    return found


def _compiler() -> Diagnosis:
    """The C++ compiler that torch.compile calls for CPU code, looked for in torch's order."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return Diagnosis("C++ compiler", "ok", path)
    return Diagnosis("C++ compiler", "missing", "torch.compile needs one on a CPU", "apt-get install g++")


def _backend_findings() -> tuple[list[Diagnosis], list[str]]:
    """Each backend that has kernels for this device, the others together, and the names of those that run."""
    from ..kernels.devices import describe, find
    from ..kernels.registry import registry

    known, here = registry(), describe(find("auto"))
    found, usable, elsewhere = [], [], []
    for name, backend in known.backends.items():
        answer, reason = known.availability(name), obstacle(known, backend, here)
        origin = f" from {answer.origin}" if answer.origin else ""
        if backend.kernels and not any(here.type in kernel.rows for kernel in backend.kernels):
            elsewhere.append(name)
        elif answer.ok and reason is None:
            usable.append(name)
            found.append(Diagnosis(name, "ok", f"{answer.version or 'of unknown version'}{origin}"))
        else:
            detail = answer.reason if reason is None else f"cannot run here: {reason}"
            status: Status = "note" if here.type in backend.yardstick else "missing"
            found.append(Diagnosis(name, status, detail or "", command_for(known, backend, here)))
    if elsewhere:
        found.append(Diagnosis("other backends", "note", f"{', '.join(elsewhere)}: {_NEED[here.type]}"))
    return found, usable


def _table() -> Diagnosis:
    from ..kernels.devices import find
    from ..tables.user_table import known_tables

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        known = known_tables(find("auto"))
    notes = [str(each.message) for each in caught] or ([known.note] if known.note else [])
    if not known.tables:
        detail = "; ".join(notes) or "nothing was measured on this device yet"
        return Diagnosis(_TABLE, "missing", detail, "attnbench sweep")
    counted = [f"{len(table.entries)} entries {table.origin}" for table in known.tables]
    return Diagnosis(_TABLE, "ok", "; ".join([*counted, *notes]))


def _verdict(findings: list[Diagnosis], usable: list[str]) -> str:
    """One line: what can run here and what to do next.  The table lists the commands that add each backend."""
    if not usable:
        commands = dict.fromkeys(each.install for each in findings if each.install)
        return "; ".join(["verdict: nothing can run here", *([f"first: {', '.join(commands)}"] if commands else [])])
    counted = f"{len(usable)} backend{'s' if len(usable) > 1 else ''}"
    parts = [f"verdict: ready: {counted} can run here ({', '.join(usable)})"]
    missing = {each.name: each.install for each in findings if each.status == "missing" and each.install}
    if gpu := missing.pop(_GPU, None):
        parts.append(f"to use the GPU: {gpu}")
    table = missing.pop(_TABLE, None)
    if missing:
        parts.append(f"the table names what would add {', '.join(missing)}")
    if table:
        parts.append(f"next: {table}")
    return "; ".join(parts)
