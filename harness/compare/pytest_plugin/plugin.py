"""The pytest plug-in: the fixture ``attention_benchmark``, for pytest-benchmark (docs/how-to/ci.md).

Every pytest session on a machine with attnbench loads this module.  So it imports only pytest, and does nothing before
a test asks for the fixture; only then are the harness and torch imported.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .fixture import AttentionBenchmark, SessionDevices
    from .gate import Gatekeeper
    from .samples import Benchmark, Replay

__all__ = ["attention_benchmark"]

_ENTRY = "attnbench"  # of machine_info
_clock: pytest.StashKey[Replay] = pytest.StashKey()
_devices: pytest.StashKey[SessionDevices] = pytest.StashKey()
_gate: pytest.StashKey[tuple[Path, float, float]] = pytest.StashKey()  # the old Python, the limit, the minutes


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of a gate."""
    group = parser.getgroup("attnbench", "attention_benchmark beside an older environment (attnbench)")
    group.addoption(
        "--attention-base-python",
        metavar="PATH",
        help="The Python of an environment with the old code: a test fails where its plan is slower than there.",
    )
    group.addoption(
        "--attention-fail-on", metavar="PERCENT", default="3%", help="The slow-down that must be found (default: 3%%)."
    )
    group.addoption(
        "--attention-minutes",
        metavar="MINUTES",
        type=float,
        default=1.0,
        help="How long it may take to know of one test (default: 1).",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Read the options of a gate before anything runs."""
    asked, minutes = config.getoption("attention_base_python"), config.getoption("attention_minutes")
    if asked is None:
        return
    from attnbench.errors import MisuseError

    from ..terms import percentage

    base = config.invocation_params.dir / asked  # not resolved: the link identifies the environment
    if not (base.is_file() and os.access(base, os.X_OK)):
        raise pytest.UsageError(f"--attention-base-python: {base} is no program; expected the Python of an environment")
    if not 0 < minutes < math.inf:
        raise pytest.UsageError(f"--attention-minutes: expected a number above 0, not {minutes:g}")
    try:
        limit = percentage(config.getoption("attention_fail_on"))
    except MisuseError as error:
        raise pytest.UsageError(f"--attention-fail-on: {error}") from None
    config.stash[_gate] = base, limit, minutes


@pytest.fixture
def attention_benchmark(
    request: pytest.FixtureRequest,
    _attention_devices: SessionDevices,
    _attention_gatekeeper: Gatekeeper | None,
    benchmark: Benchmark,
) -> AttentionBenchmark:
    """Measure one plan as ``attnbench sweep`` does (on a GPU device time, L2 cold) and report it to pytest-benchmark.

    ``attention_benchmark(plan, spec)`` returns the Measurement; see attnbench.harness.compare.pytest_plugin.fixture.
    """
    from .fixture import AttentionBenchmark

    clock = request.node.stash.get(_clock, None)
    return AttentionBenchmark(benchmark, clock, _attention_devices, _attention_gatekeeper)


@pytest.fixture(scope="session")
def _attention_devices(pytestconfig: pytest.Config) -> Iterator[SessionDevices]:
    limit = pytestconfig.getoption("benchmark_max_time", None)
    if limit is None:
        pytest.fail("attention_benchmark needs pytest-benchmark, which is not installed or was switched off", False)
    from .fixture import SessionDevices

    with SessionDevices(float(limit)) as devices:
        pytestconfig.stash[_devices] = devices
        yield devices


@pytest.fixture(scope="session")
def _attention_gatekeeper(pytestconfig: pytest.Config) -> Iterator[Gatekeeper | None]:
    asked = pytestconfig.stash.get(_gate, None)
    if asked is None:
        yield None
        return
    from .gate import Gatekeeper

    with Gatekeeper(*asked) as gatekeeper:
        yield gatekeeper


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Make pytest-benchmark use our clock: it takes one from the closest marker of the test."""
    if {"attention_benchmark", "benchmark"} <= set(getattr(item, "fixturenames", ())):
        from .samples import Replay

        item.stash[_clock] = Replay()
        if item.config.pluginmanager.hasplugin("pytest-benchmark"):  # or there is no such marker
            own = item.get_closest_marker("benchmark")
            options = {**(own.kwargs if own else {}), "timer": item.stash[_clock]}
            item.add_marker(pytest.mark.benchmark(**options), append=False)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Add the environment of each device that was measured on; leave other sessions unchanged."""
    devices = config.stash.get(_devices, None)
    if devices is not None and devices.environments:
        machine_info[_ENTRY] = {name: each.to_dict() for name, each in devices.environments.items()}


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_benchmark_compare_machine_info(
    config: pytest.Config, machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
) -> Generator[None, object, object]:
    """Warn if saved times cannot be compared with this machine's.

    pytest-benchmark compares the rest.  This runs before any test, so our entry is made equal on both sides.
    """
    saved = compared_benchmark["machine_info"].get(_ENTRY)
    if saved is None:
        return (yield)
    from .fixture import unlike

    for warning in unlike(saved):
        config.issue_config_time_warning(warning, stacklevel=2)
    machine_info[_ENTRY] = saved
    try:
        return (yield)
    finally:
        del machine_info[_ENTRY]
