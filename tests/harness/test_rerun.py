"""Measuring again in two environments: what is asked, in which order, and what comes of what cannot be asked."""

import sys
import time

import pytest
import yaml
from compared import few_samples, install_plugin, python, results, slowed, times
from hypothesis import given
from hypothesis import strategies as st

from attnbench.harness.casefile import read_cases
from attnbench.harness.regression import compare_results
from attnbench.harness.regression_terms import Terms
from attnbench.harness.rerun import Rerun, _by_case, _entry
from attnbench.mask import Mask
from attnbench.spec import AttentionSpec


@pytest.fixture
def plugged(tmp_path, monkeypatch):
    """A folder, in which every Python process finds the plug-in."""
    install_plugin(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")  # this process may be one of many; a turn is not
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    return tmp_path


def test_what_cannot_be_measured_again_is_said_and_the_first_verdict_stays(plugged):
    captured = few_samples("captured", error={"captured:acts@1#0": {"out": 0.1}})
    missing = few_samples("missing", "nobody:bf16")
    base = results(captured, missing)
    terms = Terms()
    before = compare_results(base, base, terms)
    said = []
    ours = python(plugged / "python", sys.executable)
    with Rerun((ours, ours), time.monotonic() + 200, terms, said.append) as rerun:
        assert rerun.measured(before, base) == {}
    assert any("captured: not measured again: its inputs were captured" in line for line in said)
    assert any("BASE was not measured again" in line and "nobody" in line for line in said)
    assert {each.verdict for each in before.outcomes} == {"ambiguous"}


def test_no_python_there_is_said(plugged):
    base = results(few_samples())
    said = []
    with Rerun((plugged / "none", plugged / "none"), time.monotonic() + 60, Terms(), said.append) as rerun:
        assert rerun.measured(compare_results(base, base, Terms()), base) == {}
    assert any("cannot be started: No such file" in line for line in said)


def test_the_time_is_kept_and_nothing_goes_on_behind_it(plugged):
    """An environment that hangs is ended, with whatever it has started."""
    mark = plugged / "alive"
    hanging = plugged / "hanging"
    hanging.write_text(f"#!/bin/sh\n(while :; do date +%s%N > {mark}; sleep 0.05; done) &\nsleep 600\n")
    hanging.chmod(0o755)
    base = results(few_samples("first"), few_samples("second"))
    said = []
    with Rerun((hanging, hanging), time.monotonic() + 1.5, Terms(), said.append) as rerun:
        assert rerun.measured(compare_results(base, base, Terms()), base) == {}
    assert any("BASE was not measured again: the time is over" in line for line in said)
    assert any("not measured again: 1 rows of 1 cases" in line for line in said)
    before = mark.exists() and mark.read_text()  # a busy machine may not have come to writing it
    time.sleep(0.3)
    assert (mark.exists() and mark.read_text()) == before


def test_slower_rows_are_asked_first_then_the_largest_ratio():
    few = [few_samples(case) for case in ("calm", "odd")]
    many = [few_samples(case, time_ms=times(0)) for case in ("slow", "same")]
    slow, same = (few_samples(case, time_ms=times(1, ratio=ratio)) for case, ratio in (("slow", 1.1), ("same", 1.0)))
    found = compare_results(results(*few, *many), results(few[0], slowed(few[1], 1.2), slow, same), Terms())
    assert list(_by_case(found)) == ["slow", "odd", "calm"]


masks = st.sampled_from([Mask(), Mask(right=0), Mask(right=0, alignment="bottom-right"), Mask(left=3, right=2)])
sizes = st.integers(1, 64)


@given(sizes, sizes, sizes, sizes, masks, st.sampled_from(["forward", "training"]), st.floats(0.001, 2), sizes)
def test_the_file_of_a_turn_asks_the_same_question(
    tmp_path_factory, batch, queries, keys, dim, mask, direction, scale, wide
):
    spec = AttentionSpec.make(
        batch=batch, heads=4, kv_heads=2, seqlen_q=queries, seqlen_kv=keys, head_dim=dim, head_dim_v=wide, mask=mask,
        direction=direction, scale=scale, softcap=scale,
    )  # fmt: skip
    file = tmp_path_factory.mktemp("case") / "case.yaml"
    file.write_text(yaml.safe_dump([_entry(spec, "outlier")]))
    (case,) = read_cases(file, "fp8")
    assert case.spec == spec
    assert case.families == ("outlier",)
