#!/usr/bin/env python
"""Whole training steps of several choices in turn, so that no drift of the GPU favours one of them.

    python results/steps.py size=3b,seqlen=32768,batch=1,slices=4,checkpointing=true --out steps
    python results/steps.py model=vit-huge,batch=64 --choices sdpa own,block=te sdpa,compile=true,graphs=true --out vit

A choice is sdpa (torch's default), auto, auto-fp8, or a backend, kernel or plan, and behind it the settings of the cell
that it changes.  Cells and choices set the fields of ``TrainConfig``, and two more: slices=4 takes a quarter of gpt's
layers and vocabulary, so that each part has the share of a step that it has in the whole model, which takes about four
times as long; graphs=true replays the step from a CUDA graph, so that the host, which then launches once a step, has no
part in its time.

Choices that differ in attention alone share a model and optimiser, so losses say nothing about learning; with --learn
each choice trains a model of its own by the schedule of ``attnbench train``.  A choice that would run the plans of an
earlier one of the same model is not timed again.  Rows are those of ``attnbench train`` (``attnbench train --show
FOLDER``), written after every round; what is already there is not measured again.  ``memory_bytes`` is what a process
with this choice alone would have at its peak.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
import torch.distributed as dist

from attnbench.errors import AttnbenchError, InputError
from attnbench.harness.measure.worker import is_out_of_memory
from attnbench.harness.results.peaks import PEAK_TFLOPS
from attnbench.harness.training.config import TrainConfig
from attnbench.harness.training.models.attention import Attend
from attnbench.harness.training.models.gpt import gpt_size
from attnbench.harness.training.rows import LONGEST_REASON, TrainingRun
from attnbench.harness.training.run.attention_share import share_of_attention
from attnbench.harness.training.run.foreseen import check_beforehand
from attnbench.harness.training.run.one_step import Replayed, take_step
from attnbench.harness.training.run.optimisers import learning_rate, make_optimiser, set_rate
from attnbench.harness.training.run.parallel import Ranks, join_ranks, shared_attention, spread
from attnbench.harness.training.run.session import Session
from attnbench.harness.training.run.step_clock import StepClock
from attnbench.harness.training.run.trainable import build

SETTINGS: dict[str, Any] = get_type_hints(TrainConfig) | {"slices": int, "graphs": bool}
_NOT_SET = ("attention", "fp8", "max_error", "steps")  # which a choice and --rounds say
_ROWS = 16  # of the head, which matrix products want a multiple of
_WARM = 3  # rounds that are not timed: of packed documents the third still compiled
_RATE = 1e-5  # of choices that share a model: of no consequence for times, and small enough for every size


def main() -> int:
    """Time all choices, and return 1 if one is not ok."""
    try:
        return _measure(arguments(sys.argv[1:]))
    except AttnbenchError as error:
        print(f"steps.py: {error}", file=sys.stderr)
        return error.exit_code


def _measure(asked: argparse.Namespace) -> int:
    until = time.monotonic() + asked.limit
    # A block has a version for each choice.  Beyond the limit torch runs it uncompiled, and says so in a log alone.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    with join_ranks(asked.device) as ranks, Session(asked.out, ranks, resume=True) as session:
        failed = False
        for cell in asked.cells:
            torch.compiler.reset()
            turns = Turns(session, ranks, asked, until)
            turns.take([Choice.of(cell, text, asked) for text in asked.choices])
            if ranks.first:
                print(turns.text(), flush=True)
            failed |= any(row.status != "ok" for row in turns.rows)
            del turns
            gc.collect()
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
        return int(failed)


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """What the command line asks for; ends with the usage on what cannot be asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", type=_settings, metavar="NAME=VALUE,...", help="a model and its step")
    parser.add_argument("--choices", nargs="+", default=["sdpa", "auto", "auto-fp8"])
    parser.add_argument("--learn", action="store_true", help="a model for each choice, trained by its schedule")
    parser.add_argument("--rounds", type=int, default=8, help="timed steps of each choice")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which no round is begun")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("steps"))
    asked = parser.parse_args(given)
    try:
        for choice in asked.choices:
            _settings(choice.partition(",")[2])
    except argparse.ArgumentTypeError as error:
        parser.error(f"--choices: {error}")
    return asked


def _settings(text: str) -> dict[str, Any]:
    """Fields of a configuration by name, of the types that they have there."""
    found: dict[str, Any] = {}
    for each in filter(None, text.split(",")):
        name, equals, value = each.partition("=")
        if not equals or name not in SETTINGS or name in _NOT_SET:
            raise argparse.ArgumentTypeError(f"{text}: there is no setting {name}")
        kind = SETTINGS[name]
        try:
            if kind is bool:
                found[name] = {"true": True, "false": False}[value]
            else:
                found[name] = kind(value) if kind in (int, float) else value
        except (KeyError, ValueError):
            raise argparse.ArgumentTypeError(f"{text}: {name} is not {value!r}") from None
    return found


@dataclass(frozen=True)
class Choice:
    """What is measured under a name: a configuration, and whether its step is replayed from a graph."""

    name: str
    config: TrainConfig
    graphs: bool

    @classmethod
    def of(cls, cell: dict[str, Any], text: str, asked: argparse.Namespace) -> Choice:
        """The choice in a cell.  Raises InputError if there is no such configuration."""
        attention, _, changed = text.partition(",")
        settings = {"batch": 1} | cell | _settings(changed)
        slices, graphs, fp8 = settings.pop("slices", 1), settings.pop("graphs", False), attention == "auto-fp8"
        config = TrainConfig.make(
            **settings, steps=_WARM + asked.rounds, attention="auto" if fp8 else attention, fp8=fp8
        )
        if graphs and (config.optimiser != "sgd" or config.parallel != "none" or asked.learn):
            raise InputError(
                "graphs=true replays one rate on one rank: it takes optimiser=sgd, no parallel, no --learn"
            )
        return cls(text, config if slices == 1 else _part(config, slices), graphs)

    @property
    def model(self) -> TrainConfig:
        """What choices that can share a model have in common."""
        own = self.config.block == "te"
        return self.config if own else self.config.replace(attention="auto", fp8=False)


def _part(config: TrainConfig, slices: int) -> TrainConfig:
    if config.model != "gpt":
        raise InputError(f"slices={slices}: gpt alone is cut so, not {config.model}")
    size = gpt_size(config)
    if slices < 1 or size.layers % slices:
        raise InputError(f"slices={slices}: {size.layers} layers cannot be cut so")
    return config.replace(layers=size.layers // slices, vocab=_ROWS * math.ceil(size.vocab / slices / _ROWS))


class Model:
    """A model with its optimiser and the device memory that is theirs alone."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self.device, self.held, self.peak = ranks.device, 0, 0
        with self.measured():
            self.trainable = build(config, ranks.device)
            self.mesh = spread(self.trainable, ranks)
            self.optimiser = make_optimiser(config, self.trainable.module)
            self.parameters = [each for each in self.trainable.module.parameters() if each.requires_grad]

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Note what is allocated meanwhile, without what other models hold."""
        if self.device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            yield
        finally:
            self.peak = torch.cuda.max_memory_allocated() - before + self.held
            self.held += torch.cuda.memory_allocated() - before


class Turns:
    """The choices of one cell, a step each in turn."""

    def __init__(self, session: Session, ranks: Ranks, asked: argparse.Namespace, until: float) -> None:
        self.session, self.ranks, self.asked, self.until = session, ranks, asked, until
        self.rows: list[TrainingRun] = []
        self.names: list[str] = []
        self.models: dict[object, Model] = {}
        # Steps are replayed one at a time, so that graphs may share the memory of what lives within a step.
        self.pool = torch.cuda.graph_pool_handle() if ranks.device.type == "cuda" else None

    def take(self, choices: list[Choice]) -> None:
        """Time the steps of all choices; a choice that fails gets a row with the reason, the others go on."""
        arms = self._arms(choices)
        self.names = [arm.choice.name for arm in arms]
        known = [self.session.rows.get(arm.row.key) for arm in arms]
        done = all(row is not None and row.status == "ok" for row in known)
        if self.ranks.agreed(int(done)):
            self.rows = [row for row in known if row is not None]
            return
        for number in range(_WARM + self.asked.rounds):
            if self._spent():
                break
            for arm in arms:
                arm.step(number)
                if number < _WARM:  # which may take minutes
                    self._write(arms)
            self._write(arms)
        for arm in arms:
            if not self._spent():
                arm.profile()
        self._write(arms)

    def _arms(self, choices: list[Choice]) -> list[Arm]:
        arms: list[Arm] = []
        for choice in choices:
            arm = Arm(self, choice)
            kind = choice.model, choice.graphs, arm.plans
            same = [other for other in arms if (other.choice.model, other.choice.graphs, other.plans) == kind]
            if not same or not arm.plans:
                arms.append(arm)
            elif self.ranks.first:
                print(f"{choice.name} runs {', '.join(arm.plans)} like {same[0].choice.name}", flush=True)
        return arms

    def model_of(self, choice: Choice) -> Model:
        """The model of a choice, built when it is first needed."""
        key = choice if self.asked.learn else choice.model
        if key not in self.models:
            self.models[key] = Model(choice.config, self.ranks)
        return self.models[key]

    def _spent(self) -> bool:
        """Whether the limit is over for the first rank."""
        return bool(self.ranks.agreed(int(time.monotonic() > self.until)))

    def _write(self, arms: list[Arm]) -> None:
        self.rows = [arm.updated_row() for arm in arms]
        for row in self.rows:
            self.session.keep(row)

    def text(self) -> str:
        """A line for each choice, with its rate against the first's."""
        lines, first = [], None
        for name, row in zip(self.names, self.rows, strict=True):
            rate = row.units_per_second
            first = first or rate
            share = "" if row.attention is None else f" attention {row.attention.share:.1%}"
            taken = "no time" if rate is None or first is None else f"{rate:10,.0f} {row.units}/s {rate / first:.3f}"
            memory = "" if row.memory_bytes is None else f" {row.memory_bytes / 2**30:.1f} GiB"
            plans = " ".join(dict.fromkeys(row.plans)) or "its own"
            cell = " ".join(str(row.settings[name]) for name in ("model", "size", "seqlen", "batch"))
            lines.append(f"{cell}: {name}: {row.status} {taken}{share}{memory} {plans} "
                         f"{[round(each, 1) for each in row.samples_ms[-12:]]} {row.reason or ''}")  # fmt: skip
        return "\n".join(lines)


class Arm:
    """One choice: its attention and its row."""

    def __init__(self, turns: Turns, choice: Choice) -> None:
        self.turns, self.choice, self.config = turns, choice, choice.config
        self.clock = StepClock(turns.ranks.device)
        self.replayed: Replayed | None = None
        config, ranks, environment = choice.config, turns.ranks, turns.session.environment
        more = {"graphs": choice.graphs, "learnt": turns.asked.learn}
        self.row = TrainingRun(
            settings=config.to_dict() | {"interleaved": True} | {name: True for name, on in more.items() if on},
            role="candidate",
            status="unfinished",
            reason="it was killed, or ran into its limit",
            loss=[],
            grad_norm=[],
            step_ms=[],
            timed_from=_WARM,
            world=ranks.world,
            units="tokens" if config.learns_text else "images",
            units_per_step=config.batch * (config.places if config.learns_text else 1) * ranks.world,
            flops_per_step=1.0,
            flops_model="matrix products and attention of the model, forward and backward, nothing recomputed",
            peak_tflops=PEAK_TFLOPS.get(environment.device_name, {}).get("bf16"),
            started=datetime.now(timezone.utc),
            environment=environment,
        )
        self.failed = False
        try:
            self.attend = None if config.block == "te" else Attend(config)
            self.plans = check_beforehand(config, ranks.device)
            if choice.graphs and ranks.device.type != "cuda":
                raise InputError("graphs=true is of CUDA graphs, which a CPU has not")
            self.row = self.row.model_copy(update={"plans": self.plans})
        except AttnbenchError as error:
            self.plans = []
            self.fail("error", f"{type(error).__name__}: {error}")

    def fail(self, status: Literal["oom", "error", "diverged"], reason: str) -> None:
        """Take no more steps, for this reason."""
        self.failed = True
        self.row = self.row.model_copy(update={"status": status, "reason": reason.partition("\n")[0][:LONGEST_REASON]})

    def step(self, number: int, *, replay: bool = True) -> None:
        """One step of this choice, unless an earlier one failed; ``replay`` one that was recorded, if it is to be."""
        if self.failed:
            return
        turns, config, model = self.turns, self.config, None
        try:
            model = turns.model_of(self.choice)
            set_rate(model.optimiser, learning_rate(config, number) if turns.asked.learn else _RATE)
            if self.attend is not None:
                for core in model.trainable.attention_modules:
                    core.attend = self.attend
            # As from a loader that works ahead: the step's time is the model's.
            batch = model.trainable.batch(number, turns.ranks.rank, turns.ranks.world)
            step = model.trainable, model.optimiser, model.parameters, batch
            with shared_attention(config, model.mesh), model.measured():
                if self.choice.graphs and self.replayed is None:
                    self.replayed = Replayed(*step, pool=turns.pool)
                self.clock.start()
                loss, norm = take_step(*step) if self.replayed is None or not replay else self.replayed(batch)
                self.clock.stop(number, torch.stack((turns.ranks.mean(loss.double()), norm.double())))
            self._take_in(model)
        except Exception as error:
            if turns.ranks.world > 1:
                raise  # the other ranks would wait
            self.fail("oom" if is_out_of_memory(error) else "error", f"{type(error).__name__}: {error}")
            if model is not None:
                model.optimiser.zero_grad()

    def _take_in(self, model: Model) -> None:
        """Record the step, which has ended: each step waits for the device, so that none overlaps with the next."""
        row, device = self.row, self.turns.ranks.device
        ((_, ms, loss, norm),) = self.clock.ended(all=True)
        slowest = torch.tensor(ms, device=device)
        if self.turns.ranks.world > 1:
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self.row = row.model_copy(
            update={
                "loss": [*row.loss, loss],
                "grad_norm": [*row.grad_norm, norm],
                "step_ms": [*row.step_ms, round(float(slowest), 4)],
                "memory_bytes": max(row.memory_bytes or 0, model.peak) if device.type == "cuda" else None,
                "flops_per_step": float(model.trainable.flops_per_step * self.turns.ranks.world),
            }
        )
        if not math.isfinite(loss):
            self.fail("diverged", f"its loss was {loss} at step {len(row.loss)}")

    def profile(self) -> None:
        """Measure attention's share in one more step, which is not timed; of a choice that failed there is none."""
        before = self.row
        if self.failed:
            return
        modules = self.turns.model_of(self.choice).trainable.attention_modules
        share = share_of_attention(
            [lambda: self.step(len(before.loss), replay=False)], modules, self.turns.ranks.device,
            compiled=self.config.compile,
        )  # fmt: skip
        if not self.failed:
            self.row = before.model_copy(update={"attention": share})

    def updated_row(self) -> TrainingRun:
        """Its row, ok once every round was timed."""
        if not self.failed and len(self.row.step_ms) == _WARM + self.turns.asked.rounds:
            self.row = self.row.model_copy(update={"status": "ok", "reason": None})
        return self.row


if __name__ == "__main__":
    raise SystemExit(main())
