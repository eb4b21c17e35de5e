"""Verdicts on learning: right on planted faults and rounding, seldom wrong, and how many seeds they take."""

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from small_training import builder, gradient_times, not_a_number_after, rounded, run_all, run_of, small

from attnbench.errors import InputError
from attnbench.harness.training.judge.curves import ending, gap_curve, smooth, spikes
from attnbench.harness.training.judge.learning import TOLERANCE, Pair, judge_pairs, pairs_of
from attnbench.harness.training.judge.power import chances, decided, seeds_lacking, seeds_needed
from attnbench.harness.training.report.summary import report
from attnbench.harness.training.rows import TrainingRun
from attnbench.harness.training.run.session import plan_runs
from examples import examples


@cache
def _baselines(folder: Path, steps: int):
    """The runs against which all candidates of so many steps are judged."""
    baseline = small(steps=steps)
    rows = run_all(folder, plan_runs(baseline, None, 3))
    return [row.model_copy(update={"role": "baseline"}) for row in rows]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """Rows of baselines and of candidates with a planted attention."""
    folder = tmp_path_factory.mktemp("baselines")

    def make(planted, steps: int = 100):
        candidate = small(attention="sdpa-math", steps=steps)
        rows = run_all(tmp_path_factory.mktemp("candidates"), plan_runs(candidate, None, 3), builder(planted))
        return [*_baselines(folder / str(steps), steps), *rows]

    return make


@pytest.mark.parametrize("factor", [0.0, 1.5])
def test_an_attention_with_a_wrong_gradient_is_found(trained, factor: float) -> None:
    learning = judge_pairs(pairs_of(trained(gradient_times(factor), 12)))
    assert learning.verdict == "degraded", learning
    assert math.isclose(learning.first_gradient_ratio, factor, rel_tol=0.1)


def test_runs_that_differ_by_rounding_are_equivalent(trained) -> None:
    rows = trained(rounded)
    learning = judge_pairs(pairs_of(rows))
    assert learning.verdict == "equivalent", learning
    assert rows[0].loss != rows[3].loss  # they do differ
    assert rows[0].loss[0] == pytest.approx(rows[3].loss[0], rel=1e-6)  # and have begun alike


def test_an_attention_that_becomes_nan_leaves_its_rows_and_is_diverged(trained) -> None:
    rows = trained(not_a_number_after(80))
    learning = judge_pairs(pairs_of(rows))
    assert learning.verdict == "diverged", learning
    ended = [row for row in rows if row.role == "candidate"]
    assert {row.status for row in ended} == {"diverged"}
    assert all(5 <= len(row.loss) < 100 and not math.isfinite(row.loss[-1]) for row in ended)
    assert all(math.isfinite(loss) for loss in ended[0].loss[:-5])


def _simulated(generator, gap: float, seeds: int, steps: int = 200, noise: float = 0.03, chaos: float = 0.001):
    """Pairs with the noise of batches in common, and what rounding grows into of the candidate's own."""
    course = 2 + 2 * np.exp(-np.arange(steps) / 40)
    runs = []
    for seed in range(seeds):
        shared = course * (1 + 0.01 * generator.standard_normal()) * (1 + noise * generator.standard_normal(steps))
        apart = 1 + chaos * generator.standard_normal() + chaos * generator.standard_normal(steps)
        runs += [run_of(shared, "baseline", seed), run_of(shared * apart * (1 + gap), "candidate", seed)]
    return judge_pairs(pairs_of(runs)).verdict


@pytest.mark.parametrize(
    ("gap", "chaos", "wrong", "rate"),
    [
        (0.0, 0.001, {"degraded", "diverged"}, 0.02),
        (0.0, 0.008, {"degraded", "diverged"}, 0.08),
        (2.5 * TOLERANCE, 0.001, {"equivalent", "diverged"}, 0.02),
        (2.5 * TOLERANCE, 0.008, {"equivalent", "diverged"}, 0.04),
    ],
)
def test_wrong_verdicts_are_rare(gap: float, chaos: float, wrong: set, rate: float) -> None:
    generator = np.random.default_rng(5)
    found = [_simulated(generator, gap, 3, chaos=chaos) for _ in range(examples(50, 300))]
    assert sum(verdict in wrong for verdict in found) <= rate * len(found)


@given(st.integers(0, 10**6), st.integers(100, 130), st.floats(0, 2))
def test_a_run_that_falls_is_equivalent_to_itself(seed: int, steps: int, spread: float) -> None:
    falling = np.sort(1 + spread * np.random.default_rng(seed).random(steps))[::-1]
    runs = [run_of(falling, role, seed) for seed in range(3) for role in ("candidate", "baseline")]
    assert judge_pairs(pairs_of(runs)).verdict == "equivalent"


@given(st.tuples(st.integers(0, 2), st.integers(100, 200)) | st.tuples(st.just(3), st.integers(1, 99)))
@example((2, 100))
@example((3, 99))
def test_too_few_seeds_or_steps_are_inconclusive(count: tuple[int, int]) -> None:
    curve = np.linspace(3, 2, count[1])
    runs = [run_of(curve, role, seed) for seed in range(count[0]) for role in ("candidate", "baseline")]
    assert judge_pairs(pairs_of(runs)).verdict == "inconclusive"


def test_a_loss_that_climbs_is_diverged_and_one_that_only_scatters_is_not() -> None:
    generator = np.random.default_rng(2)
    falling, climbing = np.linspace(4, 2, 200), np.concatenate((np.linspace(4, 2, 100), np.linspace(2, 3.5, 100)))
    scatter = 2 * (1 + 0.5 * generator.standard_normal(200).clip(-1, 1))
    pairs = lambda curve: pairs_of([run_of(curve), run_of(falling, "baseline")])  # noqa: E731
    assert judge_pairs(pairs(climbing)).verdict == "diverged"
    assert judge_pairs(pairs(scatter)).verdict != "diverged"
    assert judge_pairs([Pair(run_of(falling), run_of(climbing, "baseline"))]).verdict == "inconclusive"


def test_outside_the_seeds_band_nothing_is_equivalent() -> None:
    curve = np.linspace(4, 2, 200)
    runs = [run_of(curve, "baseline", seed) for seed in range(3)]  # all alike: the band is a point
    runs += [run_of(curve * 1.001, "candidate", seed) for seed in range(3)]
    learning = judge_pairs(pairs_of(runs))
    assert learning.verdict == "inconclusive"
    assert "outside" in learning.reason


def test_two_runs_of_one_seed_are_no_pair() -> None:
    with pytest.raises(InputError, match="seed 0"):
        pairs_of([run_of([1.0]), run_of([1.0])])


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=50), st.integers(1, 60))
def test_smoothing_is_the_mean_of_the_window(losses: list[float], window: int) -> None:
    for step, value in enumerate(smooth(losses, window)):
        assert value == pytest.approx(np.mean(losses[max(0, step - window + 1) : step + 1]))
    assert ending(losses, 1.0) == pytest.approx(np.mean(losses))
    assert gap_curve([1.1 * loss for loss in losses], losses, window) == pytest.approx(0.1)


@given(st.integers(20, 60), st.integers(0, 1000))
def test_a_spike_is_found_and_noise_is_none(place: int, seed: int) -> None:
    losses = 3 + 0.05 * np.random.default_rng(seed).standard_normal(80)
    assert spikes(losses) == []
    losses[place] = 6.0
    assert spikes(losses) == [place]
    losses[place] = math.nan
    assert spikes(losses) == [place]


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
