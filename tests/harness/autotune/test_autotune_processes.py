"""autotune in several processes that share a table: one measures at a time, the others find what it has measured."""

import json
import os
import subprocess
import sys
import time

import paced
import pytest
from paced import spec
from places import SUPPORT
from tunable import FAST, own_path

import attnbench
from attnbench.harness.autotune.tuning import alone


@pytest.mark.exhaustive
def test_of_two_processes_one_measures_and_the_other_finds_it_in_the_table(tmp_path):
    start = tmp_path / "start"
    commands = [(tmp_path / f"ready{number}", lengths) for number, lengths in enumerate(((32,), (32,)))]
    running = [
        subprocess.Popen(
            [sys.executable, paced.__file__, ready, start, *map(str, lengths)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": SUPPORT},
        )
        for ready, lengths in commands
    ]
    try:
        while not all(ready.exists() for ready, _ in commands):
            assert all(each.poll() is None for each in running)
            time.sleep(0.01)
        start.touch()
        said = [json.loads(each.communicate(timeout=300)[0]) for each in running]
    finally:
        for each in running:
            each.kill()
    assert sorted(length for each in said for length in each["measured"]) == [32]
    assert [why for each in said for why in each["skipped"].values()] == [
        "your table has it already; again=True measures it anew"
    ]
    assert all(each["chosen"][length] == [FAST, "measured"] for each in said for length in each["chosen"])


def test_who_cannot_measure_because_another_does_says_so(unmeasured):
    with alone(own_path(), 0.0) as ours:
        assert ours
        # Locks of one process exclude each other as those of two do: each belongs to what was opened.
        tuned = attnbench.autotune(0.2).measure([spec()], "cpu")
    assert not unmeasured
    assert tuned.skipped == {spec(): "another process was measuring for this table all the time"}
    attnbench.autotune(60).measure([spec()], "cpu")
    assert len(unmeasured) == 1
