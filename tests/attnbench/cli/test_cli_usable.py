"""What doctor and backends say can run here, and which commands they advise: none that would not help."""

import json

import pytest
import torch
from command_line import attnbench

from attnbench.cli.backends import describe_backend
from attnbench.cli.usable import command_for, obstacle
from attnbench.kernels.capabilities import Capabilities, Device
from attnbench.kernels.contract import Availability, Backend, ForwardKernel
from attnbench.kernels.registry import Registry, registry

CPU, OLD, NEW = Device("cpu", "CPU"), Device("cuda", "an old GPU", (7, 0)), Device("cuda", "a new GPU", (9, 0))
WITHOUT_CUDA = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")


class Hopper(ForwardKernel):
    """Asks its package when it is asked for more than its row says."""

    name, declared_error = "vendor:fp8", 0.1

    def __init__(self, further=()):
        self.rows = {"cuda": Capabilities(dtypes=("bf16", "e4m3"), capability=(9, 0))}
        self.further = further

    def further_refusals(self, spec, device):
        return list(self.further)

    def prepare(self, inputs, spec):
        raise NotImplementedError

    def run(self, operands):
        raise NotImplementedError


def vendor(*kernels, **answer):
    return Registry([Backend("vendor", "", lambda: Availability(**answer), kernels)])


def asked(known, here):
    backend = known.backends["vendor"]
    return obstacle(known, backend, here), command_for(known, backend, here)


def test_a_command_is_advised_where_it_helps_and_nowhere_else():
    missing = {"reason": "vendor is not installed", "install": "pip install vendor"}
    known = vendor(Hopper(["the package would have to be there to know"]), **missing)
    assert asked(known, NEW) == (None, "pip install vendor")
    reason, command = asked(known, OLD)
    assert "compute capability 9.0" in reason
    assert command is None
    limits = {here: describe_backend(known, "vendor", here)["kernels"][0]["here"][0] for here in (OLD, NEW)}
    assert limits == {OLD: "not on compute capability 7.0", NEW: "takes bf16/e4m3"}
    assert asked(known, CPU) == ("has no kernel for cpu", None)
    assert asked(vendor(**missing), CPU) == (None, "pip install vendor")  # a plug-in that could not be loaded


@WITHOUT_CUDA
def test_doctor_without_a_gpu_advises_no_command_that_cannot_help():
    report = json.loads(attnbench("doctor", "--format", "json").stdout)
    assert [each["install"] for each in report["findings"] if each["install"]] == ["attnbench sweep"]
    assert "pip install" not in report["verdict"]
    (others,) = (each for each in report["findings"] if each["name"] == "other backends")
    assert {"fa3", "te", "sdpa-cudnn"} <= set(others["detail"].partition(":")[0].split(", "))
    assert "NVIDIA GPU" in others["detail"]


@pytest.mark.skipif(registry().availability("flex").reason is not None, reason="FlexAttention is not here")
def test_doctor_calls_what_refuses_everything_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("attnbench.backends.flex.backend.compiler_reason", lambda device_type: "no compiler")
    report = json.loads(attnbench("doctor", "--format", "json").stdout)
    (found,) = (each for each in report["findings"] if each["name"] == "flex")
    assert (found["status"], found["detail"]) == ("missing", "cannot run here: no compiler")
    assert "flex" not in report["usable"]
    assert "flex" not in report["verdict"]
