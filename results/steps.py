#!/usr/bin/env python
"""Whole training steps of one gpt with several attentions in turn, so that no drift of the GPU favours one of them.

    python results/steps.py size=3b,seqlen=32768,slices=4 size=8b,slices=8,linears=te-fp8 --checkpointing --out steps
    torchrun --standalone --nproc-per-node 2 results/steps.py seqlen=131072,slices=4 --context-parallel 2 --out steps

Each choice is sdpa (torch's default), auto, auto-fp8, or a backend, kernel or plan.  One model and optimiser serve all
of them, so losses say nothing about learning.  A choice that would run the plans of an earlier one is not timed again.
Rows are those of ``attnbench train`` (``attnbench train --show FOLDER``), written after every round; what is already
there is not measured again.  slices=4 takes a quarter of the layers and of the vocabulary, so that each part has the
share of a step that it has in the whole model, which takes about four times as long.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from attnbench.errors import AttnbenchError, InputError
from attnbench.harness.measure.worker import is_out_of_memory
from attnbench.harness.results.peaks import PEAK_TFLOPS
from attnbench.harness.training.config import TrainConfig
from attnbench.harness.training.models.attention import Attend
from attnbench.harness.training.models.gpt import gpt_size
from attnbench.harness.training.rows import LONGEST_REASON, TrainingRun
from attnbench.harness.training.run.attention_share import share_of_attention
from attnbench.harness.training.run.foreseen import check_beforehand
from attnbench.harness.training.run.optimisers import make_optimiser, set_rate
from attnbench.harness.training.run.parallel import Ranks, join_ranks, shared_attention, spread
from attnbench.harness.training.run.session import Session
from attnbench.harness.training.run.step_clock import StepClock
from attnbench.harness.training.run.trainable import build

CELL = {"size": "3b", "seqlen": 32768, "batch": 1, "slices": 1, "linears": "bf16"}
_ROWS = 16  # of the head, which matrix products want a multiple of
_WARM = 2  # rounds that are not timed: the first compiles


def main() -> int:
    """Time all choices, and return 1 if one is not ok."""
    try:
        return _measure(_arguments())
    except AttnbenchError as error:
        print(f"steps.py: {error}", file=sys.stderr)
        return error.exit_code


def _measure(asked: argparse.Namespace) -> int:
    until = time.monotonic() + asked.limit
    with join_ranks(asked.device) as ranks, Session(asked.out, ranks, resume=True) as session:
        failed = False
        for cell in asked.cells:
            turns = Turns(session, ranks, asked, until)
            turns.take([_config(asked, cell, choice) for choice in asked.choices])
            if ranks.first:
                print(turns.text(), flush=True)
            failed |= any(row.status != "ok" for row in turns.rows)
            del turns
            gc.collect()
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
        return int(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    said = "model and step: " + ",".join(f"{name}={value}" for name, value in CELL.items())
    parser.add_argument("cells", nargs="+", type=_cell, metavar="CELL", help=said)
    parser.add_argument("--policy", default="autocast")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--context-parallel", type=int, default=1)
    parser.add_argument("--choices", nargs="+", default=["sdpa", "auto", "auto-fp8"])
    parser.add_argument("--rounds", type=int, default=8, help="timed steps of each choice")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which no round is begun")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("steps"))
    return parser.parse_args()


def _cell(text: str) -> dict[str, Any]:
    """The fields of ``CELL`` that the text names, and the defaults of the others."""
    named = dict(each.partition("=")[::2] for each in text.split(","))
    if unknown := sorted(named.keys() - CELL.keys()):
        raise argparse.ArgumentTypeError(f"{text}: a cell has no {unknown[0]}, only {', '.join(CELL)}")
    return {name: type(value)(named.get(name, value)) for name, value in CELL.items()}


def _config(asked: argparse.Namespace, cell: dict[str, Any], choice: str) -> TrainConfig:
    fp8, slices = choice == "auto-fp8", cell["slices"]
    config = TrainConfig.make(
        **{name: value for name, value in cell.items() if name != "slices"}, steps=_WARM + asked.rounds,
        attention="auto" if fp8 else choice, fp8=fp8, policy=asked.policy,
        checkpointing=asked.checkpointing, offload=asked.offload, compile=asked.compile,
        context_parallel=asked.context_parallel,
        parallel="fsdp2" if asked.context_parallel > 1 else "none",
    )  # fmt: skip
    size = gpt_size(config)
    if slices == 1:
        return config
    if slices < 1 or size.layers % slices:
        raise InputError(f"slices={slices}: {size.layers} layers cannot be cut so")
    return config.replace(layers=size.layers // slices, vocab=_ROWS * math.ceil(size.vocab / slices / _ROWS))


class Turns:
    """The choices of one model, a step each in turn."""

    def __init__(self, session: Session, ranks: Ranks, asked: argparse.Namespace, until: float) -> None:
        self.session, self.ranks, self.asked, self.until = session, ranks, asked, until
        self.rows: list[TrainingRun] = []

    def take(self, configs: list[TrainConfig]) -> None:
        """Time the steps of all choices; a choice that fails gets a row with the reason, the others go on."""
        arms = self._arms(configs)
        known = [self.session.rows.get(arm.row.key) for arm in arms]
        done = all(row is not None and row.status == "ok" for row in known)
        if self.ranks.agreed(int(done)):
            self.rows = [row for row in known if row is not None]
            return
        if all(arm.failed for arm in arms):
            self._write(arms)
            return
        self.model = build(next(arm.config for arm in arms if not arm.failed), self.ranks.device)
        self.mesh = spread(self.model, self.ranks)
        self.optimiser = make_optimiser(configs[0], self.model.module)
        set_rate(self.optimiser, 1e-5)  # of no consequence for times, and small enough for every size
        self.parameters = [each for each in self.model.module.parameters() if each.requires_grad]
        for number in range(_WARM + self.asked.rounds):
            if self._spent():
                break
            for arm in arms:
                arm.step(number)
            self._write(arms)
        for arm in arms:
            if not self._spent():
                arm.profile()
        self._write(arms)

    def _arms(self, configs: list[TrainConfig]) -> list[Arm]:
        arms: list[Arm] = []
        for config in configs:
            try:
                arm = Arm(self, config, check_beforehand(config, self.ranks.device))
            except AttnbenchError as error:
                arm = Arm(self, config, [])
                arm.fail("error", f"{type(error).__name__}: {error}")
            if all(arm.plans != other.plans or not arm.plans for other in arms):
                arms.append(arm)
            elif self.ranks.first:
                print(f"{_name(config)} runs {', '.join(arm.plans)} like an earlier choice", flush=True)
        return arms

    def _spent(self) -> bool:
        """Whether the limit is over for the first rank."""
        return bool(self.ranks.agreed(int(time.monotonic() > self.until)))

    def _write(self, arms: list[Arm]) -> None:
        self.rows = [arm.told() for arm in arms]
        for row in self.rows:
            self.session.keep(row)

    def text(self) -> str:
        """A line for each choice, with its rate against the first's."""
        lines, first = [], None
        for row in self.rows:
            rate = row.units_per_second
            first = first or rate
            share = "" if row.attention is None else f" attention {row.attention.share:.1%}"
            taken = "no time" if rate is None or first is None else f"{rate:10,.0f} tokens/s {rate / first:.3f}"
            said = " ".join(dict.fromkeys(row.plans)) or "torch's"
            cell = " ".join(str(row.settings[name]) for name in ("size", "seqlen", "linears"))
            lines.append(f"{cell} {row.status} {taken}{share} {said} "
                         f"{[round(each, 1) for each in row.samples_ms]} {row.reason or ''}")  # fmt: skip
        return "\n".join(lines)


class Arm:
    """One choice: its attention and its row."""

    def __init__(self, turns: Turns, config: TrainConfig, plans: list[str]) -> None:
        self.turns, self.config, self.plans = turns, config, plans
        self.attend, self.clock = Attend(config), StepClock(turns.ranks.device)
        ranks, environment = turns.ranks, turns.session.environment
        self.row = TrainingRun(
            settings=config.to_dict() | {"interleaved": True},
            role="candidate",
            status="unfinished",
            reason="it was killed, or ran into its limit",
            loss=[],
            grad_norm=[],
            step_ms=[],
            timed_from=_WARM,
            world=ranks.world,
            units="tokens",
            units_per_step=config.batch * config.places * ranks.world,
            flops_per_step=1.0,
            flops_model="matrix products and attention of the model, forward and backward, nothing recomputed",
            peak_tflops=PEAK_TFLOPS.get(environment.device_name, {}).get("bf16"),
            plans=plans,
            started=datetime.now(timezone.utc),
            environment=environment,
        )
        self.failed = False

    def fail(self, status: Literal["oom", "error", "diverged"], reason: str) -> None:
        """Take no more steps, for this reason."""
        self.failed = True
        self.row = self.row.model_copy(update={"status": status, "reason": reason.partition("\n")[0][:LONGEST_REASON]})

    def step(self, number: int) -> None:
        """One step with this attention, unless an earlier one failed."""
        if self.failed:
            return
        turns = self.turns
        if turns.ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            for core in turns.model.attention_modules:
                core.attend = self.attend
            with shared_attention(self.config, turns.mesh):
                self.clock.start()
                batch = turns.model.batch(number, turns.ranks.rank, turns.ranks.world)
                loss = turns.model.loss(batch)
                loss.backward()  # type: ignore[no-untyped-call]
            norm = get_total_norm([each.grad for each in turns.parameters if each.grad is not None])
            clip_grads_with_norm_(turns.parameters, self.config.grad_clip, norm)
            turns.optimiser.step()
            turns.optimiser.zero_grad()
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            self.clock.stop(number, torch.stack((turns.ranks.mean(loss.detach().double()), norm.double())))
            self._take_in()
        except Exception as error:
            if turns.ranks.world > 1:
                raise  # the other ranks would wait
            self.fail("oom" if is_out_of_memory(error) else "error", f"{type(error).__name__}: {error}")
            turns.optimiser.zero_grad()

    def _take_in(self) -> None:
        """Record the step, which has ended: each step waits for the device, so that none overlaps with the next."""
        row, model = self.row, self.turns.model
        ((_, ms, loss, norm),) = self.clock.ended(all=True)
        cuda = self.turns.ranks.device.type == "cuda"
        memory = torch.cuda.max_memory_allocated() if cuda else None
        slowest = torch.tensor(ms, device=self.turns.ranks.device)
        if self.turns.ranks.world > 1:
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self.row = row.model_copy(
            update={
                "loss": [*row.loss, loss],
                "grad_norm": [*row.grad_norm, norm],
                "step_ms": [*row.step_ms, round(float(slowest), 4)],
                "memory_bytes": memory,
                "flops_per_step": float(model.flops_per_step * self.turns.ranks.world),
            }
        )
        if not math.isfinite(loss):
            self.fail("diverged", f"its loss was {loss} at step {len(row.loss)}")

    def profile(self) -> None:
        """Measure attention's share in one more step, which is not timed; of a choice that failed there is none."""
        before = self.row
        if self.failed:
            return
        model, device = self.turns.model, self.turns.ranks.device
        share = share_of_attention(
            [lambda: self.step(len(before.loss))], model.attention_modules, device, compiled=self.config.compile
        )
        if not self.failed:
            self.row = before.model_copy(update={"attention": share})

    def told(self) -> TrainingRun:
        """Its row, ok once every round was timed."""
        if not self.failed and len(self.row.step_ms) == _WARM + self.turns.asked.rounds:
            self.row = self.row.model_copy(update={"status": "ok", "reason": None})
        return self.row


def _name(config: TrainConfig) -> str:
    return f"{config.attention}{', FP8' if config.fp8 else ''}"


if __name__ == "__main__":
    raise SystemExit(main())
