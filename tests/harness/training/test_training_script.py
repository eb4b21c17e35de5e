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
