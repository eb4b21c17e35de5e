"""Frozen choices: what was chosen once is chosen again, whatever tables say, and what the file lacks is said."""

import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from frozen_fakes import CPU, ENTRIES, SPECS, install, kernels, plans, rewritten, spec, table
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench import Plan, freeze
from attnbench.choosing import selector
from attnbench.choosing.selector import choose
from attnbench.errors import (
    BudgetError,
    FrozenError,
    MalformedFileError,
    NoPlanError,
    RefusedError,
)
from attnbench.freezing import file as frozen_file
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
def test_what_was_recorded_is_chosen_again_whatever_the_table_and_the_order(asked, before, after, chance):
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


# --- what others write meanwhile ---


def test_a_run_that_is_alone_reads_and_spells_no_choice_again(fakes, path, monkeypatch):
    """A growing cache of keys asks thousands of questions, and each writes the file."""
    read, spelt = Mock(wraps=frozen_file.read_text), Mock(wraps=frozen_file.short_fields)
    monkeypatch.setattr(frozen_file, "read_text", read)
    monkeypatch.setattr(frozen_file, "short_fields", spelt)
    frozen_file._ordered.cache_clear()
    with freeze(path):
        for length in range(1, 21):
            choose(spec(seqlen_q=length), CPU)
        assert read.call_count <= 3
        assert spelt.call_count == 20 == len(plans(path))
        rewritten(path, "slow", "fast")
        reads = read.call_count
        choose(spec(seqlen_q=21), CPU)
        assert read.call_count > reads  # what others write is seen


def test_a_file_that_is_damaged_meanwhile_is_an_error_and_not_overwritten(fakes, path):
    with freeze(path):
        choose(spec(), CPU)
        path.write_text(path.read_text()[:-5])
        assert choose(spec(), CPU).basis == "frozen"
        with pytest.raises(MalformedFileError):
            choose(spec(seqlen_q=7), CPU)
    assert not path.read_text().endswith("]}\n")
