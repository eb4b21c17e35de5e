"""The conformance suite on a GPU: installed backends pass, and what only a GPU shows is found by name."""

import pytest
import torch
from torch import Tensor

from attnbench.capabilities import Capabilities
from attnbench.kernel import Availability, Backend, ForwardKernel, Operands, Result
from attnbench.registry import Registry, registry
from attnbench.spec import AttentionSpec
from attnbench.testing import Report, check_backend
from attnbench.testing.faults import Late

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
]


def check(kernel: ForwardKernel) -> Report:
    name = kernel.name.partition(":")[0]
    mine = Backend(name, "a test's", lambda: Availability(version="1"), (kernel,))
    return check_backend(name, "cuda", known=Registry([*registry().backends.values(), mine]))


class OwnStream(ForwardKernel):
    """Computes on a stream of its own and joins the legacy default stream alone, not the caller's."""

    name = "own-stream:fp32"
    declared_error = 0.004
    rows = {"cuda": Capabilities(dtypes=("bf16",))}  # noqa: RUF012

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Operands:
        return registry().forward("reference:fp32").prepare(q, k, v, spec)

    def run(self, operands: Operands) -> Result:
        stream = torch.cuda.Stream()
        torch.cuda.default_stream().synchronize()
        with torch.cuda.stream(stream):
            result = registry().forward("reference:fp32").run(operands)
        stream.synchronize()
        return result


@pytest.mark.parametrize("name", [name for name in registry().backends if name != "emulated"])
def test_an_installed_backend_conforms(name: str) -> None:
    if reason := registry().availability(name).reason:
        pytest.skip(reason)
    report = check_backend(name, "cuda")
    if not any(each.outcome != "skipped" for each in report.findings):
        pytest.skip("it has no kernel for this GPU")
    assert report.ok, str(report)


def test_work_on_a_stream_of_its_own_is_found() -> None:
    assert "stream" in {each.check for each in check(OwnStream()).failures}


def test_a_result_that_comes_late_is_found() -> None:
    assert not check(Late("fp8-late")).ok
