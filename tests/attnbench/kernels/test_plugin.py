"""Third-party backends: the example, installed by pip, and plug-ins that are broken or conflict with others."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import attnbench, expect, fails_in_one_line
from patience import PATIENCE
from places import ROOT
from torch import Tensor

from attnbench import attention
from attnbench.kernels.registry import registry
from attnbench.state import forget

EXAMPLE = ROOT / "examples" / "attnbench-backend-example"


def reload_backends() -> None:
    """Clears caches, so that installed backends are searched again."""
    registry.cache_clear()
    forget()


@pytest.fixture(autouse=True)
def restore_backends() -> Iterator[None]:
    """Clears the registry after each test, so that the next one does not see its backends."""
    yield
    reload_backends()


@pytest.fixture
def write_plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Installs a distribution like pip's, with one module and one entry point of this name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, source: str) -> None:
        module = f"{name}_plugin"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[attnbench.backends]\n{name} = {module}:BACKEND\n")
        reload_backends()

    return write


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example installed by pip."""
    source, target = tmp_path_factory.mktemp("source") / "example", tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE, source)
    command = ["pip", "install", "--no-deps", "--no-build-isolation", "--target", str(target), str(source)]
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def installed_example(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the example, on the path of this process and its children."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    reload_backends()
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
    installed_example: Path, precision: str, dtype: torch.dtype, q_len: int, kv_len: int, kv_heads: int, arguments: Any
) -> None:
    shapes = [(2, 4, q_len, 16), (2, kv_heads, kv_len, 16), (2, kv_heads, kv_len, 24)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    grad = torch.randn(2, 4, q_len, 24).to(dtype)
    name = f"naive:{precision}"
    found = answers(f"{name}>{name}", dtype, tensors, grad, **arguments)
    truth = answers("reference:fp64>reference:fp64", torch.float64, tensors, grad, **arguments)
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]
    assert 0 < max(errors) < registry().forward(name).declared_error


def test_the_example_can_be_swept_like_any_backend(installed_example: Path, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("- {batch: 1, heads: 2, seqlen_q: 32, head_dim: 16, direction: training}\n")
    sweep = ("sweep", "--dtype", "bf16", "--preset", tmp_path / "one.yaml", "--backends", "naive", "--device", "cpu")
    done = expect(*sweep, "--out", tmp_path / "out", "--format", "json")
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


def test_a_plug_in_that_cannot_be_imported_loses_only_its_own_row(write_plug_in: Callable[[str, str], None]) -> None:
    for name, (source, _) in BROKEN.items():
        write_plug_in(name, source)
    listed, doctor = expect("backends", "--device", "cpu", "--format", "json"), expect("doctor")
    found = {each["name"]: each for each in json.loads(listed.stdout)["backends"]}
    for name, (_, reason) in BROKEN.items():
        assert not found[name]["available"]
        assert reason in found[name]["reason"]
    assert found["reference"]["available"]
    assert "a_library_that_is_not_there" in doctor.stdout


def test_a_plug_in_with_a_duplicate_name_is_a_clear_error(write_plug_in: Callable[[str, str], None]) -> None:
    write_plug_in("impostor", CONTRACT + "BACKEND = Backend('reference', 'not the real one', Availability, ())\n")
    message = "two installed packages provide a backend named 'reference'"
    fails_in_one_line(attnbench("backends"), 1, message, "remove one")
    doctor = expect("doctor", code=1)
    assert message in doctor.stdout
    assert "nothing can run here" in doctor.stdout
