"""``fa2``: both passes through an interface of flash-attn 2.8's signatures.  The library itself was never run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import standins_fa as standins
import torch
from agreement import assert_both_passes_agree
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import Problem, problems

from attnbench.backends.flash_attention import fa2
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import BackwardKernel, ForwardKernel
from examples import examples

H200 = Device("cuda", "NVIDIA H200", (9, 0))
FORWARDS = {kernel.name: kernel for kernel in fa2.BACKEND.kernels if isinstance(kernel, ForwardKernel)}
BACKWARDS = {kernel.name: kernel for kernel in fa2.BACKEND.kernels if isinstance(kernel, BackwardKernel)}
FLASH_ATTN = {
    "flash_attn_2_cuda": {},
    "flash_attn": {},
    "flash_attn__flash_attn_interface": {
        "_flash_attn_forward": standins.fa2_forward,
        "_flash_attn_backward": standins.fa2_backward,
    },
}


@pytest.fixture(autouse=True, scope="module")
def with_cuda() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "cuda", "13.0")
        yield


@given(problems(("bf16", "fp16")), st.booleans())
@settings(max_examples=examples(30, 200), deadline=None)
def test_both_passes_agree_with_dense_fp64(problem: Problem, foreign: bool) -> None:
    spec = problem.spec
    forward, backward = FORWARDS[f"fa2:{spec.dtype}"], BACKWARDS[f"fa2:{spec.dtype}"]
    assume(not forward.refusals(spec, H200))
    assert backward.refusals(spec, H200) == []
    with standins.modules(**FLASH_ATTN):
        assert assert_both_passes_agree(forward, backward, problem, H200, foreign)
