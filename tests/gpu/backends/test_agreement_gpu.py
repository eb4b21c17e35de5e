"""Every kernel of the libraries with backwards refuses a spec or agrees with dense FP64 on it, on a Hopper GPU.

Each skips, and says so, where its library is not installed.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
from agreement_sweep import Sweep, Truth
from gpu_checks import DEVICE, LENGTHS, MASKS

from attnbench import AttentionSpec, Mask
from attnbench.kernels.contract import Saved
from attnbench.kernels.registry import registry

END = "bottom-right"
FA3_HEADS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (64, 128), (40, 40), (5, 7)]
GROUPS = (1, 4, 8)
# Every head dimension, group and kind of mask of FlashAttention-4 compiles anew: few of each, many lengths.
FA4_HEADS = [
    (40, 24, 1),
    (64, 64, 1),
    (96, 96, 4),
    (128, 128, 1),
    (128, 128, 8),
    (192, 128, 1),
    (256, 256, 2),
    (80, 80, 1),
]
FA4_LENGTHS = [(256, 256), (257, 257), (130, 333), (333, 130), (1, 200), (77, 1)]
FA4_MASKS = [Mask(), Mask(right=0), Mask(right=0, alignment=END), Mask(37, 11), Mask(left=150, alignment=END)]
CUDNN_HEADS = [
    (64, 64, 1), (80, 80, 1), (96, 96, 4), (128, 128, 1), (128, 128, 8), (192, 128, 1), (256, 256, 2), (256, 128, 1),
]  # fmt: skip
CUDNN_LENGTHS = [(256, 256), (257, 257), (144, 333), (333, 130), (336, 130), (1, 200), (77, 1)]
CUDNN_MASKS = [*FA4_MASKS, Mask(left=0, right=0), Mask(right=260, alignment=END)]
SDPA = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math")
SHARE = {"bf16": 1, "fp16": 5, "fp32": 5, "fp64": 17}  # every how many specs a precision takes


class Case(NamedTuple):
    """Kernels, their specs, and on how many of these each must run at the least."""

    names: list[str]
    specs: list[AttentionSpec]
    least: int = 1


def spec_of(sq: int, skv: int, mask: Mask, d: int, dv: int, group: int, **more: object) -> AttentionSpec:
    return AttentionSpec.make(
        batch=2, heads=8, kv_heads=8 // group, seqlen_q=sq, seqlen_kv=skv, head_dim=d, head_dim_v=dv, mask=mask,
        direction="training", **more,
    )  # fmt: skip


def fa3_specs(dtype: str) -> list[AttentionSpec]:
    """Every head dimension with every length and mask; groups, scales and caps rotate."""
    rows = enumerate(itertools.product(LENGTHS, MASKS, FA3_HEADS))
    return [
        spec_of(*lengths, mask, *heads, GROUPS[i % 3], dtype=dtype, softcap=0.0 if i % 7 else 5.0,
                scale=heads[0] ** -0.5 * (1.0 if i % 5 else 0.6))
        for i, (lengths, mask, heads) in rows
    ]  # fmt: skip


def sdpa_specs(dtype: str) -> list[AttentionSpec]:
    masks = [*MASKS, Mask(left=37, right=0, alignment=END)]
    rows = enumerate(itertools.product(LENGTHS, masks, FA3_HEADS[:8]))
    return [spec_of(*lengths, mask, *heads, GROUPS[i % 3], dtype=dtype, scale=heads[0] ** -0.5 if i % 5 else 0.21)
            for i, (lengths, mask, heads) in rows]  # fmt: skip


def fa4_specs(heads: tuple[int, int, int]) -> list[AttentionSpec]:
    rows = enumerate(itertools.product(FA4_LENGTHS, FA4_MASKS))
    return [spec_of(*lengths, mask, *heads, softcap=3.0 if i == 7 else 0.0) for i, (lengths, mask) in rows]


def cudnn_specs() -> list[AttentionSpec]:
    rows = enumerate(itertools.product(CUDNN_HEADS, CUDNN_LENGTHS, CUDNN_MASKS))
    return [spec_of(*lengths, mask, *heads, scale=heads[0] ** -0.5 * (1.0, 0.7, 1.3)[i % 3])
            for i, (heads, lengths, mask) in rows]  # fmt: skip


def cases() -> dict[str, Case]:
    """A mask that cuts nothing is the same spec as none."""
    known, found = registry(), {}
    for dtype, share in SHARE.items():
        names = [f"{family}:{dtype}" for family in SDPA]
        names = [name for name in names if name in known.forwards and "cuda" in known.forward(name).rows]
        found[f"sdpa {dtype}"] = Case(names, list(dict.fromkeys(sdpa_specs(dtype)))[::share])
    for family, dtype in itertools.product(("fa3", "fa3-vllm"), ("bf16", "fp16")):
        specs = list(dict.fromkeys(fa3_specs(dtype)))[:: 1 if dtype == "bf16" else 4]
        found[f"{family} {dtype}"] = Case([f"{family}:fp8", f"{family}:{dtype}"], specs)
    for heads in FA4_HEADS:
        found[f"fa4 {heads}"] = Case(["fa4:bf16"], list(dict.fromkeys(fa4_specs(heads))), least=11)
    for family, precision in itertools.product(("cudnn", "te"), ("bf16", "fp8")):
        found[f"{family} {precision}"] = Case([f"{family}:{precision}"], list(dict.fromkeys(cudnn_specs())), least=11)
    return found


CASES = cases()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_kernel_refuses_or_agrees_with_dense_fp64(case: Case) -> None:
    """A backward is fed by its own forward's result and by an exact one's, in turns.

    FlashAttention-3's FP8 twice: against the truth, and against exact attention on what it quantised, where less is
    allowed.
    """
    known, family = registry(), case.names[0].partition(":")[0]
    if reason := known.availability(family).reason:
        pytest.skip(f"{family}: {reason}")
    sweep, floor, random_state = Sweep(DEVICE), Sweep(DEVICE), torch.cuda.get_rng_state()
    for index, spec in enumerate(case.specs):
        truth = Truth.of(spec, index, DEVICE)
        for name in case.names:
            narrow = family.startswith("fa3") and name.endswith(":fp8")
            few = narrow and spec.seqlen_q * spec.head_dim_v < 64  # a mean over too few to bound
            ran = (floor if few else sweep).forward(known.forward(name), truth, 0.2 if few else None)
            if ran is not None and narrow:
                floor.floor(known.forward(name), truth, ran[0], 0.05)  # of P and the accumulator
            elif ran is not None and name in known.backwards:
                backward = known.backward(name)
                own = index % 3 or backward.follows is not None or not backward.needs_lse
                sweep.backward(backward, truth, Saved(ran[0], *ran[1]) if own else sweep.exact(truth))
    print(f"{sweep.report()}\nagainst exact attention on the quantised\n{floor.report()}")
    assert not any(sweep.faults.values())
    assert not any(floor.faults.values())
    for name in case.names:
        ways = ("fwd", "bwd") if name in known.backwards and family != "fa3" else ("fwd",)  # which may lack it
        assert all(sweep.served[f"{name} {way}"] >= case.least for way in ways)
    if family in ("cudnn", "te"):
        assert torch.equal(torch.cuda.get_rng_state(), random_state)
