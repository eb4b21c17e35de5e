"""The pytest plug-in in sessions that measure nothing: somebody else's, without pytest-benchmark, switched off."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarked import HEAD, install, pytest_in

UNINVOLVED = """
import sys

def test_nothing_was_loaded():
    loaded = {name for name in sys.modules if name.startswith("attnbench.")}
    plugin = "attnbench.harness.compare.pytest_plugin.plugin"
    assert all(f"{plugin}.".startswith(f"{name}.") for name in loaded), loaded
    assert not {"torch", "numpy", "pydantic"} & set(sys.modules)
    assert plugin in sys.modules
"""

OTHERS = "def test_their_own(benchmark):\n    assert benchmark(sum, [1, 2]) == 3\n"


@pytest.mark.parametrize(
    ("passed", "arguments"),
    [
        (2, ["-W", "error", "--strict-markers", "--benchmark-json=out.json"]),
        (1, ["-p", "no:benchmark", "-k", "loaded"]),
        (1, ["-p", "no:attnbench", "-k", "own"]),
        pytest.param(2, ["--benchmark-disable"], marks=pytest.mark.exhaustive),
        pytest.param(1, ["--benchmark-skip"], marks=pytest.mark.exhaustive),
        pytest.param(1, ["--benchmark-only"], marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: value if isinstance(value, int) else " ".join(value),
)
def test_a_session_of_somebody_elses_notices_nothing(tmp_path: Path, passed: int, arguments: Sequence[str]) -> None:
    (tmp_path / "test_it.py").write_text(UNINVOLVED + OTHERS)
    brief = [] if "no:benchmark" in arguments else ["--benchmark-max-time=0", "--benchmark-min-rounds=1"]
    done = pytest_in(tmp_path, *brief, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{passed} passed" in done.stdout
    if "--benchmark-json=out.json" in arguments:
        assert "attnbench" not in json.loads((tmp_path / "out.json").read_text())["machine_info"]


def test_without_pytest_benchmark_the_fixture_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(attention_benchmark): ...\ndef test_other(): ...\n")
    done = pytest_in(tmp_path, "-p", "no:benchmark", "--strict-markers")
    assert "1 passed, 1 error" in done.stdout
    assert "attention_benchmark needs pytest-benchmark, which is not installed or was switched off" in done.stdout


def test_where_benchmarks_are_skipped_nothing_is_measured(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_it(attention_benchmark): 1 / 0\n"
        "def test_other():\n    import sys\n    assert 'torch' not in sys.modules\n"
    )
    done = pytest_in(tmp_path, "--benchmark-skip")
    assert "1 passed, 1 skipped" in done.stdout


DISABLED = (
    HEAD
    + """
def test_judged(attention_benchmark, benchmark):
    row = attention_benchmark("planted:bf16", SPEC, device="cpu")
    assert row.status == "ok" and set(row.error) == {"normal", "outlier"}
    assert all(len(samples) <= 2 for samples in row.time_ms.values())
    assert benchmark.stats is None

def test_wrong(attention_benchmark):
    attention_benchmark("planted:fp8", SPEC, device="cpu", max_error=1e-3)
"""
)


@pytest.mark.parametrize(
    "how", ["--benchmark-disable", pytest.param("-n1", marks=pytest.mark.exhaustive)]
)  # as xdist disables them
def test_where_benchmarks_are_disabled_answers_are_judged_all_the_same(tmp_path: Path, how: str) -> None:
    install(tmp_path)
    (tmp_path / "test_it.py").write_text(DISABLED)
    done = pytest_in(tmp_path, how)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "planted:fp8 on b1 h2 s32 d16 bf16 forward, cpu: inaccurate, the error of out" in done.stdout
