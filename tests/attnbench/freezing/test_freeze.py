"""Frozen choices: recorded choices are repeated, or an error says what is missing or why a plan cannot run."""

import json
import tempfile
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from fakes import FakeForward, fake_backend, fake_registry
from frozen_fakes import CPU, ENTRIES, SPECS, frozen_plans, install, kernels, replace_in_file, spec, table
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench import Plan, freeze
from attnbench.choosing import selector
from attnbench.choosing.demotion import demote, demoted
from attnbench.choosing.selector import choose
from attnbench.errors import AttnbenchWarning, BudgetError, FrozenError, MalformedFileError, NoPlanError, RefusedError
from attnbench.freezing import file as frozen_file
from attnbench.freezing import freeze as freezing
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import Availability
from attnbench.tables.user_table import Known

# --- record and repeat ---

QUESTIONS = st.fixed_dictionaries(
    {
        "spec": st.sampled_from(SPECS),
        "backend": st.sampled_from(["auto", "auto", "slow", "fast", "fast:fp8", "fast:bf16"]),
        "fp8": st.booleans(),
        "max_error": st.sampled_from([None, 0.0025, 0.1, 1, 1e300, float("inf"), 10**400]),
    }
)
ORDERS = st.permutations(list(ENTRIES)).flatmap(lambda order: st.integers(0, 3).map(lambda n: order[:n]))


def ask(asked: dict):
    try:
        return choose(asked["spec"], CPU, backend=asked["backend"], fp8=asked["fp8"], max_error=asked["max_error"]).plan
    except (BudgetError, NoPlanError, RefusedError, OverflowError) as error:  # OverflowError: 10**400 in a message
        return type(error)


@settings(max_examples=20)
@given(st.lists(QUESTIONS, max_size=12), ORDERS, ORDERS, st.randoms(use_true_random=False))
def test_recorded_choices_are_repeated_for_any_table_and_order(asked, before, after, chance):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        install(patch, kernels())
        files = [Path(folder) / name for name in ("one.json", "other.json")]
        patch.setattr(selector, "known_tables", lambda device: Known.of(table(*before)))
        usual = [ask(each) for each in asked]
        with freeze(files[0]):
            assert [ask(each) for each in asked] == usual
        shuffled = chance.sample(asked, len(asked))
        with freeze(files[1]):
            for each in shuffled:
                ask(each)
        if files[0].exists():
            assert files[0].read_bytes() == files[1].read_bytes()
        answered = [(each, plan) for each, plan in zip(asked, usual, strict=True) if isinstance(plan, Plan)]
        if not files[0].exists():
            return
        patch.setattr(selector, "known_tables", lambda device: Known.of(table(*after)))
        for missing in ("raise", "record", "choose"):
            with freeze(files[0], missing=missing):
                for each, plan in chance.sample(answered, len(answered)):
                    named = ":" in each["backend"] and not each["spec"].training
                    assert ask(each) == plan or named  # a kernel that is named is held to the budget by the table
            assert files[0].read_bytes() == files[1].read_bytes()


# --- what the file lacks ---


def test_a_missing_spec_is_an_error_recorded_or_chosen(fakes, path):
    with freeze(path):
        choose(spec(), CPU)
    before = path.read_bytes()
    with freeze(path, missing="raise"):
        with pytest.raises(FrozenError, match=r"b1 h4 s7 d64 bf16 forward on cpu, .*FP8 closed.* missing=\"record\""):
            choose(spec(seqlen_q=7), CPU)
        assert choose(spec(), CPU).basis == "frozen"
    with freeze(path, missing="choose"):
        assert choose(spec(seqlen_q=7), CPU).basis == "rule"
    assert path.read_bytes() == before
    with freeze(path):
        assert choose(spec(seqlen_q=7), CPU).basis == "frozen"
    assert len(frozen_plans(path)) == 2


@pytest.mark.parametrize("missing", ["raise", "choose"])
def test_a_missing_file_is_recorded_or_an_error(path, missing):
    with pytest.raises(FrozenError, match=r"there is no .* writes it"):
        freeze(path, missing=missing).start()
    with freeze(path):
        assert not path.exists()
    assert not path.exists()  # nothing was asked


# --- what others write meanwhile ---


def test_a_single_run_does_not_reread_or_reserialise_its_choices(fakes, path, monkeypatch):
    """A growing key cache needs thousands of choices, and each writes the file."""
    read, spelt = Mock(wraps=frozen_file.read_text), Mock(wraps=frozen_file.short_fields)
    monkeypatch.setattr(frozen_file, "read_text", read)
    monkeypatch.setattr(frozen_file, "short_fields", spelt)
    frozen_file._ordered.cache_clear()
    with freeze(path):
        for length in range(1, 21):
            choose(spec(seqlen_q=length), CPU)
        assert read.call_count <= 3
        assert spelt.call_count == 20 == len(frozen_plans(path))
        replace_in_file(path, "slow", "fast")
        reads = read.call_count
        choose(spec(seqlen_q=21), CPU)
        assert read.call_count > reads  # what others write is seen


def test_a_file_damaged_during_a_run_is_an_error_and_not_overwritten(fakes, path):
    with freeze(path):
        choose(spec(), CPU)
        path.write_text(path.read_text()[:-5])
        assert choose(spec(), CPU).basis == "frozen"
        with pytest.raises(MalformedFileError):
            choose(spec(seqlen_q=7), CPU)
    assert not path.read_text().endswith("]}\n")


CANNOT_RUN = {
    "another version": (Availability(version="1.0.1"), "recorded with fast 1.0, here is 1.0.1"),
    "another origin": (
        Availability(version="1.0", origin="another-wheel"), "recorded with fast 1.0, here is 1.0 from another-wheel",
    ),
    "not installed": (Availability(reason="the driver is too old"), "the driver is too old"),
    "unknown": (None, "no backend is named 'fats'"),
    "refused": (None, "needs another head size"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CANNOT_RUN)
def test_a_recorded_plan_that_cannot_run_here_is_refused_with_reasons(fakes, path, kind, monkeypatch):
    known = fakes("fast:bf16", "slow:bf16")
    with freeze(path):
        assert str(choose(spec(), CPU).plan) == "fast:bf16"
    answer, words = CANNOT_RUN[kind]
    if answer is not None:
        known._availability["fast"] = answer
    elif kind == "unknown":
        replace_in_file(path, "fast", "fats")
    else:
        monkeypatch.setattr(known.forward("fast:bf16"), "refusals", lambda *_: [words])
    for missing in ("raise", "record", "choose"):
        with freeze(path, missing=missing), pytest.raises(RefusedError, match=words) as caught:
            choose(spec(), CPU)
        assert str(path) in str(caught.value)
        assert "slow:bf16" in caught.value.alternatives
        assert not {"fast:fp8", "fast:bf16"} & {*caught.value.alternatives} or kind == "unknown"


@pytest.mark.parametrize(("built_on", "library"), [("cudnn", "cuDNN"), ("triton", "Triton")])
def test_versions_of_the_libraries_with_the_kernels_are_compared(path, monkeypatch, built_on, library):
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
    """GPU models by index; other indices have the model of the first."""
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


def test_another_model_of_gpu_is_refused_at_the_start_when_cuda_is_initialised(models, recorded, path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    models[0] = H100
    with pytest.raises(FrozenError, match="this is NVIDIA H100"):
        freeze(path).start()
    models[1] = H200
    freeze(path).start().stop()  # one of them is enough


def test_a_file_replaced_by_another_machines_during_a_run_is_refused(models, recorded, path):
    with freeze(path):
        replace_in_file(path, H200, H100)
        for asked in (GPU, CPU):
            with pytest.raises(FrozenError, match="recorded on NVIDIA H100"):
                choose(spec(seqlen_q=7), asked)


def test_a_guard_demotes_no_plan_while_choices_are_frozen(fakes, path):
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
