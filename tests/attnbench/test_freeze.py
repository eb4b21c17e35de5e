"""Frozen choices: what was chosen once is chosen again, whatever tables say, or nothing is."""

import json
import os
import random
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from fakes import FakeBackward, FakeForward, an_environment, fake_backend, fake_registry
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench import AttentionSpec, Mask, Plan, freeze, freezing, selector
from attnbench.capabilities import Device
from attnbench.errors import (
    AttnbenchError,
    AttnbenchWarning,
    BudgetError,
    FrozenError,
    MalformedFileError,
    NoPlanError,
    OutputError,
    RefusedError,
)
from attnbench.frozen_file import Frozen
from attnbench.guard_demotion import demote, demoted, pardon
from attnbench.kernel import Availability
from attnbench.selector import choose
from attnbench.table import Entry, Table
from attnbench.user_table import Known

CPU = torch.device("cpu")


def kernels(cuda: bool = False):
    """slow and fast, in 16 bits and with fast in FP8; gone cannot be used."""
    found = [
        fake_backend("slow", FakeForward("slow:bf16", preference=10), FakeBackward("slow:bf16")),
        fake_backend(
            "fast", FakeForward("fast:bf16", preference=20), FakeBackward("fast:bf16"), FakeForward("fast:fp8")
        ),
        fake_backend("gone", FakeForward("gone:bf16", preference=1), reason="it is not installed"),
    ]
    for backend in found if cuda else ():
        for kernel in backend.kernels:
            kernel.rows["cuda"] = kernel.rows["cpu"]
    return fake_registry(*found)


def spec(**more) -> AttentionSpec:
    return AttentionSpec.make(**{"batch": 1, "heads": 4, "seqlen_q": 1024, "head_dim": 64, **more})


SPECS = [
    spec(), spec(seqlen_q=128), spec(kv_heads=2), spec(mask=Mask(None, 0)), spec(seqlen_kv=77, mask=Mask(5, 3)),
    spec(softcap=3.0, scale=0.3), spec(return_lse=True), spec(dtype="fp16"), spec(direction="training"),
    spec(dtype="e4m3", descale="head"),
]  # fmt: skip
ENTRIES = {"slow:bf16": 0.002, "fast:bf16": 0.003, "fast:fp8": 0.08}


def table(*order: str, at=SPECS) -> Table:
    """Everything measured, the first of the plans to be the fastest."""
    entries = []
    for one in at:
        for time, name in enumerate(order, 1):
            plan = Plan(name, "slow:bf16" if name == "fast:fp8" else name) if one.training else Plan(name)
            entries.append(Entry(one, plan, "ok", float(time), 0.0, {"outlier": ENTRIES[name]}))
    return Table.from_entries(an_environment(), entries)


@pytest.fixture
def fakes(monkeypatch):
    """The fake kernels, and no table; ``fakes(table)`` gives one."""
    known = kernels()
    for module in (selector, freezing):
        monkeypatch.setattr(module, "registry", lambda: known)
    monkeypatch.setattr(selector, "known_tables", lambda device: Known())

    def use(*order: str):
        monkeypatch.setattr(selector, "known_tables", lambda device: Known.of(table(*order)))
        return known

    yield use
    pardon()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "run.choices.json"


def plans(path: Path) -> list[str]:
    return sorted(str(answer.plan) for answer in Frozen.load(path).plans.values())


def rewritten(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


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


@settings(max_examples=40)
@given(st.lists(QUESTIONS, max_size=12), ORDERS, ORDERS, st.randoms(use_true_random=False))
def test_what_was_recorded_is_chosen_again_whatever_the_table_and_the_order(asked, before, after, chance):
    known = kernels()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for module in (selector, freezing):
            patch.setattr(module, "registry", lambda: known)
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


def test_without_a_file_another_table_chooses_another_plan(fakes, path):
    """What the property above would not show if the tables never mattered."""
    for order in (("slow:bf16", "fast:bf16"), ("fast:bf16", "slow:bf16")):
        fakes(*order)
        assert str(choose(spec(), CPU).plan) == order[0]
        with freeze(path):
            assert str(choose(spec(), CPU).plan) == "slow:bf16"
    assert plans(path) == ["slow:bf16"]


def test_a_frozen_choice_reads_no_table(fakes, path, monkeypatch):
    with freeze(path):
        choose(spec(), CPU)
    monkeypatch.setattr(selector, "known_tables", lambda device: pytest.fail("a table was read"))
    with freeze(path, missing="raise"):
        assert choose(spec(), CPU).basis == "frozen"


def test_a_question_of_its_own_is_not_frozen(fakes, path):
    """Who names a table or a registry asks about those."""
    known = fakes()
    with freeze(path, missing="record"):
        assert choose(spec(), CPU, table=table("fast:bf16")).basis == "measured"
        assert choose(spec(), CPU, known=known).basis == "rule"
    assert not path.exists()


def test_opting_in_and_the_budget_are_parts_of_the_question(fakes, path):
    fakes("fast:fp8", "fast:bf16", "slow:bf16")
    with freeze(path):
        assert choose(spec(), CPU, fp8=True).plan.fp8
        assert not choose(spec(), CPU, fp8=True, max_error=0.05).plan.fp8
    with freeze(path, missing="choose"):
        assert not choose(spec(), CPU).plan.fp8
        assert not choose(spec(), CPU, fp8=True, max_error=0.05).plan.fp8
    with freeze(path, missing="raise"):
        for asked in ({}, {"fp8": True, "max_error": 0.07}, {"fp8": True, "backend": "fast"}):
            with pytest.raises(FrozenError, match="holds no choice"):
                choose(spec(), CPU, **asked)
    rewritten(path, '"fp8": true, "max_error": 0.05, "plan": "fast:bf16"', '"plan": "fast:fp8"')
    with pytest.raises(MalformedFileError, match="FP8, which the question does not open") as caught:
        freeze(path).start()
    assert path.read_text().splitlines()[caught.value.line - 1].count('"plan": "fast:fp8"') == 1


# --- what the file lacks ---


def test_a_missing_question_is_raised_recorded_or_chosen(fakes, path):
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
    assert len(plans(path)) == 2


@pytest.mark.parametrize("missing", ["raise", "choose"])
def test_a_file_that_is_not_there_is_recorded_or_an_error(path, missing):
    with pytest.raises(FrozenError, match=r"there is no .* writes it"):
        freeze(path, missing=missing).start()
    with freeze(path):
        assert not path.exists()
    assert not path.exists()  # nothing was asked


def test_whole_plans_and_kernels_without_gradients_need_no_file(fakes, path):
    with freeze(path):
        choose(spec(), CPU)
    with freeze(path, missing="raise"):
        assert choose(spec(), CPU, backend="fast:fp8").basis == "explicit"
        assert choose(spec(direction="training"), CPU, backend="fast:fp8>slow:bf16").basis == "explicit"
        with pytest.raises(FrozenError):  # its backward is a choice
            choose(spec(direction="training"), CPU, backend="fast:fp8")
        with pytest.raises(FrozenError):
            choose(spec(), CPU, backend="fast")


def test_a_folder_that_cannot_be_written_is_an_error_of_the_first_new_question(fakes, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FrozenError, match="cannot be read"):
        freeze(tmp_path / "file" / "run.json").start()
    (tmp_path / "made").mkdir()
    with freeze(tmp_path / "made" / "run.json"):
        (tmp_path / "made").rmdir()
        (tmp_path / "made").write_text("")
        with pytest.raises(AttnbenchError, match=r"run\.json"):
            choose(spec(), CPU)


def test_a_full_disk_is_an_error_and_leaves_the_old_file(fakes, path, monkeypatch):
    with freeze(path):
        choose(spec(), CPU)
        before = path.read_bytes()

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OutputError, match="No space left"):
            choose(spec(seqlen_q=7), CPU)
    assert path.read_bytes() == before


# --- who is first ---


def test_the_first_plan_that_was_written_counts(fakes, path):
    """Another rank, whose table knows better, records between our start and our question."""
    fakes("slow:bf16", "fast:bf16")
    with freeze(path):
        choose(spec(), CPU)
    theirs = path.read_text().replace("slow", "fast")
    path.unlink()
    with freeze(path):
        path.write_text(theirs)
        assert str(choose(spec(), CPU).plan) == "fast:bf16"
        path.unlink()  # what this run follows is not lost with the file
        choose(spec(seqlen_q=7), CPU)
    assert plans(path) == ["fast:bf16", "slow:bf16"]


def test_what_others_have_recorded_meanwhile_is_not_chosen_again(fakes, path, monkeypatch):
    """Even by a rank that could not choose at all."""
    with freeze(path):
        choose(spec(), CPU)
    before = path.read_bytes()
    path.unlink()
    with freeze(path):
        path.write_bytes(before)
        monkeypatch.setattr(freezing, "choose", lambda *_, **__: pytest.fail("chosen anew"))
        assert str(choose(spec(), CPU).plan) == "slow:bf16"


def test_what_a_run_follows_it_follows_to_the_end(fakes, path):
    with freeze(path):
        choose(spec(), CPU)
        rewritten(path, "slow", "fast")
        choose(spec(seqlen_q=7), CPU)  # reads the file again
        assert str(choose(spec(), CPU).plan) == "slow:bf16"


def test_a_rank_that_loses_the_race_takes_the_winners_plan(fakes, path, monkeypatch):
    """The other one writes while this one is choosing."""
    fakes("slow:bf16", "fast:bf16")
    with freeze(path):
        choose(spec(), CPU)
    theirs = path.read_text().replace("slow", "fast")
    path.unlink()
    original = freezing.choose

    def slowly(*args, **rest):
        found = original(*args, **rest)
        path.write_text(theirs)
        return found

    monkeypatch.setattr(freezing, "choose", slowly)
    with freeze(path):
        choice = choose(spec(), CPU)
    assert (str(choice.plan), choice.basis) == ("fast:bf16", "frozen")
    assert path.read_text() == theirs


def test_a_file_that_is_damaged_meanwhile_is_an_error_and_not_overwritten(fakes, path):
    with freeze(path):
        choose(spec(), CPU)
        path.write_text(path.read_text()[:-5])
        assert choose(spec(), CPU).basis == "frozen"
        with pytest.raises(MalformedFileError):
            choose(spec(seqlen_q=7), CPU)
    assert not path.read_text().endswith("]}\n")


def test_eight_threads_record_one_file(fakes, path):
    original, order = selector.known_tables, [("slow:bf16", "fast:bf16"), ("fast:bf16", "slow:bf16")]
    found: list[tuple[int, str]] = []
    together = threading.Barrier(8)

    def table_of_turn(device):  # what is chosen depends on who asks
        return Known.of(table(*random.choice(order)))

    selector.known_tables = table_of_turn
    try:
        with freeze(path):

            def work() -> None:
                together.wait(timeout=30)
                for one in SPECS:
                    found.append((SPECS.index(one), str(choose(one, CPU).plan)))

            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        selector.known_tables = original
    assert len(found) == 8 * len(SPECS)
    assert len(set(found)) == len(SPECS) == len(plans(path))


# --- where the plan cannot serve ---


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


@pytest.mark.parametrize(("backend", "library"), [("sdpa-cudnn", "cuDNN"), ("flex", "Triton")])
def test_libraries_that_have_the_kernels_count_as_versions(path, monkeypatch, backend, library):
    known = fake_registry(fake_backend(backend, FakeForward(f"{backend}:bf16")))
    for module in (selector, freezing):
        monkeypatch.setattr(module, "registry", lambda: known)
    for version in ("1", "2"):
        monkeypatch.setattr(freezing, "_library", lambda name, version=version: version)
        with freeze(path):
            if version == "1":
                assert choose(spec(), CPU).plan == Plan(f"{backend}:bf16")
                continue
            with pytest.raises(RefusedError, match=f"recorded with {library} 1, here is 2"):
                choose(spec(), CPU)


def test_another_model_of_gpu_is_refused(fakes, path, monkeypatch):
    known = kernels(cuda=True)
    models = {0: "NVIDIA H200"}

    def describe(device):
        return (
            Device("cuda", models.get(device.index, models[0]), (9, 0))
            if device.type == "cuda"
            else Device("cpu", "CPU")
        )

    for module in (selector, freezing):
        monkeypatch.setattr(module, "registry", lambda: known)
        monkeypatch.setattr(module, "describe", describe)
    gpu = torch.device("cuda", 0)
    with freeze(path):
        choose(spec(), CPU)
        assert choose(spec(), gpu).device == "cuda:0"
    assert json.loads(path.read_text())["devices"] == {"cpu": "CPU", "cuda": "NVIDIA H200"}
    before = path.read_bytes()
    with freeze(path, missing="raise"):
        assert choose(spec(), torch.device("cuda", 3)).basis == "frozen"  # which one of its model does not matter
    models[0] = "NVIDIA H100 80GB HBM3"
    for missing in ("raise", "record", "choose"):
        with freeze(path, missing=missing):
            for asked in (spec(), spec(seqlen_q=7)):
                with pytest.raises(FrozenError, match="recorded on NVIDIA H200, and this is NVIDIA H100"):
                    choose(asked, gpu)
            assert choose(spec(), CPU).basis == "frozen"
    assert path.read_bytes() == before
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(FrozenError, match="this is NVIDIA H100"):
        freeze(path).start()
    models[1] = "NVIDIA H200"
    freeze(path).start().stop()  # one of them is enough
    del models[1]
    models[0] = "NVIDIA H200"
    path.unlink()
    with freeze(path):  # two models record one file at once
        path.write_bytes(before)
        models[0] = "NVIDIA H100 80GB HBM3"
        with pytest.raises(FrozenError, match="recorded on NVIDIA H200"):
            choose(spec(), gpu)
    path.write_bytes(before)
    models[0] = "NVIDIA H200"
    with freeze(path):  # the file of another machine takes its place
        rewritten(path, "NVIDIA H200", "NVIDIA H100 80GB HBM3")
        for asked in (gpu, CPU):
            with pytest.raises(FrozenError, match="recorded on NVIDIA H100"):
                choose(spec(seqlen_q=7), asked)


def test_a_guard_demotes_nothing_while_choices_are_frozen(fakes, path):
    fakes("fast:bf16", "slow:bf16")
    with freeze(path):
        plan = choose(spec(), CPU).plan
        with pytest.warns(AttnbenchWarning, match=r"fast:bf16 stays .* frozen in .*run\.choices\.json.* demoted by a"):
            assert not demote(plan, spec(), "demoted by a guard: its out is off by 0.5")
        assert demoted(plan, spec()) is None
    assert demote(plan, spec(), "demoted by a guard: its out is off by 0.5")
    with freeze(path), pytest.raises(RefusedError, match="demoted by a guard"):
        choose(spec(), CPU)
    path.unlink()
    with freeze(path):
        assert str(choose(spec(), CPU).plan) == "slow:bf16"
