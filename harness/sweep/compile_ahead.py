"""Compile kernels in many processes at once before anything is timed.

Inductor and Triton cache what they compile on the disk, where the measuring workers find it.  Otherwise a sweep of
sixty cases would wait for one compilation after the other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from attnbench.kernels.plan import Plan, backend_of

from ..cases.case import Case
from ..measure.setup import DeviceSetup
from ..measure.worker import Setting
from .worker_pool import process_count, share_out
from .worker_process import LostError, Worker

__all__ = ["FirstRuns"]


class FirstRuns:
    """The first runs of the compiling backends' plans on one GPU, several at a time.

    ``first_ms`` maps case name and plan to the duration of the first run: in the worker that measures, the compiled
    code already exists.  A run that fails here fails there again, and gets a row.
    """

    def __init__(self, work: Sequence[tuple[Case, Sequence[Plan]]], setup: DeviceSetup) -> None:
        self.first_ms: dict[tuple[str, Plan], float] = {}
        self._setup = setup
        self._waiting = deque(_first_runs(work, setup)) if setup.device.type == "cuda" else deque()
        setting = Setting(setup.source, setup.timer, 1)
        count = process_count(len(self._waiting), setup.environment.memory_bytes)
        self._workers = [Worker(setting) for _ in range(count)]

    @property
    def needed(self) -> bool:
        """Whether there is anything to run."""
        return bool(self._workers)

    def run(self) -> Mapping[tuple[str, Plan], float]:
        """Run them all.  An exception in the calling thread, such as an interrupt, ends every process."""
        share_out(self._waiting, self._workers, self._serve)
        return self.first_ms

    def _serve(self, worker: Worker, request: tuple[Case, Plan]) -> None:
        case, plan = request
        try:
            self.first_ms[case.name, plan] = worker.ask("compile", case, plan, seconds=self._setup.seconds)
        except LostError as lost:
            if lost.status == "oom" and case.spec.batch > 1 and case.lengths is None:
                # Beside others there is too little memory; the code is nearly always that of any batch.
                self._waiting.append((replace(case, spec=case.spec.replace(batch=1)), plan))


def _first_runs(work: Sequence[tuple[Case, Sequence[Plan]]], setup: DeviceSetup) -> list[tuple[Case, Plan]]:
    """For each case the plans that together compile everything, with the one input family that is needed.

    A backward is compiled anew for each forward of its own backend, whose operands it reads as they are.  A plan that
    adds nothing to earlier ones is left out.  Runs that are likely to compile the same code are far apart: the later
    one finds it on the disk, where two at once would both compile it.
    """
    compiling = {name for name, backend in setup.registry.backends.items() if backend.compiles}
    alike = Counter[tuple[object, ...]]()
    runs: list[tuple[int, tuple[Case, Plan]]] = []
    for case, plans in work:
        spec = case.spec
        covered: set[tuple[str, ...]] = set()
        for plan in plans:
            kernels = _compiled(plan, compiling)
            if kernels - covered:
                covered |= kernels
                same = plan, spec.head_dim, spec.head_dim_v, spec.mask.kind, spec.softcap > 0
                runs.append((alike[same], (replace(case, families=case.families[:1]), plan)))
                alike[same] += 1
    return [run for _, run in sorted(runs, key=lambda each: each[0])]


def _compiled(plan: Plan, compiling: Collection[str]) -> set[tuple[str, ...]]:
    """What the plan compiles: each pass with its kernel, and a backward with the forward of the same backend."""
    passes = zip(("forward", "backward"), plan.kernels, strict=False)
    found: set[tuple[str, ...]] = {each for each in passes if backend_of(each[1]) in compiling}
    if len(found) == 2 and len(set(map(backend_of, plan.kernels))) == 1:
        found.add(plan.kernels)
    return found
