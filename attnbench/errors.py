"""Every error that attnbench raises on purpose, each a named class with the exit code the CLI gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .text.printable import printable

__all__ = [
    "AttnbenchError",
    "AttnbenchWarning",
    "BreachError",
    "BreachWarning",
    "BudgetError",
    "FrozenError",
    "InputError",
    "MalformedFileError",
    "MisuseError",
    "NewerFileError",
    "NoPlanError",
    "OutputError",
    "PeerError",
    "RefusedError",
    "UnknownBackendError",
]

_LONGEST = 400  # characters of what a message says of a file


class AttnbenchError(Exception):
    """The base of every error below; the CLI exits with ``exit_code`` (1 failure, 2 misuse)."""

    exit_code = 1


class AttnbenchWarning(UserWarning):
    """Something is wrong, but the result is still correct."""


class BreachWarning(AttnbenchWarning):
    """A guard has found that a plan's answers are further from exact attention than allowed."""


class BreachError(AttnbenchError, RuntimeError):
    """The same as an error, for ``guard(on_breach="raise")``; ``breach`` is the ``guarding.breach.Breach``."""

    def __init__(self, breach: Any) -> None:
        self.breach = breach
        super().__init__(str(breach))


class MisuseError(AttnbenchError):
    """A request that is wrong on every machine."""

    exit_code = 2


class InputError(MisuseError, ValueError):
    """Tensors or numbers that describe no attention: wrong rank, shapes, dtype, device, scale, window."""


class UnknownBackendError(MisuseError, ValueError):
    """A name that no backend or kernel carries; the message offers the nearest ones."""


class MalformedFileError(MisuseError, ValueError):
    """A file with invalid content: ``path``, ``line`` (from 1, or None) and what was ``expected`` there, printable and
    short.
    """

    def __init__(self, path: str | Path, expected: str, line: int | None = None) -> None:
        self.path, self.line, self.expected = Path(path), line, printable(expected)[:_LONGEST]
        where = f"{path}:{line}" if line is not None else str(path)
        super().__init__(f"{where}: {self.expected}")


class NewerFileError(MalformedFileError):
    """A file whose schema comes from a newer attnbench."""


class OutputError(AttnbenchError, OSError):
    """Results could not be written: no permission, no room, no such place."""


class PeerError(AttnbenchError, RuntimeError):
    """Another rank that shares this one's sequences has failed, does not answer, or asks something else."""


class RefusedError(AttnbenchError, RuntimeError):
    """A named plan cannot serve the spec; ``reasons`` are its refusals, ``alternatives`` the plans that can."""

    def __init__(self, asked: str, reasons: Sequence[str], alternatives: Sequence[str]) -> None:
        self.asked, self.reasons, self.alternatives = asked, tuple(reasons), tuple(alternatives)
        able = ", ".join(alternatives) if alternatives else "none on this machine"
        super().__init__(f"{asked} cannot serve this: {'; '.join(reasons)}. Plans that can: {able}.")


class BudgetError(AttnbenchError, RuntimeError):
    """A named plan exceeds a named ``max_error``, or is not known to stay within it."""


class FrozenError(AttnbenchError, RuntimeError):
    """The frozen choices have no answer: the file or the question is missing, or the GPU is another model."""


class NoPlanError(AttnbenchError, RuntimeError):
    """No plan can serve the spec, or none within the budget.

    ``reasons`` maps each plan to its reasons; the message lists the first ``shown`` of them.
    """

    def __init__(self, message: str, reasons: Mapping[str, Sequence[str]], shown: int | None = None) -> None:
        self.reasons = {plan: tuple(sentences) for plan, sentences in reasons.items()}
        lines = [f"  {plan}: {'; '.join(sentences)}" for plan, sentences in self.reasons.items()]
        more = [] if shown is None or shown >= len(lines) else [f"  and {len(lines) - shown} that cannot run here"]
        super().__init__("\n".join([message, *lines[:shown], *more]))
