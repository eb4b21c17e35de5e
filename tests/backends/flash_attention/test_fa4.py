"""FlashAttention-4 behind the contract, against a stand-in of its interface: masks, layouts, pairs, refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from agreement import assert_both_passes_agree
from dense import dense_attention, relative_l2
from hypothesis import assume, example, given
from problems import Problem, problems, tensors_of
from standins_fa import install_flash_attention

from attnbench.backends.flash_attention import fa4
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

H200 = Device("cuda", "NVIDIA H200", (9, 0))
B200 = Device("cuda", "NVIDIA B200", (10, 0))
FORWARDS = {k.name: k for k in fa4.BACKEND.kernels if isinstance(k, ForwardKernel)}
BACKWARDS = {k.name: k for k in fa4.BACKEND.kernels if isinstance(k, BackwardKernel)}
SPEC = AttentionSpec.make(batch=2, heads=4, kv_heads=2, seqlen_q=33, seqlen_kv=41, head_dim=64)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    install_flash_attention(monkeypatch)


@given(problems(("bf16", "fp16")))
@example(Problem(SPEC.replace(mask=Mask(right=0), seqlen_q=20, direction="training"), "bhsd", False, 0))  # keys cut off
def test_fa4_refuses_or_agrees_with_fp64_in_both_passes(problem: Problem) -> None:
    spec = problem.spec
    forward, backward = FORWARDS[f"fa4:{spec.dtype}"], BACKWARDS[f"fa4:{spec.dtype}"]
    assume(forward.refusals(spec, H200) == [])
    assert assert_both_passes_agree(forward, backward, problem, H200)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_fp8_on_blackwell_uses_the_descales_of_each_group(dtype: str) -> None:
    spec = SPEC.replace(dtype=dtype)
    q, k, v, _ = tensors_of(Problem(spec, "bhsd", False, 0))
    for x in (q, k, v):
        x *= torch.logspace(-1, 1, x.shape[0] * x.shape[1]).view(*x.shape[:2], 1, 1).to(x.dtype)
    forward = FORWARDS["fa4:fp8"]
    assert forward.refusals(spec, B200) == []
    operands = forward.prepare(Inputs(q, k, v), spec)
    result = forward.run(operands)
    truth, lse = dense_attention(*operands.tensors(torch.float64), spec)
    assert result.out.dtype == q.dtype
    assert relative_l2(result.out, truth) <= 0.01
    torch.testing.assert_close(result.lse.double(), lse, atol=1e-3, rtol=1e-3)
    assert all(descale.unique().numel() > 1 for descale in operands.native[4:])


def test_compiled_kernels_are_cached_in_the_users_folder(tmp_path: Path) -> None:
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "interface.py").write_text("import os\n_flash_attn_fwd = _flash_attn_bwd = dict(os.environ)\n")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from attnbench.backends.flash_attention import fa4\n"
        "assert not any(name.startswith(('flash_attn', 'cutlass')) for name in sys.modules)\n"
        "seen = fa4._library().forward\n"
        "assert seen['FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED'] == '1'\n"
        "assert 'attnbench' in seen['FLASH_ATTENTION_CUTE_DSL_CACHE_DIR']\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
