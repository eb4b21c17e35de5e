"""The watch reads the right GPU, condenses what it read, and is never in the way."""

import json
import sys
import threading
import time

import fake_nvml
import pytest
from fake_nvml import LOST, NOT_SUPPORTED, Board
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE
from pydantic import ValidationError
from scripted_workers import wait_until

from attnbench.errors import InputError
from attnbench.harness.measure.clocks import Conditions, Range, Reading, Watch, readings_within

ONE, TWO = "00000000-aaaa-bbbb-cccc-000000000001", "00000000-aaaa-bbbb-cccc-000000000002"
QUICK = 0.001  # seconds between readings
ALWAYS = (0.0, 1e12)  # any perf_counter there is


def readings_of(watch: Watch) -> int:
    found = watch.between(ALWAYS)
    return found.readings if found else 0


@pytest.mark.parametrize("uuid", [ONE, f"GPU-{ONE}"])
def test_the_gpu_is_found_by_uuid_whatever_its_number(monkeypatch, uuid):
    fake_nvml.install(monkeypatch, Board(f"GPU-{TWO}", clock=345), Board(f"GPU-{ONE}", clock=1830))
    with Watch(uuid, QUICK) as watch:
        wait_until(lambda: readings_of(watch) >= 3)
        found = watch.between(ALWAYS)
    assert found is not None
    assert found.clock_mhz == Range(lowest=1830, median=1830, highest=1830)
    assert found.power_w == Range(lowest=690.4, median=690.4, highest=690.4)
    assert (found.memory_mhz, found.temperature_c) == (3201, 61)
    assert (found.throttled, found.clock_set) == ({}, 0)
    assert watch.note is None


@pytest.mark.parametrize(
    ("bits", "names", "clock_set"),
    [
        (0x001, [], False),
        (0x002, [], True),
        (0x100, [], True),
        (0x8000, ["unknown"], False),
        (0x08E, ["hardware slowdown", "power brake", "power cap"], True),
        (0x670, ["board limit", "hardware thermal", "reliability", "sync boost", "thermal"], False),
    ],
)
def test_what_holds_the_clock_down_has_a_name(monkeypatch, bits, names, clock_set):
    fake_nvml.install(monkeypatch, Board(f"GPU-{ONE}", reasons=bits))
    with Watch(ONE, QUICK) as watch:
        found = watch.between(ALWAYS)
    assert found is not None
    assert found.throttled is not None
    assert list(found.throttled) == names
    assert set(found.throttled.values()) <= {1.0}
    assert found.clock_set == clock_set


@pytest.mark.parametrize(
    ("query", "fact", "message"),
    [
        ("clock", "clock_mhz", "clock"),
        ("memory", "memory_mhz", "memory clock"),
        ("milliwatts", "power_w", "power"),
        ("degrees", "temperature_c", "temperature"),
        ("reasons", "throttled", "clock reasons"),
    ],
)
def test_one_query_that_fails_costs_its_own_value_and_is_reported(monkeypatch, query, fact, message):
    fake_nvml.install(monkeypatch, Board(f"GPU-{ONE}", failing={query: NOT_SUPPORTED}))
    with Watch(ONE, QUICK) as watch:
        wait_until(lambda: readings_of(watch) >= 2)
        found = watch.between(ALWAYS)
    assert found is not None
    lacking = {name for name, value in found.model_dump().items() if value is None}
    assert lacking == ({"throttled", "clock_set"} if fact == "throttled" else {fact})
    assert f"{message} ({NOT_SUPPORTED})" in (watch.note or "")


def test_a_gpu_that_is_lost_in_mid_run_ends_the_readings_and_nothing_else(monkeypatch):
    board = Board(f"GPU-{ONE}")
    fake_nvml.install(monkeypatch, board)
    with Watch(ONE, QUICK) as watch:
        wait_until(lambda: readings_of(watch) >= 3)
        board.failing = dict.fromkeys(["clock", "memory", "milliwatts", "degrees", "reasons"], LOST)
        wait_until(lambda: watch.note is not None and "clock reasons" in watch.note)
        lost = time.perf_counter()
        wait_until(lambda: watch.steady(lost))  # there is nothing to wait for any more
        before = readings_of(watch)
        time.sleep(20 * QUICK)
        assert readings_of(watch) == before
        assert watch.between((lost + 1, lost + 2)) is None
        assert LOST in (watch.note or "")


@pytest.mark.parametrize(
    ("uuid", "prepare", "message"),
    [
        (None, lambda patch: fake_nvml.install(patch, Board(f"GPU-{ONE}")), "no GPU to watch"),
        (ONE, lambda patch: patch.setitem(sys.modules, "pynvml", None), "nvidia-ml-py"),
        (ONE, lambda patch: fake_nvml.install(patch, start="Driver Not Loaded"), "Driver Not Loaded"),
        (ONE, lambda patch: fake_nvml.install(patch, Board(f"GPU-{TWO}")), "Not Found"),
    ],
)
def test_without_a_gpu_to_read_everything_works_and_the_note_has_the_reason(monkeypatch, uuid, prepare, message):
    fake = prepare(monkeypatch)
    before = threading.active_count()
    with Watch(uuid, QUICK) as watch:
        assert fake is None or fake.sessions == 0
        assert watch.between(ALWAYS) is None
        assert watch.steady(time.perf_counter())
        assert message in (watch.note or "")
        assert ONE not in (watch.note or "")
        assert threading.active_count() == before


def test_a_driver_that_hangs_does_not_hang_the_harness(monkeypatch):
    hangs, released = threading.Event(), threading.Event()

    def clock() -> int:
        if threading.current_thread() is not threading.main_thread():
            hangs.set()
            released.wait(PATIENCE)
        return 1980

    fake = fake_nvml.install(monkeypatch, Board(f"GPU-{ONE}", clock=clock))
    monkeypatch.setattr("attnbench.harness.measure.clocks._PATIENCE", 0.01)
    with Watch(ONE, QUICK):
        assert hangs.wait(PATIENCE)
    (hanging,) = fake.threads - {threading.main_thread()}
    assert hanging.is_alive()
    released.set()
    hanging.join()
    assert fake.sessions == 0


def test_a_period_and_a_span_must_be_one():
    with pytest.raises(InputError):
        Watch(ONE, float("nan"))
    for span in ((2.0, 1.0), (float("nan"), 1.0)):
        with pytest.raises(InputError):
            readings_within([Reading(at=1.0)], [span], reach=1.0)


@pytest.mark.parametrize(
    ("clocks", "tolerance", "is_steady"),
    [
        ([1900] * 4 + [1980] * 4, 0.03, False),
        ([1900] * 4 + [1980] * 4, 0.05, True),
        ([1980] * 4 + [1900] * 4, 0.03, False),
        ([1980, 1980, 1200, 1980, 1980, 1980, 1980, 1350], 0.01, True),
        ([1980] * 7, 0.01, False),
    ],
)
def test_steady_means_medians_within_the_tolerance(monkeypatch, clocks, tolerance, is_steady):
    left, asked_beyond, stopped = iter(clocks), threading.Event(), threading.Event()

    def clock() -> int:
        if (value := next(left, None)) is None:
            asked_beyond.set()
            stopped.wait()
        return value or 0

    fake_nvml.install(monkeypatch, Board(f"GPU-{ONE}", clock=clock))
    with Watch(ONE, QUICK) as watch:
        assert asked_beyond.wait(PATIENCE)
        assert watch.steady(0.0, tolerance) == is_steady
        stopped.set()


# What is read at whole seconds, spans anywhere.
moments = st.floats(-5, 25) | st.integers(-5, 25).map(float)
spans = st.lists(st.tuples(moments, moments).map(lambda span: (min(span), max(span))), max_size=5)


@given(st.integers(0, 20), spans)
def test_a_span_has_its_own_readings_and_each_counts_once(count, spans):
    readings = [Reading(at=float(second)) for second in range(count)]
    found = [reading.at for reading in readings_within(readings, spans, reach=1.5)]
    expected = set()
    for start, stop in spans:
        inside = {second for second in range(count) if start <= second <= stop}
        away = {second: max(start - second, second - stop) for second in range(count)}
        nearest = {min(away, key=lambda second: away[second])} if away and min(away.values()) <= 1.5 else set()
        expected |= inside or nearest
    assert len(found) == len(expected)
    assert found == sorted(found)
    # Two may be equally near; then it matters not which one speaks.
    assert all(second in found or any(abs(second - other) == 1 for other in found) for second in expected)


def test_readings_are_condensed_and_come_back_from_json():
    readings = [
        Reading(1.0, clock_mhz=1980, memory_mhz=3201, power_w=690.0, throttled=("power cap",), clock_set=False),
        Reading(2.0, clock_mhz=1200, memory_mhz=2619, temperature_c=-4, throttled=(), clock_set=True),
        Reading(2.5, clock_mhz=1830, memory_mhz=2619, throttled=("power cap",)),
        Reading(
            3.0, clock_mhz=1830, memory_mhz=3201, power_w=500.0, temperature_c=64, throttled=("power cap", "thermal")
        ),
        Reading(4.0, memory_mhz=2619, temperature_c=61),
    ]
    found = Conditions.of(readings)
    assert found == Conditions(
        readings=5,
        clock_mhz=Range(lowest=1200, median=1830, highest=1980),
        memory_mhz=2619,
        power_w=Range(lowest=500, median=595, highest=690),
        temperature_c=64,
        throttled={"power cap": 0.75, "thermal": 0.25},
        clock_set=0.5,
    )
    assert Conditions.of(readings[::-1]) == found
    assert list(found.throttled) == ["power cap", "thermal"]
    assert Conditions.model_validate_json(found.model_dump_json()) == found
    assert Conditions.of([Reading(1.0)]) == Conditions(readings=1)


@pytest.mark.parametrize(
    "change",
    [
        {"readings": 0},
        {"clock_mhz": {"lowest": 2.0, "median": 1.0, "highest": 3.0}},
        {"throttled": {"bad luck": 0.5}},
        {"throttled": {"power cap": 0}},
    ],
)
def test_conditions_from_a_file_are_checked(change):
    good = json.loads(Conditions.of([Reading(1.0, 1980, 3201, 690.4, 61, ("power cap",), False)]).model_dump_json())
    with pytest.raises(ValidationError):
        Conditions.model_validate_json(json.dumps({**good, **change}))
