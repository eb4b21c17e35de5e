"""The conformance suite on a GPU: installed backends pass, and faults that only a GPU shows are reported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnbench.kernels.capabilities import Capabilities
from attnbench.kernels.contract import Availability, Backend, ForwardKernel, Inputs, Operands, Result
from attnbench.kernels.registry import Registry, registry
from attnbench.problem.spec import AttentionSpec
from attnbench.testing import Report, check_backend
from attnbench.testing.conformance import suite
from attnbench.testing.conformance.checks import CHECKS
from attnbench.testing.faults import Late


def check(kernel: ForwardKernel) -> Report:
    name = kernel.name.partition(":")[0]
    mine = Backend(name, "a test's", lambda: Availability(version="1"), (kernel,))
    return check_backend(name, "cuda", known=Registry([*registry().backends.values(), mine]))


class FaultyForward(ForwardKernel):
    """``reference:fp32`` with a fault on a GPU."""

    declared_error = 0.004
    rows = {"cuda": Capabilities(dtypes=("bf16",))}  # noqa: RUF012

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        return registry().forward("reference:fp32").prepare(inputs, spec)


class OwnStream(FaultyForward):
    """Computes on a stream of its own and joins the legacy default stream alone, not the caller's."""

    name = "own-stream:fp32"

    def run(self, operands: Operands) -> Result:
        stream = torch.cuda.Stream()
        torch.cuda.default_stream().synchronize()
        with torch.cuda.stream(stream):
            result = registry().forward("reference:fp32").run(operands)
        stream.synchronize()
        return result


class StaleGraph(FaultyForward):
    """Captures a graph with the tensors of an earlier call, which every replay then reads."""

    name = "frozen:fp32"
    before: Operands | None = None

    def run(self, operands: Operands) -> Result:
        if not torch.cuda.is_current_stream_capturing():
            self.before = Operands(operands.spec, *(x.clone() for x in operands.tensors()))
        elif self.before is not None:
            operands = self.before
        return registry().forward("reference:fp32").run(operands)


class GivesUpWaiting(FaultyForward):
    """Stops waiting after 1.5 times its time alone, and then returns an unfinished output."""

    name = "hasty:fp32"
    usual: float | None = None

    def run(self, operands: Operands) -> Result:
        begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begins.record()
        torch.cuda._sleep(5_000_000)  # cycles: some 3 ms, in which another process has the GPU as well
        ends.record()
        ends.synchronize()
        took = begins.elapsed_time(ends)
        self.usual = took if self.usual is None else min(took, self.usual)
        out, lse, state = registry().forward("reference:fp32").run(operands)
        return Result(out if took < 1.5 * self.usual else torch.zeros_like(out), lse, state)


@pytest.mark.parametrize("name", [name for name in registry().backends if name != "emulated"])
def test_an_installed_backend_conforms(name: str, tmp_path: Path) -> None:
    """Run in a separate process: a failed graph capture or a crash makes a process unusable for the next backend."""
    if reason := registry().availability(name).reason:
        pytest.skip(reason)
    command = [sys.executable, "-m", "attnbench", "check", name, "--device", "cuda", "-o", str(tmp_path / "report.md")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    print(f"{run.stdout}{run.stderr}")
    if re.search(r"^0 passed, 0 failed", run.stdout, re.MULTILINE):
        pytest.skip("it has no kernel for this GPU")
    assert run.returncode == 0
    assert torch.cuda.get_device_name(0) in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_work_on_an_unsynchronised_stream_is_found() -> None:
    assert "stream" in {each.check for each in check(OwnStream()).failures}


def test_a_late_result_is_found() -> None:
    assert not check(Late("fp8-late")).ok


def test_a_fault_caused_by_a_neighbour_process_is_found() -> None:
    assert "shared GPU" in {each.check for each in check(GivesUpWaiting()).failures}


def test_a_graph_that_ignores_new_values_is_found() -> None:
    assert {each.check for each in check(StaleGraph()).failures} == {"CUDA graph"}


@pytest.mark.parametrize(
    ("plan", "found"), [("triton:fp8>triton:fp8-all", "dv of 131072"), ("fa3:fp8", "out of 32768")]
)
def test_undeclared_error_growth_is_found(plan: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry()
    kernels = [known.forward(plan.partition(">")[0]), *([known.backward("triton:fp8-all")] if ">" in plan else [])]
    if reason := known.availability(plan.partition(":")[0]).reason:
        pytest.skip(reason)
    monkeypatch.setattr(suite, "CHECKS", tuple(each for each in CHECKS if each.name == "growth"))
    for kernel in kernels:
        monkeypatch.setattr(kernel, "error_growth", 1.0)
    assert check_backend(plan, "cuda").failures[0].detail.startswith(found)
