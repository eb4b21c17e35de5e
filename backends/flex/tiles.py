"""Tiles for FlexAttention's kernels where one was measured to beat torch's default.

Nothing is timed at run time.  ``tests/gpu/tune/tune_flex.py`` measures candidates on a GPU and prints ``TILES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from attnbench.problem.spec import AttentionSpec

__all__ = ["SHORTEST", "TILES", "Direction", "Options", "TileKey", "kernel_options"]

Options = Mapping[str, int | bool]
Direction = Literal["forward", "backward"]

SHORTEST = 128  # queries; torch gives fewer to a kernel for decoding, whose tiles mean something else


class TileKey(NamedTuple):
    """The case that a tile was measured for.

    ``capability`` is CUDA's; ``precision`` is bf16 (also for fp16) or fp8; ``head_dim`` is the power of two that the
    larger of Q's and V's is padded to; ``mask`` is none or causal (also for windows).
    """

    capability: tuple[int, int]
    precision: str
    head_dim: int
    mask: Literal["none", "causal"]
    direction: Direction


def _forward(block_m: int, block_n: int, warps: int, stages: int) -> Options:
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}


def _backward(block: int, warps: int, stages: int) -> Options:
    blocks = dict.fromkeys(("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), block)
    return {**blocks, "num_warps": warps, "num_stages": stages}


# Options by their names in torch's FlexKernelOptions.  A key that is not here runs with torch's default.
# NVIDIA H200, torch 2.11.0+cu130, cold L2, 16,384 tokens a case, hidden size 2048, at 4k and 16k tokens a sequence.
TILES: dict[TileKey, Options] = {
    TileKey((9, 0), "bf16", 64, "none", "backward"): _backward(64, 4, 3),
    TileKey((9, 0), "bf16", 64, "causal", "backward"): _backward(64, 4, 3),
    TileKey((9, 0), "bf16", 256, "none", "backward"): _backward(64, 8, 2),
    TileKey((9, 0), "bf16", 256, "causal", "backward"): _backward(64, 8, 2),
    TileKey((9, 0), "bf16", 64, "none", "forward"): _forward(64, 64, 4, 3),
    TileKey((9, 0), "bf16", 64, "causal", "forward"): _forward(64, 64, 4, 3),
    TileKey((9, 0), "bf16", 128, "none", "forward"): _forward(64, 64, 4, 3),
    TileKey((9, 0), "bf16", 128, "causal", "forward"): _forward(64, 64, 4, 3),
    TileKey((9, 0), "bf16", 256, "none", "forward"): {**_forward(128, 64, 8, 2), "USE_TMA": True},
    TileKey((9, 0), "bf16", 256, "causal", "forward"): {**_forward(128, 64, 8, 2), "USE_TMA": True},
    TileKey((9, 0), "fp8", 64, "none", "forward"): _forward(64, 128, 4, 3),
    TileKey((9, 0), "fp8", 128, "none", "forward"): _forward(128, 128, 4, 3),
    TileKey((9, 0), "fp8", 128, "causal", "forward"): _forward(64, 128, 4, 3),
    TileKey((9, 0), "fp8", 256, "none", "forward"): _forward(128, 128, 8, 3),
    TileKey((9, 0), "fp8", 256, "causal", "forward"): _forward(128, 128, 8, 3),
}


def kernel_options(
    spec: AttentionSpec, capability: tuple[int, int], precision: str, tiles: Mapping[TileKey, Options] = TILES
) -> dict[str, int | bool]:
    """The ``kernel_options`` of ``flex_attention`` for a spec, empty if torch's default serves best.

    Options of the forward are prefixed ``fwd_``, those of the backward ``bwd_``; a spec for training has both.
    """
    found: dict[str, int | bool] = {}
    if spec.lengths is not None:  # of any total, to which the kernel for decoding must not be compiled
        found["FORCE_USE_FLEX_ATTENTION"] = True
    elif spec.seqlen_q < SHORTEST:
        # The kernel for decoding puts the queries of a whole group into one tile, which must fit a block of the mask.
        unfit = spec.mask.kind != "none" and spec.group * spec.seqlen_q > SHORTEST
        return {"FORCE_USE_FLEX_ATTENTION": True} if unfit else {}
    size = 1 << (max(spec.head_dim, spec.head_dim_v) - 1).bit_length()
    directions: tuple[Direction, ...] = ("forward", "backward") if spec.training else ("forward",)
    for direction in directions:
        masked = spec.mask.kind != "none" or spec.lengths is not None
        mask: Literal["none", "causal"] = "causal" if masked else "none"
        key = TileKey(capability, "fp8" if precision == "fp8" else "bf16", size, mask, direction)
        prefix = "fwd_" if direction == "forward" else "bwd_"
        found |= {prefix + name: value for name, value in tiles.get(key, {}).items()}
    return found
