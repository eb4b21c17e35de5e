"""The pytest plug-in in a session that measures: what it hands to pytest-benchmark, and how a test fails."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from pytest_benchmark.stats import Stats
from pytest_sessions import HEAD, install, pytest_in

from attnbench.harness.compare.pytest_plugin.plugin import pytest_benchmark_compare_machine_info
from attnbench.harness.results.records import Measurement, read_measurements
from attnbench.kernels.registry import registry
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.environment import Environment

MEASURING = (
    HEAD
    + """
def test_slow(attention_benchmark):
    keep(attention_benchmark("planted:bf16", SPEC, cost="kernel", device="cpu"))

def test_training(benchmark, attention_benchmark):  # in either order
    plan = "planted:bf16>planted:bf16"
    keep(attention_benchmark(plan, SPEC.replace(direction="training"), cost="backward", device="cpu"))
    benchmark.extra_info["mine"] = 1

@pytest.mark.benchmark(group="ours")
def test_quantised(attention_benchmark):
    keep(attention_benchmark("planted:fp8", SPEC, device="cpu", families=["normal", "sink"], max_error=0.3))

def test_other(benchmark):
    benchmark(sum, [1, 2])

def test_inaccurate(attention_benchmark):
    attention_benchmark("planted:fp8", SPEC, device="cpu", max_error=1e-3)

def test_refused(attention_benchmark):
    attention_benchmark("sdpa-math:bf16", SPEC.replace(softcap=30.0), device="cpu")

def test_optional(attention_benchmark):
    attention_benchmark("sdpa-math:bf16", SPEC.replace(softcap=30.0), device="cpu", optional=True)

@pytest.mark.parametrize("arguments", [
    {"plan": "no-such:bf16"}, {"plan": "planted:bf16", "cost": "backward"}, {"plan": "planted:bf16", "cost": "wall"},
    {"plan": "planted:bf16", "max_error": 0.1}, {"plan": "emulated:fp8", "max_error": -1},
    {"plan": "planted:bf16", "families": ["no-such"]}, {"plan": "planted:bf16", "device": "cuda:99"},
])
def test_misuse(attention_benchmark, arguments):
    from attnbench.errors import MisuseError
    with pytest.raises(MisuseError):
        attention_benchmark(spec=SPEC, **{"device": "cpu", **arguments})

def test_unknown(attention_benchmark):
    attention_benchmark("planted:bf61", SPEC, device="cpu")

def test_other_times(attention_benchmark, monkeypatch):
    from pytest_benchmark.stats import Stats
    kept = Stats.update
    monkeypatch.setattr(Stats, "update", lambda self, duration: kept(self, 2 * duration))
    attention_benchmark("planted:bf16", SPEC, device="cpu")

def test_late(benchmark, request):  # when pytest-benchmark can no longer be informed
    request.getfixturevalue("attention_benchmark")

def test_twice(attention_benchmark):
    attention_benchmark("planted:bf16", SPEC, device="cpu")
    attention_benchmark("planted:bf16", SPEC, device="cpu")

def test_dies(attention_benchmark):  # the last, because others would wait for another process
    attention_benchmark("planted:fp16", SPEC.replace(dtype="fp16"), device="cpu")
"""
)


BEFORE = {"fullname": "test_it.py::test_slow", "name": "test_slow", "group": None}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a session has measured and saved, after one that was twenty times as fast; what it printed."""
    folder = tmp_path_factory.mktemp("measured")
    install(folder)
    (folder / "test_it.py").write_text(MEASURING)
    stats = {**dict.fromkeys(Stats.fields, 0.0002), "outliers": "", "iterations": 1}
    (folder / "before.json").write_text(json.dumps({"machine_info": {}, "benchmarks": [{**BEFORE, "stats": stats}]}))
    saving = ("--benchmark-json=out.json",)
    comparing = ("--benchmark-compare=before.json", "--benchmark-compare-fail=median:200%")
    done = pytest_in(folder, "--junitxml=out.xml", "--benchmark-only", "--benchmark-max-time=0.02", *saving, *comparing)
    assert done.returncode != 0
    (folder / "printed").write_text(done.stdout + done.stderr)
    return folder


@pytest.fixture(scope="module")
def saved(measured: Path) -> dict[str, Any]:
    return json.loads((measured / "out.json").read_text())


@pytest.fixture(scope="module")
def benchmarks(saved: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each for each in saved["benchmarks"]}


@pytest.fixture(scope="module")
def rows(measured: Path) -> dict[str, Measurement]:
    names = ("test_slow", "test_training", "test_quantised")
    return dict(zip(names, read_measurements(measured / "rows.jsonl"), strict=True))


COSTS = {"test_slow": "kernel", "test_training": "backward", "test_quantised": "call"}


@pytest.mark.parametrize(("name", "cost"), COSTS.items())
def test_what_is_saved_are_the_samples_of_the_row(
    benchmarks: dict[str, Any], rows: dict[str, Measurement], name: str, cost: str
) -> None:
    found, row = benchmarks[name], rows[name]
    assert found["stats"]["data"] == [sample / 1e3 for sample in row.time_ms[cost]]
    assert found["stats"]["rounds"] == len(row.time_ms[cost])
    assert found["stats"]["iterations"] == 1
    info = found["extra_info"]
    assert (info["cost"], info["device"], info["plan"]) == (cost, "cpu", str(row.plan))
    assert AttentionSpec.from_dict(info["spec"]) == row.spec
    assert info["error"] == row.error
    assert info["bound"] == row.correctness.bound
    assert found["options"] == {"timer": row.performance.timer}


def test_a_benchmark_of_the_users_own_is_what_it_was(benchmarks: dict[str, Any]) -> None:
    other = benchmarks["test_other"]
    assert other["extra_info"] == {}
    assert other["options"]["timer"] == "perf_counter"
    assert benchmarks["test_training"]["extra_info"]["mine"] == 1
    assert [benchmarks[name]["group"] for name in (*COSTS, "test_other")] == [
        "b1 h2 s32 d16 bf16 forward, kernel on cpu",
        "b1 h2 s32 d16 bf16 training, backward on cpu",
        "ours",
        None,
    ]


def test_the_environment_is_in_machine_info(saved: dict[str, Any], rows: dict[str, Measurement]) -> None:
    found = saved["machine_info"]["attnbench"]
    assert found.keys() == {"cpu"}
    assert Environment.from_dict(found["cpu"]) == rows["test_slow"].environment
    assert found["cpu"]["backends"]["planted"] == "1.0"


def test_a_session_is_compared_with_a_saved_one(measured: Path) -> None:
    """pytest-benchmark's own comparison judges our samples."""
    assert re.search(r"Performance has regressed:\n\ttest_slow .*'median'", (measured / "printed").read_text())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"commit": "1234567", "memory_bytes": 1}, None),  # times depend on neither
        ({"torch": "1.0.0"}, "torch was 1.0.0, is "),
        ({"python": []}, "not an environment: python: Input should be a valid string"),
    ],
)
def test_saved_sessions_of_another_environment_are_warned_of(change: dict[str, object], message: str | None) -> None:
    """Before pytest-benchmark compares the rest, in which our entry then makes no difference."""
    warned: list[str] = []
    config = SimpleNamespace(issue_config_time_warning=lambda warning, stacklevel: warned.append(str(warning)))
    here = Environment.detect(torch.device("cpu"), registry()).to_dict()
    saved, ours = {"attnbench": {"cpu": here | change}}, {"attnbench": "of this session"}
    comparing = pytest_benchmark_compare_machine_info(config, ours, {"machine_info": saved})  # type: ignore[arg-type]
    next(comparing)
    assert ours == saved
    comparing.close()
    assert ours == {}
    assert [message is not None and message in each for each in warned] == [True] * (message is not None)


@pytest.fixture(scope="module")
def outcomes(measured: Path) -> dict[str, str]:
    """What became of each test, with the message; empty where it passed."""
    cases = ElementTree.parse(measured / "out.xml").iter("testcase")
    return {
        each.get("name", ""): "".join(f"{element.tag}: {element.get('message')}" for element in each) for each in cases
    }


def test_what_goes_wrong_fails_its_own_test_with_the_reason(outcomes: dict[str, str]) -> None:
    refusal = "sdpa-math:bf16 on b1 h2 s32 d16 bf16 cap30.0 forward, cpu: refused, has no softcap"
    expected = {
        "test_dies": "failure: Failed: planted:fp16 on b1 h2 s32 d16 fp16 forward, cpu: crashed, the process ended",
        "test_inaccurate": "failure: Failed: planted:fp8 on b1 h2 s32 d16 bf16 forward, cpu: inaccurate, the error of",
        "test_refused": f"failure: Failed: {refusal}",
        "test_optional": f"skipped: {refusal}",
        "test_unknown": "failure: attnbench.errors.UnknownBackendError: no forward kernel is named 'planted:bf61'",
        "test_other_times": "failure: attnbench.errors.AttnbenchError: pytest-benchmark ",
        "test_late": "failure: attnbench.errors.MisuseError",
        "test_twice": "failure: pytest_benchmark.fixture.FixtureAlreadyUsed",
    }
    for name, outcome in outcomes.items():
        assert outcome.startswith(expected[name]) if name in expected else not outcome, (name, outcome)
    assert expected.keys() <= outcomes.keys()
    assert len(outcomes) == 19


def test_a_plan_that_does_not_exist_is_shown_at_the_test_s_own_line(measured: Path) -> None:
    (failure,) = [
        each.findtext("failure", "")
        for each in ElementTree.parse(measured / "out.xml").iter("testcase")
        if each.get("name") == "test_unknown"
    ]
    assert 'attention_benchmark("planted:bf61"' in failure
    assert "did you mean planted:bf16" in failure
    assert re.findall(r"^(\S+\.py):\d+: ", failure, re.MULTILINE) == ["test_it.py"]  # no frame of ours


def test_an_inaccurate_plan_is_reported_and_fails_and_what_failed_otherwise_is_not(benchmarks: dict[str, Any]) -> None:
    assert benchmarks.keys() == {*COSTS, "test_other", "test_inaccurate"}
    info = benchmarks["test_inaccurate"]["extra_info"]
    assert (info["status"], info["check"], info["bound"]) == ("inaccurate", "error", 1e-3)
    assert info["error"]["normal"]["out"] > 1e-3
