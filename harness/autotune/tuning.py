"""What to measure beside a running program: which plans, with enough memory, one process at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from attnbench.choosing.candidate import Candidate
from attnbench.choosing.choice import Choice
from attnbench.choosing.selector import choose
from attnbench.errors import InputError, MalformedFileError, MisuseError, NoPlanError, OutputError
from attnbench.files.lock import FileLock
from attnbench.kernels.plan import Plan, backend_of
from attnbench.kernels.registry import Registry, registry
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.binding import Binding
from attnbench.tables.environment import Environment
from attnbench.tables.table import Table
from attnbench.tables.user_table import user_table_path

from ..capture.file import input_bytes
from ..cases.case import Case
from ..cases.drawn_lengths import typical_lengths
from ..measure.setup import DeviceSetup
from ..results.records import Measurement
from ..sequence_lengths import SequenceLengths
from ..sweep.run import tasks_of
from .observed_specs import ObservedSpec, Terms

__all__ = ["TuningTask", "alone", "chosen", "own_table", "shortage", "tuning_task"]

_POLL_SECONDS = 0.1
_CONTEXT = 2**29  # GPU memory in bytes that a process needs before its first tensor
# Times the inputs: two families and the buffers, a plan's operands and results, and truths in FP64, four times as wide
# but of some heads only.
_COPIES = 8


@contextmanager
def alone(path: Path, deadline: float) -> Iterator[bool]:
    """Lock the table against other measuring processes; yields False if another still held the lock at the deadline.

    A file system without locks counts as locked.  Raises OutputError if the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".measuring"))
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None
    with lock:
        ours = True
        with suppress(OSError):  # a file system without locks
            while not (ours := lock.acquire()) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        yield ours


def own_table(environment: Environment) -> Table:
    """The entries of the user's table that are valid here; empty if the table is missing or damaged."""
    try:
        table = Table.load(user_table_path(environment))
    except (OSError, MalformedFileError, InputError):
        return Table(environment, {})
    return Binding.between(table, environment, registry()).usable(table)


@dataclass(frozen=True)
class TuningTask:
    """A spec to measure, with the plans that are missing in the table, the likeliest winners first.

    ``heads`` come first: what the spec's calls run now, with their terms and with default terms, and what is chosen
    without measurements.  A table entry alone decides its spec, so without their times it could make calls slower.
    """

    asked: ObservedSpec
    case: Case
    plans: Sequence[Plan]
    heads: frozenset[Plan]

    def settled_by(self, rows: Sequence[Measurement]) -> bool:
        """Whether these rows suffice for a choice: all ``heads`` and at least one other measured plan.

        A head that timed out does not count: it runs now, and may be the fastest.
        """
        answered = {row.plan for row in rows if row.status != "timeout"}
        return self.heads <= answered and sum(row.measured for row in rows) > 1


def tuning_task(
    asked: ObservedSpec, setup: DeviceSetup, fp8: bool, names: Sequence[str], own: Table, again: bool
) -> TuningTask | str:
    """The task for what the user's table lacks of the spec (``again``: for all of it), or why there is none.

    The current choice is always included, whatever the names select and the table holds: plans are only comparable if
    they are measured side by side.
    """
    spec, known = asked.spec, setup.registry
    lengths = _lengths(asked)
    if isinstance(lengths, str):
        return lengths
    try:
        case = Case(str(spec), spec, lengths=lengths)
        tasks = tasks_of([case], known, setup.device, "fp8" if fp8 else spec.dtype, names)
    except MisuseError as error:  # FP8 tensors with descales, or no plan matches the names
        return str(error)
    able = [task.plan for task in tasks if task.runs]
    there = {} if again else own.at(spec)
    here = own if there else None  # the table as it is now: another process may have written it since the call

    def choice(terms: Terms, table: Table | None) -> list[Choice]:
        with suppress(NoPlanError):
            return [chosen(asked, terms, known, table)]
        return []

    asking = [each for terms in asked.choices for each in choice(terms, here)]
    others = [each for terms in ((fp8, None), (False, None)) for each in choice(terms, here)]
    default = [each for each in choice((False, None), Table(setup.environment, {})) if each.plan not in there]
    heads = [each.plan for each in asking]
    heads += [each.plan for each in (*others, *default) if not names or each.plan in able]
    every = dict.fromkeys([*heads, *_likeliest_first(able, [*asking, *others], known)])
    if len(every) < 2:
        among = "of what was named nothing but" if names else "nothing but"
        return f"there is nothing to choose: {among} {', '.join(map(str, every))} can serve it"
    if there.keys() >= every.keys():
        return "your table has it already; again=True measures it anew"
    return TuningTask(asked, case, [plan for plan in every if plan in heads or plan not in there], frozenset(heads))


def _lengths(asked: ObservedSpec) -> SequenceLengths | str | None:
    """The lengths of the first call, or without one typical ones; None for sequences of one length, or why there are
    none.
    """
    if asked.spec.lengths is None:
        return None
    if asked.lengths is None:
        typical = typical_lengths(asked.spec)
        return typical or "the spec of padded rows does not say how long their sequences are; call attention with them"
    try:
        return SequenceLengths.read(asked.lengths, asked.spec)
    except ValidationError:
        return "its sequences are too many, or none of them has a query and a key"


def chosen(asked: ObservedSpec, terms: Terms, known: Registry, table: Table | None = None) -> Choice:
    """The choice by the tables, or by ``table``, even if choices are frozen.  Raises NoPlanError."""
    fp8, max_error = terms
    return choose(asked.spec, asked.device, asked_by="default", fp8=fp8, max_error=max_error, table=table, known=known)


def _likeliest_first(plans: Iterable[Plan], choices: Iterable[Choice], known: Registry) -> list[Plan]:
    """The plans by their best rank in any choice; the earlier choice decides between equals.

    Likely winners come first, by known or predicted time; plans without a time follow in the declared order, with FP8
    plans, whose errors are not known yet, among them.
    """

    def order(each: Candidate) -> tuple[bool, bool, float, float, str]:
        declared = known.forward(each.plan.forward).preference
        return (
            each.verdict != "chosen",
            each.verdict not in ("chosen", "eligible", "unmeasured"),
            math.inf if each.time_ms is None else each.time_ms,
            math.inf if declared is None else declared,
            str(each.plan),
        )

    best: dict[Plan, tuple[int, int]] = {}
    for number, choice in enumerate(choices):
        for place, each in enumerate(sorted(choice.candidates, key=order)):
            best[each.plan] = min((place, number), best.get(each.plan, (place, number)))
    return sorted(plans, key=lambda plan: best.get(plan, (len(best), 0)))


def shortage(spec: AttentionSpec, plans: Sequence[Plan], setup: DeviceSetup) -> str | None:
    """Which GPU memory the workers lack, each with its own context and inputs; None if there is enough.

    First releases what torch caches for this process.
    """
    device = setup.device
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    # A backend has one process, or one for each of its forwards where these compile.
    compiling = {name for name, backend in setup.registry.backends.items() if backend.compiles}
    processes = {plan.forward if backend_of(plan.forward) in compiling else backend_of(plan.forward) for plan in plans}
    need = len(processes) * (_CONTEXT + _COPIES * input_bytes(spec))
    if need <= free:
        return None
    return f"measuring it needs about {need / 1e9:.1f} GB of the GPU beside this program, {free / 1e9:.1f} GB are free"
