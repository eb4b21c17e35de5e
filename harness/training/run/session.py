"""Runs in one folder: every seed with baseline and candidate, saved as they go, resumed on request."""

from __future__ import annotations

import gc
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import torch

from attnbench.errors import AttnbenchError, MisuseError, OutputError
from attnbench.files.atomic import clear_drafts
from attnbench.files.lock import FileLock
from attnbench.kernels.registry import registry
from attnbench.tables.environment import Environment
from attnbench.text.failure import in_one_line

from ...json_lines import lines_file
from ...measure.clocks import Conditions, Watch
from ...measure.worker import is_out_of_memory
from ...results.peaks import PEAK_TFLOPS
from ..config import TrainConfig
from ..rows import LONGEST_REASON, ROWS, TrainingRun, read_runs, write_runs
from .history import History
from .loop import LoopOptions, train, warm_up_steps
from .parallel import Ranks
from .trainable import Trainable

__all__ = ["Build", "PlannedRun", "Session", "plan_runs"]

Role = Literal["candidate", "baseline"]
Status = Literal["ok", "diverged", "unfinished", "oom", "error"]
Build = Callable[[TrainConfig, torch.device], Trainable]
_LOCK = ".lock"
_CHECKPOINTS = "checkpoints"
_KEEPING_S = 2.0  # seconds between two writes of a run's row
_FLOPS_MODEL = "matrix products and attention of the model, forward and backward, nothing recomputed"


@dataclass(frozen=True)
class PlannedRun:
    """A run to make."""

    role: Role
    config: TrainConfig


def plan_runs(candidate: TrainConfig, baseline: TrainConfig | None, seeds: int) -> list[PlannedRun]:
    """The runs with ``seeds`` seeds from the candidate's on, pair by pair, so that stopping leaves whole pairs.

    Raises MisuseError if the two are the same configuration.
    """
    if baseline == candidate:
        raise MisuseError(
            f"the baseline is the candidate itself, attention={candidate.attention}; compare with another"
        )
    runs = []
    for seed in range(candidate.seed, candidate.seed + seeds):
        if baseline is not None:
            runs.append(PlannedRun("baseline", baseline.replace(seed=seed)))
        runs.append(PlannedRun("candidate", candidate.replace(seed=seed)))
    return runs


class Session:
    """``folder/training.jsonl``, written by one command at a time, and the checkpoints of unfinished runs.

    A context, entered by every rank; only the first holds the lock, reads and writes.  Raises MisuseError if the folder
    has runs and ``resume`` is not set, if another command is writing it, or if its runs come from an environment that
    cannot be compared with this one; MalformedFileError if it holds anything but runs; OutputError if it cannot be
    written.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        *,
        resume: bool = False,
        price_per_hour: float | None = None,
        checkpoint_every: int = 100,
        patience: int = 5,
    ) -> None:
        self.folder, self.ranks, self.resume, self.price_per_hour = folder, ranks, resume, price_per_hour
        self._every, self._patience = checkpoint_every, patience
        self._lock: FileLock | None = None
        self.environment = Environment.detect(ranks.device, registry())
        self.rows: dict[str, TrainingRun] = {}

    def __enter__(self) -> Session:
        refusal: AttnbenchError | None = None
        if self.ranks.first:
            try:
                self._open()
            except BaseException as error:
                self.__exit__()
                if not isinstance(error, AttnbenchError):
                    raise
                refusal = error
        if self.ranks.agreed(int(refusal is not None)):  # else the others would wait, and fail with a traceback
            raise refusal or MisuseError("the first process says what is wrong")
        return self

    def _open(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.folder / _LOCK)
            ours = self._lock.acquire()
        except OSError as error:
            raise OutputError(f"{self.folder} cannot be written: {error.strerror}") from error
        if not ours:
            raise MisuseError(f"another command is training in {self.folder}; wait or name another folder with --out")
        clear_drafts(self.folder / ROWS)
        self._read()

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _read(self) -> None:
        path = self.folder / ROWS
        if lines_file(self.folder, ROWS) != path:
            raise MisuseError(f"{self.folder} holds compressed runs, to be kept; name another folder with --out")
        if not path.exists() or not path.stat().st_size:
            return
        rows = list(read_runs(path))
        if not self.resume:
            if any(row.loss or row.status == "oom" for row in rows):
                message = f"{self.folder} already holds runs; add to them with --resume or name another with --out"
                raise MisuseError(message)
            return  # a model that could not be built has taken no step, and what it is corrected to begins anew
        for row in rows:
            hard, _ = row.environment.differences(self.environment)
            if hard:
                problem = f"{self.folder} was trained in another environment ({'; '.join(hard)})"
                raise MisuseError(f"{problem}; name another folder with --out")
            if self.price_per_hour is not None:
                row = row.model_copy(update={"price_per_hour": self.price_per_hour})
            self.rows[row.key] = row
        if self.price_per_hour is not None:
            write_runs(path, self.rows.values())

    def run(
        self, runs: Sequence[PlannedRun], build: Build, on_step: Callable[[TrainingRun], None]
    ) -> list[TrainingRun]:
        """The rows of the runs; finished ones are not run again.  ``on_step`` receives the row after every step."""
        return [self._one(each, build, on_step) for each in runs]

    def _one(self, plan: PlannedRun, build: Build, on_step: Callable[[TrainingRun], None]) -> TrainingRun:
        record = _Record(plan, self)
        known = self.rows.get(record.row.key)
        if known is not None:
            record.begin_with(known)
        if self.ranks.agreed(int(known is not None and known.status == "ok")):
            return known or record.row
        record.keep()
        options = LoopOptions(record.checkpoints, self._every, self._patience)
        if not self.resume and self.ranks.first:
            shutil.rmtree(record.checkpoints, ignore_errors=True)
        self.ranks.wait()
        try:
            with self._watched() as watch:
                began = time.perf_counter()
                torch.compiler.reset()  # each model is compiled for itself; torch gives up after some versions of one
                trainable = build(plan.config, self.ranks.device)
                record.describe(trainable)
                reason = train(
                    trainable, self.ranks, options, lambda history: on_step(record.take(history)), resume=self.resume
                )
                gpu = watch.between((began, time.perf_counter())) if watch is not None else None
            record.end("ok" if reason is None else "diverged", reason, gpu)
        except KeyboardInterrupt:
            record.end("unfinished", "it was interrupted")
            raise
        except Exception as error:
            short = is_out_of_memory(error)
            if short:
                record.end("oom", str(error).partition("\n")[0] or "out of memory")
            else:
                record.end("error", in_one_line(error))
            if not short or self.ranks.world > 1:
                raise  # where memory was short on one rank, the others wait for it in vain, and torchrun ends them
        finally:
            trainable = None  # type: ignore[assignment]  # what it holds must go before the next is built
            gc.collect()
            if self.ranks.device.type == "cuda":
                torch.cuda.empty_cache()
        if record.row.status == "ok" and self.ranks.first:
            shutil.rmtree(record.checkpoints, ignore_errors=True)
        return record.row

    @contextmanager
    def _watched(self) -> Iterator[Watch | None]:
        if self.ranks.device.type != "cuda" or not self.ranks.first:
            yield None
            return
        with Watch(str(torch.cuda.get_device_properties(self.ranks.device).uuid)) as watch:
            yield watch

    def keep(self, row: TrainingRun) -> None:
        """Write all rows including this one, on the first rank.  Raises OutputError."""
        self.rows[row.key] = row
        if self.ranks.first:
            write_runs(self.folder / ROWS, self.rows.values())


class _Record:
    """The row of a run in progress."""

    def __init__(self, plan: PlannedRun, session: Session) -> None:
        self._session, self._kept = session, 0.0
        config, ranks = plan.config, session.ranks
        self.row = TrainingRun(
            settings=config.to_dict(),
            role=plan.role,
            status="unfinished",
            reason="it was killed, or is still under way",
            loss=[],
            grad_norm=[],
            step_ms=[],
            timed_from=warm_up_steps(config.steps),
            world=ranks.world,
            units="tokens" if config.learns_text else "images",
            units_per_step=config.batch * (config.places if config.learns_text else 1) * ranks.world,
            flops_per_step=1.0,
            flops_model=_FLOPS_MODEL,
            peak_tflops=PEAK_TFLOPS.get(session.environment.device_name, {}).get("bf16"),
            price_per_hour=session.price_per_hour,
            started=datetime.now(timezone.utc),
            environment=session.environment,
        )
        name = hashlib.sha256(self.row.key.encode()).hexdigest()[:16]
        self.checkpoints = session.folder / _CHECKPOINTS / name

    def describe(self, trainable: Trainable) -> None:
        """Record the model's units and operations per step."""
        world = self._session.ranks.world
        self._change(
            units=trainable.units,
            units_per_step=trainable.units_per_step * world,
            flops_per_step=float(trainable.flops_per_step * world),
        )

    def begin_with(self, known: TrainingRun) -> None:
        """Start with the steps of an earlier command, until this one has taken more."""
        self._change(**{name: getattr(known, name) for name in History.model_fields})

    def take(self, history: History) -> TrainingRun:
        """The row with the history so far, written to disk now and then."""
        self._change(**dict(history))
        if time.monotonic() - self._kept > _KEEPING_S:
            self.keep()
        return self.row

    def end(self, status: Status, reason: str | None, gpu: Conditions | None = None) -> None:
        """Set the final status and write the row."""
        self._change(status=status, reason=None if reason is None else reason[:LONGEST_REASON], gpu=gpu)
        self.keep()

    def keep(self) -> None:
        """Write the row."""
        self._kept = time.monotonic()
        self._session.keep(self.row)

    def _change(self, **changes: object) -> None:
        self.row = self.row.model_copy(update=changes)
