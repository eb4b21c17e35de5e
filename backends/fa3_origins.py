"""Where FlashAttention-3's kernels come from: three distributions of the same source, first found wins.

==========  =========================================================================  ========
origin      what it is                                                                 backward
==========  =========================================================================  ========
official    ``flash_attn_interface``, built from Dao-AILab/flash-attention, hopper/    as built
sglang      ``sgl_kernel``, from the wheel ``sglang-kernel``                           no
hub         ``kernels-community/flash-attn3``, fetched by Hugging Face ``kernels``     yes
==========  =========================================================================  ========

``ATTNBENCH_FA3_ORIGIN`` names one of them instead.  ``hub`` is found by itself only where its files already lie
in the local cache; naming it allows the download.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnbench.kernel import Availability

from .fa3_operator import BACKWARD, FORWARD, OperatorError, bound

__all__ = ["INSTALL", "ORIGINS", "VARIABLE", "Library", "Origin", "availability", "chosen", "installed", "library"]

VARIABLE = "ATTNBENCH_FA3_ORIGIN"
INSTALL = "pip install 'attnbench[fa3]'"
_HUB = "kernels-community/flash-attn3"


class Library(NamedTuple):
    """The two passes, as ``fa3_operator.bound`` made them; None where the build has no backward."""

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None


@dataclass(frozen=True)
class Origin:
    """One distribution: ``find`` answers its version or None without loading it, ``load`` its operators' namespace.

    ``omissions`` are the parts of FlashAttention-3 that the build leaves out, as the suffixes of the source's
    own flags FLASHATTENTION_DISABLE_*.
    """

    name: str
    find: Callable[[], str | None]
    load: Callable[[], Any]
    omissions: Callable[[], frozenset[str]]


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


def _official_load() -> Any:
    import_module("flash_attn_interface")
    return torch.ops.flash_attn_3


def _official_omissions() -> frozenset[str]:
    """The flags that the build wrote down; older builds wrote none and leave nothing out that is asked here."""
    try:
        flags = import_module("flash_attn_config").CONFIG["build_flags"]
    except (ImportError, AttributeError, KeyError):
        return frozenset()
    return frozenset(name.removeprefix("FLASHATTENTION_DISABLE_") for name, off in flags.items() if off)


def _sglang_load() -> Any:
    import_module("sgl_kernel.flash_ops")
    return torch.ops.sgl_kernel


def _hub_find() -> str | None:
    """The version, where ``kernels`` is installed and the kernel is cached or was asked for by name."""
    version = installed("kernels", "kernels")
    if version is None or not (os.environ.get(VARIABLE) == "hub" or _hub_cached()):
        return None
    return f"{_HUB} v1 by kernels {version}"


def _hub_cached() -> bool:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("KERNELS_CACHE") or os.environ.get("HF_HUB_CACHE") or home / "hub")
    name = _HUB.replace("/", "--")
    return any((cache / f"{kind}s--{name}").is_dir() for kind in ("kernel", "model"))


def _hub_load() -> Any:
    module = import_module("kernels").get_kernel(_HUB, version=1)
    try:
        return module._ops.ops  # the namespace that the build gave its operators, different in each
    except AttributeError:
        raise OperatorError(f"{_HUB} does not name its operators in _ops.ops") from None


ORIGINS = (
    Origin("official", lambda: installed("flash_attn_interface", "flash_attn_3"), _official_load, _official_omissions),
    Origin(
        "sglang",
        lambda: installed("sgl_kernel", "sglang-kernel", "sgl-kernel"),
        _sglang_load,
        lambda: frozenset({"BACKWARD"}),
    ),
    Origin("hub", _hub_find, _hub_load, frozenset),
)


def chosen() -> Origin | None:
    """The origin that answers on this machine, None where none does."""
    return _chosen(os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=8)
def _chosen(wanted: str) -> Origin | None:
    return next((each for each in ORIGINS if wanted in ("", each.name) and each.find() is not None), None)


def availability() -> Availability:
    """The version and origin found, from metadata alone where it suffices, or why none can be used.

    Metadata cannot say whether what the hub holds fits this machine, so that one is loaded.
    """
    wanted = os.environ.get(VARIABLE, "")
    names = [each.name for each in ORIGINS]
    if wanted and wanted not in names:
        return Availability(reason=f"{VARIABLE} is {wanted!r}; it must be one of {', '.join(names)}")
    if torch.version.cuda is None:
        return Availability(reason=f"torch {torch.__version__} was built without CUDA", install=INSTALL)
    origin = chosen()
    if origin is None:
        sought = f"the origin {wanted} (named by {VARIABLE})" if wanted else f"none of the origins {', '.join(names)}"
        return Availability(reason=f"{sought} is {'not ' if wanted else ''}installed", install=INSTALL)
    if origin.name == "hub":
        try:
            library()
        except Exception as error:  # whatever a download or a foreign build raises
            return Availability(reason=f"{_HUB} could not be loaded: {type(error).__name__}: {error}", origin="hub")
    return Availability(version=origin.find(), origin=origin.name)


def library() -> Library:
    """The chosen origin's kernels, loaded once.

    Raises ImportError or OSError where the build cannot be loaded, OperatorError where its operators are unknown.
    """
    origin = chosen()
    if origin is None:
        raise ImportError("FlashAttention-3 is not installed; " + INSTALL)
    return _loaded(origin)


@lru_cache(maxsize=8)
def _loaded(origin: Origin) -> Library:
    operators = origin.load()
    backward = None
    if "BACKWARD" not in origin.omissions():
        backward = bound(operators.bwd.default, BACKWARD)
    return Library(bound(operators.fwd.default, FORWARD), backward)
