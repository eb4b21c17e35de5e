"""Rows of training runs: what was written is read, and nothing else; how arms, prices and failures are reported."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_training import HERE, build_small, builder, exact, not_a_number_after, run_all, run_of, session_of, small

from attnbench.errors import InputError, MalformedFileError, MisuseError
from attnbench.harness.training.judge.arms import arms_of, compare_arms, kinds_of, scaling_efficiency
from attnbench.harness.training.report.summary import offers_of, report
from attnbench.harness.training.rows import ROWS, Share, TrainingRun, read_runs, write_runs
from attnbench.harness.training.run.session import plan_runs

ANY = st.floats(-1e100, 1e100) | st.sampled_from([math.nan, math.inf, -math.inf])


@given(st.lists(ANY, max_size=20), st.booleans())
def test_what_is_written_is_read_to_the_last_bit(tmp_path_factory, losses: list[float], ended: bool) -> None:
    path = tmp_path_factory.mktemp("rows") / ROWS
    row = run_of(losses, status="ok" if ended else "diverged", reason=None if ended else "it was NaN")
    write_runs(path, [row, row])
    found = list(read_runs(path.parent))
    assert len(found) == 2
    assert list(map(repr, found[0].loss)) == list(map(repr, losses))
    assert found[0].to_line() == row.to_line()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row | {"schema": "attnbench.training/2"}, "schema"),
        (lambda row: row | {"more": 1}, "more"),
        (lambda row: row | {"loss": [1.0]}, "an entry for each step"),
        (lambda row: row | {"step_ms": [1.0, "NaN"]}, "step_ms"),
        (lambda row: row | {"status": "oom"}, "reason"),
        (lambda row: row | {"settings": {"seed": 0, "steps": 2}}, "attention"),
        (lambda row: row | {"settings": row["settings"] | {"seed": "0"}}, "whole numbers"),
        (lambda row: row | {"settings": row["settings"] | {"x": [1]}}, "settings"),
        (lambda row: row | {"price_per_hour": 0}, "price_per_hour"),
        (lambda row: row | {"started": "2026-01-01T00:00:00+02:00"}, "UTC"),
        (lambda row: row | {"environment": {}}, "environment"),
        (lambda row: [row], "schema"),
    ],
)
def test_hostile_rows_are_refused_with_their_line(tmp_path: Path, change, message: str) -> None:
    row = run_of([1.0, 2.0])
    (tmp_path / ROWS).write_text(f"{row.to_line()}\n{json.dumps(change(row.to_dict()))}\n")
    with pytest.raises(MalformedFileError, match=message) as caught:
        list(read_runs(tmp_path))
    assert caught.value.line == 2


def test_throughput_and_utilisation_come_from_undisturbed_steps() -> None:
    row = run_of(
        [1.0] * 6, step_ms=[900.0, 10.0, 10.0, 700.0, 20.0, 10.0], timed_from=1, untimed=[3], world=2,
        units_per_step=100, flops_per_step=1e12, peak_tflops=100.0,
    )  # fmt: skip
    assert row.samples_ms == [10.0, 10.0, 20.0, 10.0]
    assert row.units_per_second == pytest.approx(10_000)
    assert row.mfu == pytest.approx(1e12 / 0.01 / 100e12 / 2)
    assert run_of([1.0], timed_from=1).units_per_second is None


def test_a_session_keeps_what_is_done_and_adds_what_is_not(tmp_path: Path) -> None:
    built = []

    def build(config, device):
        built.append(config.seed)
        return build_small(config, device)

    config = small(steps=4)
    run_all(tmp_path, plan_runs(config, None, 1), build)
    with pytest.raises(MisuseError, match="--resume"), session_of(tmp_path):
        pass
    with session_of(tmp_path, resume=True, price_per_hour=3.0) as session:
        rows = session.run(plan_runs(config, None, 2), build, lambda row: None)
        with pytest.raises(MisuseError, match="another command"), session_of(tmp_path, resume=True):
            pass
    assert built == [0, 1]
    run_all(tmp_path, plan_runs(config, None, 2), build, resume=True, price_per_hour=4.0)
    assert [row.price_per_hour for row in read_runs(tmp_path)] == [4.0, 4.0]
    with session_of(tmp_path, resume=True, price_per_hour=3.0):
        found = list(read_runs(tmp_path))
    assert [(row.seed, row.status, row.price_per_hour) for row in found] == [(0, "ok", 3.0), (1, "ok", 3.0)]
    assert [row.loss for row in rows] == [row.loss for row in found]
    assert [sign.step for sign in found[0].signs] == [0, 2, 3]


def test_a_run_that_fails_leaves_the_row_of_what_it_did(tmp_path: Path) -> None:
    left = [9]

    def failing(q, k, v, is_causal):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("the kernel broke")
        return exact(q, k, v, is_causal)

    config = small(steps=8, attention="sdpa-math")
    with pytest.raises(RuntimeError, match="broke"):
        run_all(tmp_path, plan_runs(config, None, 1), builder(failing))
    (row,) = read_runs(tmp_path)
    assert row.status == "error"
    assert "the kernel broke" in row.reason
    assert 0 < len(row.loss) < 8


def test_what_a_run_has_learnt_survives_a_second_start_that_fails(tmp_path: Path) -> None:
    """Of a run that diverged, say: its curve is what it was trained for."""
    plan = plan_runs(small(steps=8, attention="sdpa-math"), None, 1)
    run_all(tmp_path, plan, builder(not_a_number_after(6)), patience=2)
    (before,) = read_runs(tmp_path)
    assert before.status == "diverged"

    def broken(config, device):
        raise RuntimeError("no such kernel today")

    with pytest.raises(RuntimeError, match="today"):
        run_all(tmp_path, plan, broken, resume=True)
    (after,) = read_runs(tmp_path)
    assert after.status == "error"
    assert repr(after.loss) == repr(before.loss)
    assert after.signs == before.signs


def test_a_cpu_without_room_is_a_row_like_a_gpu_without_room(tmp_path: Path) -> None:
    def too_large(config, device):
        torch.empty(2**60, dtype=torch.uint8)
        raise AssertionError("there was room")

    config = small(steps=2)
    run_all(
        tmp_path,
        plan_runs(config, None, 2),
        lambda config, device: (build_small if config.seed else too_large)(config, device),
    )
    first, second = read_runs(tmp_path)
    assert (first.status, second.status) == ("oom", "ok")  # the runs behind it are made all the same
    assert "allocate" in first.reason


def test_a_model_that_could_not_be_built_does_not_cost_the_folder(tmp_path: Path) -> None:
    def misspelled(config, device):
        raise InputError("there is no such text")

    with pytest.raises(InputError):
        run_all(tmp_path, plan_runs(small(steps=2, data="txt"), None, 1), misspelled)
    assert [row.status for row in read_runs(tmp_path)] == ["error"]
    run_all(tmp_path, plan_runs(small(steps=2), None, 1))  # the same command, corrected, without --resume
    assert [row.status for row in read_runs(tmp_path)] == ["ok"]


def test_a_folder_from_another_environment_is_left_alone(tmp_path: Path) -> None:
    write_runs(tmp_path / ROWS, [run_of([1.0])])
    with pytest.raises(MisuseError, match="another environment"), session_of(tmp_path, resume=True):
        pass


def test_a_row_is_marked_unfinished_while_it_runs(tmp_path: Path) -> None:
    seen: list[TrainingRun] = []
    with session_of(tmp_path) as session:
        session.run(plan_runs(small(steps=3), None, 1), build_small, lambda row: seen.extend(read_runs(tmp_path)))
    assert {row.status for row in seen} == {"unfinished"}


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
