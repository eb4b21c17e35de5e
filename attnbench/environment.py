"""Where measurements were taken: what must match for them to be compared or used, and what is good to know."""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    from torch import device as TorchDevice  # the class below has a field named torch

    from .registry import Registry

__all__ = ["Environment"]

_LONGEST = 256  # characters of any one fact: what comes from a file is bounded
_MOST_BACKENDS = 256


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One machine, device and set of installed versions.

    ``device_name`` is the GPU's name, or the CPU's model; ``capability`` the compute
    capability (``9.0``).  ``cuda`` is what torch was built for, ``cudnn`` what is loaded,
    ``driver`` the kernel driver.  ``threads`` is how many torch computes with on the CPU.
    ``backends`` holds the version of every backend that can be used here.  None means
    that there is no such thing here, or that nothing on this machine tells.
    """

    device_type: str
    device_name: str
    device_count: int = 1
    capability: str | None = None
    driver: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    torch: str
    triton: str | None = None
    python: str
    platform: str
    cpu: str
    threads: int
    attnbench: str
    backends: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(each.name, getattr(self, each.name), optional=each.default is None)

    @classmethod
    def detect(cls, device: TorchDevice, registry: Registry) -> Environment:
        """What this process would measure in: ``device`` (cpu or cuda) and the backends that the registry can use."""
        import torch

        from . import __version__

        gpu = device.type == "cuda"
        loaded: Callable[[], int | None] = torch.backends.cudnn.version
        cpu = _cpu_model()
        properties = torch.cuda.get_device_properties(device) if gpu else None
        found = {name: registry.availability(name) for name in registry.backends}
        return cls(
            device_type=device.type,
            device_name=properties.name if properties else cpu,
            device_count=torch.cuda.device_count() if gpu else 1,
            capability=f"{properties.major}.{properties.minor}" if properties else None,
            driver=_driver() if gpu else None,
            cuda=torch.version.cuda if gpu else None,
            cudnn=_cudnn(loaded()) if gpu else None,
            torch=torch.__version__.partition("+")[
                0
            ],  # cuda says the rest, and a CPU build computes as a GPU build does
            triton=_installed("triton"),
            python=platform.python_version(),
            platform=platform.platform()[:_LONGEST],
            cpu=cpu,
            threads=torch.get_num_threads(),
            attnbench=__version__,
            backends={name: answer.version or "unknown" for name, answer in found.items() if answer.ok},
        )

    @property
    def hard(self) -> dict[str, str | int | None]:
        """The facts that must match for results to be compared or used, the backends' versions aside.

        Those are compared one by one in ``differences``: a backend that was added since
        takes nothing away from what was measured of the others.
        """
        names = ["device_type", "device_name", "torch", "triton"]
        names += ["capability", "cuda", "cudnn"] if self.device_type == "cuda" else ["threads"]
        return {name: getattr(self, name) for name in names}

    @property
    def key(self) -> str:
        """A short hash of ``hard``: equal keys can be told apart by backend versions alone."""
        return hashlib.sha256(json.dumps(self.hard, sort_keys=True).encode()).hexdigest()[:12]

    def differences(self, other: Environment) -> tuple[list[str], list[str]]:
        """(hard, soft): one sentence for each fact in which ``other`` differs from this one.

        A hard difference makes times or errors incomparable; a soft one is worth a note.
        """
        hard: list[str] = []
        soft: list[str] = []
        binding = self.hard.keys() | other.hard.keys()
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if each.name != "backends" and mine != theirs:
                (hard if each.name in binding else soft).append(f"{each.name} was {_said(mine)}, is {_said(theirs)}")
        for name in sorted({*self.backends, *other.backends}):
            before, now = self.backends.get(name), other.backends.get(name)
            if before is None or now is None:
                soft.append(f"the backend {name} {'was not' if before is None else 'is no longer'} available")
            elif before != now:
                hard.append(f"the backend {name} was {before}, is {now}")
        return hard, soft

    def to_dict(self) -> dict[str, Any]:
        """Every fact, in plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> Environment:
        """The environment that ``to_dict`` wrote.  Raises InputError on missing, unknown or impossible entries."""
        if not isinstance(data, Mapping):
            raise InputError(f"an environment is a mapping, not {type(data).__name__}")
        known = {each.name for each in fields(cls)}
        if unknown := [name for name in data if name not in known]:
            raise InputError(f"an environment has no entry {str(unknown[0])[:_LONGEST]!r}")
        try:
            return cls(**data)
        except TypeError as error:
            raise InputError(f"not an environment: {error}") from None


def _check(name: str, value: object, *, optional: bool) -> None:
    if name == "backends":
        if not isinstance(value, Mapping) or len(value) > _MOST_BACKENDS:
            raise InputError(f"an environment's backends must be a mapping of at most {_MOST_BACKENDS} versions")
        for backend, found in value.items():
            _check("a backend's name", backend, optional=False)
            _check(f"the version of {backend}", found, optional=False)
    elif name in ("device_count", "threads"):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**20:
            raise InputError(f"an environment's {name} must be a positive number, not {str(value)[:_LONGEST]!r}")
    elif not (value is None and optional) and not (isinstance(value, str) and 0 < len(value) <= _LONGEST):
        raise InputError(
            f"an environment's {name} must be a text of 1 to {_LONGEST} characters, not {str(value)[:_LONGEST]!r}"
        )


def _said(value: object) -> str:
    return "absent" if value is None else str(value)


def _installed(distribution: str) -> str | None:
    try:
        return version_of(distribution)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    """The processor's own name where Linux tells, else the architecture."""
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


def _driver() -> str | None:
    """The NVIDIA driver's version as NVML tells it; None where NVML is missing or has no access."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        try:
            return str(nvml.nvmlSystemGetDriverVersion())
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None
