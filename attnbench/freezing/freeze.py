"""``freeze``: keep the choices of a run in a file, so that all ranks and later runs use the same plans.

The fastest plan may differ between machines and sweeps, and plans round differently, so ranks that choose separately
compute different functions.  A frozen file has precedence over every table, and a question that it lacks is answered
once for all ranks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import Literal, get_args

import torch

from ..choosing.budget import budget_of
from ..choosing.candidate import Candidate
from ..choosing.choice import Choice
from ..choosing.demotion import demoted
from ..choosing.freeze_hook import freezing
from ..choosing.selector import choose
from ..errors import FrozenError, InputError, RefusedError, UnknownBackendError
from ..kernels.capabilities import Device
from ..kernels.contract import Library
from ..kernels.devices import describe
from ..kernels.plan import Plan, backend_of
from ..kernels.registry import Registry, registry
from ..problem.spec import AttentionSpec
from ..state import forget
from ..text.printable import printable
from .file import Frozen, FrozenPlan, FrozenQuestion, Stamp, recording, stamp_of

__all__ = ["Freeze", "freeze"]

Missing = Literal["record", "raise", "choose"]


class Freeze:
    """What ``freeze`` returns: a context manager, or ``start`` and ``stop``; may be opened more than once.  ``path``:
    the file.
    """

    def __init__(self, path: str | PathLike[str], missing: Missing) -> None:
        if missing not in get_args(Missing):
            raise InputError(f"missing must be one of {', '.join(get_args(Missing))}, not {missing!r}")
        try:
            # Replacing a link would leave other ranks, which follow the link, with the old file.
            self.path = Path(os.path.realpath(path))
        except (TypeError, ValueError):
            raise InputError(f"the path of a file is needed, not {path!r:.200}") from None
        if not self.path.name:
            raise InputError(f"{self.path} is a folder; name a file such as run.choices.json")
        self.missing = missing
        self._content = Frozen()
        self._known: Stamp | None = None  # of the file whose choices are all in the content
        self._lock = threading.Lock()

    def start(self) -> Freeze:
        """Answer every choice of this process from the file, in all threads, until ``stop``.

        Raises FrozenError if the file cannot be read or is of another GPU model, MalformedFileError if it is damaged,
        InputError if choices are frozen already.
        """
        with freezing.lock:
            if freezing.active is not None:
                raise InputError(f"choices are frozen already, by {freezing.active.path}; stop that first")
            self._known = stamp_of(self.path)  # before it is read: what changes meanwhile is read again
            self._content = self._read()
            self._check_gpus()
            freezing.open(self)
        forget()  # after that, so that nothing that was chosen before stays
        return self

    def stop(self) -> None:
        """Choose by the tables again."""
        with freezing.lock:
            if freezing.active is not self:
                return
            freezing.close(self)
        forget()

    def __enter__(self) -> Freeze:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def choice(
        self, spec: AttentionSpec, device: torch.device, backend: str, asked_by: str, fp8: bool, max_error: float | None
    ) -> Choice:
        """The choice that ``selector.choose`` returns while this is open: the file's plan, or one that it records.

        Raises FrozenError if the file lacks the question and may not be added to, RefusedError if its plan cannot serve
        here, and what ``choose`` and ``Frozen`` raise.
        """
        # With a registry of its own, choose uses the tables and not the frozen file.
        known = registry()
        if ">" in backend or (":" in backend and not spec.training):  # there is nothing to choose
            return choose(spec, device, backend=backend, asked_by=asked_by, fp8=fp8, max_error=max_error, known=known)
        here = describe(device)
        question = FrozenQuestion.make(here.type, spec, backend, fp8, max_error)
        self._check_model(self._content, here.type, here.name)
        answer = self._content.plans.get(question)
        if answer is None and self.missing == "record":  # another rank may have been first
            with self._lock:
                answer = self._reread(here).plans.get(question)
        if answer is None:
            if self.missing == "raise":
                raise FrozenError(
                    f'{self.path} holds no choice for {question}; a run with missing="record" adds those that it '
                    "makes, and the file can then be given to every rank"
                )
            chosen = choose(spec, device, backend=backend, asked_by=asked_by, fp8=fp8, max_error=max_error, known=known)
            if self.missing == "choose":
                return chosen
            mine = FrozenPlan(chosen.plan, _versions(chosen.plan, known))
            answer = self._record(question, mine, here)
            if answer == mine:
                hint = "; ".join(filter(None, (chosen.hint, self._hint)))
                return replace(chosen, basis="frozen", frozen_in=str(self.path), hint=hint)
        self._check(question, answer, here, known)
        return Choice(
            spec=spec,
            device=str(device),
            plan=answer.plan,
            budget=budget_of(spec, backend, fp8, max_error),
            basis="frozen",
            candidates=(Candidate(answer.plan, "chosen", basis="frozen"),),
            asked=backend,
            asked_by=asked_by,
            hint=self._hint,
            frozen_in=str(self.path),
        )

    @property
    def _hint(self) -> str:
        return f"the choice is frozen in {self.path}"

    def _read(self) -> Frozen:
        try:
            return Frozen.load(self.path)
        except FileNotFoundError:
            if self.missing == "record":
                return Frozen()
            raise FrozenError(f'there is no {self.path}; a run with missing="record" writes it') from None
        except OSError as error:
            raise FrozenError(f"{self.path} cannot be read: {error.strerror}") from None

    def _record(self, question: FrozenQuestion, mine: FrozenPlan, here: Device) -> FrozenPlan:
        """Record the answer; returns the file's, which another rank may have written first."""
        with self._lock, recording(self.path):
            content = self._reread(here)
            if question not in content.plans:
                content = content.adding(here.name, question, mine)
                self._known = content.save(self.path)
                self._content = content
            return content.plans[question]

    def _reread(self, here: Device) -> Frozen:
        """The known choices with those that others have added; an unchanged file is not read."""
        stamp = stamp_of(self.path)
        if stamp is not None and stamp == self._known:
            return self._content
        found = self._read()
        for kind, model in {**self._content.devices, here.type: here.name}.items():
            self._check_model(found, kind, model)
        self._content, self._known = self._content.joined(found), stamp
        return self._content

    def _check_gpus(self) -> None:
        """Raise if this process has GPUs and none is of the file's model; does not initialise CUDA."""
        model = self._content.devices.get("cuda")
        if model is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found = [describe(torch.device("cuda", number)).name for number in range(torch.cuda.device_count())]
            if model not in found:
                self._check_model(self._content, "cuda", found[0])

    def _check_model(self, content: Frozen, kind: str, here: str) -> None:
        model = content.devices.get(kind, here)
        if model != here:
            raise FrozenError(f"{self.path} was recorded on {model}, and this is {here}: keep a file for each")

    def _check(self, question: FrozenQuestion, answer: FrozenPlan, here: Device, known: Registry) -> None:
        """Raise RefusedError unless the plan can serve here as it did where it was recorded."""
        plan, spec = answer.plan, question.spec
        reasons = list(_obstacles(answer, spec, here, known))
        if reasons:
            plans = [each for each in known.plans(spec) if question.opens_fp8 or not each.fp8]
            able = [str(each) for each in plans if each != plan and known.reasons(each, spec, here)[0] == "ok"]
            raise RefusedError(f"{plan} (frozen in {self.path})", reasons, able)


def freeze(path: str | PathLike[str], *, missing: Missing = "record") -> Freeze:
    """Record the choices of a run in a file and repeat them: a context manager, or start() and stop().

    While it is open, a question that the file holds (spec, device model, backend, FP8 opt-in and budget) is answered by
    the file, whatever the tables hold.  ``missing`` says what happens to other questions:

    - ``record``: the plan is chosen as usual and added to the file, which need not exist at first.  Several ranks may
      do so at once: of two answers the first written counts, and the other rank uses it too.  They must share one
      file, on a file system with locks.
    - ``raise``: FrozenError names the question.  Only recorded plans run, so ranks with separate copies, and later
      runs, use the same plans.
    - ``choose``: each rank chooses a plan as usual, and does not write it.

    A plan that the file names and that cannot serve here (refused, unavailable, another version of its backend, or
    demoted by a guard) raises RefusedError with reasons; nothing falls back.  Another model of GPU raises FrozenError.
    A call that names its plan, or without gradients its kernel, needs no choice and no file.

    It holds for this process, all its threads and compiled programs, which are compiled anew when it is opened and
    closed; one can be open at a time.  Backwards belong inside: activation checkpointing chooses there once more.
    A guard does not demote plans meanwhile, because one rank would then differ from the others; it only warns.

    Raises InputError for invalid arguments.

    >>> with attnbench.freeze("run.choices.json"):
    ...     train()
    """
    return Freeze(path, missing)


def _obstacles(answer: FrozenPlan, spec: AttentionSpec, here: Device, known: Registry) -> Iterator[str]:
    """Why the plan cannot serve as it did, one sentence for each reason."""
    try:
        reasons = known.reasons(answer.plan, spec, here)[1]
    except UnknownBackendError as error:
        reasons = [str(error)]
    if reasons:
        yield from reasons
        return
    now = _versions(answer.plan, known)
    for name in sorted(now.keys() | answer.versions.keys()):
        before, found = answer.versions.get(name, "unknown"), now.get(name, "unknown")
        if before != found:
            yield f"recorded with {name} {before}, here is {found}"
    reason = demoted(answer.plan, spec)
    if reason is not None:
        yield reason


def _versions(plan: Plan, known: Registry) -> dict[str, str]:
    """The version of each backend of the plan, with what it comes from, and of the libraries that have its kernels."""
    found: dict[str, str] = {}
    for backend in map(backend_of, plan.kernels):
        answer = known.availability(backend)
        full_version = " from ".join(filter(None, (answer.version or "unknown", answer.origin)))
        found[backend] = printable(full_version)[:_LONGEST]
        for library in known.backend(backend).built_on:
            found[_LIBRARIES[library]] = _library(library)
    return found


def _library(name: Library) -> str:
    if name == "cudnn":
        loaded: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        return str(loaded)
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


_LIBRARIES: dict[Library, str] = {"cudnn": "cuDNN", "triton": "Triton"}  # told from the backends of these names
_LONGEST = 256  # characters of a version: what the file is held to
