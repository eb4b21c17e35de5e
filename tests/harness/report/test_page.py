"""The page says what the rows say, for every machine and budget, and nothing that a file holds becomes part of it."""

import base64
import hashlib
import re
import shlex
from dataclasses import replace

import pytest
from fakes import an_environment
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from places import RESULTS
from report_rows import (
    CAUSAL,
    LEARNT,
    SQUARE,
    Structure,
    at_later_time,
    failed_row,
    hostile_results,
    in_environment,
    row,
    sweep_rows,
)
from row_facts import with_facts
from small_training import run_of

from attnbench.choosing.regret import QUESTIONS, Asked
from attnbench.errors import MisuseError
from attnbench.harness.cases.file import read_cases
from attnbench.harness.report.page import commands, machines, render, results
from attnbench.harness.report.page.colours import hues_of
from attnbench.harness.report.page.figures import bytes_of, loss_figure, speed_error_figure, winners_figure
from attnbench.harness.report.page.headlines import fixed_of, headlines
from attnbench.harness.report.page.machines import WIDE, machines_of
from attnbench.harness.report.page.plan_summaries import plan_summaries, points_of
from attnbench.harness.report.page.render import page
from attnbench.harness.report.page.results import Results, read_results
from attnbench.harness.report.page.shapes import grids_of
from attnbench.harness.training.config import TrainConfig
from attnbench.harness.training.judge.arms import arms_of, compare_arms
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import registry
from examples import examples

H200 = RESULTS / "nvidia-h200"


def machine(rows):
    (made,) = machines_of({"a": rows}, registry())
    return made


def case(made, spec):
    return next(each for each in made.cases if each.spec == spec)


def write(folder, rows, name="measurements.jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(each.to_line() + "\n" for each in rows))
    return folder


# What is chosen, and how it is reported.


def test_the_fastest_plan_within_each_budget_is_chosen_and_never_a_wrong_one():
    square = case(machine(sweep_rows()), SQUARE)
    assert square.answer.plan == Plan.parse("fa3:fp8")  # flex:fp8 is faster, and out of bounds
    assert square.answers[WIDE].plan == square.answers[Asked(True, 0.05)].plan == Plan.parse("fa3:bf16")
    assert square.speed(Plan.parse("fa3:fp8")) == pytest.approx(2, rel=0.01)
    assert case(machine(sweep_rows()), CAUSAL).answer.plan == Plan.parse("fa3:bf16")


def test_a_plan_that_lost_a_race_is_not_chosen_by_its_error_at_other_shapes():
    judged = [row("flex:bf16", 1.0), row("fa3:bf16", 1.0, spec=CAUSAL)]
    times = row("fa3:bf16", 0.1).performance_
    quickest = failed_row("fa3:bf16", "slower", "slower than te:fp8 at a first look", performance_=times)
    made = case(machine([*judged, quickest]), SQUARE)
    assert made.answer.plan == made.answers[WIDE].plan == Plan.parse("flex:bf16")
    assert made.speed(Plan.parse("flex:bf16")) == 1


def test_of_several_sweeps_the_newest_row_counts_unless_its_plan_lost_a_race():
    """Which the table does not choose by either: the page had no time for what it chose."""
    old, new = row("fa3:bf16", 1.0), row("fa3:bf16", 3.0)
    predicted = old.performance.model_copy(update={"time_ms": {}, "visits": {}})
    lost = [failed_row("fa3:bf16", "slower", "lost", performance_=each) for each in (new.performance, predicted)]
    for newer, expected in ((new, 3.0), *((each, 1.0) for each in lost)):
        for sweeps in ([old], [at_later_time(newer)]), ([at_later_time(newer)], [old]):
            (made,) = machines_of(dict(zip("ab", sweeps, strict=True)), registry())
            assert made.cases[0].times[made.cases[0].answer.plan] == pytest.approx(expected, rel=0.01)
            assert sum(made.cases[0].sources.values()) == 1


def test_machines_that_cannot_be_compared_are_distinguished_and_a_new_commit_is_none():
    here = row("fa3:bf16", 1.0)
    there = in_environment(here, device_name="Another GPU")
    twin = in_environment(here, torch="2.12.0")
    same = in_environment(at_later_time(here), commit="abcdef0")
    found = machines_of({"a": [here], "b": [there], "c": [twin], "d": [same]}, registry())
    assert [(each.name, list(each.sweeps)) for each in found] == [
        ("A GPU", ["a", "d"]), ("Another GPU", ["b"]), ("A GPU (2)", ["c"]),
    ]  # fmt: skip
    assert len({each.number for one in found for each in one.cases}) == 3


def test_the_findings_name_the_winner_the_gain_and_the_trap():
    made = machine(sweep_rows())
    findings = dict(headlines(made, fixed_of(made, registry())))
    assert "fa3:bf16 wins at 1 of 2 shapes, fa3:fp8 at 1" in findings["Who wins, forward"]
    assert "an FP8 plan is chosen at 1 of 2 shapes, 2.00 times as fast" in findings["Does FP8 pay"]
    assert "In training (forward and backward) no FP8 plan is chosen" in findings["Does FP8 pay"]
    assert re.search(r"flex:fp8 \(at 1, error up to 0\.3, up to 1\.2\d times", findings["Fast but wrong"])
    assert re.search(r"te:fp8 \(at 1, error up to 0\.5, up to 1\.5", findings["Fast but wrong"])


def test_plan_summaries_add_up():
    found = {str(each.plan): each for each in plan_summaries(machine(sweep_rows()).of("forward"))}
    assert (found["fa3:fp8"].wins, found["fa3:bf16"].wins, found["flex:fp8"].wins) == (1, 1, 0)
    assert found["flex:fp8"].inaccurate == 1
    costs = found["fa3:fp8"].costs
    assert (costs.kernel, costs.prepare, costs.rest) == pytest.approx((0.5, 0.3, 0.2), abs=0.01)
    learnt = plan_summaries(machine(sweep_rows()).of("training"))[0].costs
    assert learnt.kernel + learnt.prepare + learnt.backward + learnt.rest == pytest.approx(1)


@pytest.fixture(scope="module")
def swept():
    return Structure(page(Results({"a": sweep_rows()}), registry()))


def test_a_figure_has_a_dot_for_each_plan_and_case_named_by_its_case(swept):
    dots = [facts["data-case"] for tag, facts in swept.elements if tag in ("use", "path") and "data-case" in facts]
    numbers = {str(each.number): len(each.measured) for each in machine(sweep_rows()).cases}
    assert {number: dots.count(number) for number in numbers} == numbers


def test_the_page_s_script_and_styles_find_what_each_figure_draws(swept):
    plans = [facts["data-plans"].split() for _, facts in swept.elements if facts.get("class") == "scatter"]
    numbers = [number for each in plans for number in range(len(each))]
    groups = [(facts.get("class") or "", facts.get("data-plan")) for tag, facts in swept.elements if tag == "g"]
    assert [each for each in groups if each[0].startswith("dots")] == [(f"dots dots-{n}", f"{n}") for n in numbers]
    assert [each for each, _ in groups if each.startswith("mark")] == [f"mark mark-{n}" for n in numbers]
    budgets = [f"budget budget-{number}" for number in range(len(QUESTIONS))]
    assert [each for each, _ in groups if each.startswith("budget")] == budgets * len(plans)


def test_every_case_is_on_the_page_with_all_its_candidates_and_their_reasons(swept):
    text = " ".join(swept.texts)
    for each in sweep_rows():
        assert str(each.plan) in text
        if not each.measured:
            assert each.reason.partition("; ")[0] in text
    assert "its error of 0.3 on outlier inputs exceeds the budget of 0.12" in text
    assert "its last line" in text  # what a process that crashed has printed is not cut off
    assert "takes 2.00 times as long as fa3:fp8" in text


def test_the_committed_quick_sweep_is_a_page_that_asks_for_nothing():
    made = page(read_results([H200 / "quick"]), registry())
    found = Structure(made)
    assert sum(tag == "details" for tag, _ in found.tags) == 11
    assert not re.search(r"https?:", made.partition("<body>")[0])
    for tag, facts in found.elements:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form action")
        assert facts.get("src") is None
        assert (facts.get("href") or "#").startswith(("#", "data:,"))
        assert "style" not in facts, "the policy forbids it"
        assert not [name for name in facts if name.startswith("on")]
    references = {facts["href"][1:] for _, facts in found.elements if (facts.get("href") or "").startswith("#")}
    ids = [facts["id"] for _, facts in found.elements if facts.get("id")]
    assert references <= set(ids)
    assert len(ids) == len(set(ids))


# What comes from a file.

_PIECES = (
    "<", ">", '"', "'", "&", "</script>", "<script>alert(1)</script>", "<!--", "-->", "<img src=x onerror=alert(1)>",
    "</style>", "]]>", "</svg>", "</title>", "</td>", "\u2028", "\u202e", "\x00", "\x1b[31m", "\n", "{{7*7}}",
    "{% raw %}", "javascript:alert(1)", "' onmouseover='x", "$x^2$", "\\", "`", "&lt;", "é", "注意",
)  # fmt: skip
HOSTILE = st.lists(st.sampled_from(_PIECES), min_size=1, max_size=4).map("".join)


@pytest.fixture(scope="module")
def plain_page():
    return page(hostile_results("x"), registry())


@pytest.fixture(scope="module")
def plain(plain_page):
    return Structure(plain_page)


@settings(max_examples=examples(2, 30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example("".join(_PIECES[:12]))
@example("".join(_PIECES[12:]))
@given(HOSTILE)
def test_no_text_of_a_file_becomes_an_element_or_an_attribute(plain, text):
    made = Structure(page(hostile_results(text), registry()))
    assert without_figures(made.tags) == without_figures(plain.tags)
    # How many lines and ticks a figure has depends on the room that its words take.
    assert set(made.tags) == set(plain.tags)
    assert made.comments == []
    assert not re.search("[\u202e\x1b\x00\u2028]", "".join(made.texts))


def without_figures(tags):
    """The tags outside of the figures."""
    kept, inside = [], False
    for tag, names in tags:
        inside = inside or tag == "svg"
        if not inside:
            kept.append((tag, names))
        inside = inside and tag != "/svg"
    return kept


def test_the_policy_allows_exactly_the_page_s_own_script_and_styles(plain_page, plain):
    policy = next(facts["content"] for tag, facts in plain.elements if facts.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name in ("script", "style"):
        (body,) = re.findall(f"<{name}>(.*?)</{name}>", plain_page, re.DOTALL)
        assert f"sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}" in policy


def test_what_is_more_than_a_page_can_show_is_refused_before_it_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "_MOST_ROWS", 3)
    with pytest.raises(MisuseError, match="at most 3 measurements"):
        read_results([write(tmp_path / "a", sweep_rows())])
    monkeypatch.setattr(render, "_MOST_CASES", 3)
    rows = [row("fa3:bf16", 1.0, spec=SQUARE.replace(batch=size)) for size in range(1, 5)]
    with pytest.raises(MisuseError, match="at most 3 shapes"):
        page(Results({"a": rows}), registry())
    monkeypatch.setattr(machines, "_MOST_ENVIRONMENTS", 3)
    many = [in_environment(row("fa3:bf16", 1.0), torch=f"2.{number}") for number in range(4)]
    with pytest.raises(MisuseError, match="at most 3 environments"):
        machines_of({"a": many}, registry())


def test_folders_files_and_folders_of_folders_are_read_and_named_without_their_path(tmp_path):
    write(tmp_path / "all" / "one", sweep_rows())
    write(tmp_path / "all" / "two", sweep_rows()[:2])
    write(tmp_path / "all" / "two", [run_of([3, 2, 1])], "training.jsonl")
    write(tmp_path / "other", [run_of([3, 2, 1], seed=1)], "runs.jsonl")
    found = read_results([tmp_path / "all", tmp_path / "all" / "one", tmp_path / "other" / "runs.jsonl"])
    assert {name: len(rows) for name, rows in found.sweeps.items()} == {"one": 10, "two": 2}
    assert [run.seed for run in found.runs] == [0, 1]
    (tmp_path / "empty").mkdir()
    with pytest.raises(MisuseError, match="holds no results"):
        read_results([tmp_path / "empty"])


# Commands.


def test_a_case_of_a_preset_is_named_and_any_other_is_written_out():
    first = next(each for each in read_results([H200 / "quick"]).sweeps["quick"] if each.measured)
    command, note = commands.sweep_command([first])
    assert command == f"attnbench sweep --preset quick --case '{first.spec}' --backends 'PLAN'"
    assert note is None
    command, _ = commands.sweep_command([with_facts(first, error={"normal": first.error["normal"]})])
    assert "--preset case.yaml" in command
    assert "families: [normal]" in command
    command, _ = commands.sweep_command([row("fa3:fp8", 1.0, spec=CAUSAL, bound=0.3)])
    assert command == (
        "printf '%s\\n' '- {batch: 1, heads: 8, seqlen_q: 2048, head_dim: 64, kv_heads: 2, mask: causal}' > case.yaml "
        "&& attnbench sweep --preset case.yaml --max-error 0.3 --backends 'PLAN'"
    )


@settings(max_examples=examples(15, 200), deadline=None)
@given(
    st.builds(
        lambda heads, group, **sizes: SQUARE.replace(heads=heads * group, kv_heads=heads, **sizes),
        heads=st.integers(1, 4), group=st.integers(1, 4), batch=st.integers(1, 4), seqlen_q=st.integers(1, 99),
        seqlen_kv=st.integers(1, 99), head_dim=st.integers(1, 99), head_dim_v=st.integers(1, 99),
        scale=st.floats(0.001, 10), softcap=st.sampled_from([0.0, 30.5]),
        dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
        direction=st.sampled_from(["forward", "training"]),
        mask=st.builds(type(SQUARE.mask), st.none() | st.integers(0, 99), st.none() | st.integers(0, 99),
                       st.sampled_from(["top-left", "bottom-right"])),
    )
)  # fmt: skip
def test_the_yaml_of_a_command_is_the_very_case(tmp_path_factory, spec):
    command, _ = commands.sweep_command([row("fa3:bf16", 1.0, spec=spec)])
    words = shlex.split(command)
    file = tmp_path_factory.mktemp("case") / "case.yaml"
    file.write_text(words[2] + "\n")
    dtype = words[words.index("--dtype") + 1] if "--dtype" in words else "fp8"
    assert [each.spec for each in read_cases(file, dtype)] == [spec]


def test_a_command_holds_no_free_text_of_a_file():
    hostile = "x'; touch pwned; '"
    made = row("fa3:fp8", 1.0, case=hostile, spec=CAUSAL)
    assert "pwned" not in commands.sweep_command([made])[0]
    odd = with_facts(made, error={f"captured:{hostile}": {"out": 0.1}})
    assert commands.sweep_command([odd])[0] == ""
    for name, value in (("data", "/tmp/$(touch pwned)"), ("data", "a\nb"), ("model", "hf:'; touch pwned '")):
        config = TrainConfig.make("gpt", steps=3).to_dict()
        (arm,) = arms_of([run_of([3, 2, 1], settings=config | {name: value, "attention": "sdpa"})])
        assert commands.train_command(arm, None) == ""


def test_trainings_of_several_kinds_stand_apart_and_are_called_by_what_differs_within_one():
    kinds = [{"seqlen": 2048, "batch": 16}, {"seqlen": 8192, "batch": 4}]
    how = {"baseline": ("sdpa", "bf16"), "candidate": ("auto", "te-fp8")}
    runs = [
        run_of(
            [3, 2, 1], role, seed, settings={"steps": 3, "seed": seed, **kind, "attention": name, "linears": linears}
        )
        for kind in kinds
        for role, (name, linears) in how.items()
        for seed in (0, 1)
    ]
    made = page(Results({}, runs), registry())
    for kind in kinds:
        assert made.count(f"{kind['seqlen']} tokens a sample, batch {kind['batch']}") >= 2  # a heading, a table's name
    assert made.count("auto linears=te-fp8 against sdpa linears=bf16:") == 2
    assert "seqlen=" not in re.sub(r"<pre>.*?</pre>", "", made, flags=re.DOTALL)
    assert made.count("<figcaption>The loss") == 2


def test_a_machine_that_trained_in_several_environments_is_described_once_and_its_others_by_what_differs():
    first = an_environment(driver="570.1")
    others = first, replace(first, threads=77), replace(first, device_name="Another CPU")
    runs = [run_of([3, 2, 1], seed=seed, environment=each) for seed, each in enumerate(others)]
    made = page(Results({}, runs), registry())
    assert made.count("<caption>Training: ") == 2
    assert len(re.findall("Other trainings there: [^<]*threads was 2, is 77", made)) == 1
    assert made.count("Other trainings there") == 1


@pytest.mark.parametrize("count", [2, 18])
def test_the_names_of_curves_cover_none_of_them_however_many_they_are(count):
    runs = [run_of([3, 2, 1], settings={"attention": f"plan {place}", "seed": 0, "steps": 3}) for place in range(count)]
    figure = loss_figure(arms_of(runs))
    figure.draw_without_rendering()
    (panel, *_) = figure.axes
    names = figure.legends or [panel.get_legend()]
    assert len(names[0].get_texts()) == count
    inside = panel.get_window_extent().overlaps(names[0].get_window_extent())
    assert inside == (count == 2)
    assert panel.get_window_extent().height > 0.3 * figure.bbox.height


def test_a_training_command_is_that_of_its_settings():
    candidate = TrainConfig.make("gpt", steps=3, batch=4, attention="emulated:fp8", checkpointing=True)
    baseline = candidate.replace(attention="auto")
    arms = arms_of([
        run_of([3, 2, 1], role, settings=config.to_dict())
        for role, config in (("candidate", candidate), ("baseline", baseline))
    ])  # fmt: skip
    ((arm, rival, _),) = compare_arms(arms)
    assert commands.train_command(arm, rival) == (
        "attnbench train --model=gpt --size=tiny --steps=3 --batch=4 --checkpointing --attention=emulated:fp8 "
        "--compare=auto --seeds=1 --seed=0 --device=cpu"
    )


# Figures.


def texts_in(figure):
    """The texts of a figure."""
    return re.findall("<text [^>]*>([^<]+)</text>", bytes_of(figure, "svg").decode())


def test_a_map_of_winners_shows_plan_and_gain_of_each_case():
    short = SQUARE.replace(seqlen_q=512, seqlen_kv=512)
    made = machine([
        *sweep_rows()[:-1], row("fa3:fp8>fa4:bf16", 0.5, 0.1, spec=LEARNT),
        row("fa3:bf16", 1.0, 0.5, spec=short, status="inaccurate", reason="beyond 0.01", check="error"),
    ])  # fmt: skip
    texts = texts_in(winners_figure(grids_of(made), {}))
    assert {"fa3:bf16", "fa3:fp8 2.00×", "none", "fa4:bf16 6.00×"} <= {*texts}


def test_the_axis_of_speeds_shows_how_many_times_as_fast_or_which_part():
    made = machine([*sweep_rows(), row("te:bf16", 4.0)])
    texts = texts_in(speed_error_figure(points_of(made.of("forward")), {}))
    assert {"1/4", "1/2", "1×", "2×"} <= {*texts}


def test_figures_are_the_same_bytes_every_time_and_text_is_never_mathematics():
    made = machine(sweep_rows())
    hues = hues_of(made.winners())
    for draw in (
        lambda: winners_figure(grids_of(made), hues),
        lambda: speed_error_figure(points_of(made.of("forward")), hues),
        lambda: loss_figure(arms_of([run_of([3, 2, 1]), run_of([3, 2, 1], "baseline")])),
    ):
        assert bytes_of(draw(), "svg") == bytes_of(draw(), "svg")
    named = {"attention": "$\\frac{1}{2}$", "seed": 0, "steps": 3}
    assert b">$\\frac{1}{2}$<" in bytes_of(loss_figure(arms_of([run_of([3, 2, 1], settings=named)])), "svg")
