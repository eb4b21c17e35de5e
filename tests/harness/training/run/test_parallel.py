"""Two real ranks learn what one learns from a batch of both."""

import contextlib
import json
import math
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import training_ranks
from patience import PATIENCE
from places import SUPPORT
from small_training import build_small, run_of, small

from attnbench.errors import MisuseError
from attnbench.harness.training.config import TrainConfig
from attnbench.harness.training.rows import ROWS, write_runs
from attnbench.harness.training.run.history import History
from attnbench.harness.training.run.loop import LoopOptions, train
from attnbench.harness.training.run.parallel import Ranks, join_ranks, spread
from attnbench.harness.training.run.trainable import build

STEPS = 8


def _free_port() -> int:
    """Below those that the system hands out unasked: until a rank takes it, seconds later, nobody else gets it."""
    drawn = random.SystemRandom()  # tests in other processes start from the same seed
    while True:
        port = drawn.randrange(15_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _ranks(folder: Path, world: int, **settings) -> dict:
    """Every rank with what torchrun tells it; what the first one found."""
    folder.mkdir(exist_ok=True)
    encoded = json.dumps({"steps": STEPS, "lr": 0.003} | settings)
    shared = {**os.environ, "PYTHONPATH": SUPPORT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    command = [sys.executable, training_ranks.__file__, str(folder), encoded, "0", str(world)]
    assert subprocess.run(command, env=shared, stdout=subprocess.DEVNULL, timeout=PATIENCE).returncode == 0
    return json.loads((folder / "found.json").read_text())


def _alone(folder: Path) -> History:
    kept: list[History] = []
    trainable = build_small(small(steps=STEPS, batch=8, lr=0.003), torch.device("cpu"))
    train(trainable, Ranks(torch.device("cpu")), LoopOptions(folder / "alone", 0), kept.append)
    return kept[-1]


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.exhaustive), "fsdp2"])
def test_two_ranks_learn_as_one_with_the_doubled_batch_and_resume(tmp_path: Path, kind: str) -> None:
    alone = _alone(tmp_path)
    found = _ranks(tmp_path / kind, 2, parallel=kind, batch=4)
    assert len(found["loss"]) == STEPS
    for name in ("loss", "grad_norm"):
        for ours, theirs in zip(found[name], getattr(alone, name), strict=True):
            assert math.isclose(ours, theirs, rel_tol=2e-5), name
    if kind == "fsdp2":  # of which each rank has its shards in a file of its own
        again = _ranks(tmp_path / kind, 2, parallel=kind, batch=4)
        assert again["resumed_at"] == [6]
        assert again["loss"] == found["loss"]
        assert again["grad_norm"] == found["grad_norm"]


def test_ranks_and_configuration_must_agree() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(MisuseError, match="torchrun"):
        spread(build_small(small(parallel="ddp"), cpu), Ranks(cpu))
    with pytest.raises(MisuseError, match="--parallel"):
        spread(build_small(small(), cpu), Ranks(cpu, 0, 2))


@pytest.mark.parametrize(
    ("device", "environ", "message"),
    [("cpu", {"WORLD_SIZE": "two"}, "numbers"), ("cuda:0", {}, "its own GPU"), ("cpu", {}, "MASTER_ADDR")],
)
def test_what_torchrun_did_not_set_is_refused(device: str, environ: dict, message: str) -> None:
    started = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} | environ
    with pytest.raises(MisuseError, match=message), join_ranks(device, started):
        pass


def test_fsdps_mixed_precision_rounds_weights_and_not_the_angles_of_rotary_embeddings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (started | {"MASTER_PORT": str(_free_port())}).items():
        monkeypatch.setenv(name, value)
    config = TrainConfig.make(seqlen=16, batch=1, attention="sdpa", parallel="fsdp2", policy="fsdp-mixed")
    seen: list[tuple[torch.dtype, ...]] = []
    with join_ranks("cpu") as ranks:
        made = build(config, ranks.device)
        spread(made, ranks)
        first = made.blocks[0]
        first.attention.register_forward_pre_hook(
            lambda module, args: seen.append((*(each.dtype for each in args[:3]), module.query.weight.dtype))
        )
        made.loss(made.batch(0)).backward()
    assert seen == [(torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)]


def test_a_folder_in_use_is_reported_once_and_no_rank_fails_with_a_traceback(tmp_path: Path) -> None:
    write_runs(tmp_path / ROWS, [run_of([1.0])])
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "attnbench", "train", "--parallel", "ddp", "--device", "cpu", "--out", tmp_path]
    started = [
        subprocess.Popen(
            command, env=shared | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]  # fmt: skip
    stderrs = [each.communicate(timeout=PATIENCE)[1] for each in started]
    assert [each.returncode for each in started] == [2, 2]
    assert "already holds runs" in stderrs[0]
    assert "the first process says what is wrong" in stderrs[1]
    assert "Traceback" not in "".join(stderrs)
