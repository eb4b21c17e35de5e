"""Frozen plans that cannot serve here, for their version, the GPU or a guard: refused with reasons, never replaced."""

import json
import warnings

import pytest
import torch
from fakes import FakeForward, fake_backend, fake_registry
from frozen_fakes import CPU, install, kernels, rewritten, spec

from attnbench import Plan, freeze
from attnbench.choosing import selector
from attnbench.choosing.demotion import demote, demoted
from attnbench.choosing.selector import choose
from attnbench.errors import AttnbenchWarning, FrozenError, RefusedError
from attnbench.freezing import freeze as freezing
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import Availability


@pytest.mark.parametrize("kind", ["another version", "another origin", "not installed", "unknown", "refused"])
def test_a_plan_that_cannot_serve_here_is_refused_with_reasons(fakes, path, kind, monkeypatch):
    known = fakes("fast:bf16", "slow:bf16")
    with freeze(path):
        assert str(choose(spec(), CPU).plan) == "fast:bf16"
    answers = {
        "another version": Availability(version="1.0.1"),
        "another origin": Availability(version="1.0", origin="another-wheel"),
        "not installed": Availability(reason="the driver is too old"),
    }
    if kind in answers:
        known._availability["fast"] = answers[kind]
    elif kind == "unknown":
        rewritten(path, "fast", "fats")
    else:
        monkeypatch.setattr(known.forward("fast:bf16"), "refusals", lambda *_: ["needs another head size"])
    words = {
        "another version": "recorded with fast 1.0, here is 1.0.1",
        "another origin": "recorded with fast 1.0, here is 1.0 from another-wheel",
        "not installed": "the driver is too old",
        "unknown": "no backend is named 'fats'",
        "refused": "needs another head size",
    }
    for missing in ("raise", "record", "choose"):
        with freeze(path, missing=missing), pytest.raises(RefusedError, match=words[kind]) as caught:
            choose(spec(), CPU)
        assert str(path) in str(caught.value)
        assert "slow:bf16" in caught.value.alternatives
        assert not {"fast:fp8", "fast:bf16"} & {*caught.value.alternatives} or kind == "unknown"


@pytest.mark.parametrize(("built_on", "library"), [("cudnn", "cuDNN"), ("triton", "Triton")])
def test_libraries_that_have_the_kernels_count_as_versions(path, monkeypatch, built_on, library):
    install(monkeypatch, fake_registry(fake_backend("own", FakeForward("own:bf16"), built_on=(built_on,))))
    for version in ("1", "2"):
        monkeypatch.setattr(freezing, "_library", lambda name, version=version: version)
        with freeze(path):
            if version == "1":
                assert choose(spec(), CPU).plan == Plan("own:bf16")
                continue
            with pytest.raises(RefusedError, match=f"recorded with {library} 1, here is 2"):
                choose(spec(), CPU)


H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
GPU = torch.device("cuda", 0)


@pytest.fixture
def models(fakes, monkeypatch) -> dict[int, str]:
    """The model of each GPU by its number; one that has none here is as the first."""
    known = {0: H200}

    def describe(device: torch.device) -> Device:
        if device.type == "cuda":
            return Device("cuda", known.get(device.index, known[0]), (9, 0))
        return Device("cpu", "CPU")

    install(monkeypatch, kernels(cuda=True))
    for module in (selector, freezing):
        monkeypatch.setattr(module, "describe", describe)
    return known


@pytest.fixture
def recorded(models, path) -> bytes:
    """The file of a run on a CPU and an H200."""
    with freeze(path):
        choose(spec(), CPU)
        assert choose(spec(), GPU).device == "cuda:0"
    assert json.loads(path.read_text())["devices"] == {"cpu": "CPU", "cuda": H200}
    return path.read_bytes()


def test_another_model_of_gpu_is_refused(models, recorded, path):
    with freeze(path, missing="raise"):
        assert choose(spec(), torch.device("cuda", 3)).basis == "frozen"  # which one of its model does not matter
    models[0] = H100
    for missing in ("raise", "record", "choose"):
        with freeze(path, missing=missing):
            for asked in (spec(), spec(seqlen_q=7)):
                with pytest.raises(FrozenError, match="recorded on NVIDIA H200, and this is NVIDIA H100"):
                    choose(asked, GPU)
            assert choose(spec(), CPU).basis == "frozen"
    assert path.read_bytes() == recorded


def test_where_cuda_is_up_another_model_of_gpu_is_refused_at_the_start(models, recorded, path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    models[0] = H100
    with pytest.raises(FrozenError, match="this is NVIDIA H100"):
        freeze(path).start()
    models[1] = H200
    freeze(path).start().stop()  # one of them is enough


def test_the_file_of_another_machine_that_takes_the_place_of_ours(models, recorded, path):
    with freeze(path):
        rewritten(path, H200, H100)
        for asked in (GPU, CPU):
            with pytest.raises(FrozenError, match="recorded on NVIDIA H100"):
                choose(spec(seqlen_q=7), asked)


def test_a_guard_demotes_nothing_while_choices_are_frozen(fakes, path):
    fakes("fast:bf16", "slow:bf16")
    with freeze(path):
        plan = choose(spec(), CPU).plan
        with pytest.warns(AttnbenchWarning, match=r"fast:bf16 stays .* frozen in .*run\.choices\.json.* demoted by a"):
            assert not demote(plan, spec(), "demoted by a guard: its out is off by 0.5")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once is enough
            assert not demote(plan, spec(), "demoted by a guard: its out is off by 0.6")
        assert demoted(plan, spec()) is None
    assert demote(plan, spec(), "demoted by a guard: its out is off by 0.5")
    with freeze(path), pytest.raises(RefusedError, match="demoted by a guard"):
        choose(spec(), CPU)
    path.unlink()
    with freeze(path):
        assert str(choose(spec(), CPU).plan) == "slow:bf16"
