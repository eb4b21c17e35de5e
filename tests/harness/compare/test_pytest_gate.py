"""The pytest plug-in beside an older environment, and in sessions that measure nothing of ours."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from places import SUPPORT
from pytest_sessions import HEAD, install, pytest_in

# In the environment of the new code, NEW is set.  Each process that loads this adds a line.
PROGRAM = """
import os, time
from pathlib import Path
from planted import FakeForward
from attnbench.kernels.contract import Availability, Backend
NEW = "NEW" in os.environ
with Path(__file__).with_name("processes").open("a") as file:
    print("NEW" if NEW else "BASE", file=file)

def after(seconds):
    return lambda out: time.sleep(seconds) or out

steady = FakeForward("planted:bf16", after(0.002))
slower = FakeForward("planted:fp16", after(0.02 if NEW else 0.002))
young = FakeForward("planted:fp32", after(0.002))
BACKEND = Backend("planted", "for a test", lambda: Availability(version="1.0"), (steady, slower, *[young][:NEW]))
"""
TESTS = (
    HEAD
    + """
def test_steady(attention_benchmark):
    assert attention_benchmark("planted:bf16", SPEC, device="cpu").status == "ok"

def test_slower(attention_benchmark):
    attention_benchmark("planted:fp16", SPEC.replace(dtype="fp16"), device="cpu")

def test_young(attention_benchmark):
    attention_benchmark("planted:fp32", SPEC.replace(dtype="fp32"), device="cpu")

def test_exempt(attention_benchmark):
    attention_benchmark("planted:fp32", SPEC.replace(dtype="fp32"), device="cpu", gate=False)
"""
)
# What processes the session has left when pytest ends.
CONFTEST = """
import os
from pathlib import Path

def parent(process):
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return None

def pytest_unconfigure():
    processes = [each for each in Path("/proc").iterdir() if each.name.isdigit()]
    Path("left").write_text(" ".join(each.name for each in processes if parent(each) == os.getpid()))
"""
FAST = "--benchmark-max-time=0.05"  # what is gated is not what is reported


def old_python(folder: Path) -> Path:
    """A Python whose environment has the old code, and in which the folder's backend is installed."""
    path = folder / "old-python"
    path.write_text(f'#!/bin/sh\nunset NEW\nPYTHONPATH={folder}:{SUPPORT} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def planted(folder: Path, tests: str = TESTS) -> str:
    """The option of a gate in a folder with a backend and tests."""
    install(folder, PROGRAM)
    (folder / "test_it.py").write_text(tests)
    return f"--attention-base-python={old_python(folder).name}"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a session was gated."""
    folder = tmp_path_factory.mktemp("gated")
    (folder / "conftest.py").write_text(CONFTEST)
    options = (
        planted(folder),
        "--attention-fail-on=100%",
        "--attention-minutes=10",
        FAST,
        "--benchmark-json=out.json",
        "--junitxml=out.xml",
        "--override-ini=junit_logging=system-out",
    )
    done = pytest_in(folder, *options, NEW="1")
    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def gates(session: Path) -> dict[str, Any]:
    """By test, what its benchmark says of the gate."""
    saved = json.loads((session / "out.json").read_text())["benchmarks"]
    return {each["name"]: each["extra_info"].get("gate") for each in saved}


@pytest.fixture(scope="module")
def failures(session: Path) -> dict[str, str]:
    """By test, why it failed."""
    cases = ElementTree.parse(session / "out.xml").iter("testcase")
    return {each.get("name", ""): failure.get("message", "") for each in cases for failure in each.iter("failure")}


def test_a_plan_that_is_slower_than_in_the_old_environment_fails(
    gates: dict[str, Any], failures: dict[str, str]
) -> None:
    found = gates["test_slower"]
    low, high = found["costs"]["call"]["interval"]
    assert found["verdict"] == "slower"
    assert 2 < low < found["costs"]["call"]["ratio"] < high < 20
    assert failures["test_slower"].startswith("Failed: planted:fp16 on b1 h2 s32 d16 fp16 forward, cpu: slower: call +")


def test_one_that_is_not_passes_and_reports_what_could_have_been_seen(session: Path, gates: dict[str, Any]) -> None:
    found = gates["test_steady"]
    assert (found["verdict"], found["certain"]) == ("same", True)
    assert 0 < found["visible"] <= found["limits"]["time"] == 1
    assert found["base_python"] == str(session / "old-python")
    assert "is the old one really the old one?" in (session / "out.xml").read_text()


def test_one_that_the_old_environment_lacks_is_not_certain(gates: dict[str, Any], failures: dict[str, str]) -> None:
    assert (gates["test_young"]["verdict"], gates["test_young"]["certain"]) == ("uncertain", False)
    assert "not certain whether it is slower: while it was visited in BASE: " in failures["test_young"]
    assert "planted:fp32" in failures["test_young"]
    assert gates["test_exempt"] is None


def test_processes_are_kept_from_test_to_test_and_closed_at_the_end(session: Path) -> None:
    """Four, had each test its own: one for each that was gated, and another to be sure of what is slower."""
    assert 2 <= (session / "processes").read_text().split().count("BASE") < 4
    assert (session / "left").read_text() == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attention-base-python=nowhere/python"], "nowhere/python is no program; expected the Python of an env"),
        (["--attention-fail-on=3"], "--attention-fail-on: expected a percentage such as 3% or 0.5%"),
        pytest.param(["--attention-minutes=nan"], "expected a number above 0, not nan", marks=pytest.mark.exhaustive),
    ],
)
def test_options_that_make_no_sense_are_named_before_anything_runs(
    tmp_path: Path, options: Sequence[str], message: str
) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(): ...\n")
    done = pytest_in(tmp_path, f"--attention-base-python={old_python(tmp_path)}", *options)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "passed" not in done.stdout


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
