"""Refusals of several backends, lifted on a Hopper GPU: refused specs fail, are wrong or run another kernel.

What one library alone refuses is lifted beside that library's other tests.
"""

from __future__ import annotations

import dense
import pytest
import torch
from agreement_sweep import Truth
from dense import distance

from attnbench import AttentionSpec, Mask
from attnbench.backends.common.mask_tensor import MAX_SCORES
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.kernels.devices import describe
from attnbench.kernels.registry import registry
from attnbench.problem.dtypes import TO_TORCH

DEVICE = torch.device("cuda", 0)
END = "bottom-right"
BASE = AttentionSpec.make(batch=2, heads=8, seqlen_q=256, head_dim=64, direction="training")
TYPES = ("bf16", "fp16", "fp32", "fp64")


def available_kernel(name: str) -> ForwardKernel:
    reason = registry().availability(name.partition(":")[0]).reason
    if reason is not None:
        pytest.skip(reason)
    return registry().forward(name)


def of_other_types() -> list[str]:
    """Kernels that are named after a type, beside one of bf16."""
    named = registry().forwards
    return [name for name in named if name.partition(":")[2] in TYPES[1:] and f"{name.partition(':')[0]}:bf16" in named]


@pytest.mark.parametrize("name", of_other_types())
def test_a_kernel_refused_for_its_dtype_fails_or_equals_its_sibling(name: str) -> None:
    """With bf16 inputs it fails, or equals the bf16 kernel of the same name bit for bit."""
    kernel, sibling = available_kernel(name), registry().forward(f"{name.partition(':')[0]}:bf16")
    spec = BASE.replace(direction="forward")
    q, k, v, _ = Truth.of(spec, 0, DEVICE).inputs
    assert kernel.refusals(spec, describe(DEVICE))
    try:
        out = kernel.run(kernel.prepare(Inputs(q, k, v), spec)).out
    except (RuntimeError, TypeError, AssertionError, KeyError, ValueError):
        return
    assert torch.equal(out, sibling.run(sibling.prepare(Inputs(q, k, v), spec)).out)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_torchs_flash_attention_supports_these_dtypes_only_on_a_cpu(dtype: str) -> None:
    spec = BASE.replace(dtype=dtype)
    kernel = registry().forward(f"sdpa-flash:{dtype}")
    assert "runs on cpu, not on cuda" in "; ".join(kernel.refusals(spec, describe(DEVICE)))
    q, k, v = (torch.randn(2, 8, 256, 64, dtype=TO_TORCH[dtype], device=DEVICE) for _ in range(3))
    with pytest.raises((RuntimeError, NotImplementedError)):
        kernel.run(kernel.prepare(Inputs(q, k, v), spec))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sdpa-cudnn:bf16", {"seqlen_q": 128, "mask": Mask(right=0, alignment=END)}),
        ("sdpa-cudnn:bf16", {"mask": Mask(left=37, right=0)}),
        ("sdpa-cudnn:bf16", {"scale": -0.1, "seqlen_kv": 200}),
        ("sdpa-cudnn:bf16", {"seqlen_kv": 130, "mask": Mask(right=0, alignment=END)}),
        ("sdpa-efficient:bf16", {"seqlen_kv": 130, "mask": Mask(right=0, alignment=END)}),
    ],
)
def test_refused_forwards_of_torch_fail_or_give_wrong_results(name: str, changes: dict[str, object]) -> None:
    """A mask that the operator cannot express is replaced by a similar one."""
    kernel, spec = available_kernel(name), BASE.replace(**changes)
    assert kernel.refusals(spec, describe(DEVICE))
    truth = Truth.of(spec, 1, DEVICE)
    try:
        out = kernel.run(kernel.prepare(Inputs.of(truth.inputs[:3]), spec)).out
    except RuntimeError:
        return
    assert not dense.relative_l2(out, truth.out) < 2 * kernel.declared_error


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sdpa-efficient:bf16", {"seqlen_q": 128, "mask": Mask(left=37, right=0, alignment=END)}),
        ("cudnn:fp8", {"head_dim": 128, "head_dim_v": 128, "seqlen_q": 8}),
        ("te:fp8", {"head_dim": 128, "head_dim_v": 128, "seqlen_q": 8}),
        ("cudnn:bf16", {"head_dim": 264, "head_dim_v": 264}),
        ("te:bf16", {"head_dim": 264, "head_dim_v": 264}),
    ],
)
def test_refused_backwards_fail_or_give_wrong_results(name: str, changes: dict[str, object]) -> None:
    forward, spec = available_kernel(name), BASE.replace(**changes)
    backward: BackwardKernel = registry().backward(name)
    assert forward.refusals(spec, describe(DEVICE)) == []
    assert backward.refusals(spec, describe(DEVICE))
    truth = Truth.of(spec, 1, DEVICE)
    operands = forward.prepare(Inputs.of(truth.inputs[:3]), spec)
    saved = Saved(operands, *forward.run(operands))
    try:
        found = backward.run(saved, truth.inputs[3])
    except Exception as error:  # each library has exceptions of its own
        print(error)
        return
    errors = [distance(*each) for each in zip(found, truth.gradients, truth.sizes, strict=True)]
    assert not max(errors) < 2 * backward.declared_error, errors


@pytest.mark.parametrize("name", ["cudnn:fp8", "te:fp8"])
def test_incomplete_groups_make_only_the_last_queries_wrong(name: str) -> None:
    """The rows of dQ up to the last multiple of 16 are correct, and those after it are not."""
    forward, backward = available_kernel(name), registry().backward(name)
    spec = BASE.replace(head_dim=128, head_dim_v=128, seqlen_q=1000)
    truth = Truth.of(spec, 1, DEVICE)
    operands = forward.prepare(Inputs.of(truth.inputs[:3]), spec)
    dq, *_ = backward.run(Saved(operands, *forward.run(operands)), truth.inputs[3])
    whole = spec.seqlen_q // 16 * 16
    right, wrong = (
        dense.relative_l2(dq[:, :, rows], truth.gradients[0][:, :, rows]) for rows in (slice(whole), slice(whole, None))
    )
    assert right < backward.declared_error
    assert wrong > 0.5
    assert dense.relative_l2(dq, truth.gradients[0]) < backward.declared_error, "no error of the whole shows it"


def test_a_forward_without_a_log_sum_exp_returns_none() -> None:
    seen = 0
    for name, kernel in registry().forwards.items():
        rows = kernel.rows.get("cuda")
        if rows is None or rows.lse or registry().availability(name.partition(":")[0]).reason is not None:
            continue
        dtype = next(each for each in rows.dtypes if each in TO_TORCH)
        spec = BASE.replace(direction="forward", dtype=dtype)
        if kernel.refusals(spec, describe(DEVICE)):
            continue
        q, k, v, _ = Truth.of(spec, 0, DEVICE).inputs
        assert kernel.run(kernel.prepare(Inputs(q, k, v), spec)).lse is None, name
        seen += 1
    assert seen


def test_unfused_kernels_allocate_the_score_matrix_of_their_memory_limit() -> None:
    """Each score is stored at least twice, before and after the softmax; torch raises if they do not fit."""
    kernel = registry().forward("sdpa-math:bf16")
    spec = AttentionSpec.make(batch=1, heads=16, seqlen_q=16384, head_dim=128)
    assert "score matrix" in kernel.refusals(spec, describe(DEVICE))[0]
    scores = spec.batch * spec.heads * spec.seqlen_q * spec.seqlen_kv
    assert scores > MAX_SCORES
    x = torch.randn(1, 16, 131072, 128, device=DEVICE, dtype=torch.bfloat16)
    q = x[:, :, :16384]
    before = torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    kernel.run(kernel.prepare(Inputs(q, q, q), spec))
    assert torch.cuda.max_memory_allocated(DEVICE) - before >= 2 * 2 * scores
    long = spec.replace(seqlen_q=131072, seqlen_kv=131072)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        kernel.run(kernel.prepare(Inputs(x, x, x), long))
    torch.cuda.empty_cache()
