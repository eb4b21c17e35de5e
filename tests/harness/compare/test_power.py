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


# Of slow-downs so large at least this share is found, and of rows that are none at least the other is excluded.
ON_GPU = (GPU, 0.03, "cuda")
ON_CPU = (CPU, 0.05, "cpu")
RUNS = {
    "GPU, unchanged": (*ON_GPU, 0.0, 0.0, 0.98), "GPU, 3 %": (*ON_GPU, 0.03, 0.95, 0.95),
    "GPU, 5 %": (*ON_GPU, 0.05, 0.99, 0.95), "GPU, 10 %": (*ON_GPU, 0.1, 0.995, 0.95),
    "CPU, unchanged": (*ON_CPU, 0.0, 0.0, 0.0), "CPU, 5 %": (*ON_CPU, 0.05, 0.6, 0.0),
    "CPU, 10 %": (*ON_CPU, 0.1, 0.95, 0.0),
    # Four programs share the two cores: rounds are 10 to 40 % apart.
    "CPU under load, unchanged": (LOADED, 0.05, "cpu", 0.0, 0.0, 0.0),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "limit", "device", "size", "least", "excluded"), RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("runs", MANY)
def test_slow_downs_are_found_and_unchanged_runs_do_not_fail(rows, limit, device, size, least, excluded, runs):
    slowed, others, failed = counted(rows, size, limit, device, runs)
    print(size, runs, slowed, others, failed)
    assert interval(failed, runs).low <= 0.01
    assert others["same"] >= excluded * others.total()
    if size:
        assert interval(slowed["slower"], slowed.total()).high >= least
        assert interval(slowed["same"], slowed.total()).low <= (0.0 if device == "cuda" else 0.05)
