"""One record for each training run: its settings and every step.  Records are data, never code."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from attnbench.files.atomic import replace_file
from attnbench.tables.entry import LONGEST_MS, SHORTEST_MS
from attnbench.tables.environment import Environment
from attnbench.tables.record_fields import UtcTime

from ..json_lines import Form, lines_file, read_lines
from ..measure.accuracy import LARGEST_ERROR
from ..measure.clocks import Conditions

__all__ = [
    "LARGEST_PRICE",
    "LEAST_PRICE",
    "LONGEST_REASON",
    "LONGEST_SETTING",
    "MOST_PLANS",
    "MOST_RESUMED",
    "MOST_SIGNS",
    "MOST_STEPS",
    "ROWS",
    "SCHEMA",
    "Count",
    "Series",
    "Share",
    "StepTimes",
    "Text",
    "TrainingRun",
    "WarningSign",
    "read_runs",
    "write_runs",
]

SCHEMA = "attnbench.training/1"
ROWS = "training.jsonl"
LONGEST_REASON = 2000
LONGEST_SETTING = 500
MOST_STEPS = 200_000
MOST_SIGNS, MOST_PLANS, MOST_RESUMED = 1000, 100, 10_000
_FORM = Form(SCHEMA, "a training run", "training runs", longest_line=2**25, largest_file=2**28)
_MOST_SETTINGS = 64
LEAST_PRICE, LARGEST_PRICE = 1e-6, 1e12  # of an hour, in any currency
_WORDS = {math.inf: "Infinity", -math.inf: "-Infinity"}
_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _number(value: object) -> object:
    """JSON has neither infinity nor NaN, so a run that diverged writes them as text.

    A value beyond ``LARGEST_ERROR`` becomes infinite, so that sums and squares of the others stay finite.
    """
    if isinstance(value, (int, float)) and abs(value) > LARGEST_ERROR:
        return math.inf if value > 0 else -math.inf  # of a whole number beyond all floats, too
    return _NUMBERS.get(value, value) if isinstance(value, str) else value


def _to_json(value: float) -> float | str:
    return value if math.isfinite(value) else _WORDS.get(value, "NaN")


_Any = Annotated[float, BeforeValidator(_number), PlainSerializer(_to_json, when_used="json")]
_Milliseconds = Annotated[float, Field(ge=SHORTEST_MS, le=LONGEST_MS)]
_Spent = Annotated[float, Field(ge=0, le=LONGEST_MS)]
_Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=2**62)]
Text = Annotated[str, Field(max_length=500)]
_Setting = (
    Annotated[str, Field(max_length=LONGEST_SETTING)]
    | bool
    | Annotated[int, Field(ge=-(2**62), le=2**62)]
    | Annotated[float, Field(ge=-LARGEST_ERROR, le=LARGEST_ERROR)]
    | None
)
Series = Annotated[list[_Any], Field(max_length=MOST_STEPS)]
StepTimes = Annotated[list[_Milliseconds], Field(max_length=MOST_STEPS)]
_strict = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)


class Share(BaseModel):
    """The share of attention in a step, measured over ``steps`` steps under the profiler.

    ``forward_ms`` and ``backward_ms`` are attention's milliseconds per step; recomputation for checkpointing counts as
    forward.  ``busy_ms`` is all work of the device in a step, and ``share`` attention's part of it.  On a GPU these are
    times of kernels and copies, on a CPU times of operators.  ``kernels`` names those that took attention's time, the
    longest first.
    """

    model_config = _strict

    steps: Annotated[int, Field(ge=1, le=1000)]
    forward_ms: _Spent
    backward_ms: _Spent
    busy_ms: _Milliseconds
    share: _Fraction
    kernels: Annotated[list[Annotated[str, Field(max_length=200)]], Field(max_length=12)] = []


class WarningSign(BaseModel):
    """Warning signs from attention's tensors before the step ``step``, the worst over the modules.

    ``kurtosis_q`` and ``kurtosis_k`` are E[x⁴] / E[x²]² over a head (3 for normal numbers, more with outliers);
    ``ds_underflow`` maps e4m3 and e5m2 to the share of the nonzero entries of dS that one scale for the tensor would
    flush to zero, estimated on some rows.  ``gradient_norm`` is the norm of dQ, dK and dV of all modules together.
    ``checks`` are those of a guard in this pass, ``breaches`` what it found beyond its bound, from these and earlier
    checks; none of attention that it does not see, such as torch's own.
    """

    model_config = _strict

    step: Count
    kurtosis_q: _Any
    kurtosis_k: _Any
    ds_underflow: dict[Literal["e4m3", "e5m2"], _Fraction]
    gradient_norm: _Any
    checks: Count = 0
    breaches: Count = 0


class TrainingRun(BaseModel):
    """One run of one configuration with one seed.

    ``settings`` are all fields of the configuration by name.  ``status``: ``ok`` if every step was taken, ``diverged``
    if it ended because losses or gradients were not finite, ``unfinished`` while it runs and if it was killed, ``oom``,
    ``error``; ``reason`` explains every status but ``ok``.  ``loss`` (mean over all ranks, in nats) and ``grad_norm``
    (of all parameters, before clipping) have an entry for each step taken, ``step_ms`` its raw milliseconds; steps
    before ``timed_from`` are the warm-up, and those in ``untimed`` were profiled, interrupted or wrote a checkpoint.
    ``world`` ranks together took ``units_per_step`` ``units`` (tokens or images) and ``flops_per_step`` operations by
    ``flops_model`` in a step; ``peak_tflops`` is one device's bf16 peak, None if unknown.  ``memory_bytes`` is the peak
    of device memory of the first rank, None on a CPU.  ``price_per_hour`` is that of the whole machine.  ``plans`` are
    the plans that attention ran, none for torch's own or TransformerEngine's.  ``resumed_at`` lists the steps at which
    it resumed from a checkpoint.
    """

    model_config = _strict

    schema_: Annotated[Literal["attnbench.training/1"], Field(alias="schema")] = "attnbench.training/1"
    settings: Annotated[dict[Annotated[str, Field(max_length=50)], _Setting], Field(max_length=_MOST_SETTINGS)]
    role: Literal["candidate", "baseline"]
    status: Literal["ok", "diverged", "unfinished", "oom", "error"]
    reason: Annotated[str, Field(min_length=1, max_length=LONGEST_REASON)] | None = None
    loss: Series
    grad_norm: Series
    step_ms: StepTimes
    timed_from: Count
    untimed: Annotated[list[Count], Field(max_length=MOST_STEPS)] = []
    world: Annotated[int, Field(ge=1, le=2**20)] = 1
    units: Literal["tokens", "images"]
    units_per_step: Annotated[int, Field(ge=1, le=2**40)]
    flops_per_step: Annotated[float, Field(gt=0, le=1e30)]
    flops_model: Text
    peak_tflops: Annotated[float, Field(ge=1e-6, le=1e9)] | None = None
    memory_bytes: Count | None = None
    attention: Share | None = None
    signs: Annotated[list[WarningSign], Field(max_length=MOST_SIGNS)] = []
    plans: Annotated[list[Text], Field(max_length=MOST_PLANS)] = []
    price_per_hour: Annotated[float, Field(ge=LEAST_PRICE, le=LARGEST_PRICE)] | None = None
    resumed_at: Annotated[list[Count], Field(max_length=MOST_RESUMED)] = []
    gpu: Conditions | None = None
    started: UtcTime
    environment: Environment

    @model_validator(mode="after")
    def _is_consistent(self) -> TrainingRun:
        if not len(self.loss) == len(self.grad_norm) == len(self.step_ms):
            raise ValueError("loss, grad_norm and step_ms have an entry for each step")
        if (self.status == "ok") != (self.reason is None):
            raise ValueError("every status but ok has a reason, and ok has none")
        for name in ("attention", "seed", "steps"):
            if name not in self.settings:
                raise ValueError(f"settings need {name}")
        if type(self.settings["seed"]) is not int or type(self.settings["steps"]) is not int:
            raise ValueError("seed and steps are whole numbers")
        return self

    @property
    def seed(self) -> int:
        """The seed of its weights and data."""
        return int(self.settings["seed"] or 0)

    @property
    def key(self) -> str:
        """The role, settings and number of ranks, which identify a run."""
        return json.dumps([self.role, self.world, self.settings], sort_keys=True)

    @property
    def samples_ms(self) -> list[float]:
        """The valid step times: after the warm-up, undisturbed."""
        left_out = set(self.untimed)
        return [taken for step, taken in enumerate(self.step_ms) if step >= self.timed_from and step not in left_out]

    @property
    def median_ms(self) -> float | None:
        """The median of ``samples_ms``; None if there are none."""
        return float(np.median(self.samples_ms)) if self.samples_ms else None

    @property
    def units_per_second(self) -> float | None:
        """Tokens or images of all ranks in a second, at the median step."""
        return None if self.median_ms is None else self.units_per_step / self.median_ms * 1e3

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation: ``flops_per_step`` in the median step, over the bf16 peak of all devices.

        The peak is that of bf16 for every precision, so that runs can be compared; with FP8 the result may exceed 1.
        None if the device's peak is not known.
        """
        if self.median_ms is None or self.peak_tflops is None:
            return None
        return self.flops_per_step / (self.median_ms / 1e3) / (self.peak_tflops * 1e12 * self.world)

    def to_line(self) -> str:
        """One line of JSON, without its end."""
        return self.model_dump_json(by_alias=True)

    def to_dict(self) -> dict[str, Any]:
        """The record in plain JSON types."""
        return self.model_dump(mode="json", by_alias=True)


def read_runs(path: Path) -> Iterator[TrainingRun]:
    """The runs of a JSON Lines file, or of the folder that holds ``training.jsonl``, compressed or not.

    Raises MalformedFileError with the line and what was expected there.
    """
    return read_lines(lines_file(path, ROWS), TrainingRun, _FORM)


def write_runs(path: Path, runs: Iterable[TrainingRun]) -> None:
    """Replace the file by these runs atomically; one process writes it.  Raises OutputError; the old file stays."""
    replace_file(path, "".join(run.to_line() + "\n" for run in runs).encode())
