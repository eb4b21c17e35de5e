"""Host-bound calls: the cost model separates host and device time on a synthetic machine."""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from fakes import an_environment
from hypothesis import given
from hypothesis import strategies as st

from attnbench import AttentionSpec, Mask, Plan
from attnbench.choosing.cost_model.fit import Fit
from attnbench.choosing.cost_model.host import HostFloor, MeasuredHost, longer
from attnbench.choosing.cost_model.pool import PooledModel
from attnbench.choosing.cost_model.predict import CostModel
from attnbench.problem.lengths_kind import LengthsKind
from attnbench.tables.table import Entry, Table

PLAN = Plan("some:bf16")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def spec(length: int, **more) -> AttentionSpec:
    return AttentionSpec.make(**{"batch": 16384 // length, "heads": 16, "seqlen_q": length, "head_dim": 128, **more})


def device_ms_of(at: AttentionSpec) -> float:
    return 0.02 + at.flops / 600e9


def call_entry(at: AttentionSpec, host: float, scatter: float = 0.2) -> Entry:
    """A call whose time is the maximum of host and device time; its samples are noisy if it is host-bound."""
    waited = host > device_ms_of(at)
    time = max(host, device_ms_of(at))
    return Entry(at, PLAN, "ok", time, time * (scatter if waited else 0.01), {"normal": 0.002})


def test_host_and_device_times_are_predicted_from_specs_that_run_the_same_code():
    """All calls are host-bound, so their times alone do not determine the device time."""
    entries = [
        replace(call_entry(at, host), host_ms=host, device_ms=device_ms_of(at))
        for length in LENGTHS
        for host, at in ((50.0, spec(length)), (400.0, spec(length, kv_heads=1)))
    ]
    assert {each.heard for each in Fit(entries).residuals.values()} == {1.0}
    model = CostModel(entries)
    assert model.predict(PLAN, spec(768)).time_ms == pytest.approx(50.0, rel=0.1)
    assert model.predict(PLAN, spec(768, kv_heads=1)).time_ms == pytest.approx(400.0, rel=0.1)
    far = spec(max(LENGTHS) * 64, batch=1)
    assert model.predict(PLAN, far).time_ms == pytest.approx(device_ms_of(far), rel=0.3)


def test_another_tables_host_time_for_the_same_code_outweighs_this_tables_for_other_code():
    """As seen with sdpa-efficient: an H200's table without groups, and an H100's with expanded groups at 2.5 times."""

    def table(host: float, **more) -> Table:
        places = [spec(length, **more) for length in LENGTHS]
        entries = [replace(call_entry(at, host), host_ms=host, device_ms=device_ms_of(at)) for at in places]
        return Table.from_entries(an_environment(), entries)

    other, own = table(50.0), table(125.0, kv_heads=8)
    asked = spec(768, kv_heads=8)
    model = CostModel(other.entries.values())
    assert model.predict(PLAN, asked).error > 3 * model.predict(PLAN, spec(768)).error
    assert PooledModel([own, other]).predict(PLAN, asked).time_ms == pytest.approx(125.0, rel=0.1)


def test_an_outlier_has_weight_only_if_its_samples_repeat():
    def outlier_weight(scatter: float | None) -> float:
        odd = spec(512)
        entries = [call_entry(spec(length), 0.0) for length in LENGTHS if length != 512]
        time = 2 * device_ms_of(odd)
        slow = Entry(odd, PLAN, "ok", time, None if scatter is None else scatter * time, {"normal": 0.002})
        return Fit([*entries, slow]).residuals[odd].heard

    assert outlier_weight(0.002) > 0.8
    assert outlier_weight(0.3) < 0.2
    assert outlier_weight(None) < 0.2  # not known


@pytest.mark.parametrize(
    ("host", "scatter"), [(0.1, 0.2), (0.2, 0.03), (0.3, 0.2), (1.0, 0.2), (6.0, 0.2), (50.0, 0.2)]
)
def test_calls_that_waited_for_the_host_are_told_from_others_by_times_and_scatter(host, scatter):
    """Except of more than 3 ms, which no host took."""
    fit = Fit(call_entry(spec(length), host, scatter) for length in LENGTHS)
    for at, residual in fit.residuals.items():
        if host > 3 or device_ms_of(at) > 1.5 * host:
            assert residual.heard > 0.8
        elif device_ms_of(at) < 0.7 * host:
            assert residual.heard < 0.2
    for length in LENGTHS:
        assert fit.predict(spec(length))[0] == pytest.approx(max(host, device_ms_of(spec(length))), rel=0.25)


def test_calls_that_waited_for_the_host_do_not_make_a_ratio_of_device_times_uncertain():
    """Of two plans with equal device times and unequal hosts."""
    one, other = Plan("one:bf16"), Plan("other:bf16")
    hosts = {one: 1.0, other: 0.4}
    model = CostModel(
        replace(call_entry(spec(length), host), plan=plan) for length in LENGTHS for plan, host in hosts.items()
    )
    assert model.gap_error(one, other, spec(12000)) < 0.1


@given(st.floats(0.01, 0.99), st.floats(-2, 2), st.floats(0.01, 1), st.floats(0.01, 1))
def test_a_call_in_doubt_leaves_the_mean_and_variance_of_both_cases(waited, time, variance, noise):
    """The prior's if it waited for the host, and the measurement's if not; unless it then says next to nothing."""
    floor = HostFloor(np.array([time]), np.array([0.01]), np.array([False]))
    floor.waited = np.array([waited])
    (site,), (width,) = floor.sites(np.zeros(1), np.array([variance]), np.array([noise]))
    gain = variance / (variance + noise)
    mean = (1 - waited) * gain * time
    squares = waited * variance + (1 - waited) * (variance * (1 - gain) + (gain * time) ** 2)
    precision = 1 / variance + 1 / width
    if width < 99:
        assert (site / width / precision, 1 / precision) == pytest.approx((mean, squares - mean**2), abs=1e-6)


def test_a_host_that_was_measured_at_two_times_lies_between_them_with_a_larger_error():
    def host(*times: float) -> tuple[float, float]:
        at = zip(LENGTHS, times, strict=False)
        return MeasuredHost(replace(call_entry(spec(n), 0.0), host_ms=time) for n, time in at).at(spec(700))

    assert host(1.0, 4.0)[0] == pytest.approx(host(2.0, 2.0)[0])
    assert host(1.0, 4.0)[1] > 5 * host(2.0, 2.0)[1]


@pytest.mark.parametrize(
    "other",
    [
        {"mask": Mask(right=0)}, {"softcap": 50.0}, {"head_dim": 64}, {"kv_heads": 1},
        {"lengths": LengthsKind(batch="padded")},
    ],
)  # fmt: skip
def test_a_host_time_counts_most_for_specs_that_run_the_same_code(other):
    at = {50.0: spec(1024, **other), 1.0: spec(1024)}
    host = MeasuredHost(replace(call_entry(each, 0.0), host_ms=time) for time, each in at.items())
    assert host.at(spec(512, **other))[0] > host.at(spec(512))[0] + 0.5


def test_a_spec_with_few_queries_is_predicted_to_underuse_the_gpu():
    """The plan was measured with many queries; a sixteenth of them takes as long, as they all run at once."""

    def spec_of(queries: int, keys: int) -> AttentionSpec:
        return spec(queries, batch=1, heads=8, seqlen_kv=keys, mask=Mask(right=0, alignment="bottom-right"))

    entries = [call_entry(spec_of(2048, keys), 0.0) for keys in (16384, 32768, 65536, 131072)]
    found = CostModel(entries).predict(PLAN, spec_of(128, 131072))
    assert found.time_ms == pytest.approx(entries[-1].time_ms, rel=0.2)


@given(st.floats(-8, 8), st.floats(0.01, 2), st.floats(-8, 8), st.floats(0.05, 0.95))
def test_the_maximum_of_two_normals_is_below_its_quantile_with_the_given_probability(level, deviation, mean, share):
    host, device = (level, 0.35), (mean, deviation)
    bound = longer(host, device, share)
    assert NormalDist(*host).cdf(bound) * NormalDist(*device).cdf(bound) == pytest.approx(share, abs=1e-3)
