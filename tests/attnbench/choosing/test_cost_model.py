"""The cost model: it recovers a known formula, its error is calibrated, and any table gives a finite result."""

import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Thread
from time import sleep

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

from attnbench import AttentionSpec, Mask, Plan
from attnbench.choosing.cost_model import predict as cost_model
from attnbench.choosing.cost_model.fit import Fit, calibration
from attnbench.choosing.cost_model.predict import CostModel
from attnbench.choosing.similarity import of_one_length
from attnbench.problem.lengths_kind import LengthsKind
from attnbench.tables.table import Entry

PLAN = Plan("fast:bf16")
CAUSAL = Mask(right=0)


def spec(length: int = 1024, batch: int = 4, **more) -> AttentionSpec:
    return AttentionSpec.make(**{"batch": batch, "heads": 16, "seqlen_q": length, "head_dim": 128, **more})


def law(spec: AttentionSpec, launch: float = 0.05, rate: float = 500.0) -> float:
    """ms: a launch and ``rate`` tera-operations a second."""
    return launch + spec.flops / rate / 1e9


def entry(at: AttentionSpec, time: float, plan: Plan = PLAN, **more) -> Entry:
    return Entry(at, plan, "ok", time, 0.0, {"normal": 0.002}, **more)


LENGTHS = (256, 512, 2048, 4096, 16384)


def test_the_predicted_time_error_is_calibrated_and_grows_with_distance():
    """For random plans with noisy times around a formula, about two in three are within one error."""
    chance = random.Random(7)
    scores = []
    for _ in range(40):
        launch, rate = chance.uniform(0.02, 0.5), chance.uniform(200, 800)
        specs = [spec(length, mask=mask) for length in (*LENGTHS, 1024, 8192) for mask in (Mask(), CAUSAL)]
        times = {each: law(each, launch, rate) * math.exp(chance.gauss(0, 0.06)) for each in specs}
        asked = chance.choice(specs)
        model = CostModel(entry(each, time) for each, time in times.items() if each != asked)
        found = model.predict(PLAN, asked)
        scores.append(abs(math.log(found.time_ms / times[asked])) / found.error)
    assert 0.4 <= sum(score <= 1 for score in scores) / len(scores) <= 0.95
    model = CostModel(entry(spec(length), law(spec(length))) for length in LENGTHS)
    errors = [model.predict(PLAN, spec(*at)).error for at in ((2048,), (3000,), (65536,), (2048, 512))]
    assert errors[0] < errors[1] < errors[2]
    assert errors[0] < errors[3]


def test_what_a_kernel_reaches_in_a_class_that_was_not_measured_is_known_to_a_fifth():
    """Of what the operations say: no closer, for it may be better or worse at another head dimension, and no less."""
    entries = [entry(spec(length), law(spec(length), launch=1e-5)) for length in LENGTHS]
    fit = Fit(entries)
    # Where it was measured, for that the launch is uncertain does not matter to a long call.
    assert CostModel(entries).predict(PLAN, spec(LENGTHS[-1])).error < 0.1
    assert 0.05 < fit.deviation(spec(4096)) < fit.deviation(spec(8192)) < 0.1  # one repeated differs by 0.05
    assert 0.16 < fit.deviation(spec(8192, head_dim=32)) < 0.3
    assert 0.12 < fit.deviation(spec(8192, mask=CAUSAL)) < 0.2
    for other in ({"head_dim_v": 64}, {"softcap": 50.0}, {"kv_heads": 1}, {"batch": 64}):
        assert 0.12 < fit.deviation(spec(8192, **other)) < 0.2
    of_bytes = Fit(entry(spec(length), 1e-5 * length) for length in LENGTHS)
    assert of_bytes.deviation(spec(8192, head_dim=32)) > 0.5  # a kernel may pad


def test_bytes_of_a_packed_batch_are_those_of_its_tokens():
    """Not of as many sequences as the longest."""
    at = [spec(length, batch) for length in LENGTHS for batch in (4, 16)]
    model = CostModel(entry(each, 1e-5 * each.batch * each.seqlen_q) for each in at)
    lengths = LengthsKind(batch="packed", square=True, total_q=16384, total_kv=16384)
    packed = spec(8192, 16, lengths=lengths)
    assert model.predict(PLAN, packed).time_ms == pytest.approx(
        model.predict(PLAN, of_one_length(packed)).time_ms, rel=0.05
    )


def test_the_bytes_of_grouped_heads_are_those_of_their_keys():
    """In decoding, which reads the keys and does little else."""

    def decode(keys: int, kv_heads: int) -> AttentionSpec:
        return spec(1, batch=64, seqlen_kv=keys, kv_heads=kv_heads)

    at = [decode(keys, kv_heads) for keys in (4096, 16384, 65536) for kv_heads in (16, 4)]
    model = CostModel(entry(each, 1e-6 * each.seqlen_kv * each.kv_heads) for each in at)
    assert model.predict(PLAN, decode(16384, 1)).time_ms == pytest.approx(1e-6 * 16384, rel=0.1)


def test_the_more_a_time_scatters_the_less_it_counts():
    """One of six is twice what the law says."""
    odd, others = spec(1024), [entry(spec(n), law(spec(n)), host_ms=1e-3, device_ms=law(spec(n))) for n in LENGTHS]
    time = 2 * law(odd)

    def fit(scatter: float) -> Fit:
        strange = replace(entry(odd, time, host_ms=1e-3, device_ms=time), spread_ms=2 * scatter * time)
        return Fit([*others, strange])

    steady, noisy = fit(0.01), fit(0.3)
    assert steady.predict(odd)[0] > 1.5 * law(odd)
    assert noisy.predict(odd)[0] < 1.05 * law(odd)
    assert noisy.predict(spec(1500))[0] < 1.03 * law(spec(1500)) < steady.predict(spec(1500))[0] / 1.2
    assert noisy.residuals[odd].deviation > 0.3 > 3 * steady.residuals[odd].deviation


def test_errors_grow_with_the_residuals_of_which_one_outlier_is_bounded():
    """Those of calls that waited for the host do not count."""
    assert calibration([(0.5, 1.0)] * 9) < 1 < calibration([(2.0, 1.0)] * 9)
    assert calibration([(1.0, 1.0)] * 9 + [(1e6, 1.0)]) < 4
    assert calibration([(5.0, 0.0)]) == 1.0
    exact, wild = (
        CostModel(entry(spec(n), law(spec(n)) * math.exp(size * (-1) ** i)) for i, n in enumerate(LENGTHS))
        for size in (0.0, 0.5)
    )
    assert wild.predict(PLAN, spec(3000)).error > 4 * exact.predict(PLAN, spec(3000)).error


def test_a_ratio_is_known_better_than_its_parts_where_both_plans_are_slow_at_the_same_shapes():
    chance = random.Random(3)
    one, other = Plan("one:bf16"), Plan("other:bf16")

    def model(shared: bool) -> CostModel:
        entries = [entry(spec(2048, batch=1), law(spec(2048, batch=1)), other)]
        for at in map(spec, (*LENGTHS, 1024, 8192, 32768)):
            slow = chance.gauss(0, 0.3)
            entries.append(entry(at, law(at) * math.exp(slow), one))
            entries.append(entry(at, 1.5 * law(at) * math.exp(slow if shared else chance.gauss(0, 0.3)), other))
        return CostModel(entries)

    alike, apart = model(True), model(False)
    gaps = [each.gap_error(one, other, spec(3000)) for each in (alike, apart)]
    assert 4 * gaps[0] < alike.predict(one, spec(3000)).error < gaps[1]
    assert alike.gap_error(other, one, spec(3000)) == pytest.approx(gaps[0])


def test_times_of_plans_that_lost_a_race_count_and_those_of_wrong_results_do_not():
    usable, lost, wrong = (
        replace(entry(spec(length), time), **more)
        for length, time, more in (
            (1024, law(spec(1024)), {}),
            (4096, 3 * law(spec(4096)), {"status": "slower", "errors": {}}),
            (16384, 1e-3, {"status": "inaccurate", "check": "stale"}),
        )
    )
    found, plain = CostModel([usable, lost, wrong]), CostModel([usable, lost])
    assert found.predict(PLAN, spec(16384)) == plain.predict(PLAN, spec(16384))
    assert plain.predict(PLAN, spec(4096)).time_ms == pytest.approx(3 * law(spec(4096)), rel=0.2)


def test_one_short_call_does_not_make_long_ones_short():
    """It fits a constant as well as work: eight times the tokens take 1 to 64 times as long, most likely many times."""
    short, long = spec(1024), spec(8192)
    alone, both = (CostModel(entry(each, law(each)) for each in some) for some in ((short,), (short, long)))
    assert alone.predict(PLAN, short).time_ms == pytest.approx(law(short), rel=0.05)
    found = alone.predict(PLAN, long)
    assert 16 * law(short) < found.time_ms < 48 * law(short)
    assert found.error > 0.5 > 4 * both.predict(PLAN, long).error


@pytest.mark.parametrize(("seen", "expected"), [(0.5, 1.2), (2.0, 2.0)])
def test_a_mixed_pair_is_predicted_from_its_two_kernels(seen, expected):
    """Its own two entries suggest 0.5 or 2 times; its kernels suggest 1.2: a third is forward, 1.6 times as long."""
    own, mixed = Plan("y:bf16", "y:bf16"), Plan("x:bf16", "y:bf16")
    entries = []
    for length in (1024, 2048, 4096, 8192):
        step, forward = spec(length, direction="training"), spec(length)
        entries += [entry(step, law(step), own), entry(forward, law(step) / 3, Plan("y:bf16"))]
        entries.append(entry(forward, law(step) / 3 * 1.6, Plan("x:bf16")))
    few, asked = [spec(length, direction="training") for length in (512, 16384)], spec(4096, direction="training")
    model = CostModel([*entries, *(entry(each, seen * law(each), mixed) for each in few)])
    found, kernels = model.predict(mixed, asked), model.predict(own, asked)
    assert found.time_ms == pytest.approx(expected * law(asked), rel=0.05)
    assert (0.9 < found.error / kernels.error < 1.1) is (
        seen < 1
    )  # that of the many measurements of the kernels, or its own
    assert CostModel(entries).predict(mixed, asked) is None


sizes = st.sampled_from([1, 2, 7, 128, 4096, 2**20, 2**31 - 1])
hostile = st.builds(
    lambda batch, queries, keys, mask, time, spread: Entry(
        AttentionSpec.make(batch=batch, heads=2, seqlen_q=queries, seqlen_kv=keys, head_dim=64, mask=mask),
        PLAN, "ok", time, spread, {"normal": 0.001},
    ),
    sizes, sizes, sizes, st.sampled_from([Mask(), CAUSAL, Mask(0, 0), Mask(right=0, alignment="bottom-right")]),
    st.floats(0, 1e300), st.floats(0, 1e300),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(hostile, max_size=12), hostile)
def test_any_table_gives_a_finite_prediction_or_none(entries, asked):
    found = CostModel(entries).predict(PLAN, asked.spec)
    assert found is None or (0 < found.time_ms < math.inf and 0 < found.error < math.inf)


@pytest.fixture
def fitted(monkeypatch) -> list[int]:
    """The number of entries of each fit."""
    found = []

    class Counted(cost_model.Fit):
        def __init__(self, entries):
            found.append(len(entries))
            super().__init__(entries)

    monkeypatch.setattr(cost_model, "Fit", Counted)
    return found


def in_both_orders(entries: list[Entry], asked: list[AttentionSpec]) -> dict[AttentionSpec, object]:
    """The predictions, which are the same for questions in either order to a model of its own."""
    models = CostModel(entries), CostModel(entries)
    found, swapped = (
        {at: model.predict(PLAN, at) for at in order} for model, order in zip(models, (asked, asked[::-1]), strict=True)
    )
    assert found == swapped
    return found


def test_keys_that_grow_one_by_one_need_few_fits_of_a_large_table_in_any_order(fitted):
    many = [entry(spec(length, batch), law(spec(length, batch))) for length in range(64, 1664, 8) for batch in (1, 4)]
    found = in_both_orders(many, [spec(length) for length in range(700, 800)])
    assert len(set(found.values())) == 100
    assert len(fitted) <= 4
    assert set(fitted) == {256}  # the nearest of the 400


def test_a_fit_of_a_large_table_takes_the_class_first_in_any_order_of_questions():
    """The class was measured at few specs, far from the one in question; there it takes three times as long."""
    many = [entry(spec(length), law(spec(length))) for length in range(64, 3264, 8)]
    few = [entry(spec(length, mask=CAUSAL), 3 * law(spec(length, mask=CAUSAL))) for length in (6144, 8192, 16384)]
    asked = spec(800, mask=CAUSAL)
    assert in_both_orders([*many, *few], [asked, spec(800)])[asked].time_ms > 1.5 * law(asked)


def test_a_fit_evicted_by_another_thread_still_gives_a_prediction(monkeypatch):
    """Another thread's fits evict this one's as soon as it is cached."""

    class Crowded(dict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            self.clear()

    model = CostModel([entry(spec(), law(spec()))])
    monkeypatch.setattr(model, "_fits", Crowded())
    assert model.predict(PLAN, spec(2048)) == CostModel([entry(spec(), law(spec()))]).predict(PLAN, spec(2048))


def test_the_number_of_cached_fits_is_bounded(monkeypatch):
    monkeypatch.setattr(cost_model, "_MOST_FITS", 2)
    plans = [Plan(f"{name}:bf16") for name in "abcd"]
    model = CostModel([entry(spec(), law(spec()), plan) for plan in plans])
    found = {plan: model.predict(plan, spec(2048)) for plan in plans}
    assert len(model._fits) == 2
    assert {plan: model.predict(plan, spec(2048)) for plan in plans} == found


def test_a_fit_uses_one_blas_thread_and_restores_the_limit(monkeypatch):
    """Also with fits in other threads, and after a fit fails."""

    def threads() -> set[int]:
        return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}

    def allow(count: int) -> None:
        """Sets the limit in a thread that ends, because a live one would prevent others from setting it."""
        changer = Thread(target=threadpool_limits, args=(count, "blas"))
        changer.start()
        changer.join()

    def failed(entries):
        seen.append(threads())
        sleep(0.02)
        raise MemoryError

    def fit(plan: Plan) -> None:
        with pytest.raises(MemoryError):
            CostModel([entry(spec(), law(spec()), plan)]).predict(plan, spec(2048))

    seen: list[set[int]] = []
    monkeypatch.setattr(cost_model, "Fit", failed)
    before = max(threads())
    allow(2)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fit, [Plan(f"{name}:bf16") for name in "abcd"]))
    assert seen == [{1}] * 4
    assert threads() == {2}
    allow(before)
