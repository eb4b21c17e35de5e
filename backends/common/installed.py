"""What is installed, from metadata and files alone: importing a vendor's package takes seconds, and loads CUDA."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from attnbench.kernels.contract import Availability

__all__ = ["cuda_availability", "has_file", "installed", "release", "torch_availability", "versions_of", "without_cuda"]


def torch_availability() -> Availability:
    """torch itself, which is always there."""
    return Availability(version=torch.__version__, origin="torch")


def cuda_availability() -> Availability:
    """torch, where it was built with CUDA."""
    return without_cuda(origin="torch") or torch_availability()


def without_cuda(install: str | None = None, origin: str | None = None) -> Availability | None:
    """The answer of a backend whose kernels need CUDA where torch was built without; None where it has it."""
    if torch.version.cuda is not None:
        return None
    reason = f"torch {torch.__version__} was built without CUDA"
    return Availability(reason=reason, install=install, origin=origin)


def installed(module: str, *distributions: str) -> str | None:
    """The version of a top-level module that can be imported, "unknown" where no distribution says; else None."""
    try:
        if find_spec(module) is None:
            return None
    except (ImportError, ValueError):  # ValueError: something in sys.modules that has no spec
        return None
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def versions_of(install: str, *distributions: str) -> list[str] | Availability:
    """The version of each distribution, or the answer of a backend where one, or CUDA, is missing."""
    if missing := without_cuda(install):
        return missing
    versions = []
    for distribution in distributions:
        try:
            versions.append(metadata.version(distribution))
        except metadata.PackageNotFoundError:
            return Availability(reason=f"{distribution} is not installed", install=install)
    return versions


def release(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version; None where it does not start with two."""
    parts = version.split("+")[0].split(".")[:2]
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(part.isdecimal() for part in parts) else None


def has_file(package: str, pattern: str) -> bool:
    """Whether the folder of a package holds a file or folder that matches the pattern."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return any(any(Path(folder).glob(pattern)) for folder in folders or ())
