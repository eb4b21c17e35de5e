"""What autotune leaves alone: specs that it skips with a reason, calls that it does not count, and what is an error."""

from dataclasses import replace

import pytest
import torch
from autotune_setup import FAST, tensors
from delayed_kernels import spec
from planted import CPU, setup

import attnbench
from attnbench import attention, use_backend
from attnbench.dispatch.memory import listening
from attnbench.errors import InputError, MisuseError, OutputError, UnknownBackendError
from attnbench.harness.autotune.tuning import shortage
from attnbench.harness.measure.setup import INSTALLED
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import registry


def capturing(monkeypatch, value):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: value)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: value)


def test_nothing_is_measured_while_a_cuda_graph_is_captured(unmeasured, monkeypatch):
    with attnbench.autotune(60) as tuned:
        capturing(monkeypatch, True)
        attention(*tensors())
    assert not unmeasured
    assert "a CUDA graph is being captured" in tuned.skipped[spec()]
    capturing(monkeypatch, False)
    tuned.measure()
    assert [case.spec for case, _ in unmeasured] == [spec()]


def test_calls_that_leave_nothing_to_choose(unmeasured):
    with attnbench.autotune(60) as tuned:
        attention(*tensors(), backend=FAST)
        with use_backend("paced"):
            attention(*tensors(16))
        attention(*tensors(48), backend=FAST)
        attention(*tensors(48))
    assert [case.spec.seqlen_q for case, _ in unmeasured] == [48]
    assert tuned.skipped[spec()] == f"there is nothing to choose: {FAST} was asked for by argument"
    assert tuned.skipped[spec(16)] == "there is nothing to choose: paced was asked for by context"


def test_fp8_tensors_are_no_case_of_a_sweep():
    quantised = spec(dtype="e4m3", descale="head")
    tuned = attnbench.autotune(60).measure([quantised], "cpu")
    assert not tuned.measured
    assert "not e4m3" in tuned.skipped[quantised]


def test_a_program_that_fails_is_not_measured(unmeasured):
    def program():
        with attnbench.autotune(60):
            attention(*tensors())
            raise RuntimeError("the program's own")

    with pytest.raises(RuntimeError, match="the program's own"):
        program()
    assert not unmeasured
    assert listening.active is None
    with attnbench.autotune(0):  # the place is free
        pass


def test_a_gpu_without_room_is_reported_and_not_tried(monkeypatch):
    free = [0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 2**40))
    lab = replace(setup(INSTALLED), device=torch.device("cuda", 0))
    large = attnbench.AttentionSpec.make(batch=1, heads=16, seqlen_q=2**16, head_dim=128)
    assert "GB are free" in shortage(large, [Plan("sdpa-flash:bf16")], lab)
    free[0] = 2**36
    assert shortage(large, [Plan("sdpa-flash:bf16")], lab) is None
    assert "GB are free" in shortage(large, [Plan(f"{name}:bf16") for name in registry().backends] * 3, lab)
    free[0] = 0
    assert shortage(large, [Plan("sdpa-flash:bf16")], replace(lab, device=CPU)) is None


def test_a_table_that_cannot_be_written_is_reported_before_anything_is_measured(own_cache, unmeasured, monkeypatch):
    place = own_cache / "no folder"
    place.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    with pytest.raises(OutputError, match="no folder"):
        attnbench.autotune(60)
    assert listening.active is None


def test_misuse_and_an_autotune_within_an_autotune(unmeasured):
    for wrong in ({"seconds": -1}, {"seconds": float("nan")}, {"seconds": "1"}, {"seconds": True}, {"dtype": "bf16"}):
        with pytest.raises(InputError):
            attnbench.autotune(**wrong)
    with pytest.raises(UnknownBackendError):
        attnbench.autotune(backends=["nobody"])
    with pytest.raises(InputError, match="nowhere"):
        attnbench.autotune().measure([spec()], "nowhere")
    with attnbench.autotune(0) as outer, pytest.raises(MisuseError, match="another autotune"), attnbench.autotune(0):
        pass
    with outer:
        attention(*tensors())
    assert spec() in outer.skipped
