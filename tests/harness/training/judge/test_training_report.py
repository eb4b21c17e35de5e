"""How runs are reported: arms and their baselines, prices in the article's form, pictures that need nothing else."""

import dataclasses
import re

import pytest
from small_training import HERE, run_of

from attnbench.harness.training.judge.arms import arms_of, compare_arms, kinds_of, scaling_efficiency
from attnbench.harness.training.report.summary import offers_of, report
from attnbench.harness.training.rows import Share

CURVE = [3.0 - 0.005 * step for step in range(120)]


def arm_runs(role: str, named: str, seeds: int = 3, loss: float = 1.0, **more):
    settings = {"model": "gpt", "size": "tiny", "seqlen": 8, "batch": 2, "steps": 120, "attention": named}
    settings |= more.pop("settings", {})
    return [
        run_of([loss * each for each in CURVE], role, settings=settings | {"seed": seed}, **more)
        for seed in range(seeds)
    ]


def test_padded_documents_are_compared_with_packed_ones_and_windows_are_not() -> None:
    runs = arm_runs("baseline", "auto", settings={"packing": "padded"})
    runs += arm_runs("candidate", "auto", settings={"packing": "packed"}) + arm_runs("candidate", "auto")
    arms = arms_of(runs)
    assert len(kinds_of(runs)) == 2
    assert [(ours.label, theirs.label) for ours, theirs, _ in compare_arms(arms)] == [
        ("auto packing=packed", "auto packing=padded")
    ]


def test_a_candidate_is_held_against_the_baseline_that_is_most_like_it() -> None:
    runs = [
        *arm_runs("baseline", "auto", settings={"linears": "bf16"}),
        *arm_runs("baseline", "auto", settings={"linears": "te-fp8"}),
        *arm_runs("candidate", "te:fp8", settings={"linears": "te-fp8"}),
        *arm_runs("candidate", "te:fp8", settings={"linears": "bf16", "lr": 0.5}),
    ]
    arms = arms_of(runs)
    assert len({arm.label for arm in arms}) == 4
    ((candidate, baseline, learning),) = compare_arms(arms)
    assert candidate.first.settings["linears"] == baseline.first.settings["linears"] == "te-fp8"
    assert learning.verdict == "equivalent"


def test_efficiency_is_the_throughput_of_each_rank_over_that_of_one_alone() -> None:
    alone = arm_runs("candidate", "auto", settings={"parallel": "none"}, units_per_step=10)
    four = arm_runs(
        "candidate", "auto", settings={"parallel": "fsdp2"}, world=4, units_per_step=40, step_ms=[1.25] * 120
    )
    arms = arms_of([*alone, *four])
    assert scaling_efficiency(arms[1], arms) == pytest.approx(0.8)
    assert scaling_efficiency(arms[0], arms) is None
    assert scaling_efficiency(arms[1], arms[1:]) is None
    assert "80.0%" in report([*alone, *four], "text")


def test_the_report_contains_verdict_share_price_and_what_went_wrong() -> None:
    share = Share(steps=3, forward_ms=1.0, backward_ms=2.0, busy_ms=6.0, share=0.5)
    runs = [
        *arm_runs("baseline", "auto", price_per_hour=2.0),
        *arm_runs("candidate", "te:fp8", loss=1.1, attention=share, price_per_hour=2.0, step_ms=[0.5] * 120),
    ]
    runs.append(
        run_of(CURVE[:50], "candidate", settings=runs[-1].settings | {"seed": 3}, status="oom", reason="no room")
    )
    text = report(runs, "text")
    assert "te:fp8 against auto: DEGRADED, the gap is +10.000%" in text
    assert "0.50 times as long as the baseline's: it trains faster" in text
    assert "50.0%" in text
    assert "1 ms forward and 2 ms backward of 6 ms" in text
    assert "seed 3: oom, no room" in text
    assert re.search(r"te:fp8 .*\+100% +\+100%", text)
    offers = offers_of(arms_of(runs))
    assert [offer.label for offer in offers] == ["auto", "te:fp8"]
    assert offers[0].units_per_price == pytest.approx(1000 * 3600 / 2)  # a token a millisecond, 2 an hour
    assert "**degraded**" in report(runs, "markdown")
    assert report([], "text") == "No runs."


@pytest.mark.parametrize(
    ("device_type", "step_ms", "reported"), [("cuda", 60.0, True), ("cuda", 32.0, False), ("cpu", 60.0, False)]
)
def test_a_gpu_that_waits_for_its_host_is_reported(device_type: str, step_ms: float, reported: bool) -> None:
    """Then a step's time tells of launches, and not of the kernels that are compared."""
    here = dataclasses.replace(HERE, device_type=device_type)
    share = Share(steps=3, forward_ms=1.0, backward_ms=2.0, busy_ms=30.0, share=0.1)
    runs = arm_runs("candidate", "auto", attention=share, step_ms=[step_ms] * 120, environment=here)
    assert ("waits for its host in 50% of it" in " ".join(report(runs, "text").split())) == reported


def test_runs_that_were_made_twice_or_have_two_prices_stand_side_by_side() -> None:
    first = [*arm_runs("baseline", "auto", price_per_hour=2.0), *arm_runs("candidate", "te:fp8", price_per_hour=2.0)]
    again = [run.model_copy(update={"price_per_hour": 1.0, "step_ms": [0.5] * 120}) for run in first]
    arms = arms_of([*first, *again])
    assert [arm.label for arm in arms] == ["auto", "te:fp8", "auto #2", "te:fp8 #2"]
    assert [(ours.label, theirs.label) for ours, theirs, _ in compare_arms(arms)] == [
        ("te:fp8", "auto"),
        ("te:fp8 #2", "auto #2"),
    ]
    assert re.search(r"auto #2 .*\+100% +\+300%", report([*first, *again], "text"))
