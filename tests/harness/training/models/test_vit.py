"""vit-huge: timm's model with our attention in it; without timm, a refusal that says what to install."""

import sys

import pytest
import torch

from attnbench.errors import InputError
from attnbench.harness.training.config import TrainConfig
from attnbench.harness.training.data.images import random_images
from attnbench.harness.training.models.vit import make_vit
from attnbench.harness.training.models.vit_sizes import VIT_SIZES
from attnbench.harness.training.run.trainable import build

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
