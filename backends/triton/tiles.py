"""The tiles that the forward kernel of ``triton`` runs with, by GPU, head dimension and mask.

Measured beforehand and committed: nothing is timed when a kernel is chosen or run.  ``tests/gpu/tune_triton.py``
measures the candidates in turns on a GPU and prints the entries of ``TILES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from attnbench.spec import AttentionSpec

__all__ = ["DEFAULTS", "HEAD_DIMS", "TILES", "Tile", "TileKey", "padded_size", "tile_of"]

HEAD_DIMS = (64, 128, 256)  # that a block of keys has in shared memory, zeros behind what the tensors have


class Tile(NamedTuple):
    """How a program of the forward kernel computes.

    ``block_m`` queries by ``block_n`` keys at a time, in ``warps`` warps, with ``stages`` blocks of keys under way.
    ``promotion`` 0 adds each block's P·V, begun at zero, to the sum in FP32; N hands N to the compiler as
    ``max_num_imprecise_acc``: it adds what N keys have come to.  P·V is computed for V's head dimension in
    ``parts``, one after the other, which divides the registers of what is added.  ``registers`` bounds those of a
    thread, None leaves them to the compiler.  ``tma`` loads by descriptors, else by pointers.  ``interleaved`` wants
    the keys of V's transposed copy in the order of ``forward.interleaved``.

    With ``overlap`` it is the Hopper kernel that computes, where it serves (``forward_hopper_launch.serves``): it
    takes two or three warpgroups, with 64 queries each, TMA and interleaved keys; ``warps`` and ``promotion`` say
    nothing to it.  What is under way with Q·Kᵀ of the next block is P·V ("products"), the exponentials ("softmax") or
    nothing ("none"); ``turns`` lets one warpgroup multiply while another takes exponentials, of which ``polynomial``
    in eight come from multiply-adds.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    promotion: int = 0
    parts: int = 1
    registers: int | None = None
    tma: bool = True
    interleaved: bool = False
    overlap: Literal["none", "products", "softmax"] | None = None
    turns: bool = False
    polynomial: int = 0


class TileKey(NamedTuple):
    """What a tile was measured for.

    ``capability`` is CUDA's; ``head_dim`` the larger of Q's and V's, padded.  ``mask`` is none or causal: a window
    runs the causal mask's program with other bounds.  ``per_key`` says that keys have scales of their own, which take
    registers and two more products a score.
    """

    capability: tuple[int, int]
    head_dim: int
    mask: Literal["none", "causal"]
    per_key: bool


# What fits on a Hopper multiprocessor several times, by shared memory (227 KiB) and registers without spills: four
# programs at 64, two at 128; one at 256.
DEFAULTS: Mapping[int, Tile] = {
    64: Tile(64, 128, 4, 3),
    128: Tile(64, 128, 4, 3, parts=2),
    256: Tile(128, 128, 8, 2, parts=4),
}
TILES: dict[TileKey, Tile] = {}


def padded_size(size: int) -> int:
    """The head dimension that a tile has: the smallest of HEAD_DIMS that is no smaller."""
    return next(each for each in HEAD_DIMS if size <= each)


def tile_of(
    spec: AttentionSpec, capability: tuple[int, int], *, per_key: bool, tiles: Mapping[TileKey, Tile] = TILES
) -> Tile:
    """The tile of a spec: the measured one, or what fits Hopper."""
    size = padded_size(max(spec.head_dim, spec.head_dim_v))
    mask: Literal["none", "causal"] = "none" if spec.mask.kind == "none" else "causal"
    return tiles.get(TileKey(capability, size, mask, per_key), DEFAULTS[size])
