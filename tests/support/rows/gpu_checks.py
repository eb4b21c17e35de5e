"""Checks of kernels on a GPU that tests of several backends share, and their problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import dense
import torch
from agreement_sweep import Sweep, Truth

from attnbench import AttentionSpec, Mask
from attnbench.kernels.contract import ForwardKernel, Inputs
from attnbench.kernels.devices import describe
from attnbench.problem.fp8 import Quantised

DEVICE = torch.device("cuda", 0)
LENGTHS = [(256, 256), (257, 257), (130, 333), (333, 130), (200, 330), (1, 200), (77, 1)]
MASKS = [
    Mask(),
    Mask(right=0),
    Mask(right=0, alignment="bottom-right"),
    Mask(left=37, right=0),
    Mask(left=37, right=11),
    Mask(left=150, right=11, alignment="bottom-right"),
    Mask(left=37),
    Mask(right=19, alignment="bottom-right"),
]


def assert_quantising_forward_agrees(
    kernel: ForwardKernel, specs: Iterable[AttentionSpec], floor: float, say: Callable[[str], None]
) -> None:
    """The kernel refuses a spec or agrees with dense FP64, and within ``floor`` with FP64 on its quantised operands."""
    sweep, floors = Sweep(DEVICE), Sweep(DEVICE)
    for index, spec in enumerate(specs):
        truth = Truth.of(spec, index, DEVICE)
        ran = sweep.forward(kernel, truth)
        if ran is not None:
            floors.floor(kernel, truth, ran[0], floor)
    say(f"\n{sweep.report()}\nagainst exact attention on the quantised\n{floors.report()}")
    assert not any(sweep.faults.values())
    assert not any(floors.faults.values())
    assert sweep.served[f"{kernel.name} fwd"] > 20


def assert_descales_are_used(kernel: ForwardKernel, kv_heads: int, *, lengths: tuple[int, int], mask: Mask) -> None:
    """Random descales for each head, some of them large: hidden keys stay hidden for any scores."""
    spec = AttentionSpec.make(
        batch=3, heads=8, kv_heads=kv_heads, seqlen_q=lengths[0], seqlen_kv=lengths[1], head_dim=128, dtype="e4m3",
        descale="head", mask=mask,
    )  # fmt: skip
    inputs = [
        Quantised(
            (torch.randn(3, heads, length, 128, device=DEVICE) * 100).clamp(-448, 448).to(torch.float8_e4m3fn),
            torch.rand(3, heads, 1, 1, device=DEVICE) * 0.02 + 0.001,
            "head",
        )
        for heads, length in ((8, lengths[0]), (kv_heads, lengths[1]), (kv_heads, lengths[1]))
    ]
    result = kernel.run(kernel.prepare(Inputs.of(inputs), spec))
    out, lse = dense.dense_attention(*(x.dequantised(torch.float64) for x in inputs), spec)
    assert dense.relative_l2(result.out, out) < 0.05
    assert dense.relative_l2(result.lse, lse) < 0.001


def assert_many_elements_agree(kernels: Iterable[ForwardKernel]) -> None:
    """The first and last rows agree with FP64 when Q has more than 2**31 elements."""
    length = 2**20 + 2**14
    spec = AttentionSpec.make(batch=1, heads=16, kv_heads=1, seqlen_q=length, seqlen_kv=256, head_dim=128)
    assert length * 16 * 128 > 2**31
    q = torch.randn(1, 16, length, 128, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1, 256, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    for kernel in kernels:
        assert kernel.refusals(spec, describe(DEVICE)) == []
        out = kernel.run(kernel.prepare(Inputs(q, k, v), spec)).out
        for rows in (slice(0, 300), slice(length - 300, length)):
            truth, _ = dense.dense_attention(q[:, :, rows], k, v, spec.replace(seqlen_q=300))
            assert dense.relative_l2(out[:, :, rows], truth) < kernel.declared_error
        del out


def assert_wrong_at_a_negative_scale(kernel: ForwardKernel) -> None:
    """The kernel refuses negative scales, and its result is wrong with one."""
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=256, head_dim=64, mask=Mask(right=0), scale=-40.0)
    assert "positive scale" in kernel.refusals(spec, describe(DEVICE))[0]
    operands = kernel.prepare(Inputs.of(Truth.of(spec, 0, DEVICE).inputs[:3]), spec)
    out, _ = dense.dense_attention(*operands.tensors(torch.float64), spec)
    assert not dense.relative_l2(kernel.run(operands).out, out) < 0.2
