"""The tiles of the FP8 backward's kernels, by GPU, precision, head dimension and kind of mask.

Nothing is timed at run time: ``tests/gpu/tune/tune_triton_backward.py`` measures candidates and prints ``TILES``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from attnbench.problem.spec import AttentionSpec

__all__ = ["DEFAULT", "MLA", "TILES", "WIDE", "WIDE_NARROW", "Ring", "Tile", "TileKey", "Tiles", "tiles_of"]


class Ring(NamedTuple):
    """The shared-memory ring of a Hopper kernel: ``stages`` blocks of ``block`` tokens.

    Together they hold at least 128 tokens, 256 for e4m3 sums, because a rotation's matrix is stored there later.  The
    kernel over blocks of queries needs three stages, the one over blocks of keys two.
    """

    block: int
    stages: int


class Tile(NamedTuple):
    """``block_m`` queries × ``block_n`` keys at a time, by ``warps`` warps, with ``stages`` blocks in flight.

    Blocks are powers of two from 32 to 128, the length that operands are padded to.  With ``hopper`` the Hopper kernel
    computes where it serves (``hopper.launch.serves``).
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    hopper: Ring | None = None


class Tiles(NamedTuple):
    """Tiles of the kernel over blocks of keys (dK, dV) and of the one over blocks of queries (dQ).

    ``values``: dV has a kernel of its own with this tile, and the other over blocks of keys makes dK alone.
    ``fused``: one Hopper kernel computes all three if it serves, sums may be in any order, and the keys are few enough
    for sums in bf16 (``hopper.launch.MOST_SUMMED``).
    """

    keys: Tile
    queries: Tile
    fused: bool = False
    values: Tile | None = None


class TileKey(NamedTuple):
    """The case that tiles were measured for.

    ``capability`` is CUDA's; ``narrow``: sums over tokens are FP8 too; ``head_dim`` is the larger of Q's and V's,
    padded; ``mask`` is none or causal (also for windows).
    """

    capability: tuple[int, int]
    narrow: bool
    head_dim: int
    mask: Literal["none", "causal"]


# Compiled for Hopper without spilled registers, one program a multiprocessor.  128 keys (or queries) stay while 64
# queries (or keys) pass: with 64 and 64, what is read again from the L2 would take longer than the products.
DEFAULT = Tiles(Tile(64, 128, 8, 3), Tile(128, 64, 8, 3))
# Heads wider than 128 (padded), for which the sums of dK and dV of 128 keys are more than all registers.  At D = 256, 8
# heads and 16k tokens on an H100 dV, dK and dQ take 2.55, 3.78 and 3.37 ms, causal 1.28, 1.69 and 1.67; with 64 keys or
# queries in 4 warps 2.72, 5.40 and 4.85.  Heads of 161 to 192 columns, V too, take the fused kernel.
WIDE = Tiles(Tile(64, 128, 8, 2), Tile(128, 64, 8, 2), fused=True, values=Tile(64, 128, 8, 3))
# The 192 and 128 of MLA and the like leave shared memory for a block more.
MLA = Tiles(Tile(64, 128, 8, 3), Tile(128, 64, 8, 3), fused=True, values=Tile(64, 128, 8, 3))
# Sums in e4m3, each added from a fresh product, take twice the registers.
WIDE_NARROW = Tiles(Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), values=Tile(64, 64, 8, 3))
# On an H200 (Triton 3.6, cold L2, 16,384 tokens of width 2048), milliseconds of dK with dV and of dQ at 4k and 16k.
# All at once: the ``fused`` kernel, and the two Hopper kernels together in its run.
TILES: dict[TileKey, Tiles] = {
    # 1.35 and 0.87, 5.08 and 3.50; all at once 2.15, 8.05 for 2.35, 9.09
    TileKey((9, 0), False, 128, "none"): Tiles(Tile(64, 64, 4, 2, Ring(64, 3)), Tile(64, 64, 4, 3), fused=True),
    # 0.83 and 0.51, 2.79 and 1.81; all at once 1.18, 4.00 for 1.41, 4.83
    TileKey((9, 0), False, 128, "causal"): Tiles(Tile(64, 64, 4, 2, Ring(64, 3)), Tile(64, 64, 4, 3), fused=True),
    # 1.71 and 1.08, 6.89 and 4.80; all at once 2.72, 10.5 for 3.12, 11.8
    TileKey((9, 0), False, 64, "none"): Tiles(Tile(64, 64, 4, 3, Ring(64, 6)), Tile(64, 64, 4, 3), fused=True),
    # 1.00 and 0.61, 3.46 and 2.38; all at once 1.57, 5.37 for 1.73, 6.20
    TileKey((9, 0), False, 64, "causal"): Tiles(Tile(64, 64, 4, 2, Ring(64, 3)), Tile(64, 64, 4, 3), fused=True),
    # 1.32 and 0.92, 5.12 and 3.57
    TileKey((9, 0), True, 128, "none"): Tiles(Tile(64, 64, 4, 2, Ring(64, 5)), Tile(64, 128, 4, 2, Ring(64, 6))),
    # 0.80 and 0.56, 2.63 and 1.88
    TileKey((9, 0), True, 128, "causal"): Tiles(Tile(64, 64, 4, 2, Ring(64, 5)), Tile(64, 128, 4, 2, Ring(64, 6))),
    # 1.80 and 1.36, 7.23 and 5.34
    TileKey((9, 0), True, 64, "none"): Tiles(Tile(128, 64, 4, 3), Tile(64, 128, 4, 3)),
    # 1.06 and 0.75, 3.55 and 2.81
    TileKey((9, 0), True, 64, "causal"): Tiles(Tile(128, 64, 4, 3, Ring(64, 6)), Tile(64, 64, 4, 3)),
}


def tiles_of(spec: AttentionSpec, head_dim: int, capability: tuple[int, int], narrow: bool) -> Tiles:
    """The tiles of a spec whose padded head dimension is ``head_dim``: measured ones, or what fits Hopper."""
    mask: Literal["none", "causal"] = "none" if spec.mask.kind == "none" else "causal"
    found = TILES.get(TileKey(capability, narrow, head_dim, mask))
    if found is not None or head_dim <= 128:
        return found or DEFAULT
    if narrow:
        return WIDE_NARROW
    return MLA if spec.head_dim <= 192 and spec.head_dim_v <= 128 else WIDE
