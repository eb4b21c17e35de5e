"""The report answers first, fits a terminal, and hides nothing that failed."""

import io
import random
import re
from dataclasses import replace
from datetime import datetime, timezone

import pytest
import torch
import yaml
from fakes import an_environment
from planted import REPORTED, setup
from report_rows import failed_row
from rich.console import Console
from row_facts import measurement, with_facts
from scripted_workers import LocalWorkers

from attnbench.harness.cases.case import Case
from attnbench.harness.cases.file import read_cases
from attnbench.harness.cases.inputs import FAMILIES
from attnbench.harness.formatting import number
from attnbench.harness.measure.accuracy import Detail
from attnbench.harness.measure.clocks import Conditions, Range
from attnbench.harness.report.alternatives import alternatives, key_of
from attnbench.harness.report.flags import flags, highest_clock
from attnbench.harness.report.page.commands import sweep_command
from attnbench.harness.report.sentences import fastest, sentences
from attnbench.harness.report.text import report
from attnbench.harness.results.records import Measurement
from attnbench.harness.results.store import Store
from attnbench.harness.sequence_lengths import Draw, SequenceLengths
from attnbench.harness.sweep.progress import show_progress
from attnbench.harness.sweep.run import Ended, Finished, run_sweep, tasks_of
from attnbench.kernels.plan import Plan
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

CPU = torch.device("cpu")
LONG = REPORTED
PLAIN = Detail(sqnr_db=20.0, worst_head=0.1, worst_row=0.1, bias=0.0, nonfinite=0)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Every event of a sweep."""
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=64, head_dim=16)
    cases = [Case("first", spec), Case("second", spec.replace(direction="training"))]
    lab = setup("planted:reported")
    with pytest.MonkeyPatch.context() as patch, Store(tmp_path_factory.mktemp("report"), lab.environment) as store:
        LocalWorkers(patch)
        return list(run_sweep(tasks_of(cases, lab.registry, CPU, "fp8"), [lab], store))


@pytest.fixture(scope="module")
def shown(swept):
    log = io.StringIO()
    rows = list(show_progress(iter(swept), Console(file=log)))
    return rows, log.getvalue()


@pytest.fixture
def made(shown):
    """A valid row that took ``ms`` a call, give or take ``noise``, with these changes."""
    base = next(row for row in shown[0] if row.case == "first" and row.status == "ok").to_dict()

    def make(plan="a:bf16", ms=1.0, noise=0.001, count=40, **changes):
        draw = random.Random(plan)
        times = [ms * (1 + draw.uniform(-noise, noise)) for _ in range(count)]
        text = str(Plan.parse(plan))
        simple = {
            "time_ms": {"kernel": times, "prepared": times, "call": times},
            "host_ms": None,
            "ran": {},
            "visits": {},
        }
        clean = {"error": {"normal": {"out": 0.05}}, "floor": {}, "detail": {}, "leak": None, "deterministic": True}
        row = Measurement.model_validate_json(Measurement.model_validate(base | {"plan": text}, strict=False).to_line())
        return Measurement.model_validate_json(with_facts(row, **simple | clean | changes).to_line())

    return make


def on_gpu(row, clock=1980.0, throttled=None):
    conditions = Conditions(
        readings=9, clock_mhz=Range(lowest=clock, median=clock, highest=clock), throttled=throttled or {}
    )
    gpu = replace(row.environment, device_type="cuda", device_name="GPU")
    return with_facts(row, environment=gpu, gpu=conditions)


def test_six_families_and_the_longest_plans_fit_too(made):
    families = (*FAMILIES, "captured:" + "x" * 91)
    floor = {family: {"out": 1.1e-5} for family in families}
    errors = {family: {"out": 1.2e-4} for family in families} | {families[-1]: {"out": 1.23e-3}}
    long = f"{'vendor-' * 9}name:fp8-token-hadamard>{'other-' * 9}name:bf16-with-options"
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=64, head_dim=16, direction="training")
    rows = [
        on_gpu(
            made(
                plan, ms=ms, noise=0.4, case="case " * 40, spec=spec, error=errors, floor=floor, leak=0.1,
                deterministic=False, replayed=["kernel"], peak_share=1.0, first_ms=99999.0, memory_bytes=2**40,
            ),
            throttled={"thermal": 1.0},
        )
        for plan, ms in ((long, 123456.0), ("emulated:fp8-token-hadamard>emulated:bf16", 1.23456e-4))
    ]  # fmt: skip
    text = report(rows, "text")
    assert max(map(len, text.splitlines())) <= 100
    joined = "".join(text.split())
    assert "x" * 91 in joined
    assert "0.0012(1.1e-05)112x" in joined
    page = report(rows, "markdown")
    assert all(f"| on {family} " in page for family in families)


def test_the_worst_family_stands_with_its_floor_and_the_ratio_to_it(made):
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=64, head_dim=16, direction="training")
    error = {"normal": {"out": 0.05, "dq": 0.06}, "sink": {"out": 0.09, "lse": 0.5, "dq": 0.1}}
    floor = {"normal": {"out": 0.05, "dq": 0.06}, "sink": {"out": 0.09, "lse": 0.5, "dq": 0.05}}
    plan = "a:fp8>b:bf16"
    assert "0.1 (0.05) 2.0x dq on sink" in report([made(plan, spec=spec, error=error, floor=floor)], "text")
    exact = report([made("a:bf16>b:bf16", spec=spec, error=error)], "text")
    assert "0.1 dq on sink" in exact
    assert "x dq" not in exact


def test_it_names_the_fastest_within_the_bound_and_those_beyond(shown):
    first = [row for row in shown[0] if row.case == "first"]
    text = " ".join(sentences(first))
    assert f"Fastest within its bound: {fastest(first)[0].plan}," in text
    assert f"Most accurate in FP8: {LONG}, at worst" in text
    assert "Out of bounds: bad:fp8-scaled (1" in text
    lines = report(shown[0], "text").splitlines()
    for row in fastest(first):
        assert next(line for line in lines if f"{row.plan} *" in line)
    assert next(line for line in lines if line.startswith("bad:fp8-scaled !"))


def test_what_noise_cannot_part_is_no_winner(made):
    near = [made("a:bf16", 1.0, noise=0.02), made("b:fp8", 1.008, noise=0.02), made("c:bf16", 1.5, noise=0.02)]
    assert [str(row.plan) for row in fastest(near)] == ["a:bf16", "b:fp8"]
    assert sentences(near)[0].startswith(
        "Fastest within its bound, but not for certain: a:bf16, 1 ms a call; b:fp8 (1.01 "
    )
    assert "% apart) may be as fast." in sentences(near)[0]
    text = report(near, "text")
    assert "a:bf16 *" in text
    assert "b:fp8 *" in text
    assert "c:bf16 *" not in text


def test_a_clear_winner_is_one_however_few_its_samples(made):
    for count in (2, 40):
        clear = [made("a:bf16", 1.0, count=count), made("b:fp8", 1.5, count=count)]
        assert [str(row.plan) for row in fastest(clear)] == ["a:bf16"]
        assert "takes 1.5 times as long" in sentences(clear)[0]
    for count in (2, 200):  # too few to tell, and enough to tell that the difference is nothing to feel
        assert len(fastest([made("a:bf16", 1.0, count=count), made("b:fp8", 1.005, count=count)])) == 2


def test_a_vague_time_shows_how_vague(made):
    vague, few, sure = made("a:bf16", 1.0, noise=0.5), made("b:bf16", 2.0, noise=0.5, count=5), made("c:bf16", 3.0)
    one = made("d:bf16", 4.0, count=1)
    text = report([vague, few, sure, one], "text")
    line = {
        name: next(line for line in text.splitlines() if line.startswith(name)) for name in ("a:", "b:", "c:", "d:")
    }
    assert "%" in line["a:"]
    samples = few.time_ms["call"]
    median = sorted(samples)[2]
    assert f"{max(max(samples) - median, median - min(samples)) / median:.0%}" in line["b:"]
    assert "%" not in line["c:"]
    assert "?" in line["d:"]
    assert "how far off the median" in text
    assert "+-" not in report([sure], "text")


def test_flags_stand_with_the_plan_and_are_explained_once_used(made):
    row = on_gpu(made(leak=0.2, deterministic=False, replayed=["kernel"]))
    found = flags(row, None)
    assert found == ["leak", "not deterministic", "replayed"]
    text = report([row], "text")
    assert "(leak, not deterministic," in text
    assert "replayed)" in text
    for flag in found:
        assert f"\n{flag}: " in text
    plain = report([on_gpu(made(leak=0.0))], "text")
    assert not any(f"{flag}: " in plain for flag in found)


def test_the_power_cap_is_a_flag_only_where_the_clock_fell(made):
    capped = {"power cap": 0.8}
    fast, near, slow = (on_gpu(made(), clock, capped) for clock in (1980.0, 1930.0, 1900.0))
    highest = highest_clock([fast, near, slow])
    assert highest == 1980.0
    assert [flags(row, highest) for row in (fast, near, slow)] == [[], [], ["throttled"]]
    assert flags(on_gpu(made(), 1900.0), highest) == []  # slow, and nothing held it down
    assert flags(on_gpu(made(), 1980.0, {"thermal": 0.1}), highest) == ["throttled"]


def test_the_host_binds_a_gpu_and_never_a_cpu(made):
    busy = made(ms=1.0, host_ms=[0.99, 1.0, 1.0])
    assert flags(on_gpu(busy), None) == ["host-bound"]
    assert flags(busy, None) == []
    assert flags(on_gpu(made(ms=1.0, host_ms=[0.1, 1.0, 0.1])), None) == []


@pytest.mark.parametrize(
    ("facts", "sentence", "plain"),
    [
        ({"detail": {"normal": {"out": replace(PLAIN, worst_head=0.3)}}, "bound": 0.12},
         "One head of out of a:bf16 has an error of 0.3 on normal inputs; the whole tensor has 0.05.",
         {"detail": {"normal": {"out": PLAIN}}, "bound": 0.08}),
        ({"detail": {"normal": {"out": replace(PLAIN, worst_row=1.2)}}}, "One row of out", {}),
        ({"status": "inaccurate", "check": "bias", "reason": "out is 1.05 times what it should be"},
         "Not what it should be: a:bf16, by the check 'bias': out is 1.05 times", {}),
        ({"status": "inaccurate", "check": "error", "reason": "wrong"}, "No plan stayed within its bound.", {}),
        ({"truth": "exact attention in FP64 on 13 of 16 (batch, key head) groups"},
         "Errors are against exact attention in FP64 on 13 of 16 (batch, key head) groups.",
         {"truth": "exact attention in FP64 on 16 of 16 (batch, key head) groups"}),
        ({"memory_bytes": 3 * 2**30}, "Peak memory of a call: 3 GiB.", {"memory_bytes": None}),
        ({"first_ms": 7100.0}, "Slowest first run, compiling included: a:bf16, 7.1 s.", {"first_ms": 900.0}),
    ],
)  # fmt: skip
def test_what_stands_out_is_reported_and_what_does_not_is_not(made, facts, sentence, plain):
    assert sentence in " ".join(sentences([made(**facts)]))
    assert sentence[:12] not in " ".join(sentences([made(**plain)]))


def test_refusals_of_one_cause_are_one_line_and_failures_come_first(shown):
    text = report(shown[0], "text")
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    passed_over = text[text.index("Not measured") :].split("\n- ")[1:]
    assert passed_over[0].startswith("error, ")
    assert "no such tile" in passed_over[0]
    refused = [each for each in passed_over if "takes fp32 tensors" in each]
    assert len(refused) == 1
    assert all(f"picky{number}:fp8" in refused[0] for number in range(20))
    for row in shown[0]:
        backend, _, precision = row.plan.forward.partition(":")
        assert re.search(rf"{backend}:(\S+/)?{precision}", text)


def test_the_last_output_of_a_failure_is_shown_once_for_its_cause():
    rows = [
        failed_row(f"a:bf16-{number}", "crashed", f"killed by SIGSEGV; its last output: line {number}", case="first")
        for number in range(3)
    ]
    text = " ".join(report(rows, "text").split())
    assert "crashed, 1 case: killed by SIGSEGV: a:bf16-0/bf16-1/bf16-2; first a:bf16-0 on first: " in text
    assert text.count("its last output") == 1


def logged(events, **how):
    log = io.StringIO()
    rows = list(show_progress(events, Console(file=log, width=300), **how))
    return rows, log.getvalue().splitlines()


def test_a_log_has_a_line_a_case_and_a_failure_and_none_a_refusal(shown):
    rows, log = shown
    lines = log.splitlines()
    ran = sum(row.status not in ("refused", "unavailable") for row in rows)
    failed = [row for row in rows if row.status == "error"]
    assert len(lines) == 2 + len(failed) + 1
    assert lines[0] == f"[0 of {ran} plans measured] first"
    assert f" of {ran} plans measured] second" in log
    assert all(f"{row.case}: {row.plan}: error: {row.reason}" in log for row in failed)
    assert " s in all: preparing " in lines[-1]
    assert "\x1b" not in log


def test_whoever_wants_every_row_gets_a_line_for_it(shown):
    rows, lines = logged([Finished(0, 1, row, resumed=False) for row in shown[0]], verbose=True)
    assert len(lines) == len(rows)
    assert any("ok, " in line and " ms a call, error normal " in line for line in lines)


def test_the_end_of_a_log_reports_where_the_time_went():
    spent = {"preparing": 5.0, "timing": 6.0, "judging": 2.0}
    assert logged([Ended(spent, 15.0, ())])[1] == [
        "15 s in all: preparing 5 s, timing 6 s, judging 2 s, attnbench's own work 2 s "
        "(25% of timing and judging together)"
    ]


def test_a_terminal_gets_a_bar_and_no_line_a_row(swept):
    screen = io.StringIO()
    rows = list(show_progress(iter(swept), Console(file=screen, force_terminal=True, width=100)))
    assert f"/{sum(row.status not in ('refused', 'unavailable') for row in rows)}" in screen.getvalue()
    assert "no such tile" not in screen.getvalue()
    assert "judging second" in screen.getvalue()  # as it was when the sweep ended


def test_an_emulated_plan_is_in_no_ranking_and_no_ratio(made):
    """However fast it was: its time is that of other arithmetic."""
    quick = made("toy:fp8", 0.01, emulated=True, error={"normal": {"out": 0.04}})
    real = [made("a:bf16", 1.0), made("b:bf16", 17.75)]
    for rows in ([*real, quick], [quick, *real]):
        assert [str(row.plan) for row in fastest(rows)] == ["a:bf16"]
        assert sentences(rows)[0] == "Fastest within its bound: a:bf16, 1 ms a call."
        assert "Most accurate in FP8: toy:fp8, at worst 0.04" in " ".join(sentences(rows))
        text = report(rows, "text")
        lines = text.splitlines()
        (line,) = (line for line in lines if line.startswith("toy:fp8"))
        assert re.fullmatch(r"toy:fp8 +emulated +0.04", line)
        assert lines.index(line) > max(lines.index(each) for each in lines if each.startswith(("a:bf16", "b:bf16")))
        assert "0.01 ms" not in text
        assert "\nemulated: " in text
    assert sentences([quick])[0] == "No time is compared: every plan that ran is emulated."


@pytest.mark.parametrize(
    ("value", "expected"),
    [(17.75, "17.8"), (1234.0, "1230"), (999.7, "1000"), (0.012345, "0.0123"), (1.5e6, "1.5e+06")],
)
def test_numbers_have_three_digits_that_count(value, expected):
    assert number(value) == expected


def test_the_summary_states_the_answer_of_every_case_where_it_is_read_first(made):
    rows = [
        made("a:bf16", 2.0, case="one", error={"normal": {"out": 0.002}}),
        made("b:fp8", 1.0, case="one"),
        made("a:bf16", 1.0, case="two", noise=0.02),
        made("b:bf16", 1.001, case="two", noise=0.02),
    ]
    text = report(rows, "text")
    summary = text[text.index("Summary\n") :]
    assert re.search(r"\none +b:fp8 +1 +0.05 +2x without FP8\n", summary)
    assert re.search(r"\ntwo +[ab]:bf16 \? +[\d.]+ +0.05", summary)
    assert "not for certain" in summary
    assert "is in FP8, or without it." in summary
    sure = [made(f"{name}:bf16", ms, case=case) for case in ("one", "two") for name, ms in (("a", 1.0), ("b", 2.0))]
    summary = report(sure, "text").partition("Summary\n")[2]
    assert summary
    assert "for certain" not in summary
    assert "in FP8" not in summary
    assert report(rows, "markdown").startswith("### Summary\n")
    assert "Summary" not in report(rows[:2], "text")  # its own sentence has said it


HERE = an_environment()
DRAWN = Draw(distribution="zipf", total=40, longest=30, seed=2)


def row(layout, call, plan="b:bf16", q=(30, 9, 1), **facts):
    own = SequenceLengths(layout=layout, q=q, drawn=DRAWN)
    spec = AttentionSpec.make(heads=2, head_dim=16, mask=Mask(right=0), **own.sizes())
    known = {"status": "ok", "error": {"normal": {"out": 0.01}}, "bound": 0.1, "declared_error": 0.1, **facts}
    return measurement(
        case=layout, spec=spec, lengths=own, plan=Plan(plan), time_ms={"call": [call] * 20}, truth="all",
        timer="a clock", drawn_on="cpu", started=datetime(2026, 11, 20, tzinfo=timezone.utc), environment=HERE, **known,
    )  # fmt: skip


def test_each_layout_stands_beside_the_others_by_its_fastest_plan_within_its_bound():
    wrong = {"status": "inaccurate", "reason": "wrong", "check": "error"}
    rows = [row("packed", 2.0), row("packed", 2.5, "slow:bf16"), row("padded", 3.0), row("equal", 1.0)]
    rows += [row("dense", 1.0, "wrong:fp8", **wrong), row("dense", 8.0), row("packed", 9.0, q=(20, 20))]
    texts = alternatives(rows)
    assert texts[key_of(rows[0])] == (
        "Beside it, in times its call: in padded rows with lengths 1.5 (3 ms, b:bf16), in rows whose padding is "
        "computed like tokens 4 (8 ms, b:bf16), as many tokens in sequences of one length 0.5 (1 ms, b:bf16)."
    )
    assert {lengths.layout for _, lengths in texts} == {"packed", "padded"}
    assert key_of(rows[-1]) not in texts
    assert "computed like tokens 4 (8 ms, b:bf16)" in " ".join(report(rows, "text").split())


@pytest.mark.parametrize("layout", ["packed", "left-padded", "equal"])
def test_the_command_of_a_case_draws_its_lengths_again(tmp_path, layout):
    found = row(layout, 1.0)
    command, note = sweep_command([found])
    assert note is None
    entry = command.partition("'- ")[2].partition("' >")[0]
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump([yaml.safe_load(entry)]))
    (case,) = read_cases(path, "fp8")
    assert case.spec.replace(batch=1, seqlen_q=1, seqlen_kv=1, lengths=None) == found.spec.replace(
        batch=1, seqlen_q=1, seqlen_kv=1, lengths=None
    )
    assert layout == "equal" or (case.lengths.layout, case.lengths.drawn) == (layout, DRAWN)
    of_program = found.model_copy(update={"lengths": found.lengths.model_copy(update={"drawn": None})})
    assert (sweep_command([of_program])[0] == "") == (layout != "equal")
