"""Two real ranks learn what one learns from a batch of both; policies and optimisers keep what bf16 rounds away."""

import contextlib
import json
import math
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import training_ranks
from patience import PATIENCE
from places import SUPPORT
from small_training import build_small, run_of, small
from torch import Tensor

from attnbench.errors import InputError, MisuseError
from attnbench.harness.training.config import TrainConfig
from attnbench.harness.training.rows import ROWS, write_runs
from attnbench.harness.training.run.history import History
from attnbench.harness.training.run.loop import LoopOptions, train
from attnbench.harness.training.run.optimisers import MasterWeights, learning_rate, make_optimiser, set_rate
from attnbench.harness.training.run.parallel import Ranks, join_ranks, spread
from attnbench.harness.training.run.policy import sharding_policy
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


SHORT = TrainConfig.make(seqlen=16, batch=1)


@pytest.mark.parametrize(
    ("policy", "weights", "product"),
    [
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("autocast", torch.float32, torch.bfloat16),
        ("fp32-and-bf16", torch.bfloat16, torch.bfloat16),
        ("fp32", torch.float32, torch.float32),
    ],
)
def test_policies_keep_and_compute_in_their_types(policy: Any, weights: torch.dtype, product: torch.dtype) -> None:
    seen: list[torch.dtype] = []

    def noting(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        seen.extend(x.dtype for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    trainable = build(SHORT.replace(policy=policy), "cpu", attend=noting)
    assert {each.dtype for each in trainable.module.parameters()} == {weights}
    loss = trainable.loss(trainable.batch(0))
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert set(seen) == {product}
    optimiser = make_optimiser(trainable.config, trainable.module)
    loss.backward()
    optimiser.step()
    kept = optimiser._inner if isinstance(optimiser, MasterWeights) else optimiser
    state = {x.dtype for each in kept.state.values() for name, x in each.items() if name.startswith("exp")}  # type: ignore[attr-defined]
    assert state == {torch.bfloat16 if policy == "bf16" else torch.float32}


def test_fp32_copies_add_up_what_bf16_loses() -> None:
    def after(make: Any) -> float:
        weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        optimiser = make([weight])
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimiser.step()
        return weight.item()

    def sgd(parameters: list[Tensor]) -> torch.optim.SGD:
        return torch.optim.SGD(parameters, lr=1e-3)

    assert after(sgd) == 1.0  # 1 − 0.001 rounds to 1
    assert after(lambda parameters: MasterWeights(parameters, sgd)) == pytest.approx(0.9, rel=0.01)


def test_vectors_do_not_decay() -> None:
    trainable = build(SHORT.replace(weight_decay=0.5, lr=0.1), "cpu")
    before = {name: each.clone() for name, each in trainable.module.named_parameters()}
    for each in trainable.module.parameters():
        each.grad = torch.zeros_like(each)
    make_optimiser(trainable.config, trainable.module).step()
    for name, each in trainable.module.named_parameters():
        torch.testing.assert_close(each, before[name] * (1 if each.ndim == 1 else 0.95))


def test_the_rate_warms_up_and_falls() -> None:
    config = SHORT.replace(lr=1.0, warmup=10, steps=110)
    rates = [learning_rate(config, step) for step in range(config.steps)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 < rates[-1] < 0.102
    constant = config.replace(optimiser="sgd", warmup=0)
    assert {learning_rate(constant, step) for step in range(110)} == {1.0}
    trainable = build(SHORT.replace(policy="fp32-and-bf16"), "cpu")
    optimiser = make_optimiser(trainable.config, trainable.module)
    set_rate(optimiser, 0.25)
    assert {group["lr"] for group in optimiser.param_groups} == {0.25}


def test_fp8_state_needs_a_gpu() -> None:
    config = SHORT.replace(optimiser="adamw-fp8")
    with pytest.raises(InputError, match=r"compute capability 8\.9 or later, and this is cpu"):
        make_optimiser(config, build(config, "cpu").module)


def test_fsdp_gathers_in_bf16_and_reduces_in_fp32() -> None:
    mixed = sharding_policy(SHORT.replace(policy="fsdp-mixed", parallel="fsdp2"))
    assert (mixed.param_dtype, mixed.reduce_dtype) == (torch.bfloat16, torch.float32)
    copies = sharding_policy(SHORT.replace(policy="fp32-and-bf16", parallel="fsdp2"))
    assert (copies.param_dtype, copies.reduce_dtype) == (None, torch.float32)
    assert sharding_policy(SHORT.replace(parallel="fsdp2")).param_dtype is None
