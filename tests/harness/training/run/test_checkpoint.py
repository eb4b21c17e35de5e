"""A run that is killed goes on where its checkpoint stands, and nobody can tell from its curve."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import training_ranks
from places import SUPPORT
from safetensors.torch import load_file, save_file
from small_training import build_small, small

from attnbench.errors import MalformedFileError, MisuseError, OutputError
from attnbench.harness.training.config import TrainConfig
from attnbench.harness.training.run.checkpoint import load, newest, save, state_of
from attnbench.harness.training.run.history import History
from attnbench.harness.training.run.loop import LoopOptions, train
from attnbench.harness.training.run.optimisers import make_optimiser
from attnbench.harness.training.run.parallel import Ranks
from attnbench.harness.training.run.trainable import build

ALONE = Ranks(torch.device("cpu"))
STEPS = 24


def _here(folder: Path, **settings) -> History:
    """The whole run or the rest of it, in this process."""
    kept: list[History] = []
    trainable = build_small(small(**settings), torch.device("cpu"), dropout=True)
    train(trainable, ALONE, LoopOptions(folder / "checkpoints", training_ranks.EVERY), kept.append, resume=True)
    return kept[-1]


def _killed(folder: Path, after: int, **settings) -> None:
    """A process of its own, which SIGKILL ends once it has taken so many steps."""
    command = [sys.executable, training_ranks.__file__, str(folder), json.dumps(settings), "0.02"]
    environ = {**os.environ, "PYTHONPATH": SUPPORT}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        for count, _line in enumerate(process.stdout, start=1):
            if count == after:
                os.kill(process.pid, signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("moments", "settings"),
    [
        ((8,), {"optimiser": "adamw", "policy": "fp32-and-bf16"}),
        pytest.param((5, 8), {"optimiser": "adamw"}, marks=pytest.mark.exhaustive),
        pytest.param((10,), {"optimiser": "sgd", "policy": "fp32-and-bf16", "lr": 0.1}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_killed_again_and_again_has_the_curve_of_one_left_alone(tmp_path: Path, moments, settings) -> None:
    whole = _here(tmp_path / "whole", steps=STEPS, **settings)
    folder = tmp_path / "killed"
    for moment in moments:
        _killed(folder, moment, steps=STEPS, **settings)
    found = _here(folder, steps=STEPS, **settings)
    assert len(found.resumed_at) == len(moments)
    assert found.loss == whole.loss
    assert found.grad_norm == whole.grad_norm
    assert len(found.loss) == STEPS


def _trained(folder: Path, steps: int = 4, **settings):
    trainable = build_small(small(steps=steps, **settings), torch.device("cpu"))
    kept: list[History] = []
    train(trainable, ALONE, LoopOptions(folder, 2), kept.append)
    return trainable


def _state(trainable):
    """A fresh model's tensors, with an optimiser that has taken a step."""
    optimiser = make_optimiser(trainable.config, trainable.module)
    trainable.loss(trainable.batch(0)).backward()
    optimiser.step()
    return state_of(trainable.module, optimiser)


def test_a_history_survives_its_checkpoint_to_the_last_bit() -> None:
    history = History(loss=[1.5, float("nan")], grad_norm=[1 / 3, float("inf")], step_ms=[1.0, 2.0], untimed=[1])
    assert repr(History.of(history.tensors(), history.facts())) == repr(history)


def test_what_a_killed_writer_left_is_no_checkpoint(tmp_path: Path) -> None:
    _trained(tmp_path, steps=5)
    assert [each.name for each in tmp_path.iterdir()] == ["step-000000004"]  # the last alone
    whole = newest(tmp_path)
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / "rank-0.safetensors").write_bytes(b"half")
    assert newest(tmp_path) == whole
    state = _state(build_small(small(steps=4), torch.device("cpu")))
    save(tmp_path, state, History(loss=[1.0] * 3, grad_norm=[1.0] * 3, step_ms=[1.0] * 3), {}, ALONE)
    assert [each.name for each in tmp_path.iterdir()] == ["step-000000003"]


def test_a_rename_that_fails_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _trained(tmp_path)
    whole = newest(tmp_path)

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_room)
    with pytest.raises(OutputError, match="No space left"):
        save(tmp_path, {}, History(loss=[1.0] * 9, grad_norm=[1.0] * 9, step_ms=[1.0] * 9), {}, ALONE)
    assert newest(tmp_path) == whole


def test_another_runs_checkpoint_and_another_number_of_ranks_are_refused(tmp_path: Path) -> None:
    trainable = _trained(tmp_path)
    state, path = _state(trainable), newest(tmp_path)
    before = {name: tensor.clone() for name, tensor in state.items()}
    with pytest.raises(MisuseError, match="another configuration"):
        load(path, state, trainable.config.replace(seed=1).to_dict(), ALONE)
    (path / "rank-1.safetensors").write_bytes((path / "rank-0.safetensors").read_bytes())
    with pytest.raises(MisuseError, match="1 ranks"):
        load(path, state, trainable.config.to_dict(), Ranks(torch.device("cpu"), 1, 2))
    assert all(torch.equal(state[name], before[name]) for name in before)


def test_a_text_that_has_changed_is_not_gone_on_with(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("what is learnt " * 40)
    config = TrainConfig.make(seqlen=16, batch=2, steps=4, attention="sdpa", data=str(text))
    again = partial(
        train, ranks=ALONE, options=LoopOptions(tmp_path / "kept", 2), on_step=lambda history: None, resume=True
    )
    again(build(config, "cpu"))
    assert newest(tmp_path / "kept") is not None
    again(build(config, "cpu"))
    text.write_text("something else " * 41)
    with pytest.raises(MisuseError, match="other data"):
        again(build(config, "cpu"))


@pytest.mark.parametrize("fault", ["torn", "pickle", "shape", "missing", "more", "facts"])
def test_a_file_that_is_no_checkpoint_changes_nothing(tmp_path: Path, fault: str) -> None:
    trainable = _trained(tmp_path)
    state, path = _state(trainable), newest(tmp_path)
    file = path / "rank-0.safetensors"
    content = file.read_bytes()
    tensors = {each: tensor.clone() for each, tensor in load_file(file).items()}  # not of the file that is written over
    facts = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    name = next(each for each in tensors if each.startswith("model."))
    if fault == "torn":
        file.write_bytes(content[: len(content) // 2])
    elif fault == "pickle":
        torch.save(tensors, file)
    else:
        if fault == "shape":
            tensors[name] = torch.zeros(1, 2, 3)
        elif fault == "missing":
            del tensors[name]
        elif fault == "more":
            tensors["model.other"] = torch.zeros(1)
        else:
            facts["history"] = '{"untimed": ["x"]}'
        save_file(tensors, file, metadata=facts)
    before = {name: tensor.clone() for name, tensor in state.items()}
    with pytest.raises(MalformedFileError):
        load(path, state, trainable.config.to_dict(), ALONE)
    assert all(torch.equal(state[name], before[name]) for name in before)
