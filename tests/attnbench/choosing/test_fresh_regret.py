"""Fresh regret: choices by one table, compared with later measurements of other or the same shapes."""

import json
import math
import random
from dataclasses import replace
from functools import partial

import pytest
from command_line import attnbench, fails
from fakes import FakeForward, an_environment, fake_backend, fake_registry
from formula_tables import FORMULAS, KNOWN, MASKS, formula_table, spec

from attnbench import Plan
from attnbench.choosing.fresh_regret import FreshScore, FreshSummary, contenders, fresh_scores, summary_of
from attnbench.choosing.regret import Asked
from attnbench.kernels.capabilities import Device
from attnbench.tables.table import Entry, Table
from attnbench.tables.user_table import Known

FRESH = [spec(3000, mask=mask) for mask in MASKS]
NEAR, FAR = Plan("near:bf16"), Plan("far:bf16")
SLOW_NEAR = FORMULAS | {"near:bf16": (0.02, 9.0, 0.002)}


def truth(laws=FORMULAS, specs=FRESH):
    return formula_table(laws, specs)


def scores(of=None, tables=None):
    return list(fresh_scores(of or truth(), Known.of(tables or formula_table()), KNOWN))


def contenders_of(at, plans, tables, known=KNOWN):
    here = an_environment()
    return contenders(at, plans, Known.of(tables), known, Device(here.device_type, here.device_name))


def test_choices_are_scored_at_the_host_speed_of_the_tables():
    """Calls with equal times on a slow host differ by their device times on a host that is twice as fast."""
    slow, fast = (name for name, (_, _, error) in FORMULAS.items() if error < 0.01)
    parts = {slow: (0.9, 0.8), fast: (1.0, 0.2)}
    entries = [
        Entry(at, Plan.parse(name), "ok", max(part), 0.0, {"outlier": 0.002}, host_ms=part[0], device_ms=part[1])
        for at in FRESH
        for name, part in parts.items()
    ]
    measured = Table.from_entries(an_environment(), entries, 0.02)
    best = {
        launch: {each.best for each in scores(measured, replace(formula_table(), launch_ms=launch))}
        for launch in (0.02, 0.01)
    }
    assert best == {0.02: {Plan.parse(slow)}, 0.01: {Plan.parse(fast)}}


def test_contenders_include_the_choices_and_exclude_plans_that_are_surely_slower():
    slow, slow_fp8, new = (Plan.parse(name) for name in ("slow:bf16", "slow:fp8", "new:bf16"))
    known = fake_registry(
        fake_backend("near", FakeForward("near:bf16", preference=10)),
        fake_backend("far", FakeForward("far:bf16", preference=20), FakeForward("far:fp8")),
        fake_backend("slow", FakeForward("slow:bf16"), FakeForward("slow:fp8")),
        fake_backend("new", FakeForward("new:bf16")),
    )
    # FP8 is so fast that by it no other plan could win.
    laws = FORMULAS | {"slow:bf16": (0.1, 9.0, 0.002), "slow:fp8": (0.1, 9.0, 0.06), "far:fp8": (0.1, 0.5, 0.06)}
    tables = formula_table(laws)
    for at in FRESH:
        found = contenders_of(at, [NEAR, FAR, slow, new, Plan("far:fp8"), slow_fp8], tables, known)
        assert not {slow, slow_fp8} & found.keys()
        assert {NEAR, FAR, new} <= found.keys()  # of the new one nothing is known
        required = {plan for plan, wanted in found.items() if wanted}
        assert required == {each.plan for each in fresh_scores(truth(laws), Known.of(tables), known) if each.spec == at}


def test_a_plan_whose_prediction_is_uncertain_stays_a_contender():
    """It is predicted to be 1.8 times as slow by times that scatter by a third about the law."""
    chance = random.Random(5)
    table = formula_table({"near:bf16": (0.02, 2.0, 0.002), "far:bf16": (0.02, 3.6, 0.002)})
    wild = {
        key: replace(each, time_ms=each.time_ms * math.exp(chance.gauss(0, 0.3))) for key, each in table.entries.items()
    }
    for tables, expected in ((table, 1), (replace(table, entries=wild), 2)):
        assert len(contenders_of(FRESH[0], [NEAR, FAR], tables)) == expected


def test_where_the_choice_has_no_time_every_plan_is_a_contender():
    """All that is known of near:bf16 is that it is not accurate enough."""
    tables = formula_table({"near:bf16": (0.02, 2.0, 0.5)})
    assert contenders_of(FRESH[0], [NEAR, FAR], tables) == {NEAR: False, FAR: True}


def test_a_plan_that_lost_a_race_is_scored_by_its_time_alone():
    lost = {
        key: replace(each, status="slower", time_ms=9.0, errors={}) if key[1] == NEAR else each
        for key, each in truth().entries.items()
    }
    found = [each for each in scores(replace(truth(), entries=lost)) if each.plan == NEAR]
    assert len(found) >= len(FRESH)
    for each in found:
        assert (each.error, each.violated) == (None, False)
        assert each.regret > 1


def test_without_asking_for_fp8_the_best_plan_is_of_16_bits():
    """Also where FP8 is as accurate."""
    for each in scores(truth(FORMULAS | {"far:fp8": (0.001, 0.1, 0.0025)})):
        assert each.best.fp8 == each.asked.fp8


def test_a_summary_passes_up_to_each_bound():
    plain = FreshSummary(Asked(False), 50, 50, 0.02, 0.08, 0.2, 2, 0)
    assert plain.passes
    assert replace(plain, asked=Asked(True), geometric_mean=0.03).passes
    beyond = {"geometric_mean": 0.021, "percentile_90": 0.081, "worst": 0.21, "rules": 3, "violations": 1}
    assert not any(replace(plain, **{name: value}).passes for name, value in beyond.items())
    assert not replace(plain, asked=Asked(True), geometric_mean=0.031).passes


def test_a_summary_ranks_steady_regrets_and_counts_all_rules():
    steady, noisy = (
        FreshScore(FRESH[0], Asked(False), NEAR, basis, NEAR, regret, 0.002, 0.01, basis != "rule")
        for basis, regret in (("predicted", 0.01), ("rule", 5.0))
    )
    (found,) = summary_of([*[steady] * 9, replace(steady, regret=0.3), noisy])
    assert (found.choices, found.unsteady, found.percentile_90, found.worst, found.rules) == (10, 1, 0.01, 0.3, 1)


@pytest.mark.parametrize("compiles", [False, True])
def test_plans_that_must_be_compiled_are_excluded_earlier(compiles):
    """It is 35 % slower, and the measurements follow the formula exactly, so the prediction is certain."""
    other = Plan("other:bf16")
    known = fake_registry(
        fake_backend("near", FakeForward("near:bf16")),
        fake_backend("other", FakeForward("other:bf16"), compiles=compiles),
    )
    laws = {"near:bf16": FORMULAS["near:bf16"], "other:bf16": (0.02, 2.7, 0.002)}
    for at in FRESH:
        found = contenders_of(at, [NEAR, other], formula_table(laws), known)
        assert (other in found) == (not compiles)
        assert found[NEAR]


def test_entries_for_the_scored_shape_itself_are_ignored():
    """The table has a false fast time of the slow plan at the fresh shape only; using it would change the choice."""
    at = FRESH[0]
    lie = Entry(at, NEAR, "ok", 1e-6, 1e-9, {"outlier": 0.002})
    table = Table(formula_table().environment, dict(formula_table().entries) | {(at, lie.plan): lie})
    plain, lied = ([(each.plan, each.basis) for each in scores(truth(), tables)] for tables in (formula_table(), table))
    assert plain == lied


def test_a_fast_choice_beyond_its_budget_is_a_failure():
    """far:fp8 has an error of 0.06 in the table and 0.5 at the fresh shapes."""
    wild = truth(FORMULAS | {"far:fp8": (0.3, 0.1, 0.5)})
    found = [each for each in scores(wild) if each.plan == Plan("far:fp8")]
    assert found
    assert all(each.violated for each in found)
    assert not any(each.passes for each in summary_of(found))
    noisy = summary_of(scores(with_noisy_times(["far:fp8"], wild)))
    assert any(each.violations for each in noisy)  # scatter hides none


def test_dtypes_absent_from_every_table_are_chosen_by_rule_and_counted():
    unknown = [replace(at, dtype="fp16") for at in FRESH]
    (plain, _) = summary_of(scores(truth(specs=unknown)))
    assert plain.rules == plain.choices == len(unknown)
    assert not plain.passes


def with_noisy_times(plans, table, specs=FRESH):
    """The measurements with these plans' interquartile range at half of the median, which hides a regret of 20 %."""
    names = [Plan.parse(str(plan)) for plan in plans]
    wide = {
        key: replace(entry, spread_ms=0.5 * entry.time_ms) if key[0] in specs and key[1] in names else entry
        for key, entry in table.entries.items()
    }
    return replace(table, entries=wide)


@pytest.mark.parametrize("hidden", ["the choice", "the best"])
def test_choices_with_noisy_times_are_not_scored(hidden):
    """By 16 bits near:bf16 is chosen at both shapes, which takes nine times as long as far:bf16 at the second."""
    slow = truth(SLOW_NEAR, FRESH[1:])
    both = replace(truth(), entries={**truth(specs=FRESH[:1]).entries, **slow.entries})
    (plain,) = summary_of(each for each in scores(both) if not each.asked.fp8)
    assert (plain.choices, plain.unsteady) == (2, 0)
    assert plain.worst > 1
    (lost,) = (each for each in scores(both) if each.regret > 1 and not each.asked.fp8)
    unsteady = with_noisy_times([lost.plan if hidden == "the choice" else lost.best], both, [lost.spec])
    found = [each for each in scores(unsteady) if not each.asked.fp8]
    assert [(each.spec, each.regret, each.steady) for each in found] == [
        (each.spec, each.regret, each.spec != lost.spec) for each in scores(both) if not each.asked.fp8
    ]
    (clean,) = summary_of(found)
    assert (clean.choices, clean.unsteady) == (1, 1)
    assert clean.worst < 1


check = partial(attnbench, "table", "check")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The paths of the table that chooses, which is written, and of the fresh results, on the fake kernels."""
    monkeypatch.setattr("attnbench.kernels.registry.registry", lambda: KNOWN)
    formula_table().save(tmp_path / "mine.json")
    return tmp_path / "mine.json", tmp_path / "fresh.json"


def test_the_command_reports_noisy_times_and_fails_if_all_are_noisy(files):
    mine, fresh = files
    table = with_noisy_times(FORMULAS, truth(specs=FRESH[:1]))
    table.save(fresh)
    fails(check(mine, "--on", fresh), 2, "every time scatters by more than 20%", "idle")
    replace(table, entries={**table.entries, **truth(specs=FRESH[1:]).entries}).save(fresh)
    run = check(mine, "--on", fresh)
    assert run.returncode == 0
    assert "2 of 4 choices are not scored" in run.stdout
    assert "regret" not in run.stdout  # of which none that counts was above 10 %

    slow = truth(SLOW_NEAR, FRESH[1:])
    for lost, listed in ((slow, True), (with_noisy_times(FORMULAS, slow), False)):
        replace(table, entries={**truth(specs=FRESH[:1]).entries, **lost.entries}).save(fresh)
        assert (str(FRESH[1]) in check(mine, "--on", fresh).stdout) is listed


def test_the_command_scores_results_without_measuring_and_exits_by_the_bounds(files):
    mine, fresh = files
    truth().save(fresh)
    run = check(mine, "--on", fresh, "--format", "json")
    assert run.returncode == 0
    data = json.loads(run.stdout)
    assert data["passed"]
    assert {each["regret"] for each in data["choices"]} == {0.0}
    truth(SLOW_NEAR | {"far:fp8": (0.3, 9.0, 0.06)}).save(fresh)
    run = check(mine, "--on", fresh)
    assert run.returncode == 1
    assert "failed: 2 shapes" in run.stdout


def test_the_command_scales_a_table_of_another_gpu_to_that_of_the_results(files):
    mine, fresh = files
    there = replace(an_environment(), device_type="cuda", device_name="NVIDIA H200", capability="9.0")
    replace(formula_table(), environment=there).save(mine)
    for name, basis in (("NVIDIA H100 80GB HBM3", {"scaled"}), ("NVIDIA H200", {"predicted"})):
        replace(truth(), environment=replace(there, device_name=name)).save(fresh)
        shown = json.loads(check(mine, "--on", fresh, "--format", "json").stdout)
        assert {each["basis"] for each in shown["choices"]} == basis


def test_fresh_shapes_are_measured_resumed_and_scored(tmp_path):
    arguments = ("--fresh", 1, "--seed", 3, "--backends", "sdpa-flash,sdpa-math", "--out", tmp_path / "out")
    run = check(*arguments, "--format", "json")
    measured = (tmp_path / "out" / "measurements.jsonl").read_text()
    if run.returncode == 2:  # on a busy machine
        assert "every time scatters by more than 20%" in run.stderr
    else:
        assert run.returncode in (0, 1)
        assert {each["asked"] for each in json.loads(run.stdout)["fresh"]} == {"nothing", 'dtype="fp8"'}
    check(*arguments, "--resume")
    assert (tmp_path / "out" / "measurements.jsonl").read_text() == measured


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a table or results"),
        (["--fresh", "2", "--on", "."], "give one of them"),
        (["--on", ".", "--out", "x"], "belong to --fresh"),
        (["--fresh", "2", "--resume"], "--resume needs --out"),
    ],
)
def test_misuse_is_reported_before_anything_is_measured(arguments, message):
    fails(check(*arguments), 2, message)
