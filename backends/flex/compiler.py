"""What torch.compile needs on this machine before FlexAttention can run, asked without compiling anything.

Nor is torch's compiler imported, which would know: it takes a second or more, and every first call of ``attention``
asks.
"""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

import torch

__all__ = ["compiler_reason"]

_ELSEWHERE = "name another in TORCHINDUCTOR_CACHE_DIR"


@cache
def compiler_reason(device_type: str) -> str | None:
    """What inductor lacks to compile for this kind of device, or None."""
    folder = os.path.abspath(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _default_cache_folder())
    if not _writable(folder):
        return f"torch.compile cannot write its cache folder {folder}; {_ELSEWHERE}"
    if device_type == "cuda":
        from torch.utils._triton import has_triton_package

        return None if has_triton_package() else "torch.compile needs Triton for a GPU, and it is missing"
    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith("AVX"):
        return "FlexAttention's CPU kernel needs AVX2"
    if capability == "AVX2" and torch.cpu._is_avx512_supported():
        # Inductor compiles for the CPU, torch's products follow the variable: out was off by 0.97 (torch 2.13).
        return "FlexAttention's CPU kernel is wrong where ATEN_CPU_CAPABILITY is below what the CPU has; unset it"
    if not _finds_compiler():
        return "torch.compile needs a C++ compiler, which is not found; install g++, or name one in CXX"
    return _split_by_spaces(folder)


def _default_cache_folder() -> str:
    """As torch's inductor names it."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # no name is known for the user's number
        user = f"uid_{os.getuid()}"
    return os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def _finds_compiler() -> bool:
    """Whether the compiler that torch's inductor would take runs, or it would install one."""
    if os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"):
        return True
    try:
        subprocess.run([os.environ.get("CXX", "g++"), "--version"], check=True, capture_output=True)
    except (subprocess.SubprocessError, OSError):
        return False
    return True


def _writable(folder: str) -> bool:
    """Whether files can be made in it, or it can be made where it is not there yet."""
    there = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _split_by_spaces(cache_folder: str) -> str | None:
    """Which path breaks the compiler's command line: inductor joins the words of it with spaces, and quotes few."""
    if _has_space(cache_folder):
        return f"torch.compile on a CPU takes no cache folder with a space in its path, {cache_folder}; {_ELSEWHERE}"
    for owner, folder in {"torch": torch.__path__[0], "Python": sysconfig.get_path("include")}.items():
        if _has_space(folder):
            return (
                f"torch.compile on a CPU takes no {owner} with a space in its path, {folder}; "
                "make the virtual environment where no folder has a space in its name"
            )
    return None


def _has_space(path: str) -> bool:
    return any(map(str.isspace, path))
