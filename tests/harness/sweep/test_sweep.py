"""Every plan has one row with the right status, faults included, and a sweep goes on where it stopped."""

import json
from dataclasses import replace

import pytest
import torch
from command_line import expect
from planted import FakeBackward, FakeForward, backend, healthy, in_haste, setup
from scripted_workers import LocalWorkers

from attnbench.choosing.selector import choose
from attnbench.errors import MisuseError, UnknownBackendError
from attnbench.harness.cases.case import Case
from attnbench.harness.measure.timing import Timer
from attnbench.harness.results.records import Measurement, read_measurements
from attnbench.harness.results.store import Store
from attnbench.harness.sweep import contending as module
from attnbench.harness.sweep import devices
from attnbench.harness.sweep.run import Ended, Finished, Started, run_sweep, tasks_of
from attnbench.kernels.devices import describe
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.table import Table
from attnbench.tables.user_table import Known

CPU = torch.device("cpu")
FORWARD = Case("forward", AttentionSpec.make(batch=1, heads=2, seqlen_q=64, head_dim=16, mask=Mask(right=0)))
TRAINING = Case("training", AttentionSpec.make(batch=1, heads=2, seqlen_q=32, head_dim=16, direction="training"))
HUGE = Case("huge", AttentionSpec.make(batch=2**20, heads=2**10, seqlen_q=2**12, head_dim=128))


def swept(folder, lab, cases, resume=False):
    """The rows by case and plan."""
    tasks = tasks_of(cases, lab.registry, CPU, "fp8")
    with Store(folder, lab.environment, resume=resume) as store:
        list(run_sweep(tasks, [lab], store))
        return {(row.case, str(row.plan)): row for row in store.rows}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sweep that nothing disturbs, with a case that no machine holds in its middle."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        LocalWorkers(patch)
        return swept(folder, setup(), [FORWARD, HUGE, TRAINING]), folder


@pytest.fixture(scope="module")
def rows(whole):
    return whole[0]


def test_a_forward_is_swept_with_the_first_two_of_the_others_backwards_that_can_serve():
    """Which may be named, and each of which stands somewhere, or its author would look for it in vain."""

    class Partner(FakeBackward):
        def __init__(self, name, preference, refuses=False):
            super().__init__(name)
            self.preference = preference
            self.further_refusals = lambda spec, device: ["is not in the mood"] if refuses else []

    partners = [Partner("d:bf16", None), Partner("c:bf16", 3), Partner("b:bf16", 2, refuses=True), Partner("a:bf16", 1)]
    partners.append(Partner("e:bf16", 4))
    backends = [backend(FakeForward(each.name), each) for each in partners]
    known = Registry([backend(FakeForward("narrow:fp8")), *backends])

    def plans(names=()):
        tasks = tasks_of([TRAINING], known, CPU, "fp8", names)
        return {str(task.plan) for task in tasks if task.plan.forward == "narrow:fp8"}

    assert plans() == {"narrow:fp8>a:bf16", "narrow:fp8>c:bf16"}
    assert plans(["narrow"]) == {f"narrow:fp8>{name}:bf16" for name in "abcde"}
    assert plans(["d"]) == set()
    assert plans(["narrow:fp8>d:bf16"]) == {"narrow:fp8>d:bf16"}
    lonely = Registry([*known.backends.values(), backend(Partner("f:bf16", 9))])
    tasks = tasks_of([TRAINING], lonely, CPU, "fp8")
    assert any(task.plan.backward == "f:bf16" for task in tasks)


def test_every_kernel_has_a_row_for_every_case(rows):
    registry = healthy()
    cases = (FORWARD, HUGE, TRAINING)
    contenders = {(case.name, str(plan)) for case in cases for plan in registry.plans(case.spec)}
    assert set(rows) == {(case, plan) for case, plan in contenders if not plan.startswith("reference")}
    for case, kernels in (("forward", registry.forwards), ("training", [*registry.forwards, *registry.backwards])):
        covered = {kernel for name, plan in rows if name == case for kernel in Plan.parse(plan).kernels}
        assert covered >= {kernel for kernel in kernels if not kernel.startswith("reference")}
    status = {plan: row.status for (case, plan), row in rows.items() if case == "forward"}
    assert status == {
        "wide:bf16": "ok",
        "small:fp8": "ok",
        "picky:fp32": "refused",
        "absent:fp8": "unavailable",
    }
    assert "fp32 tensors, not bf16" in rows["forward", "picky:fp32"].reason
    assert "the package is not installed" in rows["forward", "absent:fp8"].reason


def test_a_row_holds_times_errors_floors_and_conditions(rows):
    row = rows["forward", "small:fp8"]
    assert set(row.time_ms) == {"kernel", "prepared", "call"}
    assert all(len(samples) >= 2 for samples in row.time_ms.values())
    found, costs = row.correctness, row.performance
    assert len(costs.host_ms) == len(row.time_ms["call"])
    assert costs.first_ms > 0
    assert set(row.error) == set(found.floor) == set(found.detail) == {"normal", "outlier"}
    for family, errors in row.error.items():
        assert 0.02 < found.floor[family]["out"] < 0.12
        # An exact kernel stands on its floor.
        assert errors["out"] == pytest.approx(found.floor[family]["out"], rel=0.05)
        assert found.detail[family]["out"].worst_row >= found.detail[family]["out"].worst_head >= errors["out"]
    assert found.bound == 0.12
    assert found.declared_error == 0.06
    assert costs.memory_bytes is costs.retained_bytes is costs.gpu is None
    assert found.deterministic is True
    assert found.leak > 0  # one scale for a head, future tokens and all
    assert rows["forward", "wide:bf16"].correctness.leak == 0
    assert rows["training", "wide:bf16>wide:bf16"].correctness.leak is None  # no mask
    assert row.ran["forward"][0] in ("aten::bmm", "aten::matmul")  # what proves the kernel, before what took longer
    assert costs.timer.startswith("perf_counter")
    assert found.truth == "exact attention in FP64 on 2 of 2 (batch, key head) groups"
    assert row.spec == FORWARD.spec
    training = rows["training", "small:fp8>wide:bf16"]
    assert set(training.time_ms) == {"kernel", "prepared", "backward", "call"}
    found = training.correctness
    assert set(found.error["normal"]) == set(found.floor["normal"]) == {"out", "lse", "dq", "dk", "dv"}
    assert found.bound == 0.2
    assert set(training.ran) == {"forward", "backward"}
    assert rows["forward", "wide:bf16"].correctness.floor == {}


@pytest.mark.parametrize(
    ("names", "forward", "training"),
    [
        (["reference:fp32"], {"reference:fp32"}, {"reference:fp32>reference:fp32"}),
        (["wide"], {"wide:bf16"}, {"wide:bf16>wide:bf16"}),
        (["small:fp8"], {"small:fp8"}, {"small:fp8>wide:bf16"}),
        (["small:fp8>reference:fp64"], set(), {"small:fp8>reference:fp64"}),
        (["back"], set(), {"reference:fp64>back:own"}),
        (["back:own"], set(), {"reference:fp64>back:own"}),
        (["many:bf16-7"], {"many:bf16-7"}, {"many:bf16-7"}),
        (["wide", "wide:bf16"], {"wide:bf16"}, {"wide:bf16>wide:bf16"}),
    ],
)
def test_names_keep_plans(names, forward, training):
    def resolve(precision):
        return (FakeForward(f"many:{precision}"),) if precision.startswith("bf16-") else ()

    parts = healthy().backends.values()
    own, many = backend(FakeBackward("back:own")), backend(FakeForward("many:bf16"), resolve=resolve)
    registry = Registry([*parts, own, many])
    tasks = tasks_of([FORWARD, TRAINING], registry, CPU, "fp8", names)
    assert {str(task.plan) for task in tasks if task.case is FORWARD} == forward
    assert {str(task.plan) for task in tasks if task.case is TRAINING} == training
    assert "many:bf16-7" not in {str(task.plan) for task in tasks_of([FORWARD], registry, CPU, "fp8")}


@pytest.mark.parametrize("name", ["wide:bf17", "wide:bf16>wide:bf17", ":", "nobody:fp8"])
def test_names_that_leave_nothing_to_measure_are_reported(name):
    with pytest.raises(MisuseError, match="small:fp8"):
        tasks_of([FORWARD], healthy(), CPU, "bf16", ["small:fp8"])
    with pytest.raises(UnknownBackendError):
        tasks_of([FORWARD], healthy(), CPU, "fp8", [name])


def test_events_count_and_rows_are_on_disk_when_they_are_reported(tmp_path, local_workers):
    lab = setup()
    tasks = tasks_of([FORWARD], lab.registry, CPU, "fp8", ["reference", "absent"])
    runs = {task.key: task.runs for task in tasks}
    assert len(set(runs.values())) == 2  # some can be measured, and some not
    finished = measured = 0
    with Store(tmp_path, lab.environment) as store:
        for event in run_sweep(tasks, [lab], store):
            if isinstance(event, Finished):
                finished += 1
                measured += runs[event.row.key]
                last = store.path.read_text().splitlines()[-1]
                assert last == event.row.to_line()
                assert len(store.path.read_text().splitlines()) == finished
                assert (event.index, event.total) == (measured, sum(runs.values()))
            elif isinstance(event, Started):
                assert (event.index, event.doing.case) == (measured, FORWARD)
    assert isinstance(event, Ended)
    assert set(event.spent) == {"preparing", "timing", "judging"}
    assert sum(event.spent.values()) <= event.seconds
    assert finished == len(tasks)


def test_resuming_another_question_is_refused(whole, rows):
    other = Case("forward", FORWARD.spec.replace(seqlen_q=65, seqlen_kv=65))
    with pytest.raises(MisuseError, match="another spec"):
        swept(whole[1], setup(), [other], resume=True)
    with pytest.raises(MisuseError, match=r"0\.12, not 0\.05"):
        swept(whole[1], setup(max_error=0.05), [FORWARD], resume=True)
    with pytest.raises(MisuseError, match="of 'forward' on normal, outlier, not normal;"):
        swept(whole[1], setup(), [replace(FORWARD, families=("normal",))], resume=True)
    assert swept(whole[1], setup(), [FORWARD], resume=True) == rows


def test_devices_share_the_cases(tmp_path):
    lab = setup()
    cases = [Case(f"case {size}", FORWARD.spec.replace(seqlen_q=size, seqlen_kv=size)) for size in range(8, 12)]
    tasks = tasks_of(cases, lab.registry, CPU, "fp8", ["wide", "absent"])
    with Store(tmp_path, lab.environment) as store:
        events = list(run_sweep(tasks, [lab, lab], store))
        assert {row.key for row in store.rows} == {task.key for task in tasks}
        assert len(store.rows) == len(tasks)
    doing = [event.doing for event in events if isinstance(event, Started)]
    first = [each.phase for each in doing].index("judging")
    assert len({each.case for each in doing[: first + 1]}) == 2  # two cases had begun before one was through


def test_what_is_predicted_to_be_slower_has_a_row_without_times_in_either_part_of_a_sweep(
    local_workers, tmp_path, monkeypatch
):
    lab, here, known = setup(), describe(CPU), Known(())
    cases = [Case(f"case {size}", FORWARD.spec.replace(seqlen_q=size, seqlen_kv=size)) for size in range(8, 11)]
    monkeypatch.setattr(devices, "_FIRST", 1)
    monkeypatch.setattr(
        module, "contenders", lambda spec, plans, *_: {plan: True for plan in plans if plan.forward == "wide:bf16"}
    )
    swept = tasks_of(cases, lab.registry, CPU, "fp8", ["wide", "small"])
    tasks = module.contending(swept, known, lab.registry, here)
    assert not any(task.required for task in tasks)
    assert any(task.required for task in module.contending(swept, known, lab.registry, here, fresh=True))
    with Store(tmp_path, lab.environment) as store:
        list(run_sweep(tasks, [lab], store))
        assert sorted(row.key for row in store.rows) == sorted(task.key for task in tasks)
        rows = {(row.case, row.plan.forward): row for row in store.rows}
    for case in cases:
        assert rows[case.name, "wide:bf16"].status == "ok"
        lost = rows[case.name, "small:fp8"]
        assert (lost.status, dict(lost.time_ms)) == ("slower", {})
        assert "predict" in lost.reason


def test_torchs_default_runs_where_it_is_predicted_to_be_slower(monkeypatch):
    lab, here, known = setup(), describe(CPU), Known(())
    plans = {text: Plan.parse(text) for text in ("wide:bf16", "small:fp8")}
    monkeypatch.setattr(module, "contenders", lambda *_: {plans["wide:bf16"]: True})
    monkeypatch.setattr(module, "torch_default", lambda own, known: plans["small:fp8"])
    tasks = tasks_of([FORWARD], lab.registry, CPU, "fp8", list(plans))
    for fresh in (False, True):
        running = {task.plan for task in module.contending(tasks, known, lab.registry, here, fresh=fresh) if task.runs}
        assert running == {plans["wide:bf16"], *(() if fresh else (plans["small:fp8"],))}


TINY = "- {batch: 1, heads: 1, seqlen_q: 128, head_dim: 128, direction: [forward, training]}\n"


def attnbench(*arguments, code=0):
    return expect("sweep", "--device", "cpu", *arguments, code=code)


@pytest.fixture(autouse=True)
def haste(monkeypatch):
    monkeypatch.setattr(Timer, "for_device", in_haste)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    file = tmp_path_factory.mktemp("cases") / "tiny.yaml"
    file.write_text(TINY)
    return file


def test_json_is_the_records_and_nothing_else_and_the_table_is_kept(tiny, tmp_path):
    names = "emulated:fp8,sdpa-flash:bf16,sdpa-cudnn:bf16"
    asked = "--preset", tiny, "--backends", names, "--format", "json", "--out", tmp_path / "out"
    done = attnbench(*asked)
    rows = [Measurement.model_validate_json(json.dumps(each)) for each in json.loads(done.stdout)]
    assert (tmp_path / "out" / "measurements.jsonl").read_text() == "".join(row.to_line() + "\n" for row in rows)
    status = {str(row.plan): row.status for row in rows if not row.spec.training}
    assert status["emulated:fp8"] == status["sdpa-flash:bf16"] == "ok"
    assert status["sdpa-cudnn:bf16"] in ("unavailable", "refused")
    for row in rows:
        if str(row.plan) == "emulated:fp8":
            assert 0.045 < row.error["normal"]["out"] < 0.06  # what every FP8 kernel measures at D = 128
            assert row.error["outlier"]["out"] > row.error["normal"]["out"]
    table = Table.load(tmp_path / "out" / "table.json")
    assert {(entry.spec, entry.plan, entry.status) for entry in table.entries.values()} == {
        (row.spec, row.plan, row.status) for row in rows
    }
    assert str(tmp_path / "out") in done.stderr
    assert f"[0 of {sum(row.measured for row in rows)} plans measured] " in done.stderr
    assert "sdpa-cudnn" not in done.stderr  # the report names what was refused, once

    misuse = attnbench("--preset", tiny, "--out", tmp_path / "out", code=2)
    assert "--resume" in misuse.stderr
    again = attnbench(*asked, "--resume", "--verbose")
    assert json.loads(again.stdout) == json.loads(done.stdout)
    assert again.stderr.count("there already") == len(rows)


def test_a_table_by_default_and_a_fresh_folder_that_is_named(tiny, own_cache, local_workers):
    done = attnbench("--preset", tiny, "--backends", "sdpa-flash:bf16,sdpa-cudnn:bf16")
    assert "Fastest within its bound: sdpa-flash:bf16" in done.stdout
    assert "Not measured" in done.stdout
    assert str(own_cache) in done.stderr
    assert len(list(own_cache.rglob("measurements.jsonl"))) == 1


def test_a_dry_run_reports_what_would_be_and_writes_nothing(tiny, own_cache):
    done = attnbench("--preset", tiny, "--dry-run", "--format", "json")
    tasks = {(task["case"], task["plan"]): task for task in json.loads(done.stdout)}
    assert {task["spec"]["direction"] for task in tasks.values()} == {"forward", "training"}
    refused = [task for task in tasks.values() if task["status"] != "ok"]
    assert refused
    assert all(task["reasons"] for task in refused)
    assert "measured" in attnbench("--preset", tiny, "--dry-run").stdout
    assert list(own_cache.rglob("*.jsonl")) == []


def test_nothing_measured_is_a_failure_with_its_rows_kept(tiny, tmp_path):
    done = attnbench("--preset", tiny, "--backends", "sdpa-cudnn", "--format", "json", "--out", tmp_path, code=1)
    assert {row["status"] for row in json.loads(done.stdout)} <= {"unavailable", "refused"}
    assert "nothing could be measured" in done.stderr


def test_packed_and_padded_cases_are_swept_reported_and_chosen_by(tmp_path, local_workers):
    file = tmp_path / "documents.yaml"
    file.write_text(
        "- heads: 2\n  head_dim: 64\n  mask: causal\n"
        "  lengths: {distribution: zipf, longest: 96, total: 200, layout: [packed, left-padded, dense, equal]}\n"
    )
    asked = "--preset", file, "--backends", "emulated:fp8-token,sdpa-flash:bf16", "--out", tmp_path / "out"
    done = attnbench(*asked)
    rows = list(read_measurements(tmp_path / "out" / "measurements.jsonl"))
    assert {row.lengths.layout for row in rows} == {"packed", "left-padded", "dense", "equal"}
    assert {row.status for row in rows} == {"ok"}
    assert "Beside it, in times its call:" in done.stdout
    packed = next(row.spec for row in rows if row.lengths.layout == "packed")
    choice = choose(packed, torch.device("cpu"), fp8=True, table=Table.load(tmp_path / "out" / "table.json"))
    assert (str(choice.plan.forward), choice.basis) == ("sdpa-flash:bf16", "measured")
    attnbench(*asked, "--resume")
