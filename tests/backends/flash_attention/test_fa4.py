"""FlashAttention-4 behind the contract, against a stand-in of its interface: masks, layouts, pairs, refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from agreement import both_passes_agree
from dense import dense_attention, relative_l2
from hypothesis import assume, given
from problems import Problem, problems, tensors_of
from standins_graph import INTERFACE

from attnbench.backends.flash_attention import fa4
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

H200 = Device("cuda", "NVIDIA H200", (9, 0))
B200 = Device("cuda", "NVIDIA B200", (10, 0))
A100 = Device("cuda", "NVIDIA A100", (8, 0))
FORWARDS = {k.name: k for k in fa4.BACKEND.kernels if isinstance(k, ForwardKernel)}
BACKWARDS = {k.name: k for k in fa4.BACKEND.kernels if isinstance(k, BackwardKernel)}
SPEC = AttentionSpec.make(batch=2, heads=4, kv_heads=2, seqlen_q=33, seqlen_kv=41, head_dim=64)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "_library", lambda: fa4._Library(INTERFACE._flash_attn_fwd, INTERFACE._flash_attn_bwd))


@given(problems(("bf16", "fp16")))
def test_it_refuses_or_agrees_with_the_truth_in_both_passes(problem: Problem) -> None:
    spec = problem.spec
    forward, backward = FORWARDS[f"fa4:{spec.dtype}"], BACKWARDS[f"fa4:{spec.dtype}"]
    assume(forward.refusals(spec, H200) == [])
    assert both_passes_agree(forward, backward, problem, H200)


@pytest.mark.parametrize("mask", [Mask(), Mask(right=0, alignment="bottom-right")], ids=str)
def test_the_whole_of_a_call_is_that_of_its_two_parts(mask: Mask) -> None:
    """And there is none where tensors are padded or cut, or gradients wanted."""
    kernel, spec = FORWARDS["fa4:bf16"], SPEC.replace(mask=mask)
    q, k, v, _ = tensors_of(Problem(spec, "bhsd", False, 0))
    whole = kernel.whole(spec, "cuda")
    assert whole is not None
    parts = kernel.run(kernel.prepare(Inputs(q, k, v), spec))
    assert all(torch.equal(x, y) for x, y in zip(whole(q, k, v), parts[:2], strict=True))
    cut: dict[str, object] = {"seqlen_q": 20, "mask": Mask(right=0)}
    for changes in ({"head_dim": 40, "head_dim_v": 40}, cut, {"direction": "training"}):
        assert kernel.whole(SPEC.replace(**changes), "cuda") is None

    spec = SPEC.replace(mask=Mask(right=0), seqlen_q=20, direction="training")
    q, k, v, grad = tensors_of(Problem(spec, "bhsd", False, 0))
    operands = FORWARDS["fa4:bf16"].prepare(Inputs(q, k, v), spec)
    _, dk, dv = BACKWARDS["fa4:bf16"].run(Saved(operands, *FORWARDS["fa4:bf16"].run(operands)), grad)
    assert dk.shape == k.shape
    assert dk[:, :, :20].any()
    assert not dk[:, :, 20:].any()
    assert not dv[:, :, 20:].any()


def test_nothing_is_copied_that_the_kernel_can_read() -> None:
    q, k, v, _ = tensors_of(Problem(SPEC, "bhsd", False, 0))
    native = FORWARDS["fa4:bf16"].prepare(Inputs(q, k, v), SPEC).native
    assert [x.data_ptr() for x in native[:3]] == [x.data_ptr() for x in (q, k, v)]


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


@pytest.mark.parametrize(
    ("kernel", "changes", "device", "reason"),
    [
        ("fa4:fp8", {}, H200, "needs compute capability 10.0, NVIDIA H200 has 9.0"),
        ("fa4:bf16", {}, B200, "9.x only"),
        ("fa4:bf16", {}, A100, "needs compute capability 9.0"),
        ("fa4:bf16", {"head_dim": 20, "head_dim_v": 20}, H200, "no multiple of 8"),
        ("fa4:bf16", {"head_dim": 264}, H200, "outside 8 to 256"),
        ("fa4:bf16", {"dtype": "fp16"}, H200, "takes bf16"),
        ("fa4:bf16", {"scale": -0.1}, H200, "must be positive"),
        ("fa4:bf16", {"seqlen_q": 60, "mask": Mask(left=3)}, H200, "cannot end before the last key"),
        ("fa4:bf16", {"batch": 2**20, "seqlen_q": 2**10}, H200, "indexes at most"),
    ],
)
def test_refusals(kernel: str, changes: dict[str, object], device: Device, reason: str) -> None:
    assert reason in "; ".join(FORWARDS[kernel].refusals(SPEC.replace(**changes), device))
    if kernel in BACKWARDS:
        assert reason in "; ".join(BACKWARDS[kernel].refusals(SPEC.replace(**changes), device))


def test_compiled_kernels_are_kept_in_a_folder_of_the_user(tmp_path: Path) -> None:
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
