"""Host-bound calls: the cost model separates host and device time on a synthetic machine."""

from dataclasses import replace
from statistics import NormalDist

import pytest
from fakes import an_environment
from hypothesis import given
from hypothesis import strategies as st

from attnbench import AttentionSpec, Mask, Plan
from attnbench.choosing.cost_model.fit import Fit
from attnbench.choosing.cost_model.host import longer
from attnbench.choosing.cost_model.pool import PooledModel
from attnbench.choosing.cost_model.predict import CostModel
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
    def outlier_weight(scatter: float) -> float:
        odd = spec(512)
        entries = [call_entry(spec(length), 0.0) for length in LENGTHS if length != 512]
        slow = Entry(odd, PLAN, "ok", 2 * device_ms_of(odd), scatter * 2 * device_ms_of(odd), {"normal": 0.002})
        return Fit([*entries, slow]).residuals[odd].heard

    assert outlier_weight(0.002) > 0.8
    assert outlier_weight(0.3) < 0.2


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
