"""The scripts that make the end-to-end rows: killed at any moment they lose nothing, and do nothing twice."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE
from places import RESULTS

from attnbench.errors import InputError
from attnbench.harness.training.rows import TrainingRun, read_runs

SCRIPT = RESULTS / "training.sh"
_spec = importlib.util.spec_from_file_location("steps", RESULTS / "steps.py")
steps = importlib.util.module_from_spec(_spec)
sys.modules["steps"] = steps
_spec.loader.exec_module(steps)


LEARNING = {
    "PARTS": "learning",
    "SEEDS": "1",
    "LEARN": "--size tiny --seqlen 16 --batch 1 --steps 120",
    "CANDIDATES": "emulated:fp8 te:fp8>te:fp8",  # the second cannot be had here
}
TURNS = {
    "PARTS": "vit recipe policies",
    "ROUNDS": "1",
    "VIT": "model=vit-huge,size=tiny",  # timm may be missing, TransformerEngine is
    "RECIPE": "size=tiny,seqlen=128,batch=2,packing=packed",
    "RECIPE_CHOICES": "auto,compile=false emulated:fp8,compile=false auto,linears=te-fp8",
    "POLICIES": "size=tiny,seqlen=32",
    "POLICY_ROUNDS": "20",
}


def _start(out: Path, small: dict[str, str] = LEARNING) -> subprocess.Popen:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | small | {"OUT": str(out), "DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PATH": path}
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

    output = _start(out).communicate(timeout=PATIENCE)[0]
    baseline, candidate = _rows(out)
    assert (baseline.status, candidate.status) == ("ok", "ok")
    assert baseline.loss[: len(before.loss)] == before.loss
    assert "1 commands are not done" in output
    assert "exit 1: attnbench train" in output
    assert "te:fp8>te:fp8" in output
    assert "emulated:fp8" in (out / "learning.md").read_text(encoding="utf-8")

    again = _start(out)
    assert "--attention emulated:fp8" not in again.communicate(timeout=PATIENCE)[0]
    assert again.returncode == 1
    assert [row.started for row in _rows(out)] == [baseline.started, candidate.started]


@pytest.mark.exhaustive
def test_choices_take_their_steps_in_turn_on_one_model(tmp_path: Path) -> None:
    def measured(cells: list[str], choices: list[str]) -> subprocess.CompletedProcess:
        command = [sys.executable, RESULTS / "steps.py", *cells, "--choices", *choices, "--rounds", "2"]
        command += ["--device", "cpu", "--out", tmp_path]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)

    cells = ["size=tiny,seqlen=64,batch=2,checkpointing=true", "size=tiny,seqlen=64,linears=te-fp8"]
    choices = ["auto", "auto-fp8", "sdpa", "emulated:fp8", "te:fp8"]
    done = measured(cells, choices)
    assert done.returncode == 1, done.stderr  # because of the last choice and cell
    assert "auto-fp8 runs sdpa-flash:bf16>sdpa-flash:bf16 like auto\n" in done.stdout
    rows = list(read_runs(tmp_path))
    assert [row.status for row in rows] == ["ok"] * 3 + ["error"] * 6
    own = rows[:3]
    assert [row.plans for row in own] == [["sdpa-flash:bf16>sdpa-flash:bf16"], [], ["emulated:fp8>emulated:fp8"]]
    for row in own:
        assert (len(row.step_ms), row.timed_from, len(row.samples_ms)) == (5, 3, 2)
        assert row.attention is not None
        assert row.attention.share > 0
    first = [row.loss[0] for row in own]
    assert first == sorted(first, reverse=True)  # on one batch, by a model that learns from step to step
    assert len(set(first)) == 3

    assert measured(cells[:1], choices[:3]).returncode == 0
    assert [row.started for row in read_runs(tmp_path)] == [row.started for row in rows]


@pytest.mark.exhaustive
def test_blocks_recipes_and_policies_take_their_steps_in_turn(tmp_path: Path) -> None:
    output = _start(tmp_path, TURNS).communicate(timeout=PATIENCE)[0]
    assert "2 commands are not done" in output
    assert "policies" not in output.partition("are not done")[2]
    vit, recipe, policies = (list(read_runs(tmp_path / part)) for part in ("vit", "recipe", "policies"))
    refused = [row for row in vit if row.settings["block"] == "te"]
    assert len(refused) == 4
    assert all("TransformerEngine's, which needs a GPU" in row.reason for row in refused if not _te(row))
    assert all("linears=te-fp8 need a GPU" in row.reason for row in (*filter(_te, vit), *filter(_te, recipe)))
    assert [row.status for row in recipe] == ["ok", "ok", "error"]
    assert all(row.settings["parallel"] == "fsdp2" and row.settings["checkpointing"] for row in recipe)
    assert len({row.loss[0] for row in recipe[:2]}) == 2  # one model, and FP8

    assert [row.settings["policy"] for row in policies] == ["autocast", "bf16", "fp32-and-bf16", "fsdp-mixed", "fp32"]
    for row in policies:  # each trained alone
        assert row.status == "ok"
        assert row.loss[0] == pytest.approx(policies[0].loss[0], rel=1e-3)
        assert row.loss[-1] < row.loss[0] - 0.1
    assert len({row.loss[-1] for row in policies}) == 5

    _start(tmp_path, TURNS | {"PARTS": "policies"}).communicate(timeout=PATIENCE)
    assert [row.started for row in read_runs(tmp_path / "policies")] == [row.started for row in policies]


def _te(row: TrainingRun) -> bool:
    return row.settings["linears"] == "te-fp8"


def _choice(cell: str, choice: str, *options: str) -> steps.Choice:
    asked = steps.arguments([cell, "--choices", choice, *options])
    return steps.Choice.of(asked.cells[0], asked.choices[0], asked)


def test_cells_and_choices_set_any_field_of_a_configuration() -> None:
    found = _choice("size=3b,seqlen=8192,slices=4,checkpointing=true,lr=3e-4", "auto-fp8,linears=te-fp8,lr=1e-4")
    config = found.config
    assert (config.attention, config.fp8, config.linears, config.lr) == ("auto", True, "te-fp8", 1e-4)
    assert (config.batch, config.layers, config.vocab, config.checkpointing) == (1, 7, 32064, True)
    vit = "model=vit-huge,size=tiny,batch=4"
    shared = [_choice(vit, choice).model for choice in ("sdpa", "auto", "auto-fp8", "sdpa,graphs=true")]
    assert len(set(shared)) == 1
    assert _choice(vit, "own,block=te").model not in shared
    assert _choice(vit, "sdpa,compile=true").model not in shared


@pytest.mark.parametrize(
    ("cell", "choice", "options"),
    [
        ("size=tiny", "sdpa,graphs=true", []),  # AdamW's rate changes, and it counts on the host
        ("model=vit-huge", "sdpa,graphs=true", ["--learn"]),
        ("model=vit-huge,parallel=fsdp2", "sdpa,graphs=true", []),
        ("model=vit-huge,slices=2", "sdpa", []),
        ("size=3b,slices=5", "sdpa", []),
        ("size=tiny,policy=fsdp-mixed", "sdpa", []),
    ],
)
def test_what_no_step_can_be_is_refused(cell: str, choice: str, options: list[str]) -> None:
    with pytest.raises(InputError):
        _choice(cell, choice, *options)


@pytest.mark.parametrize("text", ["size", "steps=3", "attention=sdpa", "batch=two", "compile=yes", "rounds=3", "=4"])
def test_a_setting_that_there_is_not_ends_with_usage(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ([text], ["size=tiny", "--choices", f"sdpa,{text}"]):
        with pytest.raises(SystemExit):
            steps.arguments(given)
        assert "usage" in capsys.readouterr().err
