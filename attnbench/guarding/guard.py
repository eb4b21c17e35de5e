"""``guard``: regularly compares a few rows of attention's results, on live tensors, with exact attention.

For every plan and spec, some rows of the output and of the gradients are computed exactly every so many calls
(``check``); a sequential test decides whether the plan is beyond its bound (``significance``).
"""

from __future__ import annotations

import logging
import random
import threading
import warnings
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from ..choosing.budget import class_bound
from ..choosing.demotion import demote
from ..dispatch.context import check_budget
from ..errors import AttnbenchWarning, BreachError, BreachWarning, InputError, OutputError
from ..kernels.contract import Inputs, Operands
from ..kernels.guard_hook import Executed, Gradients, watching
from ..kernels.plan import Plan
from ..problem.fp8 import Quantised
from ..problem.lengths import Lengths
from ..problem.spec import AttentionSpec
from ..problem.visible_keys import VisibleKeys
from ..state import forget
from .breach import Breach
from .breach_file import save_tensors
from .check import Group, Part, Sums, aside, gradient_sums, out_sums, part, pick_groups, pick_rows
from .rows import Rows, as_rows, used
from .significance import Detector

__all__ = ["Guard", "guard"]

OnBreach = Literal["warn", "raise", "demote"]
_log = logging.getLogger("attnbench.guard")
_log.addHandler(logging.NullHandler())  # a program without logging sees the warnings only
_MOST = 4096  # the most plans and specs, and breaches, to keep: a program with ever new shapes has no limit
_GREETED = 64  # of these, so many are checked at their first call; later ones at a random one of their first ``every``
_Kind = Literal["out", "gradients"]
_Drawn = TypeVar("_Drawn")


@dataclass
class _Case:
    """A plan at a spec under a bound: its passes so far, and the results of checking them."""

    plan: Plan
    spec: AttentionSpec
    bound: float
    calls: dict[_Kind, int]
    due: dict[_Kind, int]
    checks: int = 0
    detectors: dict[str, Detector] = field(default_factory=dict)
    saved: bool = False


@dataclass
class _Check:
    """A check that is under way: its sums are on the host once ``done`` has happened."""

    case: _Case
    call: int
    device: torch.device
    sums: Sums
    done: torch.cuda.Event | None
    tensors: dict[str, Tensor | Quantised]


@dataclass
class _Sample:
    """A forward whose gradients will be checked, with a copy of what the check reads, so that nothing else is kept."""

    guard: Guard
    case: _Case
    call: int
    groups: list[Group]
    part: Part
    tensors: dict[str, Tensor | Quantised]
    spec: AttentionSpec
    seen: VisibleKeys | None

    def derived(self, grad_out: Tensor, gradients: Gradients) -> None:
        """Check them."""
        self.guard._check_gradients(self, grad_out, gradients)


@dataclass
class _Prepared(threading.local):
    """The operands that this thread made last, and their inputs, by weak references."""

    operands: Callable[[], Operands | None] = lambda: None
    given: tuple[Callable[[], Tensor | None], ...] = ()


class Guard:
    """What ``guard`` returns: a context manager, or ``start`` and ``stop``; may be opened more than once.

    ``breaches`` are the findings, ``checks`` the number of checks read, ``skipped`` why others were inconclusive.
    """

    def __init__(
        self, every: int, max_error: float | None, on_breach: OnBreach, save_to: str | PathLike[str] | None, seed: int
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputError(f"every must be a number of calls, 1 or more, got {every!r}")
        if on_breach not in get_args(OnBreach):
            raise InputError(f"on_breach must be one of {', '.join(get_args(OnBreach))}, not {on_breach!r}")
        check_budget(max_error)
        self.every, self.max_error, self.on_breach = every, max_error, on_breach
        self.save_to = None if save_to is None else Path(save_to)
        self.checks = 0
        self.skipped: Counter[str] = Counter()
        self._breaches: deque[Breach] = deque(maxlen=_MOST)
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._cases: OrderedDict[tuple[Plan, AttentionSpec, float], _Case] = OrderedDict()
        self._known: dict[int, tuple[Executed, _Case]] = {}
        self._under_way: deque[_Check] = deque()
        self._prepared = _Prepared()
        self._warned: set[Plan] = set()

    @property
    def breaches(self) -> tuple[Breach, ...]:
        """The breaches so far, oldest first; at most the newest 4096."""
        return tuple(self._breaches)

    def start(self) -> Guard:
        """Watch every pass of this process, in all threads, until ``stop``; guards opened earlier see none of it."""
        with watching.lock:
            if self in watching.opened:
                raise InputError("this guard is open already")
            watching.open(self)
        return self

    def stop(self) -> None:
        """Stop watching and act on the checks under way; raises BreachError for those, with ``on_breach="raise"``."""
        watching.close(self)
        self._read(wait=True)

    def __enter__(self) -> Guard:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.stop()
            return
        watching.close(self)
        self._read(wait=True, quietly=True)  # the program's own error goes first

    def answered(self, execution: Executed, operands: Operands, inputs: Inputs, out: Tensor) -> None:
        """A forward has run."""
        if execution.backward is not None:
            self.prepared(operands, inputs)
        turn = self._turn(execution, "out", out)
        if turn is not None:
            self._check_out(*turn, inputs, out)
        if self._under_way and not _recorded(out):
            self._read()

    def prepared(self, operands: Operands, inputs: Inputs) -> None:
        """Operands were made of the inputs, perhaps for a backward in this thread."""
        self._prepared.operands = weakref.ref(operands)
        self._prepared.given = tuple(weakref.ref(x) for x in inputs.unquantised())

    def sample(self, execution: Executed, inputs: Inputs) -> _Sample | None:
        """A forward has run that may have a backward."""
        q, k, v = inputs.unquantised()
        turn = self._turn(execution, "gradients", q)
        return None if turn is None else self._sampled(*turn, q, k, v, inputs.lengths)

    def derived(self, execution: Executed, operands: Operands, grad_out: Tensor, gradients: Gradients) -> None:
        """A backward has run that may follow operands of this thread's."""
        if self._prepared.operands() is not operands:
            return
        given = [x for each in self._prepared.given if (x := each()) is not None]
        turn = self._turn(execution, "gradients", grad_out) if len(given) == 3 else None
        sample = None if turn is None else self._sampled(*turn, given[0], given[1], given[2], operands.lengths)
        if sample is not None:
            sample.derived(grad_out, gradients)

    def _turn(self, execution: Executed, kind: _Kind, x: Tensor) -> tuple[_Case, int] | None:
        """Count this pass; returns (case, number of the call) if it is to be checked, else None."""
        if type(x) not in (Tensor, torch.nn.Parameter):  # traced or distributed tensors have no rows to read
            return None
        with self._lock:
            case = self._case(execution)
            call = case.calls[kind]
            if call == case.due[kind]:
                if _recorded(x):
                    return None
                case.due[kind] = call + self.every
                case.calls[kind] += 1
                return case, call
            case.calls[kind] += 1
            return None

    def _case(self, execution: Executed) -> _Case:
        known = self._known.get(id(execution))
        if known is not None:
            return known[1]
        plan, spec = execution.plan, execution.spec
        bound = self.max_error or execution.budget or class_bound(plan, spec)
        case = self._cases.get((plan, spec, bound))
        if case is None:
            first = 0 if len(self._cases) < _GREETED else self._random.randrange(self.every)
            case = _Case(plan, spec, bound, dict.fromkeys(get_args(_Kind), 0), dict.fromkeys(get_args(_Kind), first))
            self._cases[plan, spec, bound] = case
            if len(self._cases) > _MOST:
                self._cases.popitem(last=False)
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[id(execution)] = execution, case  # kept alive, so that no other object gets its id
        return case

    def _draw(self, pick: Callable[[AttentionSpec, random.Random], _Drawn], spec: AttentionSpec) -> _Drawn:
        with self._lock:
            return pick(spec, self._random)

    def _check_out(self, case: _Case, call: int, inputs: Inputs, out: Tensor) -> None:
        q, k, v, lengths, _ = inputs
        if lengths is None:
            picks, tensors = self._draw(pick_rows, case.spec), self._saved(q=q, k=k, v=v)
            self._check(case, call, out.device, lambda: out_sums(q, k, v, out, case.spec, picks), tensors)
            return
        plain = inputs.unquantised()
        picks = self._draw(pick_rows, as_rows(case.spec, *plain[:2]))

        def sums() -> Sums:
            rows = Rows.of(case.spec, lengths, *plain)
            return out_sums(rows.q, rows.k, rows.v, out, rows.spec, picks, rows.seen)

        self._check(case, call, out.device, sums, {})

    def _saved(self, **tensors: Tensor | Quantised) -> dict[str, Tensor | Quantised]:
        return tensors if self.save_to is not None else {}

    def _sampled(
        self, case: _Case, call: int, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None
    ) -> _Sample | None:
        try:
            with aside(q.device):
                spec, seen = case.spec, None
                kept: dict[str, Tensor | Quantised] = {}
                if lengths is not None:
                    spec, seen, q, k, v = Rows.of(case.spec, lengths, q, k, v)
                elif self.save_to is not None:
                    kept = {"q": q.detach().clone(), "k": k.detach().clone(), "v": v.detach().clone()}
                groups = self._draw(pick_groups, spec)
                return _Sample(self, case, call, groups, part(groups, q, k, v), kept, spec, seen)
        except Exception as error:  # memory, most likely: the program goes on without this check
            self._skip(type(error).__name__, str(error))
            return None

    def _check_gradients(self, sample: _Sample, grad_out: Tensor, gradients: Gradients) -> None:
        if self not in watching.opened or _recorded(grad_out):
            return
        given = grad_out if sample.seen is None else used(grad_out, sample.seen.used_q)
        sums = partial(gradient_sums, sample.part, sample.groups, given, gradients, sample.spec, sample.seen)
        tensors = {**sample.tensors, "grad_out": grad_out} if sample.tensors else {}
        self._check(sample.case, sample.call, grad_out.device, sums, tensors)

    def _check(
        self, case: _Case, call: int, device: torch.device, sums: Callable[[], Sums],
        tensors: dict[str, Tensor | Quantised],
    ) -> None:  # fmt: skip
        """Queue a check; read it at once on a CPU, or if the tensors are to be saved."""
        try:
            with aside(device):
                found, done = sums(), None
                if device.type == "cuda":
                    host = torch.empty(found.packed.shape, dtype=found.packed.dtype, pin_memory=True)
                    found = replace(found, packed=host.copy_(found.packed, non_blocking=True))
                    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    done.record()
        except Exception as error:  # memory, most likely: the program goes on without this check
            self._skip(type(error).__name__, str(error))
            return
        with self._lock:
            self._under_way.append(_Check(case, call, device, found, done, tensors))
        self._read(wait=bool(tensors))

    def _read(self, wait: bool = False, quietly: bool = False) -> None:
        """Act on the checks that are done, or on all."""
        found: list[Breach] = []
        with self._lock:
            while self._under_way:
                check = self._under_way[0]
                if check.done is not None:
                    if wait:
                        check.done.synchronize()
                    elif not check.done.query():  # type: ignore[no-untyped-call]
                        break
                found += self._judge(self._under_way.popleft())
        errors = [error for each in found if (error := self._act(each)) is not None]
        if errors and not quietly:
            raise errors[0]

    def _judge(self, check: _Check) -> list[Breach]:
        case = check.case
        usable, found = check.sums.read()
        if not usable:
            self._skip("values that are not finite went in, or gradients left the range of fp16")
            return []
        self.checks, case.checks = self.checks + 1, case.checks + 1
        breaches = []
        for name, sums in found.items():
            detector = case.detectors.setdefault(name, Detector(case.bound))
            finding = detector.add(*sums)
            if finding is not None:
                breaches.append(
                    Breach(
                        case.plan, case.spec, str(check.device), name, finding.error, case.bound, finding.evidence,
                        check.call, case.checks,
                    )
                )  # fmt: skip
        if breaches and check.tensors and self.save_to is not None and not case.saved:
            case.saved = True
            try:
                path = save_tensors(self.save_to, breaches[0], check.tensors)
                breaches = [replace(each, path=path) for each in breaches]
            except OutputError as error:  # the breach is reported all the same
                self._skip("its tensors could not be written", str(error))
        return breaches

    def _act(self, breach: Breach) -> BreachError | None:
        self._breaches.append(breach)
        _log.warning("%s", breach, extra={"breach": breach.to_dict()})
        if self.on_breach == "raise":
            return BreachError(breach)
        if self.on_breach == "demote" and demote(breach.plan, breach.spec, f"demoted by a guard: {breach.reason}"):
            forget()
        with self._lock:
            new = breach.plan not in self._warned
            self._warned.add(breach.plan)
        if new:
            message = f"{breach}; what else is found of this plan is in Guard.breaches and in the log {_log.name}"
            warnings.warn(message, BreachWarning, stacklevel=2)
        return None

    def _skip(self, reason: str, detail: str = "") -> None:
        with self._lock:
            self.skipped[reason] += 1
            new = self.skipped[reason] == 1
        if new:
            message = f"a check fell short: {reason}{detail and f': {detail}'}"
            _log.warning("%s", message)
            warnings.warn(f"{message}; Guard.skipped counts such checks", AttnbenchWarning, stacklevel=2)


def _recorded(x: Tensor) -> bool:
    """Whether a CUDA graph is being recorded: it would replay a check that is never read."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def guard(
    every: int = 1000,
    max_error: float | None = None,
    on_breach: OnBreach = "warn",
    *,
    save_to: str | PathLike[str] | None = None,
    seed: int = 0,
) -> Guard:
    """Check the errors of running plans on the program's own tensors: a context manager, or start() and stop().

    For each plan and spec, the first pass and every ``every``-th after it is checked: some queries of some heads
    against exact attention, and some rows of dq, dk and dv.  All threads and compiled programs are checked; what a CUDA
    graph records or replays is not.  Of several open guards the one opened last is active.

    ``max_error`` is the largest relative L2 of out and gradients; None is the budget that the plan was chosen under
    (for a named plan the default of its precision).  A breach needs evidence from several checks, fewer the further
    they are beyond the bound, or one check that is ten times beyond or not finite.  A row of dq or dk whose sum cancels
    counts with at least half its length without cancellation.

    Every breach is logged to ``attnbench.guard``.  ``warn`` warns once for each plan and spec; ``raise`` raises
    BreachError; ``demote`` warns and counts the plan as inaccurate at that spec in this process, so that another is
    chosen unless it was named; ``explain`` says so.  On a GPU no call waits for a check: a later call or ``stop`` reads
    it, and may raise BreachError.

    ``save_to`` is a folder for the tensors of each plan and spec's first breach (safetensors, for
    ``attnbench sweep --preset``); the program then waits for each check, and keeps a copy of q, k, v from a checked
    forward to its backward.  ``seed`` seeds the guard's own generator, which draws the rows.  Raises InputError for
    invalid arguments.

    >>> with attnbench.guard(every=1000, on_breach="demote"):
    ...     train()
    """
    return Guard(every, max_error, on_breach, save_to, seed)
