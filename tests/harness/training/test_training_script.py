"""The scripts that make the end-to-end rows: killed at any moment they lose nothing, and do nothing twice."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE
from places import RESULTS

from attnbench.harness.training.rows import TrainingRun, read_runs

SCRIPT = RESULTS / "training.sh"


def _start(out: Path) -> subprocess.Popen:
    small = {
        "PARTS": "learning",
        "DEVICE": "cpu",
        "SEEDS": "1",
        "LEARN": "--size tiny --seqlen 16 --batch 1 --steps 120",
        "CANDIDATES": "emulated:fp8 te:fp8>te:fp8",  # the second cannot be had here
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | small | {"OUT": str(out), "OMP_NUM_THREADS": "1", "PATH": path}
    return subprocess.Popen(
        [SCRIPT], env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )


def _rows(out: Path) -> list[TrainingRun]:
    return list(read_runs(out / "learning")) if (out / "learning" / "training.jsonl").exists() else []


@pytest.mark.exhaustive
def test_the_script_goes_on_where_it_was_killed_and_repeats_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out of it"
    killed = _start(out)
    until = time.monotonic() + PATIENCE
    while not any(row.loss for row in _rows(out)):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    (before,) = _rows(out)
    assert before.loss

    said = _start(out).communicate(timeout=PATIENCE)[0]
    baseline, candidate = _rows(out)
    assert (baseline.status, candidate.status) == ("ok", "ok")
    assert baseline.loss[: len(before.loss)] == before.loss
    assert "1 commands are not done" in said
    assert "exit 1: attnbench train" in said
    assert "te:fp8>te:fp8" in said
    assert "emulated:fp8" in (out / "learning.md").read_text(encoding="utf-8")

    again = _start(out)
    assert "--attention emulated:fp8" not in again.communicate(timeout=PATIENCE)[0]
    assert again.returncode == 1
    assert [row.started for row in _rows(out)] == [baseline.started, candidate.started]


@pytest.mark.exhaustive
def test_choices_take_their_steps_in_turn_on_one_model(tmp_path: Path) -> None:
    def measured(cells: list[str], choices: list[str]) -> subprocess.CompletedProcess:
        command = [sys.executable, RESULTS / "steps.py", *cells, "--choices", *choices, "--rounds", "2"]
        command += ["--checkpointing", "--device", "cpu", "--out", tmp_path]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)

    cells = ["size=tiny,seqlen=64,batch=2", "size=tiny,seqlen=64,linears=te-fp8"]
    choices = ["auto", "auto-fp8", "sdpa", "emulated:fp8", "te:fp8"]
    done = measured(cells, choices)
    assert done.returncode == 1, done.stderr  # because of the last choice and cell
    assert "auto, FP8 runs sdpa-flash:bf16>sdpa-flash:bf16 like an earlier choice" in done.stdout
    rows = list(read_runs(tmp_path))
    assert [row.status for row in rows] == ["ok"] * 3 + ["error"] * 6
    own = rows[:3]
    assert [row.plans for row in own] == [["sdpa-flash:bf16>sdpa-flash:bf16"], [], ["emulated:fp8>emulated:fp8"]]
    for row in own:
        assert (len(row.step_ms), len(row.samples_ms)) == (4, 2)
        assert row.attention is not None
        assert row.attention.share > 0
    first = [row.loss[0] for row in own]
    assert first == sorted(first, reverse=True)  # on one batch, by a model that learns from step to step
    assert len(set(first)) == 3

    assert measured(cells[:1], choices[:3]).returncode == 0
    assert [row.started for row in read_runs(tmp_path)] == [row.started for row in rows]
