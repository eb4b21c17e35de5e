"""torch's SDPA kernels: results, strides, refusals, and that only the named operator runs."""

from __future__ import annotations

import re
from itertools import permutations

import pytest
import torch
from agreement import assert_both_passes_agree
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from packed import Documents, answers, documents
from problems import Problem, every_mask, problems, tensors_of
from torch.profiler import ProfilerActivity, profile

from attnbench.backends.sdpa import cudnn as sdpa_cudnn
from attnbench.backends.sdpa import efficient as sdpa_efficient
from attnbench.backends.sdpa import flash as sdpa_flash
from attnbench.backends.sdpa import math as sdpa_math
from attnbench.backends.sdpa.efficient import causal_band
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.problem.mask import ALIGNMENTS, Mask
from attnbench.problem.spec import AttentionSpec

CPU = Device("cpu", "CPU")
H200 = Device("cuda", "NVIDIA H200", (9, 0))
FAMILIES = (sdpa_flash.BACKEND, sdpa_cudnn.BACKEND, sdpa_efficient.BACKEND, sdpa_math.BACKEND)
FORWARDS = {k.name: k for family in FAMILIES for k in family.kernels if isinstance(k, ForwardKernel)}
BACKWARDS = {k.name: k for family in FAMILIES for k in family.kernels if isinstance(k, BackwardKernel)}
ON_CPU = sorted(name for name, kernel in FORWARDS.items() if "cpu" in kernel.rows)


def small(dtype: str, **changes: object) -> AttentionSpec:
    return AttentionSpec.make(batch=1, heads=2, seqlen_q=16, head_dim=8, dtype=dtype, direction="training").replace(
        **changes
    )


@given(problems(), st.sampled_from(["sdpa-flash", "sdpa-math"]), st.booleans())
@example(
    Problem(small("bf16", seqlen_q=7, seqlen_kv=3, mask=Mask(right=0, alignment="bottom-right")), "bshd", False, 0),
    "sdpa-flash", True,
)  # fmt: skip
@settings(max_examples=100)
def test_cpu_kernels_agree_with_dense_fp64(problem: Problem, family: str, foreign: bool) -> None:
    """Out, log-sum-exp and gradients; ``foreign`` hands the backward what another, exact forward would."""
    spec = problem.spec
    name = f"{family}:{spec.dtype}"
    forward, backward = FORWARDS[name], BACKWARDS[name]
    assume(not forward.refusals(spec, CPU))
    assert backward.refusals(spec, CPU) == []
    assert backward.cannot_follow(forward, CPU) is None
    assert assert_both_passes_agree(forward, backward, problem, CPU, foreign)


@pytest.mark.parametrize("name", ON_CPU)
def test_only_the_named_operator_runs(name: str) -> None:
    spec = small(name.partition(":")[2])
    forward, backward = FORWARDS[name], BACKWARDS[name]
    q, k, v, grad = tensors_of(Problem(spec, "bhsd", False, 0))
    operands = forward.prepare(Inputs(q, k, v), spec)
    with profile(activities=[ProfilerActivity.CPU]) as first:
        result = forward.run(operands)
    with profile(activities=[ProfilerActivity.CPU]) as second:
        backward.run(Saved(operands, *result), grad)
    ran = [{event.key for event in each.key_averages()} for each in (first, second)]
    assert any(re.search(forward.evidence["cpu"], key) for key in ran[0])
    assert any(re.search(backward.evidence["cpu"], key) for key in ran[1])
    others = {each.evidence["cpu"] for each in (*FORWARDS.values(), *BACKWARDS.values()) if "cpu" in each.evidence}
    others -= {forward.evidence["cpu"]}
    assert not any(re.search(pattern, key) for pattern in others for key in ran[0])


def rows_of(mask: Mask, sq: int, skv: int) -> list[list[int]]:
    return [list(range(*mask.span(row, sq, skv))) for row in range(sq)]


def test_the_causal_band_matches_cutlasss_reading_of_the_mask() -> None:
    served = 0
    for mask, sq, skv in every_mask():
        band = causal_band(mask, sq, skv)
        if isinstance(band, str):
            assert mask.kind == "window"
            continue
        shift = skv - sq if band.diagonal == 2 else 0
        width = sq + skv if band.width is None else band.width
        seen = [
            [j for j in range(skv) if not band.diagonal or i + shift - width < j <= i + shift] for i in range(sq)
        ]  # fmt: skip
        assert seen == rows_of(mask, sq, skv), (mask, sq, skv)
        served += 1
    assert served > 1000


def test_score_matrices_larger_than_memory_are_refused_before_allocation() -> None:
    fits = AttentionSpec.make(batch=1, heads=2, seqlen_q=2**15, head_dim=8, direction="training")
    for kernel in (FORWARDS["sdpa-math:bf16"], BACKWARDS["sdpa-math:bf16"]):
        assert kernel.refusals(fits, CPU) == []
        assert "score matrix" in kernel.refusals(fits.replace(batch=2), CPU)[0]
    long = AttentionSpec.make(batch=1, heads=1, seqlen_q=2**17, head_dim=8)
    flash = FORWARDS["sdpa-flash:bf16"]
    assert flash.refusals(long.replace(mask=Mask(right=0)), CPU) == []
    assert "mask as a tensor" in flash.refusals(long.replace(mask=Mask(left=9, right=0)), CPU)[0]


@settings(deadline=None)
@given(st.data())
def test_cudnns_backward_gets_strides_that_depend_only_on_the_layout(data: st.DataObject) -> None:
    """torch keeps a graph for the strides of q, k and v, and runs it on other layouts of the rest.

    So q comes in strides that nobody else has, of the same numbers and from that layout alone, and all others in a
    function of them, whatever the caller's layout was, with rows that can be read as vectors.
    """
    sizes = [*(data.draw(st.integers(1, 3)) for _ in range(3)), 16]
    axes = [*data.draw(st.permutations([0, 1, 2])), 3]
    q = torch.empty_permuted(sizes, axes, dtype=torch.bfloat16).normal_()
    if data.draw(st.booleans()):
        q = q[:, :1].expand(sizes)
    apart = sdpa_cudnn._apart(q)
    assert torch.equal(apart, q)
    assert apart.stride() == sdpa_cudnn._apart(q.clone(memory_format=torch.preserve_format)).stride() or 0 in q.stride()
    assert apart.stride(3) == 1
    assert not any(stride % 8 for stride in apart.stride()[:3])  # rows begin where vectors do
    assert apart.data_ptr() % 16 == 0
    assert apart.stride() not in {torch.empty_permuted(sizes, order).stride() for order in permutations(range(4))}
    if sizes[axes[0]] == 1 and 0 not in q.stride():
        assert apart.data_ptr() == q.data_ptr()
    wanted = None
    for _ in range(3):
        x = torch.empty_permuted([*sizes[:3], 8], data.draw(st.permutations([0, 1, 2, 3])), dtype=torch.bfloat16)
        laid = sdpa_cudnn._laid_out_as(q, x.normal_())
        assert torch.equal(laid, x)
        assert laid.stride(3) == 1
        assert wanted in (None, laid.stride())
        wanted = laid.stride()


SIDES = st.none() | st.integers(0, 9)
MASKS = st.builds(Mask, SIDES, SIDES, st.sampled_from(ALIGNMENTS))


@settings(max_examples=20, deadline=None)
@given(documents(20, MASKS, padding=st.sampled_from([None, "left", "right"])))
def test_cpu_flash_gives_each_sequence_the_result_that_it_has_alone(batch: Documents) -> None:
    """Also between padding of NaN."""
    forward, backward = sdpa_flash.FlashForward("bf16"), sdpa_flash.FlashBackward("bf16")
    for found, alone in zip(answers(batch, forward, backward), batch.run_alone(forward, backward), strict=True):
        for x, y in zip(found, alone, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
