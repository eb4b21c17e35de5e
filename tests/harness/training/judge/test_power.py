"""The number of seeds that a verdict on learning takes, held against the verdicts themselves."""

import numpy as np
import pytest
from small_training import run_of

from attnbench.errors import InputError
from attnbench.harness.training.judge.learning import judge_pairs, pairs_of
from attnbench.harness.training.judge.power import chances, decided, seeds_lacking, seeds_needed
from attnbench.harness.training.report.summary import report
from attnbench.harness.training.rows import TrainingRun


def _run(role: str, seed: int, end: float) -> TrainingRun:
    return run_of([end] * 100, role, seed)


def test_gaps_are_decided_as_the_verdict_decides_them() -> None:
    random = np.random.default_rng(1)
    found = set()
    for deviation in (0.0005, 0.002, 0.005):
        for gap in (0.0, 0.003, 0.006):
            gaps = gap + deviation * random.standard_normal(5)
            band = np.linspace(0.95, 1.05, 5)  # wide, as the chances assume
            runs = [_run("baseline", seed, end) for seed, end in enumerate(band)]
            runs += [_run("candidate", seed, end * (1 + gaps[seed])) for seed, end in enumerate(band)]
            equivalent, degraded = decided(gaps)
            expected = "equivalent" if equivalent else "degraded" if degraded else "inconclusive"
            assert judge_pairs(pairs_of(runs)).verdict == expected
            found.add(expected)
    assert found == {"equivalent", "degraded", "inconclusive"}


def test_an_inconclusive_verdict_states_how_many_seeds_it_lacks() -> None:
    random = np.random.default_rng(3)
    gaps = random.standard_normal(4)
    gaps = 0.006 * (gaps - gaps.mean()) / gaps.std(ddof=1)
    runs = [_run("baseline", seed, 2 + seed / 10) for seed in range(4)]
    runs += [_run("candidate", seed, (2 + seed / 10) * (1 + gap)) for seed, gap in enumerate(gaps)]
    learning = judge_pairs(pairs_of(runs))
    assert learning.verdict == "inconclusive"
    assert seeds_lacking(learning) == seeds_needed(0.006)
    assert seeds_needed(0.1) is None  # more than anybody has
    assert seeds_lacking(judge_pairs(pairs_of(runs)[:2])) is None  # which lacks seeds for any verdict
    assert f"{seeds_needed(0.006)} seeds that scatter like these" in " ".join(report(runs, "text").split())


def test_a_candidate_that_is_surely_better_lacks_no_seeds() -> None:
    runs = [_run("baseline", seed, 2 + seed / 10) for seed in range(4)]
    runs += [_run("candidate", seed, (2 + seed / 10) * (0.994 + seed / 1e4)) for seed in range(4)]
    learning = judge_pairs(pairs_of(runs))
    assert (learning.verdict, seeds_lacking(learning)) == ("inconclusive", None)


@pytest.mark.parametrize(("seeds", "deviation"), [(2, 0.01), (3, -0.1), (3, float("nan"))])
def test_chances_of_what_gives_no_verdict_are_refused(seeds: int, deviation: float) -> None:
    with pytest.raises(InputError, match="takes 3 seeds"):
        chances(seeds, deviation)
