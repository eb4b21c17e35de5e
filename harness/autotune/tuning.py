"""What may be measured beside a running program: enough memory, which plans, one process at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

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

from ..cases.case import Case
from ..measure.setup import DeviceSetup
from ..results.records import Measurement
from ..sweep.run import tasks_of
from .asked_specs import AskedSpec, Terms, input_bytes

__all__ = ["TuningTask", "alone", "chosen", "own_table", "shortage", "tuning_task"]

_POLL_SECONDS = 0.1
_CONTEXT = 2**29  # GPU memory in bytes that a process needs before its first tensor
# Times the inputs: two families and the buffers, a plan's operands and results, and truths in
# FP64, which are four times as wide and of some of the heads.
_COPIES = 8


@contextmanager
def alone(path: Path, deadline: float) -> Iterator[bool]:
    """Keep other processes from measuring for this table; whether none was left at the deadline, waited for until then.

    On a file system without locks nobody is waited for.  Raises OutputError where the folder cannot be written.
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
    """The entries of the user's table that may be used here; empty if there is no table or it is damaged."""
    try:
        table = Table.load(user_table_path(environment))
    except (OSError, MalformedFileError, InputError):
        return Table(environment, {})
    return Binding.between(table, environment, registry()).usable(table)


@dataclass(frozen=True)
class TuningTask:
    """A spec to be measured, with the plans that are lacking, those first that are likeliest to win.

    ``heads`` come before all others: what the spec's calls run now, as they asked and as those
    do that say nothing, and what runs where nothing is known.  A spec that is in the user's
    table is chosen by that alone, so without the times of these an entry could make calls slower.
    """

    asked: AskedSpec
    case: Case
    plans: Sequence[Plan]
    heads: frozenset[Plan]

    def settled_by(self, rows: Sequence[Measurement]) -> bool:
        """Whether these rows suffice for a choice: those of all ``heads``, and one more plan to compare.

        A head that timed out does not count: it runs now, and may be the fastest.
        """
        answered = {row.plan for row in rows if row.status != "timeout"}
        return self.heads <= answered and sum(row.measured for row in rows) > 1


def tuning_task(
    asked: AskedSpec, setup: DeviceSetup, fp8: bool, names: Sequence[str], own: Table, again: bool
) -> TuningTask | str:
    """What of the spec is not in the user's own table yet (``again``: all), or why it cannot be measured.

    The plan that is chosen now is always included, whatever the names select and the table holds: another plan counts
    as faster only if both were measured side by side.
    """
    spec, known = asked.spec, setup.registry
    try:
        case = Case(str(spec), spec)
        tasks = tasks_of([case], known, setup.device, "fp8" if fp8 else spec.dtype, names)
    except MisuseError as error:  # FP8 tensors with descales; or nothing of what the names keep
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


def chosen(asked: AskedSpec, terms: Terms, known: Registry, table: Table | None = None) -> Choice:
    """The choice by the tables, or by this table, even if choices are frozen.  Raises NoPlanError."""
    fp8, max_error = terms
    return choose(asked.spec, asked.device, asked_by="default", fp8=fp8, max_error=max_error, table=table, known=known)


def _likeliest_first(plans: Iterable[Plan], choices: Iterable[Choice], known: Registry) -> list[Plan]:
    """The plans by their best place in any of the choices, of two in one place that of the first choice.

    There those come first that may win, by the times that are known or predicted; of those
    without any the first in the declared order, FP8 plans, whose errors nobody knows yet, among them.
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
    """What the GPU lacks of memory for the workers, each with a context and inputs of its own; None for nothing.

    What torch keeps for this process without using it is given back first.
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
