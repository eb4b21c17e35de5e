"""Delayed scaling with our own state: the last steps' magnitudes decide the next step's scales.

TransformerEngine keeps the magnitudes of the last 1024 steps in each module.  Here calls with one spec share a history.
It holds ratios to a bound from each step's own inputs, so that callers with other magnitudes can share it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch
from torch import Tensor

from attnbench.graph_pools import current_stream, outside_pools, recording
from attnbench.problem.spec import AttentionSpec

__all__ = ["Histories", "History"]

_LENGTH = 1024  # steps: DelayedScaling's amax_history_len
# DelayedScaling's margin=8: what the next step may grow by without saturating.  Gradients that pointed anywhere and now
# point one way grow by √n over n tokens.  These are e5m2, whose precision is the same over 30 binades.
_MARGIN = 256.0
_KEPT = 256  # histories in memory, a few KiB each


class History:
    """Ratios of the last steps, one column a role, on one device and stream; thread-safe.

    Not ``live``, it only answers: nothing made while a graph is recorded may be kept, because it has no value yet.
    """

    def __init__(self, roles: int, device: torch.device, *, live: bool = True) -> None:
        def zeros() -> Tensor:
            return torch.zeros(_LENGTH + 2, roles, dtype=torch.float32, device=device)

        # All of it is written in place: a recorded graph goes on reading it, and none of it may be a graph's memory.
        state = outside_pools(zeros, device) if live else zeros()
        self._ratios, self._largest, self._noted = state[:_LENGTH], state[-2], state[-1]
        self._steps = 0
        self._pending = False
        self._lock = threading.Lock()
        self._live = live

    @property
    def cold(self) -> bool:
        """Whether no step has been noted, and one can be."""
        return self._live and self._steps == 0 and not self._pending

    def frozen(self) -> History:
        """A view of the same numbers that does not record."""
        view = object.__new__(History)
        view.__dict__ |= {**self.__dict__, "_live": False, "_pending": False}
        return view

    def scales(self, bounds: Tensor, limit: float) -> Tensor:
        """Factors (roles,) in fp32 that bring the largest expected magnitude to ``limit``.

        ``bounds`` (roles,) are magnitudes that nothing exceeds in this step, expected as long as no step has been
        noted.
        """
        with self._lock:
            if self._pending:
                self._fold()
                self._pending = False
            ratios = (self._largest * _MARGIN).clamp_max(1.0)
            expected = torch.where(ratios > 0, ratios, 1.0) * bounds
        return limit / expected.clamp_min(torch.finfo(torch.float32).tiny * limit)

    def note(self, amax: Tensor, bounds: Tensor) -> None:
        """Record that a step with these bounds reached the magnitudes ``amax``, both (roles,); it counts from the next
        step.
        """
        if not self._live or recording():
            return
        with self._lock:
            # As TransformerEngine does, a step with something that is not finite leaves the scales alone.
            self._noted.copy_(torch.nan_to_num(amax / bounds, nan=0.0, posinf=0.0))
            self._pending = True

    def _fold(self) -> None:
        self._ratios[self._steps % _LENGTH].copy_(self._noted)
        self._largest.copy_(self._ratios.amax(dim=0))
        self._steps += 1


class Histories:
    """One history for each spec, device and stream."""

    def __init__(self, roles: int) -> None:
        self._roles = roles
        self._kept: OrderedDict[tuple[AttentionSpec, torch.device, int], History] = OrderedDict()
        self._recorded: list[History] = []  # read by graphs that may be replayed as long as the process lives
        self._lock = threading.Lock()

    def of(self, spec: AttentionSpec, device: torch.device) -> History:
        """The history for such calls; while a graph is recorded, a frozen view of the latest one."""
        with self._lock:
            if recording():
                return self._while_recording(spec, device)
            key = (spec, device, current_stream(device))
            found = self._kept.get(key)
            if found is None:
                found = self._kept[key] = History(self._roles, device)
            self._kept.move_to_end(key)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return found

    def _while_recording(self, spec: AttentionSpec, device: torch.device) -> History:
        for (mine, where, _), history in reversed(self._kept.items()):
            if (mine, where) == (spec, device):
                if not any(history is each for each in self._recorded):
                    self._recorded.append(history)
                return history.frozen()
        return History(self._roles, device, live=False)
