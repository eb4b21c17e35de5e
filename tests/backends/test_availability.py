"""When a vendor's backend is available, judged by its distributions' files alone: importing any of them raises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from attnbench.backends import flashinfer, sage
from attnbench.backends.cudnn import backend as cudnn
from attnbench.backends.flash_attention import fa2, fa3_vllm, fa4
from attnbench.backends.te import backend as te


class Case(NamedTuple):
    """Installed files and a part of the reason; None if it is available in the first version."""

    backend: ModuleType
    versions: dict[str, str]
    reason: str | None
    install: str = ""
    modules: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    cudnn: int = 91900


FA4, CUTLASS = "flash-attn-4", "nvidia-cutlass-dsl"
FRONT, TE, TE_TORCH = "nvidia-cudnn-frontend", "transformer-engine", "transformer-engine-torch"
FLASH, VLLM, SAGE, INFER = "flash_attn_2_cuda", "vllm", "sageattention", "flashinfer"
NVCC, AOT = "bin/nvcc", "flashinfer/data/aot/kernel"
VLLM_FA3, QATTN = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "sageattention/_qattn_sm90.cpython-312-x86_64.so"
CASES = [
    Case(fa2, {}, "flash-attn is not installed"),
    *(Case(fa2, {"flash-attn": found}, None, modules=(FLASH,)) for found in ("2.8.3", "2.8.3.post1")),
    *(Case(fa2, {"flash-attn": found}, found, modules=(FLASH,)) for found in ("2.7.4", "3.0.0", "unknown")),
    Case(fa3_vllm, {}, "vllm is not installed"),
    Case(fa3_vllm, {"vllm": "0.11"}, "without FlashAttention-3", modules=(VLLM,)),
    Case(fa3_vllm, {"vllm": "0.11"}, None, modules=(VLLM,), files=(VLLM_FA3,)),
    Case(fa4, {}, "flash-attn-4 is not installed", "flash-attn-4"),
    Case(fa4, {FA4: "4.0.0b36"}, "nvidia-cutlass-dsl is not installed", "flash-attn-4"),
    Case(fa4, {FA4: "4.0.0b36", CUTLASS: "4.8.1"}, None),
    Case(cudnn, {}, "not installed", "pip install nvidia-cudnn-frontend"),
    *(Case(cudnn, {FRONT: "1.32.0"}, None, cudnn=found) for found in (91501, 91900)),
    Case(cudnn, {FRONT: "1.32.0"}, "91501", cudnn=91400),
    Case(te, {TE: "2.20.2", TE_TORCH: "2.20.2"}, None),
    Case(te, {TE: "2.20.2", TE_TORCH: "2.19.0"}, "do not belong together"),
    Case(te, {TE: "2.9.0", TE_TORCH: "2.9.0"}, "2.20 or newer"),
    Case(te, {TE: "2.20.2", TE_TORCH: "2.20.2"}, "91501", cudnn=91400),
    Case(te, {TE: "2.20.2"}, "transformer-engine-torch is not installed", "transformer-engine"),
    Case(sage, {}, "is not installed; 1.0.6 brings sage:int8", "sageattention==1.0.6"),
    Case(sage, {"sageattention": "1.0.6"}, None, modules=(SAGE,)),
    *(Case(sage, {"sageattention": found}, found, modules=(SAGE,)) for found in ("1.0.5", "2.1.1", "3.0", "x")),
    Case(sage, {"sageattention": "2.2.0.post1"}, "built without its kernel", "git+", modules=(SAGE,)),
    Case(sage, {"sageattention": "2.2.0.post1"}, None, modules=(SAGE,), files=(QATTN,)),
    Case(flashinfer, {}, "flashinfer is not installed"),
    *(
        Case(flashinfer, {"flashinfer-python": found}, None, modules=(INFER,), files=(NVCC,))
        for found in ("0.7.0", "0.7.2.post1", "0.8.1")
    ),
    *(
        Case(flashinfer, {"flashinfer-python": found}, found, modules=(INFER,), files=(NVCC,))
        for found in ("0.6.18.post1", "1.0", "unknown")
    ),
    Case(flashinfer, {"flashinfer-python": "0.7.0"}, "no nvcc", "CUDA toolkit", modules=(INFER,)),
    Case(flashinfer, {"flashinfer-python": "0.7.0"}, None, modules=(INFER,), files=(AOT,)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.backend.BACKEND.name} {case.reason or 'available'}")
def test_an_installed_backend_is_available_or_the_reason_names_what_is_missing(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, version in case.versions.items():
        facts = tmp_path / f"{name.replace('-', '_')}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for file in (*(f"{module}/__init__.py" for module in case.modules), *case.files):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: case.cudnn)
    found = case.backend.BACKEND.availability()
    assert found.ok == (case.reason is None)
    assert found.version == (next(iter(case.versions.values())) if case.reason is None else None)
    assert (case.reason or "") in (found.reason or "")
    assert case.install in (found.install or "")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in (case.backend.BACKEND.availability().reason or "")


def test_availability_of_the_triton_backend_does_not_import_triton() -> None:
    pytest.importorskip("triton")
    looked = (
        "import sys; from attnbench.backends.triton import BACKEND; from attnbench import AttentionSpec;"
        "from attnbench.kernels.capabilities import Device; assert BACKEND.availability().version;"
        "spec = AttentionSpec.make(batch=1, heads=1, seqlen_q=8, head_dim=64);"
        "[k.refusals(spec, Device('cpu', 'CPU')) for k in BACKEND.kernels]; assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", looked], check=True)
