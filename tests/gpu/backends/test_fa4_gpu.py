"""FlashAttention-4 on a Hopper GPU: dense FP64, and refusals lifted."""

from __future__ import annotations

import itertools

import dense
import pytest
import torch
from sweep import Sweep, Truth

from attnbench import AttentionSpec, Mask
from attnbench.backends.flash_attention import fa4
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.kernels.devices import describe

pytestmark = pytest.mark.skipif(not fa4.BACKEND.availability().ok, reason=str(fa4.BACKEND.availability().reason))
FORWARDS = {k.name: k for k in fa4.BACKEND.kernels if isinstance(k, ForwardKernel)}
BACKWARDS = {k.name: k for k in fa4.BACKEND.kernels if isinstance(k, BackwardKernel)}
END = "bottom-right"
# Every head dimension, group and kind of mask compiles anew: few of each, many lengths.
HEADS = [(40, 24, 1), (64, 64, 1), (96, 96, 4), (128, 128, 1), (128, 128, 8), (192, 128, 1), (256, 256, 2), (80, 80, 1)]
LENGTHS = [(256, 256), (257, 257), (130, 333), (333, 130), (1, 200), (77, 1)]
MASKS = [Mask(), Mask(right=0), Mask(right=0, alignment=END), Mask(left=37, right=11), Mask(left=150, alignment=END)]


def specs(d: int, dv: int, group: int) -> list[AttentionSpec]:
    made = [
        AttentionSpec.make(batch=2, heads=8, kv_heads=8 // group, seqlen_q=sq, seqlen_kv=skv, head_dim=d, head_dim_v=dv,
                           mask=mask, direction="training", softcap=3.0 if i == 7 else 0.0)
        for i, ((sq, skv), mask) in enumerate(itertools.product(LENGTHS, MASKS))
    ]  # fmt: skip
    return list(dict.fromkeys(made))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_it_refuses_or_agrees_with_dense_fp64(heads: tuple[int, int, int]) -> None:
    sweep = Sweep(torch.device("cuda", 0))
    for index, spec in enumerate(specs(*heads)):
        truth = Truth.of(spec, index, sweep.device)
        ran = sweep.forward(FORWARDS["fa4:bf16"], truth)
        if ran is not None:
            saved = Saved(ran[0], *ran[1]) if index % 3 else sweep.exact(truth)
            sweep.backward(BACKWARDS["fa4:bf16"], truth, saved)
    print(f"{heads}\n{sweep.report()}")
    assert not any(sweep.faults.values())
    assert all(sweep.served[f"fa4:bf16 {way}"] > 10 for way in ("fwd", "bwd"))


@pytest.mark.parametrize("head_dim", [128, 256])
def test_fp8_really_fails_here(head_dim: int) -> None:
    device = torch.device("cuda", 0)
    spec = AttentionSpec.make(batch=1, heads=4, seqlen_q=256, head_dim=head_dim)
    assert FORWARDS["fa4:fp8"].refusals(spec, describe(device))
    operands = FORWARDS["fa4:fp8"].prepare(Inputs.of(Truth.of(spec, 0, device).inputs[:3]), spec)
    with pytest.raises(AssertionError, match="SM100"):
        FORWARDS["fa4:fp8"].run(operands)


def test_the_backward_needs_the_padding_of_its_head_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, the library has been mended, and its step can be smaller."""
    spec = AttentionSpec.make(batch=1, heads=4, seqlen_q=256, head_dim=80, direction="training")
    truth = Truth.of(spec, 0, torch.device("cuda", 0))
    forward, backward = FORWARDS["fa4:bf16"], BACKWARDS["fa4:bf16"]
    operands = forward.prepare(Inputs.of(truth.inputs[:3]), spec)
    saved = Saved(operands, *forward.run(operands))
    assert dense.relative_l2(backward.run(saved, truth.inputs[3])[0], truth.gradients[0]) < 0.02
    monkeypatch.setattr(fa4, "_BACKWARD_STEP", 8)
    assert dense.relative_l2(backward.run(saved, truth.inputs[3])[0], truth.gradients[0]) > 0.5
