"""The tiles of ``triton``'s forward kernel, by GPU, head dimension and mask.

Nothing is timed at run time: ``tests/gpu/tune/tune_triton.py`` measures candidates on a GPU and prints ``TILES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

__all__ = [
    "DEFAULTS",
    "HEAD_DIMS",
    "ONE_PASS",
    "TILES",
    "WIDE_SCORES",
    "Chunks",
    "Tile",
    "TileKey",
    "chunks_of",
    "default_tile",
    "head_class",
    "one_pass_tile",
    "padded_size",
    "tile_of",
]

HEAD_DIMS = (64, 128, 256)  # that a block of keys has in shared memory, zeros behind what the tensors have
_MLA = 192  # DeepSeek's head dimension of Q and K, beside 128 of V
_CHUNK = 32  # of the head dimension: what an FP8 tensor core sums over at once
# Blocks of 128 keys where they compute at most so many of the keys that blocks of 256 do.  On an H200 128 took 0.69 to
# 1.01 of the time of whole calls up to there (257 tokens, 512 under a causal mask, windows of 1,024), 0.90 to 1.05 at
# 0.94 and 1.02 to 1.07 at 0.97.  Packed: 0.72 to 0.88 up to 0.82, 0.93 at 0.90, 1.03 and 1.04 at 0.93.
_SHORTER, _WORTHWHILE = 128, 0.91
# Sequences of unequal length are taken for four that are so many tokens longer or shorter than the typical one, because
# it is chance how much of its last block one fills.
_AROUND = (-96, -32, 32, 96)
_SAMPLED = 128  # tiles of queries that are looked at


class Chunks(NamedTuple):
    """A head dimension as the Hopper kernel has it: ``number`` chunks of ``width``, a power of two."""

    width: int
    number: int

    @property
    def size(self) -> int:
        """Of the head dimension with the zeros behind it."""
        return self.width * self.number


class Tile(NamedTuple):
    """How a program of the forward kernel computes.

    ``block_m`` queries by ``block_n`` keys at a time, in ``warps`` warps, with ``stages`` blocks of keys in flight.
    ``promotion`` 0 adds each block's P·V, from zero, to the sum in FP32; N is the compiler's ``max_num_imprecise_acc``.
    P·V is computed for V's head dimension in ``parts``, one after the other, which divides the registers.
    ``registers`` limits those of a thread.  ``tma`` loads by descriptors, else by pointers.  ``interleaved``: the keys
    of V's transposed copy are in the order of ``interleaving``.

    With ``hopper`` the Hopper kernel computes where it serves (``hopper.launch.serves``): ``block_m`` is 128, keys are
    interleaved, ``warps`` and ``promotion`` are ignored.  ``turns``: one of its warpgroups multiplies while the other
    takes exponentials.  From ``alone_from`` keys on each tile has its own program; otherwise programs are persistent,
    which hides where tiles begin and end, but balances the unequal tiles of a causal mask less evenly.  Those of
    sequences of unequal length always are: they draw their tiles.
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
    hopper: bool = False
    turns: bool = False
    alone_from: int | None = None


class TileKey(NamedTuple):
    """The case that a tile was measured for.

    ``capability`` is CUDA's; ``head_dim`` is ``head_class``; ``mask`` is none or causal (also for windows).
    ``per_key``: keys have their own scales, which take registers and two more products a score.
    """

    capability: tuple[int, int]
    head_dim: int
    mask: Literal["none", "causal"]
    per_key: bool


# What fits on a Hopper multiprocessor several times, by shared memory (227 KiB) and registers without spills: four
# programs at 64, three at 128; one at 256.
DEFAULTS: Mapping[int, Tile] = {
    64: Tile(64, 128, 4, 3),
    128: Tile(64, 128, 4, 2),
    192: Tile(64, 128, 4, 2),
    256: Tile(128, 128, 8, 3, parts=4),
}
# Where Q and K have 16 bits, which take twice the shared memory; not yet tuned.
WIDE_SCORES: Mapping[int, Tile] = {
    64: Tile(64, 128, 4, 3, interleaved=True),
    128: Tile(64, 128, 4, 2, interleaved=True),
    192: Tile(64, 64, 4, 2, parts=2, interleaved=True),
    256: Tile(64, 64, 4, 2, parts=4, interleaved=True),
}
# Where the kernel casts Q, and K and V have a scale for each of its blocks of keys: by head dimension, from 128 on, and
# whether there is no mask.  Where the Hopper kernel does not run, so long are the blocks all the same.
ONE_PASS: Mapping[tuple[int, bool], Tile] = {
    (128, True): Tile(128, 256, 4, 2, interleaved=True, hopper=True, turns=True),
    (128, False): Tile(128, 256, 4, 2, interleaved=True, hopper=True, turns=True, alone_from=8192),
    (192, True): Tile(128, 256, 4, 2, interleaved=True, hopper=True, turns=True),
    (192, False): Tile(128, 256, 4, 2, interleaved=True, hopper=True, turns=True, alone_from=8192),
    (256, True): Tile(128, 128, 4, 2, parts=8, interleaved=True, hopper=True, turns=True),
    (256, False): Tile(128, 128, 4, 2, parts=8, interleaved=True, hopper=True, alone_from=0),
}
# On an H200 (Triton 3.6, cold L2, 16,384 tokens of width 2048), TFLOPS at 16k / 4k / 1k tokens, beside FlashAttention-3
# in the same run; with a scale for each key beside nothing.
TILES: dict[TileKey, Tile] = {
    # 653 632 558 beside 673 604 441
    TileKey((9, 0), 64, "none", False): Tile(64, 128, 4, 3, interleaved=True),
    # 639 566 379 beside 662 537 298
    TileKey((9, 0), 64, "causal", False): Tile(64, 128, 4, 3, registers=128, interleaved=True),
    # 1008 969 770 beside 955 916 744
    TileKey((9, 0), 128, "none", False): Tile(128, 256, 4, 2, interleaved=True, hopper=True, turns=True),
    # 934 793 509 beside 945 825 509; 880 where programs go on at 16k, 763 and 397 where they do not below
    TileKey((9, 0), 128, "causal", False): Tile(
        128, 256, 4, 2, interleaved=True, hopper=True, turns=True, alone_from=8192
    ),
    # On an H100, 192 and 128, 16 heads, at 8k: 1143; 1103 where programs do not go on
    TileKey((9, 0), 192, "none", False): Tile(128, 256, 4, 2, interleaved=True, hopper=True, turns=True),
    # The same: 1000; 851 where programs go on
    TileKey((9, 0), 192, "causal", False): Tile(
        128, 256, 4, 2, interleaved=True, hopper=True, turns=True, alone_from=8192
    ),
    # 1221 1133 858 beside 1297 1237 1005
    TileKey((9, 0), 256, "none", False): Tile(128, 128, 4, 2, parts=8, interleaved=True, hopper=True, turns=True),
    # 1194 983 570 beside 1275 1109 713
    TileKey((9, 0), 256, "causal", False): Tile(128, 128, 4, 2, parts=8, interleaved=True, hopper=True, alone_from=0),
    # 453 450 399
    TileKey((9, 0), 64, "none", True): Tile(64, 128, 4, 2, interleaved=True),
    # 424 374 257
    TileKey((9, 0), 64, "causal", True): Tile(64, 128, 4, 2, registers=168, interleaved=True),
    # 681 666 601
    TileKey((9, 0), 128, "none", True): Tile(64, 128, 4, 2, registers=168, interleaved=True),
    # 603 551 365
    TileKey((9, 0), 128, "causal", True): Tile(64, 128, 4, 2, registers=168, interleaved=True),
    # 554 533 459
    TileKey((9, 0), 256, "none", True): Tile(128, 128, 8, 2, parts=4, interleaved=True),
    # 515 446 290
    TileKey((9, 0), 256, "causal", True): Tile(128, 128, 8, 2, parts=2, interleaved=True),
}


def padded_size(size: int) -> int:
    """The head dimension that a tile has: the smallest of HEAD_DIMS that is no smaller."""
    return next(each for each in HEAD_DIMS if size <= each)


def chunks_of(size: int) -> Chunks:
    """A head dimension as chunks that pad it least: one where a power of two does, else as wide ones as do."""
    whole = max(HEAD_DIMS[0], -(-size // _CHUNK) * _CHUNK)
    width = whole & -whole
    return Chunks(width, whole // width)


def head_class(spec: AttentionSpec) -> int:
    """What tiles are chosen by: 192 for the 192 and 128 of MLA and the like, else the larger dimension, padded."""
    if HEAD_DIMS[1] < spec.head_dim <= _MLA and spec.head_dim_v <= HEAD_DIMS[1]:
        return _MLA
    return padded_size(max(spec.head_dim, spec.head_dim_v))


@lru_cache(maxsize=1024)  # every call asks for it
def one_pass_tile(spec: AttentionSpec) -> Tile:
    """The tile where the kernel casts Q."""
    return _fitted(ONE_PASS[max(head_class(spec), HEAD_DIMS[1]), spec.mask.kind == "none"], spec)


def tile_of(
    spec: AttentionSpec, capability: tuple[int, int], *, per_key: bool, tiles: Mapping[TileKey, Tile] = TILES
) -> Tile:
    """The tile of a spec: the measured one, its blocks of keys perhaps shorter, or what fits Hopper."""
    size = head_class(spec)
    mask: Literal["none", "causal"] = "none" if spec.mask.kind == "none" else "causal"
    tile = tiles.get(TileKey(capability, size, mask, per_key))
    return default_tile(spec, per_key=per_key) if tile is None else _fitted(tile, spec)


def default_tile(spec: AttentionSpec, *, per_key: bool) -> Tile:
    """A tile that fits Hopper, with a scale for each key or without."""
    size = head_class(spec)
    # Scales of keys are loaded ahead like K and V; at 256 three stages of all of them are 1 KiB too much.
    return DEFAULTS[size]._replace(stages=2) if per_key and size == HEAD_DIMS[-1] else DEFAULTS[size]


@lru_cache(maxsize=1024)
def _fitted(tile: Tile, spec: AttentionSpec) -> Tile:
    """The tile, with shorter blocks of keys where those compute far fewer keys that no query sees."""
    shorter = tile._replace(block_n=_SHORTER)
    if not tile.hopper or tile.block_n <= _SHORTER:
        return tile
    return shorter if _computed(shorter, spec) <= _WORTHWHILE * _computed(tile, spec) else tile


def _computed(tile: Tile, spec: AttentionSpec) -> int:
    """How many keys a head's tiles of queries compute with, added up over the tiles of one sequence, or of some that
    stand for all; of long ones over some of the tiles.
    """
    queries, keys = map(round, spec.typical_lengths)
    around = (0,) if queries == spec.seqlen_q else _AROUND
    return sum(_computed_of(tile, spec.mask, max(queries + each, 1), max(keys + each, 1)) for each in around)


def _computed_of(tile: Tile, mask: Mask, queries: int, keys: int) -> int:
    blocks = 0
    # An odd number of tiles apart: some begin where a longer block does, and some in its middle.
    for top in range(0, queries, tile.block_m * (queries // (_SAMPLED * tile.block_m) | 1)):
        first, _ = mask.span(top, queries, keys)
        _, end = mask.span(min(top + tile.block_m, queries) - 1, queries, keys)
        blocks += max(-(-end // tile.block_n) - first // tile.block_n, 1)  # as ``span_of_keys`` has it
    return blocks * tile.block_n
