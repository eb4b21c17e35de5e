"""Assertions for kernels on a stand-in of their library: the stand-in is exact, so only rounding errors remain."""

from __future__ import annotations

import torch
from dense import dense_attention, dense_gradients, distance, gradient_sizes, relative_l2
from problems import Problem, tensors_of

from attnbench import AttentionSpec
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Operands, Saved
from attnbench.kernels.execution import Execution
from attnbench.problem.fp8 import Quantised, Recipe, quantise


def assert_both_passes_agree(
    forward: ForwardKernel, backward: BackwardKernel, problem: Problem, device: Device, foreign: bool = False
) -> bool:
    """Asserts that each pass is within its declared error of dense FP64; whether the backward serves the problem.

    ``foreign`` passes the backward the tensors of another, exact forward.  Inputs must not change.
    """
    spec, tensors = problem.spec, tensors_of(problem)
    q, k, v, grad = tensors
    before = [x.clone() for x in tensors]
    truth, truth_lse = dense_attention(q, k, v, spec)
    operands = forward.prepare(Inputs(q, k, v), spec)
    result = forward.run(operands)
    assert (result.out.dtype, result.out.shape) == (q.dtype, truth.shape)
    assert distance(result.out, truth, 0.1 * v.double().norm().item()) <= forward.declared_error
    assert (result.lse is not None) == forward.rows[device.type].lse
    lse_dtype = torch.float64 if spec.dtype == "fp64" else torch.float32
    if result.lse is not None:
        assert result.lse.dtype == lse_dtype
        assert result.lse.untyped_storage().nbytes() == result.lse.nbytes, "unused memory in the lse's storage"
        torch.testing.assert_close(result.lse.double(), truth_lse, atol=1e-4, rtol=1e-4)
    if backward.refusals(spec, device):
        return False
    saved = Saved(operands, *result)
    if foreign:
        saved = Saved(Operands(spec, q, k, v), truth.to(q.dtype), truth_lse.to(lse_dtype))
    found, exact = backward.run(saved, grad), dense_gradients(q, k, v, grad, spec)
    for each, wanted, size in zip(found, exact, gradient_sizes(q, k, v, grad, spec), strict=True):
        assert (each.dtype, each.shape) == (q.dtype, wanted.shape)
        # One rounding for the gradient, one for the out that it is computed from, one for chance.
        assert distance(each, wanted, size) <= 3 * backward.declared_error
    assert all(torch.equal(x, old) for x, old in zip(tensors, before, strict=True))
    return True


def assert_autograd_gradients_agree(forward: ForwardKernel, backward: BackwardKernel, spec: AttentionSpec) -> None:
    """Asserts the gradients of the output's sum (an expanded gradient) for leaves with unusual strides."""
    spec = spec.replace(direction="training")
    leaves = [x.detach().requires_grad_() for x in tensors_of(Problem(spec, "bshd", True, 0))[:3]]
    before = [x.detach().clone() for x in leaves]
    out, lse = Execution(spec, forward, backward)(Inputs(*leaves))
    assert out.requires_grad
    assert not lse.requires_grad
    grad = torch.ones((), dtype=out.dtype).expand(out.shape)
    found, sizes = torch.autograd.grad(out, leaves, grad), gradient_sizes(*before, grad, spec)
    for each, wanted, size in zip(found, dense_gradients(*before, grad, spec), sizes, strict=True):
        assert distance(each, wanted, size) <= 2 * backward.declared_error
    assert all(map(torch.equal, leaves, before))


def assert_quantised_attention_agrees(kernel: ForwardKernel, spec: AttentionSpec, problem: Problem) -> Operands:
    """Asserts that out and lse agree with exact attention on the operands, and returns the operands."""
    inputs = tensors_of(problem)[:3]
    before = [x.clone() for x in inputs]
    operands = kernel.prepare(Inputs.of(inputs), spec)
    result = kernel.run(operands)
    out, lse = dense_attention(*operands.tensors(torch.float64), spec)
    assert result.lse is not None
    assert (result.out.dtype, result.out.shape) == (inputs[0].dtype, out.shape)
    assert relative_l2(result.out, out) <= 0.004 or out.norm() == 0
    assert (result.lse.dtype, result.lse.shape) == (torch.float32, lse.shape)
    torch.testing.assert_close(result.lse.double(), lse, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(x, old) for x, old in zip(inputs, before, strict=True))
    return operands


def assert_descales_are_used(kernel: ForwardKernel, spec: AttentionSpec, seed: int) -> None:
    """Asserts that random descales of each tensor or head are applied to e4m3 tensors."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (
        (spec.heads, spec.seqlen_q, spec.head_dim),
        (spec.kv_heads, spec.seqlen_kv, spec.head_dim),
        (spec.kv_heads, spec.seqlen_kv, spec.head_dim_v),
    )
    inputs = []
    for heads, length, size in sizes:
        x = quantise(torch.randn(spec.batch, heads, length, size, generator=generator), Recipe(spec.descale))
        shape = (1, 1, 1, 1) if spec.descale == "tensor" else (spec.batch, heads, 1, 1)
        inputs.append(Quantised(x.data, torch.rand(shape, generator=generator) * 0.02 + 1e-4, spec.descale))
    result = kernel.run(kernel.prepare(Inputs.of(inputs), spec))
    out, lse = dense_attention(*(x.dequantised(torch.float64) for x in inputs), spec)
    assert result.out.dtype == torch.bfloat16
    assert relative_l2(result.out, out) < 0.004
    assert relative_l2(result.lse, lse) < 1e-5
