"""The models on a CPU: sizes, weights, gradients, work, and that they learn whatever computes their attention."""

import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from attnbench.errors import InputError, RefusedError
from attnbench.harness.training.config import TrainConfig
from attnbench.harness.training.data.images import random_images
from attnbench.harness.training.models.attention import Attend
from attnbench.harness.training.models.gpt import SIZES, Gpt
from attnbench.harness.training.models.loss import head_loss, token_loss
from attnbench.harness.training.models.vit import make_vit
from attnbench.harness.training.models.vit_sizes import VIT_SIZES
from attnbench.harness.training.run.trainable import build

SHORT: dict[str, Any] = {"seqlen": 48, "batch": 2}


# 1b, 3b and 8b: what the model cards of Llama 3.2 and Llama 3 count.
@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("tiny", 492_160),
        ("small", 125_848_320),
        ("medium", 356_566_016),
        ("1b", 1_235_814_400),
        ("3b", 3_212_749_824),
        ("8b", 8_030_261_248),
    ],
)
def test_sizes_have_the_parameters_they_state(size: str, parameters: int) -> None:
    with torch.device("meta"):
        model = Gpt(SIZES[size], nn.Identity)  # type: ignore[arg-type]
    assert sum(each.numel() for each in model.parameters()) == SIZES[size].parameters == parameters


def test_a_vocabulary_of_ones_own_changes_embedding_and_head() -> None:
    assert build(TrainConfig.make(vocab=1024), "cpu").parameters == 492_160 + 2 * 128 * (1024 - 384)
    with pytest.raises(InputError, match="a vocabulary of 257, not 256"):
        build(TrainConfig.make(vocab=256), "cpu")


def test_attention_is_causal_and_grouped_and_rotated() -> None:
    """Against the same block written out; and no logit knows a later token."""
    seen = []

    def plain(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        seen.append((q.shape, k.shape, is_causal))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        return (q @ k.mT * q.shape[3] ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    config = TrainConfig.make(policy="fp32", **SHORT)
    own, sdpa = build(config, "cpu", attend=plain), build(config, "cpu")
    batch = own.batch(0)
    torch.testing.assert_close(own.loss(batch), sdpa.loss(batch), rtol=1e-5, atol=1e-6)
    assert seen[0] == ((2, 2, 48, 64), (2, 1, 48, 64), True)

    tokens, targets = batch
    targets = targets.clone()
    model = sdpa.module
    x = model.embedding(tokens).detach().requires_grad_()
    model.embedding = nn.Identity()
    model(x, targets.fill_(-100).index_fill_(1, torch.tensor([20]), 7)).backward()
    assert x.grad is not None
    assert x.grad[:, 21:].abs().max() == 0
    assert (x.grad[:, :21].abs().amax(-1) > 0).all()


def test_positions_are_relative() -> None:
    """A rotation by positions leaves q·k a function of their difference."""
    found: list[tuple[Tensor, Tensor]] = []

    def noting(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        found.append((q, k))
        return torch.zeros_like(q)

    trainable = build(TrainConfig.make(policy="fp32", **SHORT), "cpu", attend=noting)
    trainable.module(torch.full((1, 48), 7), torch.full((1, 48), 7))
    q, k = found[0]
    scores = (q @ k.mT)[0, 0].detach()
    for distance in (0, 1, 5, 30):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    assert float(scores[0, 0]) != pytest.approx(float(scores[30, 0]), rel=1e-3)


def test_one_seed_gives_one_model_whatever_computes_it() -> None:
    base = TrainConfig.make(**SHORT)
    others = [
        base.replace(attention="reference"),
        base.replace(attention="auto", fp8=True, max_error=0.1),
        base.replace(checkpointing=True, compile=True, seqlen=32, batch=4, steps=7),
        base.replace(policy="fp32", optimiser="sgd"),
    ]
    weights = {name: each.clone() for name, each in build(base, "cpu").module.named_parameters()}
    for config in others:
        torch.randn(5)  # what was drawn before does not matter
        found = dict(build(config, "cpu").module.named_parameters())
        torch.testing.assert_close(found, weights, rtol=0, atol=0)
    rounded = dict(build(base.replace(policy="bf16"), "cpu").module.named_parameters())
    assert all(torch.equal(rounded[name], weights[name].bfloat16()) for name in weights)
    reseeded = dict(build(base.replace(seed=1), "cpu").module.named_parameters())
    assert not any(torch.equal(reseeded[name], weights[name]) for name in weights if weights[name].ndim > 1)
    drawn = [each.flatten()[:64] for each in weights.values() if each.ndim > 1]
    assert not any(torch.equal(one, other) for one, other in pairwise(drawn))


@pytest.mark.parametrize("largest", [1, 700, 10**9])
def test_the_loss_in_parts_is_the_loss(largest: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    head = torch.randn(300, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(300, (2, 9))
    wanted = F.cross_entropy((hidden @ head.T).flatten(0, 1).float(), targets.flatten())
    expected = torch.autograd.grad(wanted, (hidden, head))
    for loss in (head_loss(hidden, head, targets, largest), token_loss(hidden @ head.T, targets, largest)):
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, wanted)
        found = torch.autograd.grad(loss, (hidden, head))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_an_attention_that_cannot_serve_is_refused_with_its_reasons() -> None:
    trainable = build(TrainConfig.make(attention="fa3:fp8", policy="bf16", **SHORT), "cpu")
    with pytest.raises(RefusedError, match=r"fa3:fp8 .* cannot serve this: .* Plans that can: reference"):
        trainable.loss(trainable.batch(0))


def test_ranks_share_samples_and_know_their_places() -> None:
    alone = build(TrainConfig.make(seqlen=16, batch=2, attention="auto"), "cpu")
    shared = build(TrainConfig.make(seqlen=16, batch=2, attention="auto", parallel="ddp", context_parallel=2), "cpu")
    assert (shared.units_per_step, shared.flops_per_step) == (16, alone.flops_per_step / 2)
    for first in (0, 2):  # of four ranks each two share the samples that one of two has
        parts = [shared.batch(3, rank, 4) for rank in (first, first + 1)]
        places = torch.cat([part[2] for part in parts], 1)[0]
        assert parts[0][2].tolist() == [[0, 1, 2, 3, 12, 13, 14, 15]]
        for whole, *own in zip(alone.batch(3, first // 2, 2), *parts, strict=False):
            assert torch.equal(torch.cat(own, 1)[:, places.argsort()], whole)


def test_torchs_ring_is_given_whole_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, heads, 16, 8) for heads in (4, 2, 2))
    config = TrainConfig.make(attention="sdpa", parallel="ddp")
    grouped, seen = Attend(config)(q, k, v, True), []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *x, **how: seen.append((x, how)) or sdpa(*x, **how)
    )
    whole = Attend(config.replace(context_parallel=2))(q, k, v, True)
    ((tensors, how),) = seen
    assert ([x.shape[1] for x in tensors], how["enable_gqa"]) == ([4, 4, 4], False)
    torch.testing.assert_close(whole, grouped)


def test_positions_are_those_of_the_sample() -> None:
    trainable = build(TrainConfig.make(seqlen=16, batch=1, attention="sdpa", policy="fp32"), "cpu")
    tokens, targets = trainable.batch(0)
    places = torch.arange(16)[None]
    assert trainable.module(tokens, targets, places) == trainable.module(tokens, targets)
    assert trainable.module(tokens, targets, places.flip(1)) != trainable.module(tokens, targets)


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


TINY = TrainConfig.make("vit-huge", size="tiny", batch=3, policy="fp32")


def test_without_timm_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm.models.vision_transformer", None)
    with pytest.raises(InputError, match="pip install 'timm>=1'"):
        build(TINY, "cpu")


def test_images_are_the_seeds_and_the_numbers() -> None:
    device = torch.device("cpu")
    images, labels = random_images(0, range(8), 16, 10, device)
    assert images.shape == (8, 3, 16, 16)
    assert abs(images.mean()) < 0.05
    assert abs(images.std() - 1) < 0.05
    assert ((labels >= 0) & (labels < 10)).all()
    some, their = random_images(0, range(3, 5), 16, 10, device)
    assert torch.equal(some, images[3:5])
    assert torch.equal(their, labels[3:5])
    assert not torch.equal(random_images(1, range(8), 16, 10, device)[0], images)


class TestWithTimm:
    @pytest.fixture(autouse=True)
    def timm(self) -> None:
        pytest.importorskip("timm")

    def test_huge_has_the_articles_parameters(self) -> None:
        vit = make_vit(VIT_SIZES["huge"], torch.device("meta"), 0, None)
        assert round(sum(each.numel() for each in vit.parameters()) / 1e6) == 632

    def test_our_attention_is_timms(self) -> None:
        batch = build(TINY, "cpu").batch(0)
        timms = make_vit(VIT_SIZES["tiny"], torch.device("cpu"), TINY.seed, None)
        wanted = timms(*batch)
        wanted.backward()
        theirs = dict(timms.named_parameters())
        for attention in ("sdpa", "reference"):
            trainable = build(TINY.replace(attention=attention), "cpu")
            assert len(trainable.blocks) == len(trainable.attention_modules) == 2
            loss = trainable.loss(batch)
            torch.testing.assert_close(loss, wanted)
            loss.backward()
            for name, parameter in trainable.module.named_parameters():
                torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-6)
