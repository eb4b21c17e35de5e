"""How often the gate finds slow-downs of a known size in real noise, and how often one that is not there.

What was recorded is of an H200 and of a shared CPU of two cores: ``python tests/gpu/gate_power.py OUT --record``.
"""

import random
from collections import Counter

import pytest
from recorded_rounds import Recording, gated, recorded_rows
from scipy import stats

GPU = recorded_rows("nvidia-h200", ("prepared", "backward"))
CPU = recorded_rows("amd-epyc", ("call",))
LOADED = recorded_rows("amd-epyc", ("call",), "rounds-under-load")
MANY = [5, pytest.param(1000, marks=pytest.mark.exhaustive)]


def counted(rows, size, limit, device_type, runs):
    """What is found of slowed and of other rows, and in how many runs one of the latter was slower."""
    rng = random.Random(round(1e4 * size) + runs)
    slowed, others, failed = Counter(), Counter(), 0
    for _ in range(runs):
        planted = dict.fromkeys(rng.sample(range(len(rows)), len(rows) // 2), size) if size else {}
        found = gated(Recording(rows, rng, planted), limit, device_type)
        slowed.update(each for number, each in enumerate(found) if number in planted)
        mistaken = [each for number, each in enumerate(found) if number not in planted]
        others.update(mistaken)
        failed += "slower" in mistaken
    return slowed, others, failed


def interval(count, total):
    """Of 95 %, of a share."""
    return stats.binomtest(count, total).proportion_ci(method="exact")


@pytest.mark.parametrize(("size", "least"), [(0.03, 0.95), (0.05, 0.99), (0.1, 0.995)])
@pytest.mark.parametrize("runs", MANY)
def test_a_slow_down_on_a_gpu_is_found(size, least, runs):
    slowed, others, failed = counted(GPU, size, 0.03, "cuda", runs)
    print(size, runs, slowed, others, failed)
    assert interval(slowed["slower"], slowed.total()).high >= least
    assert not slowed["same"]
    assert interval(failed, runs).low <= 0.01
    assert others["same"] >= 0.95 * others.total()


@pytest.mark.parametrize("runs", MANY)
def test_an_unchanged_run_on_a_gpu_does_not_fail(runs):
    _, others, failed = counted(GPU, 0.0, 0.03, "cuda", runs)
    print(runs, others, failed)
    assert interval(failed, runs).low <= 0.01
    assert others["same"] >= 0.98 * others.total()


@pytest.mark.parametrize(("size", "least"), [(0.05, 0.6), (0.1, 0.95)])
@pytest.mark.parametrize("runs", MANY)
def test_a_slow_down_on_a_shared_cpu_is_found(size, least, runs):
    slowed, others, failed = counted(CPU, size, 0.05, "cpu", runs)
    print(size, runs, slowed, others, failed)
    assert interval(slowed["slower"], slowed.total()).high >= least
    assert interval(slowed["same"], slowed.total()).low <= 0.05
    assert interval(failed, runs).low <= 0.01


@pytest.mark.parametrize("rows", [CPU, LOADED], ids=["quiet", "loaded"])
@pytest.mark.parametrize("runs", MANY)
def test_an_unchanged_run_on_a_shared_cpu_does_not_fail(runs, rows):
    """Also where four programs share the two cores, whose rounds are 10 to 40 % apart."""
    _, others, failed = counted(rows, 0.0, 0.05, "cpu", runs)
    print(runs, others, failed)
    assert interval(failed, runs).low <= 0.01
