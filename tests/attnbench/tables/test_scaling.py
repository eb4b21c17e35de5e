"""Times of one GPU scaled to another: bounded by the ratios of the rates, and near what was measured there."""

import math
from dataclasses import replace

import pytest
from fakes import an_environment
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from attnbench import AttentionSpec, Mask, Plan
from attnbench.problem.lengths_kind import LengthsKind
from attnbench.tables.gpu_models import GPU_MODELS
from attnbench.tables.scaling import Rates, impossible, scaled, scaled_ms
from attnbench.tables.table import Entry, Table

H200 = an_environment(device_type="cuda", device_name="NVIDIA H200", capability="9.0", power_cap_w=700)
H100 = replace(H200, device_name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 10**9, driver="570.1")
HOPPERS = sorted(name for name in GPU_MODELS if "A100" not in name)
PLANS = {
    "forward": [Plan("fast:bf16"), Plan("fast:fp8-token"), Plan("slow:int8")],
    "training": [Plan("fast:fp8", "slow:bf16"), Plan("slow:bf16", "slow:bf16")],
}


def spec(**more) -> AttentionSpec:
    return AttentionSpec.make(**{"batch": 4, "heads": 16, "seqlen_q": 4096, "head_dim": 128, **more})


SPECS = st.builds(
    spec,
    batch=st.sampled_from([1, 4, 64]),
    seqlen_q=st.sampled_from([1, 300, 2048, 65536]),
    seqlen_kv=st.sampled_from([128, 2048, 65536]),
    head_dim=st.sampled_from([64, 128]),
    mask=st.sampled_from([Mask(), Mask(right=0)]),
    direction=st.sampled_from(["forward", "training"]),
)
CALLS = SPECS.flatmap(lambda at: st.tuples(st.just(at), st.sampled_from(PLANS[at.direction]), st.floats(1e-5, 1e5)))
RATES = st.sampled_from(HOPPERS).map(lambda name: Rates(GPU_MODELS[name], GPU_MODELS[name].clock()))


def table(*times: float, environment=H200, plan: str = "fast:bf16", **more) -> Table:
    return Table.from_entries(
        environment, [Entry(spec(batch=n), Plan(plan), "ok", time, **more) for n, time in enumerate(times, 1)]
    )


def ratios(source: Rates, target: Rates) -> list[float]:
    operations = [source.operations(each) / target.operations(each) for each in ("bf16", "fp8", "fp32")]
    return [*operations, source.model.bandwidth / target.model.bandwidth]


@given(CALLS, st.floats(0, 2), RATES, RATES)
def test_the_factor_lies_between_the_ratios_of_the_rates(call, launch, source, target):
    at, plan, time = call
    found = scaled_ms(plan, at, time, launch, source, target)
    factors = [1.0, *ratios(source, target)]
    assert time * min(factors) * (1 - 1e-9) <= found <= time * max(factors) * (1 + 1e-9)
    if time <= launch:
        assert found == time


@pytest.mark.parametrize(("host_ms", "device_ms"), [(9.0, 4.0), (0.1, 9.0)])
def test_only_the_device_part_of_a_call_is_scaled(host_ms, device_ms):
    given = table(9.0, host_ms=host_ms, device_ms=device_ms)
    (moved,) = scaled(given, replace(H100, power_cap_w=350)).entries.values()
    alone = scaled(table(device_ms), replace(H100, power_cap_w=350))
    assert moved.host_ms == host_ms
    assert moved.device_ms > 1.01 * device_ms
    assert moved.device_ms == pytest.approx(next(iter(alone.entries.values())).time_ms, rel=0.1)
    assert moved.time_ms == max(host_ms, moved.device_ms)


def test_the_device_part_is_scaled_for_any_host_time_of_the_shortest_call():
    """The host's time is not part of the device's launch time."""

    def shortest(host_ms: float) -> float:
        entries = [
            Entry(spec(batch=n), Plan("fast:bf16"), "ok", max(host_ms, device), host_ms=host_ms, device_ms=device)
            for n, device in ((1, 0.2), (64, 9.0))
        ]
        found = scaled(Table.from_entries(H200, entries), replace(H100, power_cap_w=350))
        return found.at(spec(batch=1))[Plan("fast:bf16")].device_ms

    assert shortest(4.0) == shortest(0.1) > 0.2


def test_what_a_plan_needs_to_begin_is_not_scaled():
    """In either type: the rest of its calls takes as much longer as the other GPU's peak is lower."""
    launches = {"bf16": 0.05, "fp16": 1.0}
    entries = [
        Entry(at, Plan("fast:bf16"), "ok", launch + at.flops / 600e9)
        for dtype, launch in launches.items()
        for at in (spec(batch=1, seqlen_q=128, dtype=dtype), spec(batch=64, seqlen_q=16384, dtype=dtype))
    ]
    moved = scaled(Table.from_entries(H200, entries), replace(H100, power_cap_w=350)).entries
    for entry in entries:
        factor = moved[entry.spec, entry.plan].time_ms / entry.time_ms
        assert factor < 1.03 if entry.spec.seqlen_q == 128 else factor > 1.1


def test_training_moves_three_times_the_bytes_of_a_forward():
    """Scaled to a GPU that differs in bandwidth alone."""
    fast, plan = GPU_MODELS["NVIDIA H200"], Plan("slow:bf16", "slow:bf16")
    slow = replace(fast, bandwidth=fast.bandwidth / 2)
    forward, training = (
        scaled_ms(plan, spec(direction=each), 1e3, 0.0, Rates(fast), Rates(slow)) - 1e3
        for each in ("forward", "training")
    )
    assert training == pytest.approx(3 * forward)


def test_each_pass_is_scaled_by_the_peak_rate_of_its_precision():
    """Scaled to a GPU that is slower only in FP8."""
    at, fast = spec(seqlen_q=65536, direction="training"), GPU_MODELS["NVIDIA H200"]
    slow = replace(fast, tflops={**fast.tflops, "fp8": fast.tflops["fp8"] / 4})
    took = {
        plan: scaled_ms(Plan.parse(plan), at, 1e-3, 0.0, Rates(fast), Rates(slow))
        for plan in ("slow:bf16>slow:bf16", "fast:fp8>slow:bf16", "fast:fp8>fast:fp8")
    }
    exact, mixed, narrow = took.values()
    # Of the peak's time the FP8 forward takes one part of six: its operations are one of 3.5, at twice the rate.
    assert (mixed - exact) / (narrow - exact) == pytest.approx(1 / 6, rel=0.02)


@given(CALLS, RATES, RATES, st.sampled_from(["tflops", "bandwidth", "clock"]), st.floats(1, 9))
def test_a_faster_gpu_is_never_slower(call, source, target, what, factor):
    at, plan, time = call
    model = target.model
    if what == "tflops":
        model = replace(model, tflops={name: rate * factor for name, rate in model.tflops.items()})
    if what == "bandwidth":
        model = replace(model, bandwidth=model.bandwidth * factor)
    faster = Rates(model, target.clock * (factor if what == "clock" else 1))
    before, after = (scaled_ms(plan, at, time, 0.01, source, each) for each in (target, faster))
    assert after <= before * (1 + 1e-12)


# Whole calls on an H100 of a plain install: the best plan in FP8 and sdpa-cudnn:bf16, in TFLOPS.
MEASURED = [
    ({"batch": 4, "heads": 32, "head_dim": 64, "seqlen_q": 4096}, 526, 472),
    ({"batch": 1, "heads": 32, "head_dim": 64, "seqlen_q": 16384, "mask": Mask(right=0)}, 588, 467),
    ({"batch": 4, "heads": 16, "head_dim": 128, "seqlen_q": 4096}, 809, 657),
]


@pytest.fixture(scope="module")
def shipped() -> Table:
    return Table.load(ROOT / "attnbench/tables/nvidia-h200.json")


@pytest.mark.parametrize(("sizes", "fp8", "bf16"), MEASURED)
def test_the_scaled_h200_table_predicts_h100_times(shipped, sizes, fp8, bf16):
    here = replace(shipped.environment, device_name="NVIDIA H100 80GB HBM3")
    at = AttentionSpec.make(**sizes, dtype="bf16")
    rates = {str(plan): at.flops / entry.time_ms / 1e9 for plan, entry in scaled(shipped, here).at(at).items()}
    ours = max(rate for plan, rate in rates.items() if plan.startswith("triton:fp8"))
    cudnn = rates["sdpa-cudnn:bf16"]
    assert (ours, cudnn) == pytest.approx((fp8, bf16), rel=0.04)
    assert ours / cudnn == pytest.approx(fp8 / bf16, rel=0.02)


# flash-attention issue 1310, TFLOPS of FlashAttention-3 and cuDNN on an H20, 2,048 keys without a mask.
@pytest.mark.parametrize(("head_dim", "fa3", "cudnn"), [(64, 120.1, 126.1), (128, 126.2, 129.1)])
def test_the_scaled_h200_table_predicts_h20_times(shipped, head_dim, fa3, cudnn):
    here = replace(shipped.environment, device_name="NVIDIA H20", power_cap_w=400)
    at = AttentionSpec.make(batch=8, heads=2048 // head_dim, seqlen_q=2048, head_dim=head_dim)
    found = scaled(shipped, here).at(at)
    rates = [at.flops / found[Plan(name)].time_ms / 1e9 for name in ("fa3:bf16", "sdpa-cudnn:bf16")]
    assert rates == pytest.approx([fa3, cudnn], rel=0.09)


def test_a_scaled_table_keeps_errors_and_versions_and_has_this_gpus_facts():
    found = scaled(table(1.0, 2.0, spread_ms=0.1, errors={"normal": 0.01}), H100)
    assert (found.scaled_from, found.environment) == ("NVIDIA H200", H100)
    for entry in found.entries.values():
        before = float(entry.spec.batch)
        assert entry.errors == {"normal": 0.01}
        assert entry.device_ms is None
        assert before < entry.time_ms < before * 4.8 / 3.35
        assert entry.spread_ms / entry.time_ms == pytest.approx(0.1 / before)
    other = replace(H200, backends={"fast": "0.9"}, torch="2.8.0")
    kept = scaled(table(1.0, environment=other), H100).environment
    assert (kept.backends, kept.torch, kept.driver) == ({"fast": "0.9"}, "2.8.0", "570.1")


ELSEWHERE = {
    "same": H200,
    "capability": replace(H100, capability="9.1"),
    "unknown capability": replace(H100, capability=None),
    "unknown model": replace(H100, device_name="NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
    "generation": replace(H100, device_name="NVIDIA A100-SXM4-80GB", capability="8.0"),
    "cpu": replace(H100, device_type="cpu"),
}


@pytest.mark.parametrize("here", ELSEWHERE)
def test_scaling_needs_another_known_model_of_the_same_generation(here):
    assert scaled(table(1.0), ELSEWHERE[here]) is None


def test_the_error_of_a_scaled_time_grows_with_the_distance():
    def error(name: str, power: int | None = None) -> float:
        return scaled(table(1.0, environment=H100), replace(H200, device_name=name, power_cap_w=power)).time_error

    assert error("NVIDIA H800") == pytest.approx(0.05)
    assert 0.05 < error("NVIDIA H200") < error("NVIDIA H100 PCIe") < 0.15 < error("NVIDIA H20") < 0.3


def test_a_plan_beyond_the_peak_makes_a_table_impossible(shipped):
    assert impossible(shipped) is None
    least = spec(batch=1).flops / 989.4e9
    assert impossible(table(least)) is None  # a clock may exceed the one that peaks are published for
    assert "fast:bf16 at b1 h16 s4096 d128 bf16 forward" in impossible(table(least / 1.2))
    assert impossible(table(least / 1.2, plan="fast:fp8")) is None
    for other in ({"device_name": "NVIDIA B200"}, {"device_type": "cpu"}):
        assert impossible(table(least / 1.2, environment=replace(H200, **other))) is None


def test_packed_and_padded_plans_are_impossible_only_below_the_fewest_operations_of_their_counts():
    """A packed spec rounds its counts up, and a padded one does not contain the lengths of its rows."""
    kind = LengthsKind(batch="packed", square=True, total_q=65536, total_kv=65536)

    def verdict(asked: AttentionSpec, time_ms: float) -> str | None:
        entry = Entry(asked, Plan("fast:bf16"), "ok", time_ms)
        return impossible(Table.from_entries(H200, [entry]))

    packed, padded = spec(batch=16, lengths=kind), spec(lengths=LengthsKind(batch="padded"))
    assert packed.least_flops < packed.flops / 1.9
    assert verdict(packed, packed.least_flops / 989.4e9) is None
    assert verdict(packed, packed.least_flops / 1.2 / 989.4e9) is not None
    assert verdict(padded, 1e-5) is None


@pytest.mark.parametrize("name", sorted(GPU_MODELS))
def test_the_published_peak_rates_are_consistent(name):
    model = GPU_MODELS[name]
    assert model.tflops["fp16"] == model.tflops["bf16"]
    assert model.tflops.get("fp8", 2 * model.tflops["bf16"]) == pytest.approx(2 * model.tflops["bf16"], rel=1e-3)
    assert 1 < model.bandwidth < 5
    assert 0.8 < model.clock() <= 1
    assert not math.isclose(model.clock(), model.clock(model.watts // 2), rel_tol=1e-3) or name == "NVIDIA H20"
