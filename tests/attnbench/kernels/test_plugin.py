"""A third party's backend: the example, installed for real, and plug-ins that are broken or ill-mannered."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Run
from patience import PATIENCE
from places import ROOT, SUPPORT

EXAMPLE = ROOT / "examples" / "attnbench-backend-example"


def run(*command: object, site: Path) -> subprocess.CompletedProcess[str]:
    """A Python process for which what lies in ``site`` is installed, too."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=site,
        env={**os.environ, "PYTHONPATH": str(site)},
        check=False,
    )


# The commands that argv names, one after the other, and what came of each.
COMMANDS = """
import json, sys
sys.path += sys.argv[1].split(":")
from command_line import attnbench
print(json.dumps([attnbench(*command) for command in json.loads(sys.argv[2])]))
"""
LIST = ("backends", "--device", "cpu", "--format", "json")


def commands(site: Path, *words: tuple[str, ...]) -> list[Run]:
    """What came of these commands in one process."""
    done = run("-c", COMMANDS, SUPPORT, json.dumps(words), site=site)
    assert done.returncode == 0, done.stderr
    return [Run(*each) for each in json.loads(done.stdout)]


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


def test_the_example_is_listed_with_its_kernels(site: Path) -> None:
    naive = by_name(commands(site, LIST)[0])["naive"]
    assert (naive["available"], naive["version"], naive["origin"]) == (True, "0.1.0", "attnbench-backend-example")
    assert {(each["name"], each["pass"]) for each in naive["kernels"]} == {
        (name, each) for name in ("naive:fp32", "naive:bf16") for each in ("forward", "backward")
    }


AGREEMENT = """
import json, torch
from attnbench import attention
from attnbench.kernels.registry import registry

def answers(backend, dtype, tensors, grad, arguments):
    q, k, v = (x.to(dtype).requires_grad_() for x in tensors)
    out, lse = attention(q, k, v, backend=backend, return_lse=True, **arguments)
    return [out, lse, *torch.autograd.grad(out, (q, k, v), grad.to(dtype))]

torch.manual_seed(0)
worst = {}
for q_len, kv_len, kv_heads, arguments in [
    (64, 64, 4, {}),
    (33, 57, 2, {"is_causal": True}),
    (33, 57, 1, {"is_causal": True, "causal_alignment": "bottom-right"}),
    (57, 33, 4, {"is_causal": True, "scale": 0.3}),
    (1, 40, 2, {"is_causal": True, "causal_alignment": "bottom-right"}),
]:
    for precision, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        shapes = [(2, 4, q_len, 16), (2, kv_heads, kv_len, 16), (2, kv_heads, kv_len, 24)]
        tensors = [torch.randn(shape).to(dtype) for shape in shapes]
        grad = torch.randn(2, 4, q_len, 24).to(dtype)
        name = f"naive:{precision}"
        got = answers(f"{name}>{name}", dtype, tensors, grad, arguments)
        truth = answers("reference:fp64>reference:fp64", torch.float64, tensors, grad, arguments)
        for a, b in zip(got, truth):
            worst[name] = max(worst.get(name, 0.0), float((a.double() - b).norm() / b.norm()))
declared = {name: kernel.declared_error for name, kernel in registry().forwards.items() if name in worst}
print(json.dumps([worst, declared]))
"""


def test_the_example_computes_attention_and_its_gradients(site: Path) -> None:
    done = run("-c", AGREEMENT, site=site)
    assert done.returncode == 0, done.stderr
    worst, declared = json.loads(done.stdout)
    assert worst.keys() == declared.keys() == {"naive:fp32", "naive:bf16"}
    for name, error in worst.items():
        assert 0 < error < declared[name]


REFUSALS = """
import json
from attnbench.kernels.devices import describe, find
from attnbench.problem.mask import Mask
from attnbench.kernels.registry import registry
from attnbench.problem.spec import AttentionSpec

shape = dict(batch=1, heads=2, seqlen_q=64, head_dim=16)
kernel = registry().forward("naive:bf16")
print(json.dumps([
    kernel.refusals(AttentionSpec.make(**shape, **more), describe(find("cpu")))
    for more in ({}, {"mask": Mask(8, 8)}, {"softcap": 30.0}, {"seqlen_kv": 2**30}, {"dtype": "fp16"})
]))
"""


def test_the_example_refuses_in_sentences_what_it_cannot_do(site: Path) -> None:
    done = run("-c", REFUSALS, site=site)
    assert done.returncode == 0, done.stderr
    served, *refused = json.loads(done.stdout)
    assert served == []
    for reasons, said in zip(refused, ("no window mask", "no softcap", "would hold", "not fp16"), strict=True):
        assert len(reasons) == 1
        assert said in reasons[0]


def test_the_example_is_swept_like_any_backend(site: Path, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("- {batch: 1, heads: 2, seqlen_q: 32, head_dim: 16, direction: training}\n")
    sweep = ("sweep", "--dtype", "bf16", "--preset", tmp_path / "one.yaml", "--backends", "naive", "--device", "cpu")
    done = run("-m", "attnbench", *sweep, "--out", tmp_path / "out", "--format", "json", site=site)
    assert done.returncode == 0, done.stderr
    rows = {row["plan"]: row for row in json.loads(done.stdout)}
    assert rows["naive:bf16>naive:bf16"]["status"] == "ok"


def test_a_plug_in_that_cannot_be_imported_costs_its_own_row_alone(tmp_path: Path) -> None:
    plug_in(tmp_path, "brittle", "brittle_plugin", "import a_library_that_is_not_there\n")
    plug_in(tmp_path, "wrong", "wrong_plugin", "BACKEND = 'not a backend'\n")
    plug_in(
        tmp_path,
        "moody",
        "moody_plugin",
        "from attnbench.kernels.contract import Backend\nBACKEND = Backend('moody', 'raises', lambda: 1 / 0, ())\n",
    )
    plug_in(
        tmp_path,
        "alien",
        "alien_plugin",
        "from attnbench.kernels.contract import Availability, Backend\n"
        "BACKEND = Backend('alien', 'built on another', Availability, (), built_on=('cutlass',))\n",
    )
    listed, doctor = commands(tmp_path, LIST, ("doctor",))
    found = by_name(listed)
    for name, reason in {
        "brittle": "No module named 'a_library_that_is_not_there'",
        "wrong": "wrong_plugin:BACKEND",
        "moody": "ZeroDivisionError",
        "alien": "a backend can be built on cudnn or triton, not on 'cutlass'",
    }.items():
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
DECLARED = """
import json, torch
from dataclasses import replace
from attnbench import AttentionSpec, Plan, attention
from attnbench.errors import RefusedError
from attnbench.kernels.registry import registry
from attnbench.tables.binding import Binding
from attnbench.tables.environment import Environment
from attnbench.tables.table import Entry, Table

known = registry()
there = replace(Environment.detect(torch.device("cpu"), known), triton="3.6.0")
spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=64, head_dim=16)
entries = [Entry(spec, Plan(name), "ok", 1.0, 0.0, {"normal": 0.1}) for name in ("mine:fp8", "reference:fp32")]
table = Table.from_entries(there, entries)
used = [
    sorted(str(plan) for _, plan in Binding.between(table, replace(there, triton=version), known).usable(table).entries)
    for version in ("3.6.1", "3.7.0")
]

torch.manual_seed(0)
q, k, v, grad = (torch.randn(1, 2, 64, 16, dtype=torch.bfloat16) for _ in range(4))

def gradients(backend):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attention(*leaves, backend=backend), leaves, grad)

pairs = zip(gradients("mine:fp8>triton:fp8"), gradients("reference:fp32>reference:fp32"))
errors = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]
try:
    gradients("mine:fp8-odd>triton:fp8")
    refused = None
except RefusedError as error:
    refused = str(error)
print(json.dumps([used, errors, refused]))
"""


def test_what_a_third_party_declares_counts_as_ours_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    plug_in(tmp_path, "mine", "mine_plugin", DECLARING)
    done = run("-c", DECLARED, site=tmp_path)
    assert done.returncode == 0, done.stderr
    used, errors, refused = json.loads(done.stdout)
    assert used == [["mine:fp8", "reference:fp32"], ["reference:fp32"]]
    assert all(0.001 < error < 0.15 for error in errors), errors
    assert "follows only forwards that leave e4m3" in refused


def test_a_plug_in_that_takes_a_name_is_a_clear_error(tmp_path: Path) -> None:
    plug_in(
        tmp_path,
        "impostor",
        "impostor_plugin",
        "from attnbench.kernels.contract import Availability, Backend\n"
        "BACKEND = Backend('reference', 'not the real one', Availability, ())\n",
    )
    done, doctor = commands(tmp_path, ("backends",), ("doctor",))
    assert done.returncode == 1
    assert done.stderr == "attnbench: two installed packages provide a backend named 'reference'; remove one\n"
    assert doctor.returncode == 1
    assert "two installed packages provide a backend named 'reference'" in doctor.stdout
    assert "nothing can run here" in doctor.stdout
