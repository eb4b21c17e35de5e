"""The tiles of FlexAttention: which one a spec gets, and that it reaches the kernel."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from problems import Problem
from torch.nn.attention.flex_attention import AuxOutput

from attnbench.backends.flex import backend as flex
from attnbench.backends.flex.tiles import TileKey, kernel_options
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import ForwardKernel, Inputs
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

H200 = Device("cuda", "NVIDIA H200", (9, 0))
FORWARDS = {k.name: k for k in flex.BACKEND.kernels if isinstance(k, ForwardKernel)}


def spec_of(seqlen_q: int, seqlen_kv: int, mask: Mask, **more: object) -> AttentionSpec:
    sizes = {"batch": 1, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "bf16", **more}
    return AttentionSpec.make(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, mask=mask, **sizes)


HOPPER = (9, 0)
TILE = {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 3}
BACKWARD_TILE = {"BLOCK_M1": 64, "BLOCK_N1": 128, "BLOCK_M2": 128, "BLOCK_N2": 64, "num_warps": 8, "num_stages": 2}
MEASURED = {
    TileKey(HOPPER, "bf16", 128, "none", "forward"): TILE,
    TileKey(HOPPER, "bf16", 128, "none", "backward"): BACKWARD_TILE,
    TileKey(HOPPER, "fp8", 64, "causal", "forward"): {**TILE, "num_warps": 8},
}


def test_a_measured_tile_is_used_for_specs_of_the_same_program() -> None:
    spec = spec_of(4096, 4096, Mask(), head_dim=128)
    forward = {f"fwd_{name}": value for name, value in TILE.items()}
    backward = {f"bwd_{name}": value for name, value in BACKWARD_TILE.items()}
    assert kernel_options(spec, HOPPER, "bf16", MEASURED) == forward
    assert kernel_options(spec, HOPPER, "fp16", MEASURED) == forward
    assert kernel_options(spec.replace(direction="training"), HOPPER, "bf16", MEASURED) == forward | backward
    smaller = spec_of(4096, 100, Mask(), head_dim=80, head_dim_v=96)  # both are filled up to 128
    assert kernel_options(smaller, HOPPER, "bf16", MEASURED) == forward
    for mask in (Mask(right=0), Mask(left=100, right=7)):
        windowed = spec_of(4096, 4096, mask, head_dim=64)
        assert kernel_options(windowed, HOPPER, "fp8", MEASURED)["fwd_num_warps"] == 8


@pytest.mark.parametrize(
    ("queries", "group", "mask", "unfit"),
    [(64, 2, Mask(right=0), False), (65, 2, Mask(right=0), True), (127, 1, Mask(right=0), False),
     (127, 8, Mask(), False), (17, 8, Mask(left=5), True)],
)  # fmt: skip
def test_groups_that_do_not_fit_a_mask_block_avoid_the_decoding_kernel(
    queries: int, group: int, mask: Mask, unfit: bool
) -> None:
    """Whose tile is the power of two from queries times group on, and must divide the mask's block of 128."""
    spec = AttentionSpec.make(
        batch=1, heads=8, kv_heads=8 // group, seqlen_q=queries, seqlen_kv=512, head_dim=64, mask=mask
    )
    assert kernel_options(spec, HOPPER, "bf16") == ({"FORCE_USE_FLEX_ATTENTION": True} if unfit else {})


@pytest.mark.parametrize(("precision", "head_dim"), [("bf16", 16), ("fp8", 32)])
def test_the_tile_is_passed_to_the_kernel(precision: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through prepare, and from there into the call: torch's own check of its options sees them."""
    tiles = {TileKey(HOPPER, precision, head_dim, "none", "forward"): TILE}
    monkeypatch.setattr(flex, "kernel_options", partial(kernel_options, tiles=tiles))
    monkeypatch.setattr(flex, "describe", lambda device: H200)
    spec = spec_of(128, 128, Mask(), head_dim=head_dim)
    inputs = Inputs.of(Problem(spec, "bhsd", False, 0).tensors()[:3])
    native = FORWARDS[f"flex:{precision}"].prepare(inputs, spec).native
    assert native.options == {f"fwd_{option}": value for option, value in TILE.items()}
    seen: list[object] = []
    monkeypatch.setattr(
        flex, "flex_attention", lambda q, k, v, **given: seen.append(given) or (q, AuxOutput(None, None))
    )
    flex._attend(native, spec.scale, False, torch.bfloat16)
    assert seen[0]["kernel_options"] == native.options
