"""A worker of the gate: plans of many cases, prepared side by side, each sampled on request.

The environment with the old code runs its own version of this module.  So only plain values cross the pipe, and
``PROTOCOL`` counts up when their meaning changes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from attnbench import __version__
from attnbench.kernels.plan import Plan
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.environment import own_commit

from ...cases.case import Case
from ...measure.open_case import OpenCase
from ...measure.setup import registry_of
from ...measure.timing import Cost, Timer
from ...measure.trial import Trial
from ...measure.worker import main as serve
from ...sequence_lengths import SequenceLengths

__all__ = ["PROTOCOL", "GateWorker", "main"]

PROTOCOL = 1
# Seconds of samples on a GPU, where rounds vary with the clock more than samples within a visit.
_VISIT = 0.005
_COUNTED = 20_000  # the anchor's host work, counting to this number, takes less than a millisecond


class GateWorker:
    """Rows by number, each a case with one input family and a plan.  Methods are requests and may raise anything."""

    def __init__(self, source: str, timer: Timer) -> None:
        self._source, self._timer = source, timer
        self._cases: dict[str, OpenCase] = {}
        self._trials: dict[int, Trial] = {}
        self._anchor: torch.Tensor | None = None
        if timer.device.type == "cuda":
            torch.cuda.set_device(timer.device)

    def protocol(self) -> int:
        """The protocol of this end of the pipe."""
        return PROTOCOL

    def about(self) -> dict[str, str]:
        """The versions of attnbench and torch."""
        return {"attnbench": __version__, "commit": own_commit() or "unknown", "torch": str(torch.__version__)}

    def begin(self, row: int, name: str, spec: Mapping[str, Any], family: str, plan: str, lengths: str = "") -> float:
        """Prepare a row and run it for the first time; returns the milliseconds.

        ``lengths`` are those of the case's sequences as JSON, if it has such: an older version knows no argument for
        them, and fails.
        """
        if name not in self._cases:
            own = SequenceLengths.model_validate_json(lengths) if lengths else None
            case = Case(name, AttentionSpec.from_dict(spec), (family,), own)
            self._cases[name] = OpenCase(case, registry_of(self._source), self._timer.device)
        start = time.perf_counter()
        trial = Trial(Plan.parse(plan), self._cases[name])
        trial.run()
        trial.synchronize()
        trial.restore()
        self._trials[row] = trial
        return (time.perf_counter() - start) * 1e3

    def visit(self, row: int, costs: list[str], replay: bool) -> dict[str, list[float]]:
        """Samples of these costs, milliseconds; ``host`` is the host's part of each call.

        ``worn`` is 1 if a call could not be recorded as a CUDA graph; the process must then be replaced.
        """
        trial = self._trials[row]
        trial.case.load_first()
        asked = {"call" if cost == "host" else cost for cost in costs}
        visit = trial.sample(self._timer, replay, cast(set[Cost], asked))
        samples: dict[str, list[float]] = {str(cost): times for cost, times in visit.time_ms.items()}
        return samples | {"host": visit.host_ms, "worn": [float(visit.worn)]}

    def anchor(self, row: int, costs: list[str], replay: bool) -> dict[str, list[float]]:
        """The same for a piece of work that no version of attnbench changes, under the name of every cost.

        The device multiplies two matrices, which takes as long as attention on 1k tokens; the host counts.
        """
        device = self._timer.device
        if self._anchor is None:
            size, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
            self._anchor = torch.full((size, size), 0.5, dtype=dtype, device=device)
        x = self._anchor
        taken = self._timer.take(lambda: x @ x)
        start = time.perf_counter()
        for _ in range(_COUNTED):
            pass
        host = (time.perf_counter() - start) * 1e3
        return {cost: [host] if cost == "host" else taken.device_ms for cost in costs}

    def end(self, row: int) -> None:
        """Release a row, and its case if no other row has it."""
        case = self._trials.pop(row).case
        if all(each.case is not case for each in self._trials.values()):
            del self._cases[case.case.name]
        if self._timer.device.type == "cuda":
            torch.cuda.empty_cache()


def _made(setting: Mapping[str, Any]) -> GateWorker:
    """The worker for a setting with source, device, threads and, unless an older release made it, core."""
    torch.set_num_threads(setting["threads"])
    timer = Timer.for_device(torch.device(setting["device"]), setting.get("core"))
    return GateWorker(setting["source"], replace(timer, visit=_VISIT) if timer.device.type == "cuda" else timer)


def main(descriptor: int, parent: int) -> None:
    """Serve the inherited connection ``descriptor``."""
    serve(descriptor, parent, _made)
