"""Every plan has one row with the right status, faults included, and a sweep goes on where it stopped."""

import math

import pytest
import torch
from planted import FAULTS, REFERENCE, FakeBackward, FakeForward, backend, fail, healthy, same

from attnbench.environment import Environment
from attnbench.errors import MisuseError, UnknownBackendError
from attnbench.harness.cases import Case
from attnbench.harness.condense import condense
from attnbench.harness.measure import Laboratory
from attnbench.harness.peaks import PEAK_TFLOPS
from attnbench.harness.store import Store
from attnbench.harness.sweep import Finished, Started, run_sweep, tasks_of
from attnbench.harness.timing import Timer
from attnbench.mask import Mask
from attnbench.plan import Plan
from attnbench.registry import Registry
from attnbench.spec import AttentionSpec

CPU = torch.device("cpu")
FORWARD = Case("forward", AttentionSpec.make(batch=1, heads=2, seqlen_q=64, head_dim=16, mask=Mask(right=0)))
TRAINING = Case("training", AttentionSpec.make(batch=1, heads=2, seqlen_q=32, head_dim=16, direction="training"))


def laboratory(registry, max_error=None):
    timer = Timer(CPU, seconds=0.0, warmup_seconds=0.0, patience=1.0, least=3)
    return Laboratory(CPU, registry, Environment.detect(CPU, registry), timer, max_error)


def rows_of(folder, registry, cases=(FORWARD, TRAINING), names=(), dtype="fp8", max_error=None, resume=False):
    lab = laboratory(registry, max_error)
    tasks = tasks_of(cases, registry, CPU, dtype, names)
    with Store(folder, lab.environment, resume=resume) as store:
        list(run_sweep(tasks, lab, store))
        return {(row.case, str(row.plan)): row for row in store.rows}


def test_every_kernel_has_a_row_for_every_case(tmp_path):
    registry = healthy()
    rows = rows_of(tmp_path, registry)
    assert set(rows) == {(case.name, str(plan)) for case in (FORWARD, TRAINING) for plan in registry.plans(case.spec)}
    for case, kernels in (("forward", registry.forwards), ("training", [*registry.forwards, *registry.backwards])):
        covered = {kernel for name, plan in rows if name == case for kernel in Plan.parse(plan).kernels}
        assert covered == {*kernels}
    status = {plan: row.status for (case, plan), row in rows.items() if case == "forward"}
    assert status == {
        "wide:bf16": "ok",
        "small:fp8": "ok",
        "picky:fp32": "refused",
        "absent:fp8": "unavailable",
        "reference:fp64": "ok",
        "reference:fp32": "ok",
    }
    assert "fp32 tensors, not bf16" in rows["forward", "picky:fp32"].reason
    assert "the package is not installed" in rows["forward", "absent:fp8"].reason


def test_a_row_holds_times_errors_floors_and_conditions(tmp_path):
    rows = rows_of(tmp_path, healthy(), names=["small", "wide"])
    row = rows["forward", "small:fp8"]
    assert set(row.time_ms) == {"kernel", "prepared", "call"}
    assert all(len(samples) >= 3 for samples in row.time_ms.values())
    assert set(row.error) == set(row.floor) == {"normal", "outlier"}
    for family, errors in row.error.items():
        assert 0.02 < row.floor[family]["out"] < 0.12
        assert errors["out"] == pytest.approx(row.floor[family]["out"], rel=0.05)  # an exact kernel stands on its floor
    assert row.bound == 0.12
    assert row.declared_error == 0.06
    assert row.memory_bytes is None
    assert "aten::bmm" in row.ran["forward"] or "aten::matmul" in row.ran["forward"]
    assert row.timer.startswith("perf_counter")
    assert row.truth == "exact attention in FP64 on 2 of 2 (batch, key head) groups"
    assert row.spec == FORWARD.spec
    training = rows["training", "small:fp8>wide:bf16"]
    assert set(training.time_ms) == {"kernel", "prepared", "backward", "call"}
    assert set(training.error["normal"]) == set(training.floor["normal"]) == {"out", "lse", "dq", "dk", "dv"}
    assert training.bound == 0.2
    assert set(training.ran) == {"forward", "backward"}
    assert rows["forward", "wide:bf16"].floor == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_gets_its_status_and_costs_its_own_row_alone(tmp_path, fault):
    kernel, status, reason = FAULTS[fault]
    registry = Registry([REFERENCE, backend(kernel), backend(FakeForward("good:bf16"))])
    rows = rows_of(tmp_path, registry, [FORWARD])
    row = rows["forward", kernel.name]
    assert row.status == status
    assert reason in row.reason
    assert "\n" not in row.reason
    assert bool(row.time_ms) == bool(row.error) == (status == "inaccurate")
    assert rows["forward", "good:bf16"].status == "ok"


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [(lambda dq: dq * 1.05, "inaccurate", "dq on"), (lambda dq: dq * math.nan, "inaccurate", "infinite"),
     (fail(RuntimeError("no")), "error", "RuntimeError: no"), (same, "ok", None)],
)  # fmt: skip
def test_faults_of_a_backward(tmp_path, change, status, reason):
    registry = Registry([REFERENCE, backend(FakeForward("bad:bf16"), FakeBackward("bad:bf16", change))])
    row = rows_of(tmp_path, registry, [TRAINING])["training", "bad:bf16>bad:bf16"]
    assert row.status == status
    assert row.reason is None if reason is None else reason in row.reason


def test_a_time_that_cannot_be_is_an_error_and_a_possible_one_a_share(tmp_path, monkeypatch):
    device = Environment.detect(CPU, healthy()).device_name
    for folder, peak in {"slow": 1e-9, "fast": 1e3}.items():
        monkeypatch.setitem(PEAK_TFLOPS, device, {"bf16": peak})
        row = rows_of(tmp_path / folder, healthy(), [FORWARD])["forward", "wide:bf16"]
        if folder == "slow":
            assert row.status == "error"
            assert "of the device's peak" in row.reason
        else:
            assert row.status == "ok"
            assert 0 < row.peak_share < 1


def test_an_error_row_still_says_what_ran(tmp_path):
    kernel, *_ = FAULTS["another kernel"]
    row = rows_of(tmp_path, Registry([REFERENCE, backend(kernel)]), [FORWARD])["forward", "bad:bf16"]
    assert row.status == "error"
    assert any(name in row.reason for name in row.ran["forward"])


def test_a_case_too_large_for_the_machine_costs_its_own_rows(tmp_path):
    huge = Case("huge", AttentionSpec.make(batch=2**20, heads=2**10, seqlen_q=2**12, head_dim=128))
    rows = rows_of(tmp_path, healthy(), [huge, FORWARD])
    assert rows["huge", "wide:bf16"].status == "oom"
    assert rows["huge", "absent:fp8"].status == "unavailable"
    assert rows["forward", "wide:bf16"].status == "ok"


def test_max_error_is_the_bound_of_fp8_plans_alone(tmp_path):
    rows = rows_of(tmp_path, healthy(), [FORWARD], max_error=0.011)
    assert rows["forward", "small:fp8"].status == "inaccurate"
    assert "beyond 0.011" in rows["forward", "small:fp8"].reason
    assert rows["forward", "wide:bf16"].bound == 0.01


def test_a_sweep_of_a_wider_type_leaves_fp8_out(tmp_path):
    case = Case("wide", FORWARD.spec.replace(dtype="fp32"))
    rows = rows_of(tmp_path, healthy(), [case], dtype="fp32")
    assert {plan for _, plan in rows} == {"wide:bf16", "picky:fp32", "reference:fp64", "reference:fp32"}
    assert rows["wide", "picky:fp32"].status == "ok"


@pytest.mark.parametrize(
    ("names", "forward", "training"),
    [
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


@pytest.mark.parametrize("name", ["wid", "wide:bf17", "wide:bf16>wide:bf17", "wide:bf16>", ":", "nobody:fp8"])
def test_unknown_names_are_said(name):
    with pytest.raises(UnknownBackendError):
        tasks_of([FORWARD], healthy(), CPU, "fp8", [name])


def test_nothing_left_to_measure_is_misuse():
    with pytest.raises(MisuseError, match="small:fp8"):
        tasks_of([FORWARD], healthy(), CPU, "bf16", ["small:fp8"])


def test_events_count_and_rows_are_on_disk_when_they_are_told(tmp_path):
    registry = healthy()
    lab = laboratory(registry)
    tasks = tasks_of([FORWARD], registry, CPU, "fp8")
    with Store(tmp_path, lab.environment) as store:
        for event in run_sweep(tasks, lab, store):
            assert event.total == len(tasks)
            if isinstance(event, Finished):
                last = store.path.read_text().splitlines()[-1]
                assert last == event.row.to_line()
                assert len(store.path.read_text().splitlines()) == event.index
            else:
                assert isinstance(event, Started)
                assert event.task == tasks[event.index - 1]


def test_what_was_measured_is_not_measured_again(tmp_path):
    registry = healthy()
    before = rows_of(tmp_path, registry, [FORWARD])
    runs = []
    registry.forward("wide:bf16").change = lambda out: (runs.append(1), out)[1]
    after = rows_of(tmp_path, registry, resume=True)
    assert {key: after[key] for key in before} == before
    assert {case for case, _ in after} == {"forward", "training"}
    assert len(rows_of(tmp_path, registry, resume=True)) == len(after)
    assert runs


def test_resuming_another_question_is_refused(tmp_path):
    registry = healthy()
    before = rows_of(tmp_path, registry, [FORWARD])
    other = Case("forward", FORWARD.spec.replace(seqlen_q=65, seqlen_kv=65))
    with pytest.raises(MisuseError, match="another spec"):
        rows_of(tmp_path, registry, [other], resume=True)
    with pytest.raises(MisuseError, match=r"0\.12, not 0\.05"):
        rows_of(tmp_path, registry, [FORWARD], resume=True, max_error=0.05)
    assert rows_of(tmp_path, registry, [FORWARD], resume=True) == before


def test_interrupting_leaves_what_was_written(tmp_path):
    registry = healthy()
    lab = laboratory(registry)

    def interrupt(_):
        raise KeyboardInterrupt

    registry.forward("small:fp8").change = interrupt
    with Store(tmp_path, lab.environment) as store, pytest.raises(KeyboardInterrupt):
        list(run_sweep(tasks_of([FORWARD], registry, CPU, "fp8", ["wide", "small"]), lab, store))
    registry.forward("small:fp8").change = same
    rows = rows_of(tmp_path, registry, [FORWARD], ["wide", "small"], resume=True)
    assert [row.status for row in rows.values()] == ["ok", "ok"]


def test_rows_are_condensed_to_what_is_chosen_by(tmp_path):
    rows = rows_of(tmp_path, healthy(), [TRAINING])
    entries = {str(entry.plan): entry for entry in condense(rows.values())}
    assert len(entries) == len(rows)
    row, entry = rows["training", "small:fp8>wide:bf16"], entries["small:fp8>wide:bf16"]
    low, middle, high = sorted(row.time_ms["call"])
    assert entry.time_ms == middle
    assert entry.spread_ms == pytest.approx((high - low) / 2)
    assert set(entry.errors) == {"normal", "outlier"}
    refused = entries["absent:fp8>wide:bf16"]
    assert (refused.status, refused.time_ms, refused.spread_ms, refused.errors) == ("unavailable", None, None, {})
    assert "not installed" in refused.reason


@pytest.mark.parametrize("worst", ["out", "dq", "dk", "dv"])
def test_the_error_chosen_by_is_the_worst_of_out_and_gradients(tmp_path, worst):
    row = rows_of(tmp_path, healthy(), [TRAINING], ["small"])["training", "small:fp8>wide:bf16"]
    errors = {**dict.fromkeys(("out", "dq", "dk", "dv"), 0.1), "lse": 0.9, worst: 0.2}
    (entry,) = condense([row.model_copy(update={"error": {"normal": errors}})])
    assert entry.errors == {"normal": 0.2}
