"""TransformerEngine on a Hopper GPU: dense FP64, evidence, warm steps, its own module, refusals lifted."""

from __future__ import annotations

import dense
import pytest
import torch
from agreement_sweep import Truth
from torch import Tensor

from attnbench import AttentionSpec, Mask
from attnbench.backends.cudnn import backend as cudnn
from attnbench.backends.flash_attention import fa4
from attnbench.backends.sdpa import cudnn as sdpa_cudnn
from attnbench.backends.te import backend as te
from attnbench.backends.te import library as te_library
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.kernels.devices import describe

pytestmark = pytest.mark.skipif(not te.BACKEND.availability().ok, reason=str(te.BACKEND.availability().reason))
FORWARDS = {k.name: k for k in te.BACKEND.kernels if isinstance(k, ForwardKernel)}
BACKWARDS = {k.name: k for k in te.BACKEND.kernels if isinstance(k, BackwardKernel)}
FP8, FP8_BACKWARD = FORWARDS["te:fp8"], BACKWARDS["te:fp8"]
CAUSAL = Mask(right=0)


def step(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """O, dQ, dK, dV of one FP8 training step."""
    operands = FP8.prepare(Inputs(q, k, v), spec)
    result = FP8.run(operands)
    return (result.out, *FP8_BACKWARD.run(Saved(operands, *result), grad))


@pytest.mark.parametrize("mask", [Mask(), CAUSAL], ids=str)
def test_the_first_and_tenth_step_have_the_same_error(mask: Mask) -> None:
    spec = AttentionSpec.make(batch=1, heads=4, seqlen_q=2048, head_dim=128, mask=mask, direction="training")
    truth = Truth.of(spec, 0, torch.device("cuda", 0))
    wanted = (truth.out, *truth.gradients)
    for number in range(1, 11):
        errors = [dense.relative_l2(x, y) for x, y in zip(step(spec, *truth.inputs), wanted, strict=True)]
        if number in (1, 2, 10):
            print(f"{mask} step {number}: O, dQ, dK, dV {[round(error, 4) for error in errors]}")
        assert errors[0] <= FP8.declared_error
        assert max(errors[1:]) <= FP8_BACKWARD.declared_error


def test_maxima_reported_by_the_kernels_are_below_those_assumed() -> None:
    spec = AttentionSpec.make(batch=1, heads=4, seqlen_q=2048, head_dim=128, mask=CAUSAL, direction="training")
    q, k, v, grad = Truth.of(spec.replace(seqlen_q=256, seqlen_kv=256), 0, torch.device("cuda", 0)).inputs
    q, k, v, grad = (x.repeat(1, 1, 8, 1) for x in (q, k, v, grad))
    for _ in range(3):
        step(spec, q, k, v, grad)
    operands = FP8.prepare(Inputs(q, k, v), spec)
    out = FP8.run(operands).out
    amax_s, amax_o = operands.native.amax.tolist()
    ratios = te._gradients.of(spec, q.device)._largest.tolist()
    print(f"amax of P {amax_s}, of O {amax_o}, max |O| {out.abs().max().item()}, dS and dQKV over bound {ratios}")
    assert 0 < amax_s <= 1.01
    assert amax_o == pytest.approx(out.abs().max().item(), rel=0.1)
    assert all(0 < ratio <= 1 for ratio in ratios)


def test_an_fp8_forward_works_with_a_sixteen_bit_backward() -> None:
    """te:bf16, and every other backward here that can follow, each on what the forward computed with."""
    device = torch.device("cuda", 0)
    spec = AttentionSpec.make(batch=2, heads=8, kv_heads=4, seqlen_q=512, head_dim=64, mask=CAUSAL,
                              direction="training")  # fmt: skip
    truth = Truth.of(spec, 0, device)
    operands = FP8.prepare(Inputs.of(truth.inputs[:3]), spec)
    saved = Saved(operands, *FP8.run(operands))
    exact = dense.dense_gradients(*operands.tensors(), truth.inputs[3], spec)
    here = [module.BACKEND for module in (te, cudnn, fa4, sdpa_cudnn) if module.BACKEND.availability().ok]
    kernels = [each for backend in here for each in backend.kernels if each.name == f"{backend.name}:bf16"]
    for backward in (each for each in kernels if isinstance(each, BackwardKernel)):
        if backward.refusals(spec, describe(device)) or backward.cannot_follow(FP8, describe(device)):
            continue
        found = backward.run(saved, truth.inputs[3])
        errors = [dense.relative_l2(x, y) for x, y in zip(found, exact, strict=True)]
        print(f"te:fp8>{backward.name}: dQ, dK, dV {[round(error, 4) for error in errors]}")
        assert max(errors) <= FP8.declared_error


REFUSED_BACKWARDS = [("te:fp8", 64, 64), ("te:fp8", 256, 256)]


@pytest.mark.parametrize(("name", "size", "size_v"), REFUSED_BACKWARDS)
def test_a_refused_backward_fails(name: str, size: int, size_v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 at 64 is not refused here: without the padding that serves it, it would have to be."""
    monkeypatch.setattr(te_library.Narrow, "padded", lambda self, size: self)
    spec = AttentionSpec.make(batch=1, heads=4, seqlen_q=256, head_dim=size, head_dim_v=size_v, direction="training")
    truth = Truth.of(spec, 0, torch.device("cuda", 0))
    assert (size == 64) or BACKWARDS[name].refusals(spec, describe(torch.device("cuda", 0)))
    operands = FORWARDS[name].prepare(Inputs.of(truth.inputs[:3]), spec)
    saved = Saved(operands, *FORWARDS[name].run(operands))
    with pytest.raises(RuntimeError):
        BACKWARDS[name].run(saved, truth.inputs[3])


@pytest.mark.parametrize("seqlen", [4096, 16384])
def test_a_step_is_as_accurate_as_transformer_engines_own_module(seqlen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole FP8 training step through DotProductAttention, warmed, and one of ours."""
    for variable in ("NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(variable, "0")
    import transformer_engine.pytorch as module
    from transformer_engine.common.recipe import DelayedScaling

    spec = AttentionSpec.make(batch=16384 // seqlen, heads=16, seqlen_q=seqlen, head_dim=128, direction="training",
                              mask=CAUSAL)  # fmt: skip
    rows = [torch.randn(spec.batch, seqlen, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    leaves = [x.requires_grad_() for x in rows[:3]]
    attention = module.DotProductAttention(16, 128, qkv_format="bshd", attn_mask_type="causal")
    recipe = DelayedScaling(fp8_dpa=True)

    def theirs() -> tuple[Tensor, ...]:
        with module.autocast(enabled=True, recipe=recipe):
            out = attention(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, rows[3].reshape(out.shape)))

    def ours() -> tuple[Tensor, ...]:
        return step(spec, *(x.transpose(1, 2) for x in rows))

    for _ in range(10):  # its scales follow what it saw in earlier steps
        found = theirs()
    as_ours = (y.reshape(rows[0].shape).transpose(1, 2) for y in found)
    apart = [dense.relative_l2(x, y) for x, y in zip(ours(), as_ours, strict=True)]
    assert max(apart) <= FP8_BACKWARD.declared_error + 0.05
