"""Machines on which FlexAttention cannot compile: a refusal says what to install or to set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from needs import needs_avx2

from attnbench.backends.flex import backend as flex
from attnbench.backends.flex.compiler import compiler_reason
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import ForwardKernel
from attnbench.problem.spec import AttentionSpec

CPU, H200 = Device("cpu", "CPU"), Device("cuda", "NVIDIA H200", (9, 0))
SPEC = AttentionSpec.make(batch=1, heads=4, seqlen_q=64, head_dim=16)
KERNEL = next(k for k in flex.BACKEND.kernels if isinstance(k, ForwardKernel) and k.name == "flex:bf16")
Change = Callable[[pytest.MonkeyPatch, Path], None]


def with_compiler(compiler: str) -> Change:
    return lambda patch, folder: patch.setenv("CXX", compiler)


def torch_path_with_space(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(torch, "__path__", [str(folder / "a b")])


def python_path_with_space(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr("sysconfig.get_path", lambda name: str(folder / "a b"))


def cache_path_with_space(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "a b"))


def no_cache_folder(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "file").write_text("")
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "file" / "folder"))


def lower_capability(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """As in a process with ATEN_CPU_CAPABILITY=avx2 on a CPU with AVX-512, whose results were wrong."""
    patch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    patch.setattr("torch.cpu._is_avx512_supported", lambda: True)


def no_triton(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr("torch.utils._triton.has_triton_package", lambda: False)


@pytest.mark.parametrize(
    ("change", "device", "message"),
    [
        *(
            pytest.param(with_compiler(compiler), CPU, "g++", marks=needs_avx2)
            for compiler in ("no-such-compiler", "false", "/dev/null")
        ),
        (torch_path_with_space, CPU, "no torch with a space in its path, {folder}/a b"),
        (python_path_with_space, CPU, "no Python with a space in its path, {folder}/a b"),
        (cache_path_with_space, CPU, "{folder}/a b; name another in TORCHINDUCTOR_CACHE_DIR"),
        (lower_capability, CPU, "ATEN_CPU_CAPABILITY"),
        (no_triton, H200, "needs Triton"),
        *((no_cache_folder, device, "cannot write its cache folder") for device in (CPU, H200)),
    ],
)
def test_a_machine_that_cannot_compile_gets_a_refusal_that_names_what_is_missing(
    change: Change, device: Device, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if message.startswith(("no ", "{")):
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")  # without it, that is the reason
    change(monkeypatch, tmp_path)
    compiler_reason.cache_clear()
    try:
        (reason,) = KERNEL.refusals(SPEC, device)
    finally:
        compiler_reason.cache_clear()
    assert message.format(folder=tmp_path) in reason
