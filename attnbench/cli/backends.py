"""``attnbench backends``: every backend, whether it can be used here, and what its kernels serve."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .output import DeviceOption, FormatOption, print_json, print_table
from .usable import command_for, obstacle

if TYPE_CHECKING:
    from ..kernels.capabilities import Capabilities, Device
    from ..kernels.contract import BackwardKernel, ForwardKernel
    from ..kernels.registry import Registry

__all__ = ["backends", "describe_backend"]


def backends(format: FormatOption = "table", device: DeviceOption = "auto") -> None:
    """List every backend and what it can serve on this machine.

    Shows the version, whether the backend can be used, otherwise the reason and the command that adds it, and its
    kernels with their limits.
    """
    from ..kernels import devices
    from ..kernels.registry import registry

    known = registry()
    here = devices.describe(devices.find(device))
    found = [describe_backend(known, name, here) for name in known.backends]
    if format == "json":
        print_json({"device": {"type": here.type, "name": here.name}, "backends": found})
    else:
        print_table([row for each in found for row in _rows(each)], format)


def describe_backend(known: Registry, name: str, here: Device) -> dict[str, Any]:
    """A description of a backend on this device, in plain JSON types."""
    backend, answer = known.backend(name), known.availability(name)
    return {
        "name": name,
        "summary": backend.summary,
        "available": answer.ok,
        "version": answer.version,
        "origin": answer.origin,
        "reason": answer.reason,
        "install": command_for(known, backend, here),
        "obstacle": obstacle(known, backend, here) if answer.ok else None,
        "kernels": [_kernel(kernel, here) for kernel in backend.kernels],
        "resolves_more": backend.resolve is not None,
    }


def _kernel(kernel: ForwardKernel | BackwardKernel, here: Device) -> dict[str, Any]:
    from ..kernels.contract import ForwardKernel
    from ..kernels.plan import precision_of

    row = kernel.rows.get(here.type)
    return {
        "name": kernel.name,
        "pass": "forward" if isinstance(kernel, ForwardKernel) else "backward",
        "precision": precision_of(kernel.name),
        "declared_error": kernel.declared_error,
        "capabilities": None if row is None else asdict(row),
        "here": [f"runs on {' and '.join(kernel.rows)} only"] if row is None else _limits(row, here),
    }


def _limits(row: Capabilities, here: Device) -> list[str]:
    """The limits of the row on this device, a few words each; a property without a limit is not listed."""
    from ..kernels.capabilities import capability_text

    least, most, multiple = row.head_dims
    bounded = (least, multiple) != (1, 1) or most < 2**31
    masks = [each for each in ("causal", "window") if each not in row.masks]
    alignments = [each for each in ("top-left", "bottom-right") if each not in row.alignments]
    limits = {
        f"not on compute capability {capability_text(here.capability)}": not _fits(row, here),
        f"takes {'/'.join(row.dtypes)}": True,
        f"D {least}-{most}" + (f" by {multiple}" if multiple > 1 else ""): bounded,
        "Dv = D": not row.head_dim_v,
        f"no {' or '.join(masks)} mask": bool(masks),
        f"no {' or '.join(alignments)} alignment": bool(alignments),
        "no GQA": not row.gqa,
        "no softcap": not row.softcap,
        "no empty rows": not row.empty_rows,
        "no training": not row.training,
        "no LSE": not row.lse,
        f"descales per {'/'.join(row.descales)}": bool(row.descales),
    }
    return [words for words, applies in limits.items() if applies]


def _fits(row: Capabilities, here: Device) -> bool:
    below = row.capability_below
    return row.capability <= here.capability and (below is None or here.capability < below)


def _rows(found: dict[str, Any]) -> list[dict[str, str]]:
    """One line of the table for each group of kernels with the same limits."""
    passes: dict[tuple[str, str], list[str]] = {}
    for kernel in found["kernels"]:
        # The precision in the name already says which tensors the kernel takes.
        limits = [each for each in kernel["here"] if each != f"takes {kernel['precision']}"]
        usable = found["available"] and not found["obstacle"]
        here = ", ".join(limits or ["no limits"]) if usable else _missing(found)
        passes.setdefault((kernel["precision"], here), []).append(kernel["pass"])
    groups: dict[tuple[str, str], list[str]] = {}
    for (precision, here), both in passes.items():
        groups.setdefault((" and ".join(both), here), []).append(precision)
    if not groups:
        groups["", _missing(found) if not found["available"] else "no kernels"] = []
    return [
        {
            "backend": found["name"],
            "version": " from ".join(each for each in (found["version"], found["origin"]) if each),
            "pass": both,
            "kernels": f"{' '.join(precisions)}: {here}" if precisions else here,
        }
        for (both, here), precisions in groups.items()
    ]


def _missing(found: dict[str, Any]) -> str:
    reason = found["reason"] or found["obstacle"]
    return f"cannot be used: {reason}" + (f"; add it with: {found['install']}" if found["install"] else "")
