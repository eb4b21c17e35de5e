"""check_backend: correct backends pass, each fault is reported by its check, compiling specs are rehearsed, and the
exact attention of a few rows is that of all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conforming import ROW, Backward, Forward
from logging_kernel import LOG_FILE, LoggingForward
from logging_kernel import registry as noting
from nonconforming import BACKWARDS, FORWARDS, ShortAccumulator

from attnbench import AttentionSpec, Mask
from attnbench.backends.emulated import BACKEND as EMULATED
from attnbench.backends.emulated import emulate
from attnbench.backends.emulated_arithmetic import Accumulator
from attnbench.backends.reference import BACKEND as REFERENCE
from attnbench.choosing import selector
from attnbench.errors import AttnbenchError, UnknownBackendError
from attnbench.harness.cases.inputs import draw
from attnbench.harness.sweep import worker_pool
from attnbench.kernels.capabilities import Capabilities
from attnbench.kernels.contract import Availability, Backend, BackwardKernel, ForwardKernel, Operands, Result
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry
from attnbench.tables.environment import Environment
from attnbench.tables.user_table import Known
from attnbench.testing import Finding, Report, check_backend, sampled_truth
from attnbench.testing.conformance import one_check, suite
from attnbench.testing.conformance.checks import CHECKS, Check
from attnbench.testing.conformance.one_check import FEW, specs_for
from attnbench.testing.conformance.rehearsal import Setting, rehearse
from attnbench.testing.conformance.subject import Subject, exact_of, truth_of


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors do not benefit from threads, which wait for one another on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(*kernels: ForwardKernel | BackwardKernel) -> Report:
    found = Availability(version="1")
    return check_backend(
        "mine", "cpu", known=Registry([REFERENCE, Backend("mine", "a test's", lambda: found, kernels)]), quiet=True
    )


@cache
def examine(name: str) -> Report:
    return check(FORWARDS[name][0]()) if name in FORWARDS else check(*BACKWARDS[name][0]())


@pytest.mark.parametrize("name", [*FORWARDS, *BACKWARDS])
def test_each_planted_fault_is_reported_by_its_check(name: str) -> None:
    _, expected, message = (FORWARDS | BACKWARDS)[name]  # type: ignore[operator]
    report = examine(name)
    assert [each.check for each in report.failures] == [expected], str(report)
    (failure,) = report.failures
    assert message in failure.detail
    assert failure.look
    assert not report.ok


@pytest.mark.parametrize("check", [each for each in CHECKS if each.batch], ids=lambda each: each.name)
def test_one_of_few_checked_specs_has_sequences_without_queries_or_keys(check: Check) -> None:
    known = Registry([REFERENCE, Backend("mine", "", lambda: Availability(version="1"), (Forward(), Backward()))])
    for seed in range(12):
        subject = Subject(Plan(Forward.name, Backward.name), torch.device("cpu"), known, seed)
        specs = one_check.specs_for(subject, check, one_check.FEW)
        assert [spec.seqlen_q == spec.seqlen_kv for spec in specs] in ([True, False], [False, True]), seed


def test_every_check_that_runs_on_a_cpu_has_a_planted_fault() -> None:
    named = {expected for _, expected, _ in (*FORWARDS.values(), *BACKWARDS.values())}
    assert named == {each.name for each in CHECKS if each.on is None}


def test_a_correct_backend_passes_every_check_on_a_cpu() -> None:
    report = check(Forward(), Backward())
    assert report.ok, str(report)
    passed = {each.check for each in report.findings if each.outcome == "passed"}
    assert passed == {each.name for each in CHECKS if each.on is None}
    assert {each.check for each in report.findings if each.outcome == "skipped"} == {
        "stream", "shared GPU", "CUDA graph",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "sdpa-math:bf16",
        pytest.param("emulated:fp8-token-hadamard", marks=pytest.mark.exhaustive),
        pytest.param("reference:fp32", marks=pytest.mark.exhaustive),
        pytest.param("emulated:fp8", marks=pytest.mark.exhaustive),
    ],
)
def test_our_own_kernels_conform(name: str) -> None:
    report = check_backend(name, "cpu", quiet=True)
    assert report.ok, str(report)


@pytest.fixture
def growth_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "CHECKS", tuple(each for each in CHECKS if each.name == "growth"))


@pytest.mark.usefixtures("growth_alone")
@pytest.mark.parametrize(
    ("promote", "growth", "ok"),
    [(None, 1.0, False), pytest.param(None, 2.0, True, marks=pytest.mark.exhaustive), (128, 1.0, True)],
)
def test_errors_of_hoppers_accumulator_grow_unless_it_is_promoted(
    promote: int | None, growth: float, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, _ = emulate(accumulator=Accumulator(13, promote))
    monkeypatch.setattr(forward, "error_growth", growth)
    known = Registry([REFERENCE, replace(EMULATED, kernels=(forward,), resolve=None)])
    assert check_backend("emulated", "cpu", known=known, quiet=True).ok is ok


@pytest.mark.usefixtures("growth_alone")
def test_errors_of_sums_over_queries_grow_with_their_number() -> None:
    (failure,) = check(Forward(), ShortAccumulator()).failures
    assert failure.plan == "mine:fp64>mine:fp64"
    assert failure.detail.startswith("dv of 2048 tokens is off by 0.03")


@pytest.mark.usefixtures("growth_alone")
def test_a_kernel_without_declared_error_growth_is_not_checked_with_many_keys() -> None:
    class WithoutGrowth(Forward):
        name = "mine:fp8"

    (found,) = check(WithoutGrowth()).findings
    assert (found.outcome, found.detail) == ("skipped", "the plan declares no error_growth")


def test_a_backward_may_serve_fewer_specs_than_its_forward() -> None:
    """Specs that only the forward serves, such as FP8 tensors, do not run the backward."""

    class Narrow(Backward):
        rows: Mapping[str, Capabilities] = {"cpu": replace(ROW, head_dims=(8, 16, 8))}

    report = check(Forward(), Narrow())
    assert not [each for each in report.failures if each.check == "refusals"], str(report)


@pytest.mark.parametrize("after", [1, 26, 100])
def test_a_kernel_that_loses_the_gpu_is_reported_with_its_spec_and_ends_the_run(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also during the reduction of a failing spec: the 26th run, after 22 runs that are not checked."""
    ran: list[AttentionSpec] = []

    class LosesGpu(Forward):
        def run(self, operands: Operands) -> Result:
            assert len(ran) < after, "asked although the GPU is lost"
            ran.append(operands.spec)
            result = super().run(operands)
            return Result(result.out * 2, result.lse) if after == 26 else result

    reason = "AcceleratorError: CUDA error: an illegal memory access was encountered"
    monkeypatch.setattr(one_check, "_device_error", lambda device: reason if len(ran) >= after else None)
    report = check(LosesGpu())
    (failure,) = report.failures
    assert failure.detail.endswith(reason)
    assert failure.spec == ran[-1]
    later = report.findings[report.findings.index(failure) + 1 :]
    assert later
    assert all(each.outcome == "skipped" and failure.check in each.detail for each in later)


def test_findings_are_printed_as_they_arrive(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Finding("mine", "first", "passed", "one"), Finding("mine", "second", "failed", "two", look="here")]
    monkeypatch.setattr(suite, "run_check", Mock(side_effect=[*found, KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):
        check_backend("reference:fp32", "cpu")
    printed = capsys.readouterr().out
    assert re.search(
        r"reference:fp32 .* on .*\n(.*\n)+mine\n  passed +first +one\n  FAILED +second +two\n +look at +here\n$",
        printed,
    )


def test_an_unavailable_backend_is_an_error_with_the_reason() -> None:
    gone = Backend("mine", "", lambda: Availability(reason="no such wheel", install="pip install it"), (Forward(),))
    with pytest.raises(AttnbenchError, match="no such wheel; add it with: pip install it"):
        check_backend("mine", "cpu", known=Registry([REFERENCE, gone]))
    with pytest.raises(UnknownBackendError):
        check_backend("nobody", "cpu")


def test_a_backend_that_refuses_everything_does_not_pass() -> None:
    kernel = Forward()
    kernel.rows = {"cuda": ROW}
    report = check(kernel)
    assert not report.failures
    assert not report.ok


def test_the_users_own_table_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(return_value=Known())
    monkeypatch.setattr(selector, "known_tables", read)
    monkeypatch.setattr(suite, "CHECKS", tuple(each for each in CHECKS if each.name == "refusals"))
    assert check(Forward()).ok
    read.assert_not_called()


CPU = torch.device("cpu")
MINE = Backend("mine", "a test's", lambda: Availability(version="1"), (Forward(), Backward()), compiles=True)


def test_specs_are_rehearsed_in_other_processes_even_if_one_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG_FILE, str(tmp_path / "noted"))
    monkeypatch.setattr(worker_pool, "usable_cores", lambda: 2)
    subject = Subject(Plan(LoggingForward.name), CPU, noting(), seed=3)
    rehearse([subject], Setting(CPU, 3, "logging_kernel:registry"), 2**33)
    lines = [line.partition(" ") for line in (tmp_path / "noted").read_text().splitlines()]
    assert str(os.getpid()) not in {process for process, _, _ in lines}
    assert (tmp_path / "noted.ended").exists()
    ran = {spec for _, _, spec in lines}
    one_each = [
        each for each in CHECKS if each.on is None and not (each.mixed or each.specs or each.only == "training")
    ]
    compiled = [each for each in one_each if each.name not in ("refusals", "descales")]  # which runs no such spec
    assert len(compiled) > 15
    assert {str(spec) for each in compiled for spec in specs_for(subject, each, FEW)} <= ran
    growth = next(each for each in CHECKS if each.name == "growth")
    assert not {str(spec) for spec in specs_for(subject, growth, FEW)} & ran


@pytest.mark.parametrize(
    ("device", "compiles", "given", "rehearsed"),
    [
        ("cuda", True, False, True),
        ("cpu", True, False, False),
        ("cuda", False, False, False),
        ("cuda", True, True, False),
    ],
)
def test_only_installed_backends_that_compile_for_a_gpu_are_rehearsed(
    device: str, compiles: bool, given: bool, rehearsed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Registry([REFERENCE, replace(MINE, compiles=compiles)])
    asked: list[tuple[list[Plan], Setting]] = []

    def note(subjects: Sequence[Subject], setting: Setting, memory_bytes: int | None) -> None:
        asked.append(([each.plan for each in subjects], setting))

    monkeypatch.setattr(suite, "rehearse", note)
    monkeypatch.setattr(suite, "installed", lambda: known)
    monkeypatch.setattr(suite.devices, "find", lambda name: torch.device(name))
    here = Environment.detect(CPU, known)
    monkeypatch.setattr(suite.Environment, "detect", lambda *_: here)
    monkeypatch.setattr(suite, "_findings", lambda *_: iter(()))
    check_backend("mine", device, seed=5, known=known if given else None, quiet=True)
    plans = [Plan(Forward.name), Plan(Forward.name, Backward.name)]
    assert asked == ([(plans, Setting(torch.device(device), 5))] if rehearsed else [])


# --- exact attention of a few rows ---

MASKS = (Mask(), Mask(right=0), Mask(right=0, alignment="bottom-right"), Mask(3, 20))
SPECS = [
    AttentionSpec.make(
        batch=2, heads=4, kv_heads=2, seqlen_q=queries, seqlen_kv=keys, head_dim=8, mask=mask, softcap=2.0,
        direction="training",
    )
    for mask in MASKS
    for queries, keys in ((5, 5), (97, 97), (16, 130), (130, 16), (61, 130))
]  # fmt: skip


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.has_empty_rows], ids=str)
def test_sampled_rows_equal_those_of_the_full_result(spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_truth, "_SCORES", {"cpu": 2000})  # several slices of queries
    inputs = draw(spec, "normal", CPU)
    whole = truth_of(Subject(None, CPU, Registry([REFERENCE])), spec, inputs)
    found = sampled_truth.sampled_truth(spec, inputs, 16)
    assert found.keys() == {"out", "dq", "dk", "dv"}
    for name, value in found.items():
        torch.testing.assert_close(
            value, sampled_truth.sampled(name, exact_of(whole, name), 16), rtol=1e-11, atol=1e-13
        )
