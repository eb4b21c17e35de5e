"""Where FlashAttention-3's kernels come from: five distributions of the same source, first found wins.

==============  =====================================================================  ========
origin          what it is                                                             backward
==============  =====================================================================  ========
official        ``flash_attn_interface``, built from Dao-AILab/flash-attention hopper  as built
repackaged      the same module from another distribution: the wheel                   as built
                ``tokenspeed-fa3``
sglang          ``sgl_kernel``, from the wheel ``sglang-kernel``                       no
fa3-fwd         ``fa3_fwd``, from the wheel ``fa3-fwd``                                no
hub             ``kernels-community/flash-attn3``, by Hugging Face ``kernels``         yes
==============  =====================================================================  ========

``ATTNBENCH_FA3_ORIGIN`` names one of them instead.  ``hub`` is found by itself only where its files already lie
in the local cache; naming it allows the download.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnbench.kernels.contract import Availability

from ..common.installed import installed, without_cuda
from .fa3_operator import BACKWARD, FORWARD, OperatorError, bound

__all__ = [
    "INSTALL",
    "ORIGINS",
    "VARIABLE",
    "Build",
    "Library",
    "availability",
    "chosen",
    "interface",
    "library",
]

VARIABLE = "ATTNBENCH_FA3_ORIGIN"
INSTALL = "pip install 'attnbench[fa3]'"
_HUB = "kernels-community/flash-attn3"
_OFFICIAL = "flash-attn-3"  # the distribution that the source's own setup.py builds


class Library(NamedTuple):
    """The two passes, as ``fa3_operator.bound`` made them; None where the build has no backward."""

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None


@dataclass(frozen=True)
class Build:
    """A build that is installed, found without loading it.

    ``name``: the origin, or the distribution of a repackaged one.  ``load`` gives the namespace of its operators.
    ``omissions`` are the parts it leaves out, as the suffixes of the source's flags FLASHATTENTION_DISABLE_*.
    ``verify``: only loading shows whether it fits this torch and CUDA.
    """

    name: str
    version: str
    load: Callable[[], Any]
    omissions: Callable[[], frozenset[str]]
    verify: bool = False


@lru_cache(maxsize=1)
def interface() -> Build | None:
    """The build behind ``flash_attn_interface``, under the name of the distribution that brought it."""
    version = installed("flash_attn_interface", _OFFICIAL)
    if version is None:
        return None
    providers = metadata.packages_distributions().get("flash_attn_interface", [])
    names = [name.replace("_", "-").lower() for name in providers]
    if not names or _OFFICIAL in names:
        return Build("official", version, _interface_load, _interface_omissions)
    return Build(names[0], metadata.version(names[0]), _interface_load, _interface_omissions, verify=True)


def _interface_load() -> Any:
    import_module("flash_attn_interface")
    return torch.ops.flash_attn_3


def _interface_omissions() -> frozenset[str]:
    return _omissions("flash_attn_config")


def _omissions(config: str) -> frozenset[str]:
    """The flags that the build wrote down; older builds wrote none and leave nothing out that is asked here."""
    try:
        flags = import_module(config).CONFIG["build_flags"]
    except (ImportError, AttributeError, KeyError):
        return frozenset()
    return frozenset(name.removeprefix("FLASHATTENTION_DISABLE_") for name, off in flags.items() if off)


def _official() -> Build | None:
    build = interface()
    return build if build is not None and build.name == "official" else None


def _repackaged() -> Build | None:
    build = interface()
    return build if build is not None and build.name != "official" else None


def _sglang() -> Build | None:
    version = installed("sgl_kernel", "sglang-kernel", "sgl-kernel")
    return None if version is None else Build("sglang", version, _sglang_load, lambda: frozenset({"BACKWARD"}))


def _sglang_load() -> Any:
    import_module("sgl_kernel.flash_ops")
    return torch.ops.sgl_kernel


def _fa3_fwd() -> Build | None:
    version = installed("fa3_fwd", "fa3-fwd")
    if version is None:
        return None
    return Build("fa3-fwd", version, _fa3_fwd_load, lambda: _omissions("fa3_fwd_config"), verify=True)


def _fa3_fwd_load() -> Any:
    import_module("fa3_fwd._C")
    return torch.ops.fa3_fwd


def _hub() -> Build | None:
    """If ``kernels`` is installed and the kernel is cached or was named."""
    version = installed("kernels", "kernels")
    if version is None or not (os.environ.get(VARIABLE) == "hub" or _hub_cached()):
        return None
    return Build("hub", f"{_HUB} v1 by kernels {version}", _hub_load, frozenset, verify=True)


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


ORIGINS: Mapping[str, Callable[[], Build | None]] = {
    "official": _official,
    "repackaged": _repackaged,
    "sglang": _sglang,
    "fa3-fwd": _fa3_fwd,
    "hub": _hub,
}


def chosen() -> Build | None:
    """The build that answers on this machine, None where there is none."""
    return _chosen(os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=8)
def _chosen(wanted: str) -> Build | None:
    finders = [find for name, find in ORIGINS.items() if wanted in ("", name)]
    return next((build for find in finders if (build := find()) is not None), None)


def availability() -> Availability:
    """The version and origin found, or why there is none; a prebuilt wheel is loaded, because metadata does not say if
    it fits.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted and wanted not in ORIGINS:
        return Availability(reason=f"{VARIABLE} is {wanted!r}; it must be one of {', '.join(ORIGINS)}")
    if missing := without_cuda(INSTALL):
        return missing
    build = chosen()
    if build is None:
        if wanted:
            return Availability(reason=f"the origin {wanted} (named by {VARIABLE}) is not installed", install=INSTALL)
        return Availability(reason="FlashAttention-3 is not installed", install=INSTALL)
    if build.verify:
        try:
            library()
        except Exception as error:  # whatever a download or a foreign build raises
            reason = f"{build.name} {build.version} could not be loaded: {type(error).__name__}: {error}"
            return Availability(reason=reason, origin=build.name)
    return Availability(version=build.version, origin=build.name)


def library() -> Library:
    """The chosen build's kernels, loaded once.  Raises ImportError, OSError or OperatorError."""
    build = chosen()
    if build is None:
        raise ImportError("FlashAttention-3 is not installed; " + INSTALL)
    return _loaded(build)


@lru_cache(maxsize=8)
def _loaded(build: Build) -> Library:
    operators = build.load()
    backward = None
    if "BACKWARD" not in build.omissions():
        backward = bound(operators.bwd.default, BACKWARD)
    return Library(bound(operators.fwd.default, FORWARD), backward)
