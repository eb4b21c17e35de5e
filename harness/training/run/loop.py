"""The training loop: every step taken, timed and recorded, from the first or from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnbench.guarding.guard import Guard

from ..models.attention import note_plans
from .attention_share import share_of_attention
from .checkpoint import load, newest, save, state_of
from .history import History
from .one_step import take_step
from .optimisers import learning_rate, make_optimiser, set_rate
from .parallel import Ranks, shared_attention, spread
from .step_clock import StepClock
from .trainable import Trainable
from .warning_signs import signs_of

__all__ = ["LoopOptions", "train", "warm_up_steps"]

_MOST_WARM_UP = 10  # steps, as the article has; a quarter of a shorter run
_MOST_WATCHED = 3


@dataclass(frozen=True)
class LoopOptions:
    """How a run is checkpointed and when it stops.

    Every ``checkpoint_every`` steps (0: never) its state is written to ``checkpoints``.  It ends as diverged after
    ``patience`` consecutive steps whose loss or gradient is not finite.
    """

    checkpoints: Path
    checkpoint_every: int = 100
    patience: int = 5


def warm_up_steps(steps: int) -> int:
    """How many of a run's first steps are not timed."""
    return min(_MOST_WARM_UP, steps // 4)


def train(
    trainable: Trainable,
    ranks: Ranks,
    options: LoopOptions,
    on_step: Callable[[History], None],
    *,
    resume: bool = False,
) -> str | None:
    """Take every step and call ``on_step`` with the history after each; returns why the run diverged, or None.

    The model is first spread over the ranks.  With ``resume`` it continues from the newest checkpoint, if there is one.
    Before the first step, one in the middle and the last, an extra pass reads the warning signs; after the warm-up, a
    few steps run under the profiler.  Neither changes what is learnt, and these steps are not timed.
    """
    run = _Run(trainable, ranks, options, on_step)
    if resume:
        run.restore()
    with shared_attention(run.config, run.mesh):
        return run.go()


class _Run:
    def __init__(
        self, trainable: Trainable, ranks: Ranks, options: LoopOptions, on_step: Callable[[History], None]
    ) -> None:
        self.mesh = spread(trainable, ranks)
        self.trainable, self.ranks, self.options, self.on_step = trainable, ranks, options, on_step
        self.config, self.device = trainable.config, ranks.device
        self.optimiser = make_optimiser(self.config, trainable.module)
        self.history = History()
        self.clock = StepClock(self.device)
        self.parameters = [each for each in trainable.module.parameters() if each.requires_grad]
        # In each pass that reads the signs a forward and a backward are checked, of however many layers.
        self.guard = Guard(max(1, len(trainable.attention_modules)), None, "warn", None, self.config.seed)
        self.bad = 0
        self.watched = False

    def restore(self) -> None:
        path = newest(self.options.checkpoints)
        step = self.ranks.agreed(-1 if path is None else int(path.name.partition("-")[2]))
        if step < 0:
            return
        self._make_state()
        path = self.options.checkpoints / f"step-{step:09d}"
        state = state_of(self.trainable.module, self.optimiser)
        self.history = load(path, state, self._learnt(), self.ranks)
        self.history.resumed_at.append(self.history.steps)
        warm = range(self.history.steps, self.history.steps + warm_up_steps(self.config.steps))
        self.history.untimed += [step for step in warm if step < self.config.steps]
        for norm, loss in zip(self.history.grad_norm, self.history.loss, strict=True):
            self._count(loss, norm)

    def go(self) -> str | None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        step = self.history.steps
        while step < self.config.steps:
            if step in (0, self.config.steps // 2, self.config.steps - 1):
                self._read_signs(step)
            if watched := self._to_watch(step):
                step = self._watch(step, watched)
            else:
                self._clocked(step)
                step += 1
            every = self.options.checkpoint_every
            due = bool(every) and step // every > (step - max(1, watched)) // every and step < self.config.steps
            if reason := self._take_in(all=due or step == self.config.steps):
                return reason
            if due and not self.bad:
                self._checkpoint()
        return None

    def _step(self, step: int) -> None:
        set_rate(self.optimiser, learning_rate(self.config, step))
        batch = self.trainable.batch(step, self.ranks.rank, self.ranks.world)
        loss, norm = take_step(self.trainable, self.optimiser, self.parameters, batch)
        self._found = torch.stack((self.ranks.mean(loss.double()), norm.double()))

    def _clocked(self, step: int) -> None:
        self.clock.start()
        self._step(step)
        self.clock.stop(step, self._found)

    def _take_in(self, *, all: bool) -> str | None:
        """Record the steps that have ended; returns why the run diverged, if it did."""
        for step, ms, loss, norm in self.clock.ended(all=all):
            self.history.loss.append(loss)
            self.history.grad_norm.append(norm)
            self.history.step_ms.append(round(ms, 6))
            self._count(loss, norm)
            self._note_memory()
            self.on_step(self.history)
            if self.bad >= self.options.patience:
                steps = "1 step" if self.bad == 1 else f"{self.bad} steps"
                return f"loss or gradients were not finite for {steps}, from step {step - self.bad + 1} on"
        return None

    def _count(self, loss: float, norm: float) -> None:
        self.bad = 0 if math.isfinite(loss) and math.isfinite(norm) else self.bad + 1

    def _note_memory(self) -> None:
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            self.history.memory_bytes = max(peak, self.history.memory_bytes or 0)

    def _to_watch(self, step: int) -> int:
        """How many steps from here on to profile."""
        count = min(_MOST_WATCHED, self.config.steps // 8)
        fits = warm_up_steps(self.config.steps) <= step <= self.config.steps - count
        return count if fits and not self.watched and self.history.attention is None else 0

    def _watch(self, step: int, count: int) -> int:
        self.watched = True
        steps = range(step, step + count)
        work = [partial(self._clocked, each) for each in steps]
        modules = self.trainable.attention_modules
        self.history.attention = share_of_attention(work, modules, self.device, compiled=self.config.compile)
        self.history.untimed += list(steps)
        return step + count

    def _read_signs(self, step: int) -> None:
        """One extra forward and backward of the step's batch, which changes nothing."""
        self._note_memory()

        def work() -> None:
            loss = self.trainable.loss(self.trainable.batch(step, self.ranks.rank, self.ranks.world))
            loss.backward()  # type: ignore[no-untyped-call]

        gpus = [self.device] if self.device.type == "cuda" else []
        modules = self.trainable.attention_modules
        before = self.guard.checks, len(self.guard.breaches)
        with (
            torch.random.fork_rng(devices=gpus),
            torch.compiler.set_stance("force_eager"),
            note_plans(modules) as plans,
            self.guard,
        ):
            sign = signs_of(step, modules, work)
        self.history.plans = list(dict.fromkeys([*self.history.plans, *plans]))
        self.optimiser.zero_grad()
        if sign is not None:
            found = self.guard.checks - before[0], len(self.guard.breaches) - before[1]
            sign = sign.model_copy(update={"checks": found[0], "breaches": found[1]})
            self.history.signs = [each for each in self.history.signs if each.step != step] + [sign]
            self.history.untimed.append(step)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _make_state(self) -> None:
        """Create the optimiser's state, which a first step makes, by a step that changes nothing."""
        for each in self.parameters:
            each.grad = torch.zeros_like(each)
        set_rate(self.optimiser, 0.0)
        self.optimiser.step()
        self.optimiser.zero_grad()

    def _checkpoint(self) -> None:
        state = state_of(self.trainable.module, self.optimiser)
        save(self.options.checkpoints, state, self.history, self._learnt(), self.ranks)

    def _learnt(self) -> dict[str, Any]:
        """What must be the same to resume: the configuration, and the text that its data names."""
        corpus = self.trainable.corpus
        return self.config.to_dict() | ({} if corpus is None else {"corpus": corpus.digest})
