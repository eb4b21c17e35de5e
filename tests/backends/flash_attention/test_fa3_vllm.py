"""``fa3-vllm``: packed sequences through an operator of vLLM's schema, and when it is available."""

from __future__ import annotations

import pytest
import standins_fa as standins
from agreement import quantised_attention_agrees
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import Problem, problems

from attnbench.backends.flash_attention import fa3_vllm
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import BackwardKernel
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec
from examples import examples

H200 = Device("cuda", "NVIDIA H200", (9, 0))
FORWARDS = {kernel.name: kernel for kernel in fa3_vllm.BACKEND.kernels}
VLLM = {"vllm": {}, "vllm__vllm_flash_attn": {}, "vllm__vllm_flash_attn___vllm_fa3_C": {}}


@pytest.fixture(autouse=True, scope="module")
def operators() -> None:
    standins.define()


@given(problems(("bf16", "fp16")), st.booleans())
@settings(max_examples=examples(20, 200), deadline=None)
def test_it_computes_exact_attention_on_what_it_was_given(problem: Problem, fp8: bool) -> None:
    spec = problem.spec.replace(direction="forward")
    kernel = FORWARDS["fa3-vllm:fp8" if fp8 else f"fa3-vllm:{spec.dtype}"]
    assume(not kernel.refusals(spec, H200))
    with standins.modules(**VLLM):
        quantised_attention_agrees(kernel, spec, problem)


def test_refusals_and_the_lack_of_a_backward() -> None:
    assert not any(isinstance(kernel, BackwardKernel) for kernel in fa3_vllm.BACKEND.kernels)
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=9, seqlen_kv=4, head_dim=64)
    kernel = FORWARDS["fa3-vllm:fp8"]
    assert kernel.refusals(spec, H200) == []
    assert "last key" in kernel.refusals(spec.replace(mask=Mask(left=1, right=0)), H200)[0]
    assert "tokens" in kernel.refusals(spec.replace(batch=2**20, seqlen_q=2**11), H200)[0]
    assert "not per block" in kernel.refusals(spec.replace(dtype="e4m3", descale="block"), H200)[0]
