"""The test that turns checks into a breach: rare false alarms at the bound, fast alarms beyond it, for any rows."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.guarding.significance import Detector

HEADS = 8
BOUND = 0.05


def even_errors(draw: random.Random) -> float:
    """Rows of 128 dimensions: nearly equal errors in all heads."""
    return draw.gammavariate(200, 1 / 200)


def uneven_errors(draw: random.Random) -> float:
    """Three times larger errors in some heads."""
    return draw.choice((0.2, 0.6, 2.2)) * even_errors(draw)


def single_head_errors(draw: random.Random) -> float:
    """Nearly all of the error in one head of twenty."""
    return 19.05 if draw.random() < 0.05 else 0.05


ROWS = {"even": even_errors, "uneven": uneven_errors, "rare": single_head_errors}


def checks(draw, rows, relative, count):
    """(errors, sizes) of checks of a plan whose relative L2 is ``relative`` times the bound; sizes vary too."""
    for _ in range(count):
        sizes = [draw.gammavariate(4, 3.0) for _ in range(HEADS)]
        mean = math.fsum(sizes) / HEADS
        yield [rows(draw) * (relative * BOUND) ** 2 * mean for _ in range(HEADS)], sizes


def first_alarm(detector, stream) -> int | None:
    return next((number for number, check in enumerate(stream, 1) if detector.add(*check)), None)


@pytest.mark.parametrize("rows", ROWS)
def test_a_plan_at_its_bound_causes_no_alarm_in_ten_thousand_checks(rows):
    draw = random.Random(rows)
    assert first_alarm(Detector(BOUND), checks(draw, ROWS[rows], 1.0, 10_000)) is None


@pytest.mark.parametrize(
    ("rows", "relative", "within"),
    [("even", 1.5, 5), ("uneven", 1.5, 15), ("even", 2.0, 2), ("even", 4.0, 1), ("rare", 4.0, 30)],
)
@pytest.mark.parametrize("healthy", [0, 500])
def test_a_plan_beyond_its_bound_is_found_soon_after_any_correct_period(rows, relative, within, healthy):
    found = []
    for seed in range(20):
        draw, detector = random.Random(seed), Detector(BOUND)
        assert first_alarm(detector, checks(draw, even_errors, 0.4, healthy)) is None
        found.append(first_alarm(detector, checks(draw, ROWS[rows], relative, 200)) or 200)
    assert sorted(found)[15] <= within, found


@given(
    st.lists(st.floats(0, 20), min_size=2, max_size=6),
    st.sampled_from([0.05, 0.2, 0.5, 0.9]),
)
def test_errors_with_an_allowed_mean_give_no_evidence_on_average(shares, bet):
    """This bounds false alarms: for any errors with an allowed mean, the mean of the factor is at most 1."""
    mean = math.fsum(shares) / len(shares)
    if mean == 0:
        return
    allowed = [share * 1.25 / mean for share in shares]
    gains = []
    for share in allowed:
        detector = Detector(1.0)
        place = (0.05, 0.2, 0.5, 0.9).index(bet)
        if detector.add([share], [1.0]) is None:
            gains.append(math.exp(detector._logs[place]))
    assert len(gains) < len(allowed) or math.fsum(gains) / len(gains) <= 1 + 1e-9


@pytest.mark.parametrize("seed", range(2))
def test_an_alarm_reports_an_error_above_the_bound(seed):
    """Checks of small rows (late keys under a causal mask) may be wrong where those of large ones are right."""
    draw, detector, alarms = random.Random(seed), Detector(BOUND), []
    for _ in range(2000):
        small = draw.random() < 0.7
        sizes = [(0.01 if small else 10.0) * draw.gammavariate(4, 3.0) for _ in range(HEADS)]
        relative = (2.0 if small else 0.2) * BOUND
        found = detector.add([uneven_errors(draw) * relative**2 * size for size in sizes], sizes)
        alarms += [] if found is None else [found.error]
    assert alarms
    assert min(alarms) > BOUND


def test_nonfinite_and_nonzero_errors_are_found_at_once_and_then_reset():
    detector = Detector(BOUND)
    for value in (math.nan, math.inf):
        found = detector.add([0.0, value], [1.0, 1.0])
        assert (found.error, found.evidence) == (math.inf, math.inf)
    assert detector.add([0.0], [0.0]) is None
    assert detector.add([1e-30], [0.0]).error == math.inf
    assert detector.add([1.0], [1.0]).error == 1.0
    assert detector.add([4.0], [1.0]).error == 2.0  # of the checks since the last alarm
    assert first_alarm(detector, checks(random.Random(3), even_errors, 1.0, 1000)) is None
