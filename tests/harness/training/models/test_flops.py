"""The stated model of a step's work against what torch counts of every matrix product that it runs."""

import pytest
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attnbench.harness.training.config import TrainConfig
from attnbench.harness.training.run.trainable import build


def no_products(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Something that every input has a part in, and no matrix product."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return q + k + v


def products(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Attention over the whole square, in two products."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return (q @ k.mT).softmax(-1) @ v


def counted(config: TrainConfig, attend: object) -> tuple[float, float]:
    trainable = build(config, "cpu", attend=attend)  # type: ignore[arg-type]
    batch = trainable.batch(0)
    with FlopCounterMode(display=False) as counter:
        trainable.loss(batch).backward()
    return counter.get_total_flops(), trainable.flops_per_step


@pytest.mark.parametrize("seqlen", [32, 80])
def test_a_step_of_gpt_costs_what_is_stated(seqlen: int) -> None:
    config = TrainConfig.make(seqlen=seqlen, batch=3)
    linear, stated = counted(config, no_products)
    whole, _ = counted(config, products)
    visible = (seqlen + 1) / (2 * seqlen)  # a causal mask shows half the square and its diagonal
    assert stated == linear + visible * (whole - linear)


def test_a_step_of_vit_costs_what_is_stated() -> None:
    pytest.importorskip("timm")
    config = TrainConfig.make("vit-huge", size="tiny", batch=3)
    whole, stated = counted(config, products)
    assert stated == whole
