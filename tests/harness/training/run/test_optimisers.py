"""Policies and optimisers: what is kept in which type, and that fp32 copies remember what bf16 rounds away."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attnbench.errors import InputError
from attnbench.harness.training.config import TrainConfig
from attnbench.harness.training.run.optimisers import MasterWeights, learning_rate, make_optimiser, set_rate
from attnbench.harness.training.run.policy import sharding_policy
from attnbench.harness.training.run.trainable import build

CONFIG = TrainConfig.make(seqlen=16, batch=1)


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

    trainable = build(CONFIG.replace(policy=policy), "cpu", attend=noting)
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
    trainable = build(CONFIG.replace(weight_decay=0.5, lr=0.1), "cpu")
    before = {name: each.clone() for name, each in trainable.module.named_parameters()}
    for each in trainable.module.parameters():
        each.grad = torch.zeros_like(each)
    make_optimiser(trainable.config, trainable.module).step()
    for name, each in trainable.module.named_parameters():
        torch.testing.assert_close(each, before[name] * (1 if each.ndim == 1 else 0.95))


def test_the_rate_warms_up_and_falls() -> None:
    config = CONFIG.replace(lr=1.0, warmup=10, steps=110)
    rates = [learning_rate(config, step) for step in range(config.steps)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 < rates[-1] < 0.102
    constant = config.replace(optimiser="sgd", warmup=0)
    assert {learning_rate(constant, step) for step in range(110)} == {1.0}
    trainable = build(CONFIG.replace(policy="fp32-and-bf16"), "cpu")
    optimiser = make_optimiser(trainable.config, trainable.module)
    set_rate(optimiser, 0.25)
    assert {group["lr"] for group in optimiser.param_groups} == {0.25}


def test_fp8_state_needs_a_gpu() -> None:
    config = CONFIG.replace(optimiser="adamw-fp8")
    with pytest.raises(InputError, match=r"compute capability 8\.9 or later, and this is cpu"):
        make_optimiser(config, build(config, "cpu").module)


def test_fsdp_gathers_in_bf16_and_reduces_in_fp32() -> None:
    mixed = sharding_policy(CONFIG.replace(policy="fsdp-mixed", parallel="fsdp2"))
    assert (mixed.param_dtype, mixed.reduce_dtype) == (torch.bfloat16, torch.float32)
    copies = sharding_policy(CONFIG.replace(policy="fp32-and-bf16", parallel="fsdp2"))
    assert (copies.param_dtype, copies.reduce_dtype) == (None, torch.float32)
    assert sharding_policy(CONFIG.replace(parallel="fsdp2")).param_dtype is None
