"""The pytest plug-in in sessions that measure nothing: somebody else's, without pytest-benchmark, switched off."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from pytest_sessions import pytest_in

UNINVOLVED = """
import sys

def test_nothing_was_loaded():
    loaded = {name for name in sys.modules if name.startswith("attnbench.")}
    plugin = "attnbench.harness.compare.pytest_plugin.plugin"
    assert all(f"{plugin}.".startswith(f"{name}.") for name in loaded), loaded
    assert plugin in sys.modules
"""

OTHERS = "def test_their_own(benchmark):\n    assert benchmark(sum, [1, 2]) == 3\n"
OURS = """
def test_ours(attention_benchmark):
    1 / 0

def test_no_kernel_was_loaded():
    assert not {"torch", "numpy", "pydantic"} & set(sys.modules)
"""


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [
        (["-W", "error", "--strict-markers", "-k", "not ours", "--benchmark-json=out.json"], "3 passed, 1 deselected"),
        (["-p", "no:benchmark", "--strict-markers", "-k", "not own"], "2 passed, 1 deselected, 1 error"),
        pytest.param(["--benchmark-skip"], "2 passed, 2 skipped", marks=pytest.mark.exhaustive),
        pytest.param(["-p", "no:attnbench", "-k", "own"], "1 passed", marks=pytest.mark.exhaustive),
        pytest.param(["--benchmark-disable", "-k", "not ours"], "3 passed", marks=pytest.mark.exhaustive),
        pytest.param(["--benchmark-only", "-k", "not ours"], "1 passed, 2 skipped", marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_session_that_measures_nothing_of_ours_loads_nothing(
    tmp_path: Path, arguments: Sequence[str], outcome: str
) -> None:
    (tmp_path / "test_it.py").write_text(UNINVOLVED + OTHERS + OURS)
    brief = [] if "no:benchmark" in arguments else ["--benchmark-max-time=0", "--benchmark-min-rounds=1"]
    done = pytest_in(tmp_path, *brief, *arguments)
    assert outcome in done.stdout, done.stdout + done.stderr
    if "no:benchmark" in arguments:
        assert "attention_benchmark needs pytest-benchmark, which is not installed or was switched off" in done.stdout
    if "--benchmark-json=out.json" in arguments:
        assert "attnbench" not in json.loads((tmp_path / "out.json").read_text())["machine_info"]
