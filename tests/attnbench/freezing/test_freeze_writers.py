"""Several that record choices in one file at once: the plan that was written first is everybody's."""

from unittest.mock import Mock

import pytest
from frozen_fakes import CPU, plans, rewritten, spec

from attnbench import freeze
from attnbench.choosing.selector import choose
from attnbench.errors import MalformedFileError
from attnbench.freezing import file as frozen_file
from attnbench.freezing import freeze as freezing


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
