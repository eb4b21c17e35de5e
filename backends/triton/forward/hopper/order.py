"""Which tiles a program of the forward's Hopper kernel computes, in what order, and which keys each sees (Gluon)."""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...tile_rows import DRAWN, ENDED, ROW

__all__ = [
    "TILES_AHEAD",
    "Board",
    "Order",
    "Span",
    "Tile",
    "after",
    "blocks_of",
    "board_for",
    "bounds",
    "end",
    "following",
    "has_tile",
    "publish_tile",
    "read_tile",
    "span_of_keys",
    "tile_at",
]

TILES_AHEAD = gl.constexpr(3)  # of which the loading warp may have published
_NUMBERS = gl.constexpr(8)  # numbers of a tile: whether there is one, and all but V's slot
_ROW = gl.constexpr(ROW.value)
_DRAWN, _ENDED = gl.constexpr(DRAWN.value), gl.constexpr(ENDED.value)

# What decides where a tile is: the table, blocks of a head, heads and how many take turns, lengths, query heads.
Order = namedtuple("Order", "tiles blocks programs section seqlen_q seqlen_kv heads")
# Batch entry, head, first query, where its sequence's queries start and their number, the same of its keys, V's slot.
Tile = namedtuple("Tile", "batch head top q_start queries k_start keys v_start")
# Where a tile's keys start, from where to where all its queries see all keys, how many blocks of keys there are.
Span = namedtuple("Span", "first whole parted blocks")
# Shared memory in which the loading warp publishes tiles: their numbers, barriers of published and of read.
Board = namedtuple("Board", "numbers published read")


@gluon.jit
def blocks_of(seqlen_q, tiles, block_m: gl.constexpr):
    """How many blocks of queries a head has: those of all sequences in the table, where there is one."""
    return gl.cdiv(seqlen_q, block_m) if tiles is None else gl.load(tiles)


@gluon.jit
def tile_at(place, order, block_m: gl.constexpr, backwards: gl.constexpr):
    """The ``Tile`` at ``place`` of the ``Order``.

    Where all lengths are alike even rounds of programs go up, odd ones down, and with ``backwards`` a head's last
    blocks come first, as the table has them anyway.
    """
    first, programs_at_once = gl.program_id(0), gl.num_programs(0)
    if order.tiles is None:
        before = place - first
        whole = before + programs_at_once <= order.blocks * order.programs
        back = whole & ((before // programs_at_once) % 2 == 1)
        place = gl.where(back, before + programs_at_once - 1 - first, place)
    before = place // (order.section * order.blocks) * order.section
    width = gl.minimum(order.section, order.programs - before)
    place -= before * order.blocks
    block, head = place // width, before + place % width
    if order.tiles is None:
        if backwards:  # the last queries see the most keys, and start first
            block = order.blocks - 1 - block
        found = Tile(head // order.heads, head % order.heads, block * block_m, 0, order.seqlen_q, 0, order.seqlen_kv, 0)
    else:
        row = order.tiles + (1 + block) * _ROW
        found = Tile(
            gl.load(row), head, gl.load(row + 1), gl.load(row + 2), gl.load(row + 3), gl.load(row + 4),
            gl.load(row + 5), gl.load(row + 7),
        )  # fmt: skip
    return found


@gluon.jit
def following(place, tiles):
    """A program's next place: of a table's the first that no program has drawn, else that of the next round.

    A table's tiles are too unequal for rounds.
    """
    drawn = gl.num_programs(0)
    return place + drawn if tiles is None else drawn + gl.atomic_add(tiles + _DRAWN, 1)


@gluon.jit
def end(tiles):
    """The last program that ends leaves the table as it was."""
    if tiles is not None:  # noqa: SIM102 (where all lengths are alike there is no branch)
        if gl.atomic_add(tiles + _ENDED, 1) == gl.num_programs(0) - 1:
            gl.store(tiles + _DRAWN, 0)
            gl.store(tiles + _ENDED, 0)


@gluon.jit
def board_for(readers: gl.constexpr):
    """The ``Board`` on which the loading warp publishes tiles to so many readers."""
    one: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    numbers = gl.allocate_shared_memory(gl.int32, [TILES_AHEAD * _NUMBERS, 1], one)
    published = gl.allocate_shared_memory(gl.int64, [TILES_AHEAD, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [TILES_AHEAD, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(TILES_AHEAD):
        mbarrier.init(published.index(i), count=1)
        mbarrier.init(read.index(i), count=readers)
    return Board(numbers, published, read)


@gluon.jit
def publish_tile(board, slot, phase, there, tile):
    """The loading warp publishes its next tile, or that there is none."""
    mbarrier.wait(board.read.index(slot), phase)
    _set(board.numbers.index(slot * _NUMBERS), there)
    for i in gl.static_range(_NUMBERS - 1):
        _set(board.numbers.index(slot * _NUMBERS + 1 + i), tile[i])
    fence_async_shared()
    mbarrier.arrive(board.published.index(slot), count=1)


@gluon.jit
def _set(place, x):
    place.store(gl.full([1], x, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def has_tile(board, slot, phase):
    """Whether there is another tile."""
    mbarrier.wait(board.published.index(slot), phase)
    return _number(board, slot, 0) == 1


@gluon.jit
def _number(board, slot, which: gl.constexpr):
    """For four warps."""
    return gl.max(board.numbers.index(slot * _NUMBERS + which).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def read_tile(board, slot):
    """The ``Tile`` that ``has_tile`` waited for, without V's slot."""
    found = ()
    for i in gl.static_range(_NUMBERS - 1):
        found = found + (_number(board, slot, 1 + i),)  # noqa: RUF005
    return Tile(*found, 0)  # type: ignore[call-arg]


@gluon.jit
def bounds(low, high, queries, keys, aligned: gl.constexpr):
    """A sequence's own ``low`` and ``high``."""
    if aligned:
        low, high = low + keys - queries, high + keys - queries
    return low, high


@gluon.jit
def span_of_keys(
    top, seqlen_q, seqlen_kv, low, high,
    block_m: gl.constexpr, block_n: gl.constexpr, left: gl.constexpr, right: gl.constexpr,
):  # fmt: skip
    """The ``Span`` of a tile's keys: one block at least, in which no query need see a key."""
    bottom = gl.minimum(top + block_m, seqlen_q) - 1
    first, whole = 0, 0
    last, parted = seqlen_kv, seqlen_kv // block_n * block_n
    if right:
        last = gl.minimum(last, gl.maximum(bottom + high + 1, 0))
        parted = gl.minimum(parted, gl.maximum(top + high + 1, 0) // block_n * block_n)
    if left:
        first = gl.minimum(gl.maximum(top + low, 0), last) // block_n * block_n
        whole = gl.minimum(gl.cdiv(gl.maximum(bottom + low, 0), block_n) * block_n, gl.cdiv(last, block_n) * block_n)
        parted = gl.maximum(parted, whole)
    return Span(first, whole, parted, gl.maximum(gl.cdiv(last - first, block_n), 1))


@gluon.jit
def after(slot, phase, stages: gl.constexpr):
    """The next slot of a ring, and the phase of its barriers."""
    last = slot == stages - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)
