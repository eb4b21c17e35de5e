"""Each check sees a planted fault that all the others let pass, and none accuses an honest kernel."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from patience import PATIENCE
from torch import Tensor

from attnbench.choosing.budget import class_bound
from attnbench.harness.cases.inputs import FAMILIES, Drawn, draw
from attnbench.harness.measure import verdict
from attnbench.harness.measure.accuracy import Detail, Judgement
from attnbench.harness.measure.probes import negate, undo_negation
from attnbench.harness.measure.truth import Truth
from attnbench.harness.measure.verdict import CHECKS, Observations, Verdict, judge
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import Operands, Saved
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import registry
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec
from examples import examples

CPU = torch.device("cpu")
FP8 = Plan("emulated:fp8-token")
FORWARD = AttentionSpec.make(batch=2, heads=32, seqlen_q=40, head_dim=32, mask=Mask(right=0))
TRAINING = AttentionSpec.make(batch=1, heads=16, seqlen_q=64, head_dim=32, mask=Mask(right=0), direction="training")
Values = dict[str, Tensor]
Change = Callable[[Values], object]


def answers(plan: Plan, inputs: Drawn, spec: AttentionSpec) -> tuple[Operands, Values]:
    forward = registry().forward(plan.forward)
    operands = forward.prepare(inputs.qkv, spec)
    out, lse, state = forward.run(operands)
    values = {"out": out}
    if lse is not None:
        values["lse"] = lse
    if plan.backward is not None:
        saved = Saved(operands, out, lse, state)
        gradients = registry().backward(plan.backward).run(saved, inputs.grad_out)
        values.update(zip(("dq", "dk", "dv"), gradients, strict=True))
    return operands, values


@cache
def runs(plan: Plan, spec: AttentionSpec, families: tuple[str, ...]) -> dict[str, tuple[Truth, Operands, Values]]:
    found = {}
    for family in families:
        inputs = draw(spec, family, CPU)
        found[family] = (Truth.of(spec, inputs, registry()), *answers(plan, inputs, spec))
    return found


def evidence(
    plan: Plan,
    spec: AttentionSpec,
    change: Change = lambda values: None,
    families: tuple[str, ...] = ("normal", "outlier"),
    stale: Callable[[Values, Values], Values] | None = None,
) -> Observations:
    """What the harness would find of a plan whose tensors are changed; ``stale`` mixes (before, now) into an answer."""
    judged, floor, own = {}, {}, {}
    for family, (truth, operands, values) in runs(plan, spec, families).items():
        changed = {name: value.clone() for name, value in values.items()}
        change(changed)
        judged[family] = truth.judge(changed)
        if exact := truth.exact_on(operands):
            floor[family], own[family] = exact.judgements, exact.judge(changed)
    inputs = draw(spec, families[-1], CPU)
    negate(*(x for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out) if x is not None))
    now = answers(plan, inputs, spec)[1]
    change(now)
    if stale is not None:
        now = stale(changed, now)
    again = truth.judge(undo_negation(now))
    return Observations(bound=class_bound(plan, spec), judged=judged, floor=floor, own=own, stale=again)


def noisy(share: float) -> Change:
    def change(values: Values) -> None:
        noise = torch.randn(values["out"].shape, generator=torch.Generator().manual_seed(0))
        values["out"] += noise * share * values["out"].float().norm(dim=-1, keepdim=True) / math.sqrt(noise.shape[-1])

    return change


def one_head(values: Values) -> None:
    values["out"][1, 5] *= 1.35


def last_row(values: Values) -> None:
    values["out"][0, 3, -1] = 0


def gain(name: str, factor: float) -> Change:
    def change(values: Values) -> None:
        values[name] *= factor

    return change


def shifted_lse(values: Values) -> None:
    values["lse"] -= 0.02


def one_old_head(before: Values, now: Values) -> Values:
    out = now["out"].clone()
    out[1, 5] = before["out"][1, 5]
    return now | {"out": out}


def wide() -> Observations:
    """A 16-bit kernel that shows FP8 operands."""
    found = {}
    for family, (truth, operands, _) in runs(FP8, FORWARD, ("normal", "biased-v")).items():
        values = answers(Plan("sdpa-math:bf16"), draw(FORWARD, family, CPU), FORWARD)[1]
        exact = truth.exact_on(operands)
        found[family] = (truth.judge(values), exact.judgements, exact.judge(values))
    judged, floor, own = ({family: each[part] for family, each in found.items()} for part in range(3))
    return Observations(bound=class_bound(FP8, FORWARD), judged=judged, floor=floor, own=own)


def without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "CHECKS", {other: check for other, check in CHECKS.items() if other != name})


BF16 = Plan("sdpa-math:bf16")
MIXED = Plan("emulated:fp8-token", "reference:fp32")
FAULTS: list[tuple[str, str, Callable[[], Observations]]] = [
    ("inputs", "changed inputs", lambda: replace(evidence(FP8, FORWARD), untouched=False)),
    ("settled", "changed after the return", lambda: replace(evidence(FP8, FORWARD), settled=False)),
    ("stale", "one head of before", lambda: evidence(FP8, FORWARD, stale=one_old_head)),
    (
        "stale",
        "a gradient of before",
        lambda: evidence(MIXED, TRAINING, stale=lambda before, now: now | {"dk": before["dk"]}),
    ),
    ("error", "1.3 % of noise in 16 bits", lambda: evidence(BF16, FORWARD, noisy(0.013))),
    ("too good", "16 bits in an FP8 name", wide),
    ("head", "one head 1.35 times too large", lambda: evidence(FP8, FORWARD, one_head)),
    ("row", "one row of zeros", lambda: evidence(FP8, FORWARD, last_row)),
    ("bias", "out 0.97 times", lambda: evidence(FP8, FORWARD, gain("out", 0.97))),
    ("bias", "a gradient 1.05 times", lambda: evidence(MIXED, TRAINING, gain("dq", 1.05))),
    ("lse", "2 % of every sum of exponentials", lambda: evidence(FP8, FORWARD, shifted_lse)),
    ("own", "7 % of noise in FP8", lambda: evidence(FP8, FORWARD, noisy(0.07))),
]


@pytest.mark.parametrize(("name", "make"), [pytest.param(name, make, id=what) for name, what, make in FAULTS])
def test_a_planted_fault_is_seen_by_its_check_and_by_no_other(name, make, monkeypatch):
    found = make()
    result = judge(found)
    assert (result.status, result.check) == ("inaccurate", name)
    assert result.reason
    without(name, monkeypatch)
    assert judge(found) == Verdict("ok")


def judgement(error: float = 0.03, rows: int = 1000, **changes: object) -> Judgement:
    detail = Detail(sqnr_db=30.0, worst_head=error, worst_row=error, bias=0.0, nonfinite=0)
    return Judgement(error, replace(detail, **changes), rows)


def test_values_that_are_not_finite_are_counted():
    wrong = judgement(math.inf, worst_head=math.inf, worst_row=math.inf, bias=math.inf, nonfinite=3)
    result = judge(Observations(bound=0.12, judged={"normal": {"out": wrong}}, stale={"out": wrong}))
    assert result.reason == "the error of out on normal inputs is infinite (values that are not finite: 3), beyond 0.12"
    result = judge(Observations(bound=0.12, judged={"normal": {"out": judgement()}}, stale={"out": wrong}))
    assert result.reason.startswith("out has 3 values that are not finite where all inputs are negated, and none where")


def test_the_worst_is_reported():
    far, near = judgement(0.6), judgement(0.3)
    judged = {"normal": {"out": near, "dq": near}, "sink": {"out": near, "dq": far}, "outlier": {"out": near}}
    result = judge(Observations(bound=0.12, judged=judged))
    assert result.reason == "the error of dq on sink inputs is 0.6, beyond 0.12"
    result = judge(Observations(bound=0.12, judged={"normal": {"out": judgement()}}, stale={"out": far}))
    assert result.reason.startswith(
        "out is off by 0.6 where all inputs are negated, by 0.03 where they are not: it keeps"
    )
    result = judge(Observations(bound=0.12, judged=alike(judgement(0.01)), floor=GOOD))
    assert result.reason.startswith("the error of out is 0.01 where its quantised operands alone make 0.05: it did not")


def alike(value: Judgement, *families: str, name: str = "out") -> dict[str, dict[str, Judgement]]:
    return {family: {name: value} for family in families or ("normal", "sink")}


def shifted(floor: float, **means: float) -> Observations:
    """An LSE of these means, where exact attention on the operands is off by ``floor``."""
    judged = {family: {"lse": judgement(0.001, bias=mean)} for family, mean in means.items()}
    return Observations(bound=0.12, judged=judged, own=judged, floor=alike(judgement(floor), *means, name="lse"))


def sunk(**changes: object) -> Observations:
    """P without a scale, which a sink takes below the smallest number."""
    parts = {
        "judged": {"sink": {"out": judgement(0.11)}, "normal": {"out": judgement(0.06)}},
        "floor": {"sink": {"out": judgement(0.06)}, "normal": {"out": judgement(0.05)}},
        "own": {"sink": {"out": judgement(0.093)}, "normal": {"out": judgement(0.03)}},
    }
    return Observations(**{"bound": 0.12, **parts, **changes})


def exact(normal: float, sink: float, floor: float | None = 0.05) -> Observations:
    judged = {"normal": {"out": judgement(normal)}, "sink": {"out": judgement(sink)}}
    beside = {} if floor is None else alike(judgement(floor))
    return Observations(bound=0.12, judged=judged, floor=beside, own=beside)


GAIN = alike(judgement(bias=0.05))
GOOD = alike(judgement(0.08), "normal") | alike(judgement(0.05), "sink")  # floors
LARGE = alike(judgement(0.1, bias=0.05))
SUNK = alike(judgement(0.093))
LITTLE = alike(judgement(0.05))
HEARD: dict[str, tuple[Observations, str | None]] = {
    "a gain on every family": (Observations(bound=0.12, judged=GAIN), "bias"),
    "smaller on another": (Observations(bound=0.12, judged=GAIN | {"sink": {"out": judgement(bias=0.001)}}), None),
    "of another sign": (Observations(bound=0.12, judged=GAIN | {"sink": {"out": judgement(bias=-0.05)}}), None),
    "on one family": (Observations(bound=0.12, judged={"normal": GAIN["normal"]}), None),
    "an error far below the floor": (Observations(bound=0.12, judged=GAIN, floor=alike(judgement(0.11))), "too good"),
    "a gain beside as large a floor": (Observations(bound=0.12, judged=LARGE, floor=alike(judgement(0.11))), None),
    "beside a smaller one": (
        Observations(bound=0.12, judged=LARGE, floor=alike(judgement(0.11)) | alike(judgement(0.05), "normal")),
        "bias",
    ),
    "means of few rows": (Observations(bound=0.12, judged=alike(judgement(0.0, rows=8, bias=0.01), name="lse")), None),
    "means of few rows of one tensor": (
        Observations(bound=0.12, judged={"normal": {
            "lse": judgement(0.0, rows=8, bias=0.01), "dk": judgement(0.0)}}), None),
    "means of enough": (
        Observations(bound=0.12, judged=alike(judgement(0.0, rows=64, bias=0.01), name="lse")), "lse"),
    # One family whose scores are all large, as on Hopper's accumulator.
    "an LSE moved by one family": (shifted(0.0005, outlier=-0.005), "lse"),
    "no farther than its floor": (shifted(0.0030, outlier=-0.005), None),
    "not moved by another": (shifted(0.0005, outlier=-0.005, normal=0.0004), None),
    "moved by little": (shifted(0.0005, outlier=-0.0025, normal=-0.0025), None),
    "moved by three": (shifted(0.0005, outlier=-0.005, normal=-0.004, sink=-0.001), "lse"),
    "P below the smallest number in a sink": (sunk(), None),
    "on every family": (sunk(own=SUNK), "own"),
    "where more is accepted": (sunk(own=SUNK, bound=0.2), None),
    "in a sink alone": (sunk(own={"sink": SUNK["sink"]}, judged={"sink": {"out": judgement(0.11)}}), None),
    "the rounding of P, however little is accepted": (
        Observations(bound=0.06, judged=LITTLE, own=LITTLE, floor=sunk().floor), None),
    "below the floor on every family": (exact(0.01, 0.01), "too good"),
    "below it on one": (exact(0.01, 0.03), None),
    "without a floor": (exact(0.01, 0.01, None), None),
    "exact operands": (exact(0.0, 0.0, 0.0), None),
    # Not called stale where it is wrong anyway.
    "wrong, and otherwise when negated": (
        Observations(bound=0.12, judged=alike(judgement(1.0), "normal"), stale={"out": judgement(1.3)}), "error"),
    # As off as the worst of 800 correct heads in bf16, and as off as a factor of 1.3 makes it.
    "a head of a gradient in 16 bits": (
        Observations(bound=0.01, judged=alike(judgement(0.004, worst_head=0.043), "normal", name="dk")), None),
    "a wrong one": (
        Observations(bound=0.01, judged=alike(judgement(0.004, worst_head=0.3), "normal", name="dk")), "head"),
    "a head of one, when negated": (
        Observations(
            bound=0.12, judged=alike(judgement(), "normal", name="dk"), stale={"dk": judgement(worst_head=2.0)}
        ),
        None,
    ),
    "an error of just the bound": (Observations(bound=0.12, judged=alike(judgement(0.12))), None),
    # No bound is wide enough for what is left out.
    "a head of zeros": (Observations(bound=0.6, judged=alike(judgement(0.1, worst_head=1.0), "normal")), "head"),
    "a row of zeros": (Observations(bound=0.6, judged=alike(judgement(0.1, worst_row=1.0), "normal")), "row"),
}  # fmt: skip


@pytest.mark.parametrize(("found", "check"), HEARD.values(), ids=HEARD)
def test_what_is_a_fault_and_what_is_none(found, check):
    result = judge(found)
    assert (result.status, result.check) == ("ok" if check is None else "inaccurate", check)


# The largest values on correct kernels, in bounds or as they are, and what a fault makes of them.
PARTS = [
    ("head", "out", 1.1), ("head", "lse", 1.1), ("head", "dv", 0.7), ("head", "dq", 3.3), ("head", "dk", 3.3),
    ("row", "out", 2.7), ("row", "lse", 2.7), ("row", "dv", 3.1),
]  # fmt: skip
GAINS = [("out", 0.016), ("dv", 0.016), ("dq", 0.035), ("dk", 0.035)]


@pytest.mark.parametrize(("part", "tensor", "correct"), PARTS)
def test_one_head_or_row_may_be_off_by_what_correct_kernels_reach_and_not_by_what_a_missing_one_makes(
    part, tensor, correct
):
    for bound in (0.1, 0.2):
        for times, check in ((correct, None), (5, part)):
            wrong = judgement(0.01, **{f"worst_{part}": times * bound})
            assert judge(Observations(bound=bound, judged=alike(wrong, "normal", name=tensor))).check == check


@pytest.mark.parametrize(("tensor", "correct"), GAINS)
def test_a_gain_may_be_what_correct_kernels_reach_and_not_a_factor_of_1_05(tensor, correct):
    for bias, check in ((correct, None), (-correct, None), (0.05, "bias"), (-0.05, "bias")):
        assert judge(Observations(bound=0.12, judged=alike(judgement(bias=bias), name=tensor))).check == check


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, AttentionSpec]:
    training = draw(st.booleans())
    narrow = ["fp8", "fp8-tensor", "fp8-block", "fp8-token", "fp8-e5m2", "fp8-hadamard", "fp8-token-hadamard-smooth"]
    kernel = "emulated:" + draw(st.sampled_from(narrow)) if draw(st.integers(0, 3)) else "sdpa-math:bf16"
    partner = draw(st.sampled_from([kernel, "sdpa-math:bf16", "emulated:fp8"])) if training else None
    kv_heads = draw(st.integers(1, 2))
    length = draw(st.integers(1, 150))
    spec = AttentionSpec.make(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.sampled_from([1, 2, 4])),
        kv_heads=kv_heads,
        seqlen_q=length,
        seqlen_kv=draw(st.sampled_from([length, length, 1, 130, 300])),
        head_dim=draw(st.sampled_from([64, 128])),
        mask=draw(
            st.sampled_from([Mask(), Mask(right=0), Mask(right=0, alignment="bottom-right"), Mask(20, 0), Mask(5, 9)])
        ),
        softcap=draw(st.sampled_from([0.0, 0.0, 20.0])),
        direction="training" if training else "forward",
    )
    return Plan(kernel, partner), spec


@given(cases())
@settings(max_examples=examples(25, 80))
@example((Plan("emulated:fp8"), AttentionSpec.make(batch=1, heads=1, seqlen_q=70, seqlen_kv=2048, head_dim=64)))
@example((Plan("emulated:fp8-acc13"), AttentionSpec.make(batch=1, heads=2, seqlen_q=70, head_dim=64)))
def test_an_honest_kernel_is_accused_of_nothing_but_its_error(case):
    plan, spec = case
    if registry().reasons(plan, spec, Device("cpu", "CPU"))[0] != "ok":
        return
    for families in (("normal", "outlier"), FAMILIES):
        result = judge(evidence(plan, spec, families=families))
        # What FP8 itself makes too inaccurate on an input is for the error to say.
        assert result.check in (None, "error"), (result, families)
    runs.cache_clear()


def test_no_torch_is_needed_for_a_verdict():
    code = f"import sys; sys.modules['torch'] = None; import {verdict.__name__}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
