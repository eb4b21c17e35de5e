"""torch's SDPA kernels on a GPU: each refuses a spec or agrees with dense FP64 on it."""

from __future__ import annotations

import itertools

import dense
import pytest
import torch
from agreement_sweep import Truth
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnbench import AttentionSpec, Mask
from attnbench.backends.sdpa import cudnn as sdpa_cudnn
from attnbench.backends.sdpa import efficient as sdpa_efficient
from attnbench.backends.sdpa import flash as sdpa_flash
from attnbench.backends.sdpa import math as sdpa_math
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.kernels.devices import describe

FAMILIES = (sdpa_flash.BACKEND, sdpa_cudnn.BACKEND, sdpa_efficient.BACKEND, sdpa_math.BACKEND)
KERNELS = [kernel for family in FAMILIES for kernel in family.kernels if "cuda" in kernel.rows]
FORWARDS = {kernel.name: kernel for kernel in KERNELS if isinstance(kernel, ForwardKernel)}
BACKWARDS = {kernel.name: kernel for kernel in KERNELS if isinstance(kernel, BackwardKernel)}


@pytest.mark.parametrize("name", [name for name in FORWARDS if not name.startswith("sdpa-math")])
def test_readable_layouts_are_not_copied(name: str) -> None:
    device = torch.device("cuda", 0)
    spec = AttentionSpec.make(batch=2, heads=8, seqlen_q=512, head_dim=64, dtype=name.partition(":")[2])
    for index in (0, 1):
        q, k, v, _ = Truth.of(spec, index, device).inputs
        before = torch.cuda.memory_allocated(device)
        operands = FORWARDS[name].prepare(Inputs(q, k, v), spec)
        assert torch.cuda.memory_allocated(device) == before, operands.native
        del operands  # or the next round would count its inputs


@pytest.mark.parametrize("scale", [-0.2, 0.0])
@pytest.mark.parametrize("mask", [Mask(), Mask(right=0)], ids=["no mask", "causal"])
def test_flash_gives_wrong_results_for_the_refused_nonpositive_scales(mask: Mask, scale: float) -> None:
    """257 keys are no multiple of its tile: those that fill it up are hidden, with or without a mask."""
    device = torch.device("cuda", 0)
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=257, head_dim=64, mask=mask, scale=scale)
    forward = FORWARDS["sdpa-flash:bf16"]
    assert forward.refusals(spec, describe(device)) != []
    truth = Truth.of(spec, 0, device)
    out = forward.run(forward.prepare(Inputs.of(truth.inputs[:3]), spec)).out
    assert not dense.relative_l2(out, dense.dense_attention(*truth.inputs[:3], spec)[0]) < 0.1


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_cudnns_gradients_are_correct_after_torchs_own_calls(batch: int, head_dim: int) -> None:
    """A call of torch's own with a gradient in another layout leaves a graph that ours must not run."""
    spec = AttentionSpec.make(batch=batch, heads=4, seqlen_q=200, head_dim=head_dim, direction="training")
    generator = torch.Generator("cuda").manual_seed(head_dim)

    def normal(extra: int = 0) -> torch.Tensor:
        shape = batch, 200, 4 * head_dim + extra
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)[..., : 4 * head_dim]
        return x.unflatten(-1, (4, head_dim)).transpose(1, 2)

    q, k, v = (normal().requires_grad_() for _ in range(3))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for extra in (64, 0):  # a slice of a wider tensor first
            scaled_dot_product_attention(q, k, v).backward(normal(extra))
    operands = (forward := FORWARDS["sdpa-cudnn:bf16"]).prepare(Inputs(q.detach(), k.detach(), v.detach()), spec)
    out, lse, state = forward.run(operands)
    for extra in (0, 64):
        grad_out = normal(extra)
        found = BACKWARDS["sdpa-cudnn:bf16"].run(Saved(operands, out, lse, state), grad_out)
        wanted = dense.dense_gradients(q.detach(), k.detach(), v.detach(), grad_out, spec)
        for mine, true in zip(found, wanted, strict=True):
            assert dense.relative_l2(mine, true) < 0.01


@pytest.mark.parametrize("layouts", list(itertools.permutations(["bhsd", "bshd"])), ids="-".join)
def test_cudnns_gradients_are_correct_in_every_layout_of_the_output_and_its_gradient(layouts: tuple[str, str]) -> None:
    """torch keeps a graph for the strides of q, k and v; a second layout of the others must not run the first's."""
    spec = AttentionSpec.make(batch=2, heads=8, seqlen_q=640, head_dim=128, mask=Mask(right=0), direction="training")
    generator = torch.Generator("cuda").manual_seed(3)

    def normal() -> torch.Tensor:
        return torch.randn(2, 8, 640, 128, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, k, v, grad_out = (normal() for _ in range(4))
    wanted = dense.dense_gradients(q, k, v, grad_out, spec)
    forward, backward = FORWARDS["sdpa-cudnn:bf16"], BACKWARDS["sdpa-cudnn:bf16"]
    operands = forward.prepare(Inputs(q, k, v), spec)
    out, lse, state = forward.run(operands)
    for layout in layouts:
        laid = [x if layout == "bhsd" else x.transpose(1, 2).contiguous().transpose(1, 2) for x in (out, grad_out)]
        found = backward.run(Saved(operands, laid[0], lse, state), laid[1])
        for mine, true in zip(found, wanted, strict=True):
            assert dense.relative_l2(mine, true) < 0.01
