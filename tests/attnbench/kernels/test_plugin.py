"""A third party's backend: the example, installed for real, and plug-ins that are broken or ill-mannered."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run, attnbench
from patience import PATIENCE
from places import ROOT
from torch import Tensor

from attnbench import AttentionSpec, Plan, attention
from attnbench.errors import RefusedError
from attnbench.kernels.registry import registry
from attnbench.state import forget
from attnbench.tables.binding import Binding
from attnbench.tables.environment import Environment
from attnbench.tables.table import Entry, Table

CPU = torch.device("cpu")
EXAMPLE = ROOT / "examples" / "attnbench-backend-example"


LIST = ("backends", "--device", "cpu", "--format", "json")


def look_again() -> None:
    """Look for installed backends at the next question, as a new process does."""
    registry.cache_clear()
    forget()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The next test finds the backends that are installed without those of this one."""
    yield
    look_again()


def by_name(listed: Run) -> dict[str, Any]:
    """What ``attnbench backends`` says."""
    assert listed.returncode == 0, listed.stderr
    return {each["name"]: each for each in json.loads(listed.stdout)["backends"]}


def plug_in(site: Path, name: str, module: str, source: str) -> None:
    """A distribution as pip lays it down, with one module and one entry point."""
    (site / f"{module}.py").write_text(source)
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[attnbench.backends]\n{name} = {module}:BACKEND\n")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the example."""
    source, target = tmp_path_factory.mktemp("source") / "example", tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE, source)
    command = ["pip", "install", "--no-deps", "--no-build-isolation", "--target", str(target), str(source)]
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, on the path of this process and of those that it starts."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    look_again()
    return site


def answers(backend: str, dtype: torch.dtype, tensors: list[Tensor], grad: Tensor, **arguments: Any) -> list[Tensor]:
    q, k, v = (x.to(dtype).requires_grad_() for x in tensors)
    out, lse = attention(q, k, v, backend=backend, return_lse=True, **arguments)
    return [out.detach(), lse, *torch.autograd.grad(out, (q, k, v), grad.to(dtype))]


@pytest.mark.parametrize(
    ("q_len", "kv_len", "kv_heads", "arguments"),
    [
        (64, 64, 4, {}),
        (33, 57, 1, {"is_causal": True, "causal_alignment": "bottom-right"}),
        (57, 33, 2, {"is_causal": True, "scale": 0.3}),
    ],
)
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_example_computes_attention_and_its_gradients(
    installed: Path, precision: str, dtype: torch.dtype, q_len: int, kv_len: int, kv_heads: int, arguments: Any
) -> None:
    shapes = [(2, 4, q_len, 16), (2, kv_heads, kv_len, 16), (2, kv_heads, kv_len, 24)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    grad = torch.randn(2, 4, q_len, 24).to(dtype)
    name = f"naive:{precision}"
    found = answers(f"{name}>{name}", dtype, tensors, grad, **arguments)
    truth = answers("reference:fp64>reference:fp64", torch.float64, tensors, grad, **arguments)
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]
    assert 0 < max(errors) < registry().forward(name).declared_error


def test_the_example_is_swept_like_any_backend(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("- {batch: 1, heads: 2, seqlen_q: 32, head_dim: 16, direction: training}\n")
    sweep = ("sweep", "--dtype", "bf16", "--preset", tmp_path / "one.yaml", "--backends", "naive", "--device", "cpu")
    done = attnbench(*sweep, "--out", tmp_path / "out", "--format", "json")
    assert done.returncode == 0, done.stderr
    rows = {row["plan"]: row for row in json.loads(done.stdout)}
    assert rows["naive:bf16>naive:bf16"]["status"] == "ok"


CONTRACT = "from attnbench.kernels.contract import Availability, Backend\n"
BROKEN = {
    "brittle": ("import a_library_that_is_not_there\n", "No module named 'a_library_that_is_not_there'"),
    "wrong": ("BACKEND = 'not a backend'\n", "wrong_plugin:BACKEND"),
    "moody": (CONTRACT + "BACKEND = Backend('moody', 'raises', lambda: 1 / 0, ())\n", "ZeroDivisionError"),
    "alien": (
        CONTRACT + "BACKEND = Backend('alien', 'built on another', Availability, (), built_on=('cutlass',))\n",
        "a backend can be built on cudnn or triton, not on 'cutlass'",
    ),
}


def test_a_plug_in_that_cannot_be_imported_costs_its_own_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, (source, _) in BROKEN.items():
        plug_in(tmp_path, name, f"{name}_plugin", source)
    monkeypatch.syspath_prepend(tmp_path)
    look_again()
    found, doctor = by_name(attnbench(*LIST)), attnbench("doctor")
    for name, (_, reason) in BROKEN.items():
        assert not found[name]["available"]
        assert reason in found[name]["reason"]
    assert found["reference"]["available"]
    assert doctor.returncode == 0
    assert "a_library_that_is_not_there" in doctor.stdout


# A backend that declares what attnbench cannot know of it: Triton compiles it, and what its operands are in FP8.
DECLARING = """
from attnbench.kernels.contract import Availability, Backend, ForwardKernel, Operands, Result
from attnbench.kernels.registry import registry
from attnbench.kernels.capabilities import Capabilities
from attnbench.problem.fp8 import Recipe, quantise

class Forward(ForwardKernel):
    rows = {"cpu": Capabilities(dtypes=("bf16",))}
    declared_error = 0.1

    def __init__(self, name, leaves):
        self.name, self.leaves = name, leaves

    def prepare(self, inputs, spec):
        return Operands(spec, *(quantise(x.detach(), Recipe("token")) for x in inputs.unquantised()))

    def run(self, operands):
        return registry().forward("reference:fp32").run(Operands(operands.spec, *operands.tensors()))

BACKEND = Backend("mine", "a third party's", lambda: Availability(version="1.0"),
                  (Forward("mine:fp8", "e4m3"), Forward("mine:fp8-odd", None)), built_on=("triton",))
"""


@pytest.fixture
def declaring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(tmp_path, "mine", "mine_plugin", DECLARING)
    monkeypatch.syspath_prepend(tmp_path)
    look_again()


def test_what_a_third_party_is_built_on_binds_its_entries(declaring: None) -> None:
    known = registry()
    there = replace(Environment.detect(CPU, known), triton="3.6.0")
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=64, head_dim=16)
    entries = [Entry(spec, Plan(name), "ok", 1.0, 0.0, {"normal": 0.1}) for name in ("mine:fp8", "reference:fp32")]
    table = Table.from_entries(there, entries)
    for version, used in (("3.6.1", ["mine:fp8", "reference:fp32"]), ("3.7.0", ["reference:fp32"])):
        usable = Binding.between(table, replace(there, triton=version), known).usable(table)
        assert sorted(str(plan) for _, plan in usable.entries) == used


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs Triton's kernels on the CPU")
def test_a_backward_of_ours_follows_a_third_partys_forward_by_what_that_leaves(declaring: None) -> None:
    pytest.importorskip("triton")
    q, k, v, grad = (torch.randn(1, 2, 64, 16, dtype=torch.bfloat16) for _ in range(4))
    found, exact = (
        answers(plan, torch.bfloat16, [q, k, v], grad)[2:]
        for plan in ("mine:fp8>triton:fp8", "reference:fp32>reference:fp32")
    )
    errors = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, exact, strict=True)]
    assert all(0.001 < error < 0.15 for error in errors), errors
    with pytest.raises(RefusedError, match="follows only forwards that leave e4m3"):
        answers("mine:fp8-odd>triton:fp8", torch.bfloat16, [q, k, v], grad)


def test_a_plug_in_that_takes_a_name_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = CONTRACT + "BACKEND = Backend('reference', 'not the real one', Availability, ())\n"
    plug_in(tmp_path, "impostor", "impostor_plugin", source)
    monkeypatch.syspath_prepend(tmp_path)
    look_again()
    said = "two installed packages provide a backend named 'reference'"
    done, doctor = attnbench("backends"), attnbench("doctor")
    assert (done.returncode, done.stderr) == (1, f"attnbench: {said}; remove one\n")
    assert doctor.returncode == 1
    assert said in doctor.stdout
    assert "nothing can run here" in doctor.stdout
