"""What two result sets leave open, measured again: old and new environment in turns, on one machine.

Each turn is an ``attnbench sweep`` of its own in a process of the environment that it
measures, so that two states of attnbench need to agree on nothing but the command line and the
records.  Two runs on two days differ by more than their samples tell: another GPU of the
model, another temperature, another state of the memory.  Turns of seconds (A B B A) share all of that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import yaml

from attnbench.errors import MalformedFileError
from attnbench.plan import Plan
from attnbench.spec import AttentionSpec

from .captured import PREFIX
from .cases import SWEEP_DTYPES
from .records import Measurement
from .regression import Outcome, Regression
from .regression_pairs import machine_differences, other_differences, rows_of
from .regression_terms import Key, Terms
from .regression_times import changes_of, verdict_of
from .store import MEASUREMENTS
from .timing import Cost

__all__ = ["MOST_ROUNDS", "Rerun"]

MOST_ROUNDS = 4  # of four turns each; what these leave open, noise has made undecidable here
_MOST_SAMPLES = 250  # of one cost and turn: one turn with thousands must not outweigh the others
_LONGEST_REASON = 300
_NAME = "again"  # of the case in the file for a turn: its own may be anything
_ORDERS = (("BASE", 0), ("NEW", 1), ("NEW", 1), ("BASE", 0)), (("NEW", 1), ("BASE", 0), ("BASE", 0), ("NEW", 1))
# What makes a sweep one part of several, if this process is one of many.
_LAUNCHERS = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE")
_Pooled = dict[Plan, Measurement]


class Rerun:
    """Measures with two Pythons, BASE's and NEW's, until ``deadline`` (``time.monotonic`` seconds).

    ``say`` is told, a line at a time, what is done and what could not be done.  The user's own
    tables and caches stay as they are.  No process is left when the context is left.
    """

    def __init__(
        self, pythons: tuple[Path, Path], deadline: float, terms: Terms, say: Callable[[str], object] = print
    ) -> None:
        # Not resolved: a virtual environment is known by the link that its Python is.
        self._pythons = tuple(Path(os.path.abspath(python)) for python in pythons)
        self._deadline, self._terms, self._say = deadline, terms, say
        self._scratch = tempfile.TemporaryDirectory(prefix="attnbench-rerun-")
        self._turns = 0
        self._compared = False

    def __enter__(self) -> Rerun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scratch.cleanup()

    def measured(
        self, regression: Regression, base: Mapping[Key, Measurement]
    ) -> dict[Key, tuple[Measurement, Measurement]]:
        """The rows of BASE and NEW of what was ambiguous or slower, as far as they could be measured again.

        What is slower comes first, to be confirmed; then what may be, the largest ratio first.
        """
        found: dict[Key, tuple[Measurement, Measurement]] = {}
        waiting = _by_case(regression)
        for number, (case, outcomes) in enumerate(waiting.items(), start=1):
            if time.monotonic() >= self._deadline:
                left = sum(len(each) for each in list(waiting.values())[number - 1 :])
                self._say(f"the time is over; not measured again: {left} rows of {len(waiting) - number + 1} cases")
                break
            row = base[outcomes[0].key]
            if reason := _obstacle(row):
                self._say(f"{case}: not measured again: {reason}")
                continue
            self._say(f"[{number}/{len(waiting)}] {case}: {', '.join(str(each.key[1]) for each in outcomes)}")
            for plan, rows in self._case(row, outcomes, regression.family).items():
                found[case, plan] = rows
        return found

    def _case(
        self, row: Measurement, outcomes: Sequence[Outcome], family: int
    ) -> dict[Plan, tuple[Measurement, Measurement]]:
        """Turns until every plan of the case is decided."""
        pooled: tuple[_Pooled, _Pooled] = {}, {}
        open_plans = {outcome.key[1]: outcome for outcome in outcomes}
        for number in range(MOST_ROUNDS):
            for name, side in _ORDERS[number % 2]:
                rows = self._turn(self._pythons[side], row, list(open_plans))
                if isinstance(rows, str):
                    self._say(f"{row.case}: {name} was not measured again: {rows}")
                    return _both(pooled)
                for plan, each in rows.items():
                    if not each.measured:
                        self._say(f"{row.case}: {plan} in {name}: {each.status}: {each.reason}")
                        open_plans.pop(plan, None)
                    pooled[side][plan] = _joined(pooled[side].get(plan), each)
                self._introduce(row, pooled)
            for plan, (before, after) in _both(pooled).items():
                if plan in open_plans:
                    factor = open_plans[plan].limits.time
                    changes = changes_of(before, after, self._terms.costs, factor)
                    if verdict_of(changes, factor, family) != "ambiguous":
                        del open_plans[plan]
            if not open_plans:
                break
        return _both(pooled)

    def _introduce(self, row: Measurement, pooled: tuple[_Pooled, _Pooled]) -> None:
        """Say once which two environments are compared, and where that may not be what is meant."""
        if self._compared or not (pooled[0] and pooled[1]):
            return
        self._compared = True
        before, after = (next(iter(side.values())).environment for side in pooled)
        for python, each in zip(self._pythons, (before, after), strict=True):
            self._say(f"{python}: attnbench {each.attnbench}, commit {each.commit or 'unknown'}, torch {each.torch}")
        if not other_differences(before, after):
            self._say("the two environments say the same of themselves: is the old one really the old one?")
        if unlike := machine_differences(row.environment, before):
            self._say(f"this machine is another than that of the results: {'; '.join(unlike)}")

    def _turn(self, python: Path, row: Measurement, plans: Sequence[Plan]) -> dict[Plan, Measurement] | str:
        """The rows of one sweep by plan, or why there are none."""
        self._turns += 1
        folder = Path(self._scratch.name, f"turn-{self._turns}")
        folder.mkdir()
        (folder / "case.yaml").write_text(yaml.safe_dump([_entry(row.spec, next(iter(row.error)))]), encoding="utf-8")
        dtype = "fp8" if row.spec.dtype == "bf16" else row.spec.dtype  # bf16 tensors, FP8 plans beside the others
        options = {
            "--preset": folder / "case.yaml",
            "--out": folder / "out",
            "--backends": ",".join(map(str, plans)),
            "--dtype": dtype,
            "--device": row.environment.device_type,
            "--format": "json",
        }
        # Each environment has caches of its own for as long as this takes; its table is not the user's.
        cache = Path(self._scratch.name, f"cache-{self._pythons.index(python)}")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
        environ |= {"XDG_CACHE_HOME": str(cache)}
        command = [str(python), "-m", "attnbench", "sweep"]
        command += [str(word) for option in options.items() for word in option]
        with (folder / "log").open("wb") as log:
            try:
                # In the folder, because Python looks first where it is started, which may be a checkout.
                process = subprocess.Popen(
                    command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                return f"{python} cannot be started: {error.strerror}"
            try:
                process.wait(max(0.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return "the time is over"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not (folder / "out" / MEASUREMENTS).exists():
            return _last_words(folder / "log") or f"the sweep ended with the exit code {process.returncode}"
        try:
            rows = rows_of(folder / "out")
        except MalformedFileError as error:
            return f"its records are of another kind than these: {error.expected}"
        return {plan: each for (_, plan), each in rows.items() if plan in plans}


def _by_case(regression: Regression) -> dict[str, list[Outcome]]:
    """What is to be measured again, by case, the case with the most suspicious row first."""
    suspects = [each for each in regression.outcomes if each.costs and each.verdict in ("slower", "ambiguous")]
    suspects.sort(key=lambda each: (each.verdict != "slower", -max(change.ratio for change in each.costs.values())))
    cases: dict[str, list[Outcome]] = {}
    for each in suspects:
        cases.setdefault(each.key[0], []).append(each)
    return cases


def _obstacle(row: Measurement) -> str | None:
    """Why a sweep cannot ask the question of this row again."""
    if next(iter(row.error)).startswith(PREFIX):
        return "its inputs were captured; sweep their file in both environments"
    if row.spec.dtype not in SWEEP_DTYPES[1:]:
        return f"no sweep has tensors of {row.spec.dtype}"
    return None


def _entry(spec: AttentionSpec, family: str) -> dict[str, object]:
    """The spec as a file of cases writes it (attnbench.harness.casefile)."""
    sizes = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_kv", "head_dim", "head_dim_v")
    entry: dict[str, object] = {name: getattr(spec, name) for name in (*sizes, "scale", "softcap", "direction")}
    if spec.mask.kind != "none":
        sides = {"left": spec.mask.left, "right": spec.mask.right, "alignment": spec.mask.alignment}
        entry["mask"] = {name: side for name, side in sides.items() if side is not None}
    return entry | {"families": [family], "name": _NAME}


def _joined(before: Measurement | None, row: Measurement) -> Measurement:
    """A turn's row behind those before it; samples of another kind, replayed or not, take their place."""
    times: dict[Cost, list[float]] = {cost: _thinned(taken) for cost, taken in row.time_ms.items()}
    if before is not None and before.measured and row.measured:
        for cost in times.keys() & before.time_ms.keys():
            if (cost in before.replayed) == (cost in row.replayed):
                times[cost] = before.time_ms[cost] + times[cost]
    return row.model_copy(update={"time_ms": times})


def _thinned(samples: list[float]) -> list[float]:
    return samples[:: -(-len(samples) // _MOST_SAMPLES)]


def _both(pooled: tuple[_Pooled, _Pooled]) -> dict[Plan, tuple[Measurement, Measurement]]:
    """The plans that have numbers on both sides."""
    before, after = pooled
    return {
        plan: (before[plan], after[plan])
        for plan in before
        if plan in after and before[plan].measured and after[plan].measured
    }


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return said[-_LONGEST_REASON:]
