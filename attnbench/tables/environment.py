"""The environment of a measurement: facts that must match for results to be compared or used, and others."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable
from dataclasses import asdict, field, fields
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from ..errors import InputError
from ..files.json_text import validation_fault
from ..text.printable import printable
from .nvml import Nvml

if TYPE_CHECKING:
    from torch import device as TorchDevice  # the class below has a field named torch

    from ..kernels.registry import Registry

__all__ = ["Environment", "own_commit", "text_of"]

_LONGEST = 256  # characters of any one fact: what comes from a file is bounded
_COMMIT = "[0-9a-f]{7,64}(-dirty)?"
_GIT_PATIENCE = 5.0  # seconds
_Text = Annotated[str, Field(min_length=1, max_length=_LONGEST)]
_Number = Annotated[int, Field(gt=0, lt=2**20)]
_ByBackend = Annotated[dict[_Text, _Text], Field(max_length=256)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class Environment:
    """One machine, device and set of installed versions; None: there is no such thing, it is unknown, or the record is
    older.

    ``device_name`` is the GPU's or CPU's model, ``capability`` the compute capability (``9.0``).  ``cuda`` is what
    torch was built for, ``cudnn`` what is loaded, ``driver`` the kernel driver.  ``uuid_hash`` tells GPUs of one model
    apart without disclosing the UUID; ``clock_mhz`` is the highest SM clock, ``power_cap_w`` the power limit,
    ``memory_bytes`` the memory.  ``threads`` is torch's number of CPU threads.  ``commit`` is attnbench's own, with
    ``-dirty`` for local changes, None for a wheel.  ``backends`` has the version of every usable backend, ``origins``
    the distribution or build it comes from.
    """

    device_type: _Text
    device_name: _Text
    device_count: _Number = 1
    capability: _Text | None = None
    driver: _Text | None = None
    uuid_hash: Annotated[str, Field(pattern="^[0-9a-f]{12}$")] | None = None
    clock_mhz: _Number | None = None
    power_cap_w: _Number | None = None
    memory_bytes: Annotated[int, Field(gt=0, lt=2**60)] | None = None
    cuda: _Text | None = None
    cudnn: _Text | None = None
    torch: _Text
    triton: _Text | None = None
    python: _Text
    platform: _Text
    cpu: _Text
    threads: _Number
    attnbench: _Text
    commit: Annotated[str, Field(pattern=f"^{_COMMIT}$")] | None = None
    backends: _ByBackend = field(default_factory=dict, hash=False)
    origins: _ByBackend = field(default_factory=dict, hash=False)

    @classmethod
    def detect(cls, device: TorchDevice, registry: Registry) -> Environment:
        """The environment of this process for ``device`` (cpu or cuda) and the registry's backends."""
        import torch

        from .. import __version__

        gpu = device.type == "cuda"
        loaded: Callable[[], int | None] = torch.backends.cudnn.version
        cpu = _cpu_model()
        properties = torch.cuda.get_device_properties(device) if gpu else None
        answers = {name: registry.availability(name) for name in registry.backends}
        found = {name: answer for name, answer in answers.items() if answer.ok}
        uuid = str(properties.uuid) if properties else None
        return cls(
            device_type=device.type,
            device_name=properties.name if properties else cpu,
            device_count=torch.cuda.device_count() if gpu else 1,
            capability=f"{properties.major}.{properties.minor}" if properties else None,
            uuid_hash=hashlib.sha256(uuid.encode()).hexdigest()[:12] if uuid else None,
            memory_bytes=properties.total_memory if properties else None,
            cuda=torch.version.cuda if gpu else None,
            cudnn=_cudnn(loaded()) if gpu else None,
            # Without the build: cuda has it, and a CPU build computes as a GPU build does.
            torch=torch.__version__.partition("+")[0],
            triton=_installed("triton"),
            python=platform.python_version(),
            platform=platform.platform()[:_LONGEST],
            cpu=cpu,
            threads=torch.get_num_threads(),
            attnbench=__version__,
            commit=own_commit(),
            backends={name: (answer.version or "unknown")[:_LONGEST] for name, answer in found.items()},
            origins={name: answer.origin[:_LONGEST] for name, answer in found.items() if answer.origin},
            **(_driver_facts(uuid) if uuid else {}),
        )

    @property
    def hard(self) -> dict[str, str | int | None]:
        """The facts that must always match for results to be compared or used.

        ``differences`` also compares facts that bind only if both sides know them: versions and origins of backends,
        power cap.
        """
        names = ["device_type", "device_name", "torch", "triton"]
        names += ["capability", "cuda", "cudnn"] if self.device_type == "cuda" else ["threads"]
        return {name: getattr(self, name) for name in names}

    @property
    def key(self) -> str:
        """A short hash of ``hard``, the same for older records; equal keys do not promise that nothing hard differs."""
        return hashlib.sha256(json.dumps(self.hard, sort_keys=True).encode()).hexdigest()[:12]

    def differences(self, other: Environment) -> tuple[list[str], list[str]]:
        """(hard, soft): a line for each fact that differs; hard ones make times or errors incomparable."""
        hard: list[str] = []
        soft: list[str] = []
        binding = self.hard.keys() | other.hard.keys()
        if None not in (self.power_cap_w, other.power_cap_w):
            binding |= {"power_cap_w"}
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if each.name not in ("backends", "origins") and mine != theirs:
                (hard if each.name in binding else soft).append(
                    f"{each.name} was {text_of(mine)}, is {text_of(theirs)}"
                )
        for name in sorted({*self.backends, *other.backends}):
            before, now = self.backends.get(name), other.backends.get(name)
            if before is None or now is None:
                soft.append(f"the backend {text_of(name)} {'was not' if before is None else 'is no longer'} available")
                continue
            if before != now:
                hard.append(f"the backend {text_of(name)} was {text_of(before)}, is {text_of(now)}")
            came, comes = self.origins.get(name), other.origins.get(name)
            if None not in (came, comes) and came != comes:
                hard.append(f"the backend {text_of(name)} came from {text_of(came)}, comes from {text_of(comes)}")
        both = self.backends.keys() & other.backends.keys()
        if unsure := sorted(both & (self.origins.keys() ^ other.origins.keys())):
            soft.append(f"where {text_of(', '.join(unsure))} come from is known on one side only")
        return hard, soft

    def to_dict(self) -> dict[str, Any]:
        """Every fact, in plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Environment:
        """The environment that ``to_dict`` wrote.  Raises InputError on missing, unknown or impossible entries."""
        try:
            return cls(**data)
        except ValidationError as error:
            fault = validation_fault(error, "the whole")
        except TypeError as error:  # no mapping
            fault = str(error)
        raise InputError(f"not an environment: {printable(fault)}")


def text_of(value: object) -> str:
    """A fact in one line, as a message may show it."""
    return "absent" if value is None else printable(str(value))


def _installed(distribution: str) -> str | None:
    try:
        return version_of(distribution)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    """The processor's name where Linux has it, else the architecture."""
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return platform.processor() or platform.machine() or "unknown"
    for line in facts.splitlines():
        label, _, value = line.partition(":")
        if label.strip() == "model name" and value.strip():
            return value.strip()[:_LONGEST]
    return platform.machine() or "unknown"


def _cudnn(number: int | None) -> str | None:
    """91900 is 9.19.0: the numbering of cuDNN since version 9."""
    return None if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _driver_facts(uuid: str) -> dict[str, Any]:
    """NVML's facts of the GPU with this UUID; None for what is missing, forbidden or not known."""
    with Nvml() as nvml:
        gpu = nvml.gpu(uuid)
        return {
            "driver": nvml.driver(),
            "clock_mhz": gpu.highest_clock_mhz() if gpu else None,
            "power_cap_w": gpu.power_cap_w() if gpu else None,
        }


def own_commit() -> str | None:
    """The commit of attnbench's checkout, ``-dirty`` with local changes; None for a wheel or without git."""
    return _commit_of(Path(__file__).resolve().parents[2])


@cache
def _commit_of(folder: Path) -> str | None:
    """Asked once: a process computes with the code that it has loaded, whatever becomes of the files."""
    if not (folder / ".git").exists():  # a wheel may be installed inside another repository
        return None
    try:
        if not re.search(
            r'^name = "attnbench"$', (folder / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
        ):
            return None
    except (OSError, UnicodeDecodeError):
        return None
    # Variables such as GIT_DIR, set inside hooks, would point git at another repository; a
    # damaged .git would send it looking further up.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    bounded = {**outside, "GIT_CEILING_DIRECTORIES": str(folder.parent), "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        run = subprocess.run(
            command, env=bounded, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_GIT_PATIENCE
        )
    except (OSError, UnicodeDecodeError, subprocess.TimeoutExpired):
        return None
    commit = run.stdout.strip()
    return commit if run.returncode == 0 and re.fullmatch(_COMMIT, commit) else None
