"""The forward kernel of ``triton`` for Hopper: warps of their own load, others compute (Gluon).

What it computes is said in ``forward.kernel``; this is how.  One warp brings Q, and K and V block by block, into
rings of shared memory; two warpgroups with 64 queries each compute on the same keys, so that K and V come from L2
once for both (two programs of 64 queries would ask L2 for all it has at 900 TFLOPS).  A program goes on from tile to
tile, and the next one's operands come while the last one's output is written.  The loading warp finds the tiles and
tells the others.  In a table, where registers do, a tile's first scores are computed beneath the end of the one before.

P·V starts at zero, and is added in FP32: one multiply-add an element, which rescaling would cost as well.  Where the
warpgroups take ``turns``, one multiplies while the other takes exponentials (FlashAttention-3, arXiv 2407.08608,
section 3.1).  What its section 3.2 adds, Q·Kᵀ of the next block beneath a warpgroup's own exponentials, was slower
here on an H200: 128 keys are all that registers hold twice, and 256 at once need half as many of everything else.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from .order import (
    TILES_AHEAD,
    Order,
    Tile,
    after,
    blocks_of,
    board_for,
    bounds,
    end,
    following,
    has_tile,
    publish_tile,
    read_tile,
    span_of_keys,
    tile_at,
)
from .products import add_products, rows_at, start_scores, store_tile
from .scales import LOG2_E, at_least, cast_rows, factors_of_heads, number, set_numbers, unit_of
from .softmax import MINUS_INFINITY, ROWS, block_weights, soft_capped, totals

__all__ = ["CONSUMERS", "triton_fp8_attention_forward_hopper"]

CONSUMERS = gl.constexpr(2)  # warpgroups that compute
_APART = gl.constexpr(128)  # head dimension up to which Q in 16 bits and in e4m3 both fit into shared memory
_COPIES = gl.constexpr(2)  # of a program's queries: this tile's and the next one's
_OUTSIDE = gl.constexpr(1 << 30)  # behind every key

# What partitions are given: tensors and descriptors, shared memory (a Triton tuple has `values` of its own), barriers,
# numbers.  Of a block of keys: K's descale, the unit of the sums, and what makes those before it sums in that unit.
_Given = namedtuple(
    "_Given",
    "q k v out lse q_factors k_factors v_factors scale softcap "
    "queries narrow keys value_blocks of_keys units changes board "
    "q_filled k_filled v_filled q_emptied k_emptied v_emptied turn "
    "q_by_batch q_by_head q_aside k_by_batch k_by_head k_aside "
    "q_batch q_head k_batch k_head v_batch v_head "
    "seqlen_q seqlen_kv programs section low high heads group head_dim_v",
)


@gluon.jit
def _load(
    given, tiles, block_n: gl.constexpr, stages: gl.constexpr, left: gl.constexpr, right: gl.constexpr,
    chunks: gl.constexpr, chunks_v: gl.constexpr, casting: gl.constexpr, aligned: gl.constexpr,
):  # fmt: skip
    """Brings the operands of every tile of this program."""
    block_m: gl.constexpr = CONSUMERS * ROWS
    width: gl.constexpr = given.k.block_type.shape[1]
    height: gl.constexpr = given.v.block_type.shape[0]
    slot, phase, q_copy, q_phase = 0, 1, 0, 1
    q_copies: gl.constexpr = given.queries.shape[0] // (CONSUMERS * chunks)
    tile_slot, tile_phase = 0, 1
    blocks_of_head = blocks_of(given.seqlen_q, tiles, block_m)
    total = given.programs * blocks_of_head
    order = Order(tiles, blocks_of_head, given.programs, given.section, given.seqlen_q, given.seqlen_kv, given.heads)
    place = gl.program_id(0)
    while place < total:
        tile = tile_at(place, order, block_m, right)
        publish_tile(given.board, tile_slot, tile_phase, 1, tile)
        tile_slot, tile_phase = after(tile_slot, tile_phase, TILES_AHEAD)
        lowest, highest = bounds(given.low, given.high, tile.queries, tile.keys, aligned)
        span = span_of_keys(tile.top, tile.queries, tile.keys, lowest, highest, block_m, block_n, left, right)
        kv_head = tile.head // given.group
        q_row = tile.batch * given.q_by_batch + tile.head * given.q_by_head + tile.q_start + tile.top
        for i in gl.static_range(CONSUMERS):
            own = q_copy * CONSUMERS + i
            mbarrier.wait(given.q_emptied.index(own), q_phase)
            full = given.q_filled.index(own)
            mbarrier.expect(full, chunks * given.q.block_type.nbytes)
            for chunk in gl.static_range(chunks):
                at = [q_row + i * ROWS, tile.head * given.q_aside + chunk * width]
                tma.async_copy_global_to_shared(given.q, at, full, given.queries.index(own * chunks + chunk))
        q_copy, q_phase = after(q_copy, q_phase, q_copies)
        k_row = tile.batch * given.k_by_batch + kv_head * given.k_by_head + tile.k_start + span.first
        k_column = kv_head * given.k_aside
        v_row = kv_head * given.head_dim_v
        if tiles is None:
            v_row += tile.batch * (given.heads // given.group) * given.head_dim_v
        v_column = tile.v_start + span.first
        if tiles is not None:  # without keys a block of zeros, as TMA has it outside of a tensor, whatever memory holds
            v_column = gl.where(tile.keys > 0, v_column, _OUTSIDE)
        if casting:
            some = tile.keys > 0
            begin, apart = gl.minimum(span.first, tile.keys - 1), block_n
            if tiles is None:  # blocks of all heads that have none behind them end here
                begin, apart = begin // block_n, 1
            else:  # each token's place has its block's
                begin += tile.k_start
            k_factor = given.k_factors + tile.batch.to(gl.int64) * given.k_batch + kv_head * given.k_head + begin
            v_factor = given.v_factors + tile.batch.to(gl.int64) * given.v_batch + kv_head * given.v_head + begin
            of_keys = gl.load(k_factor, mask=some, other=1.0)
            of_values = gl.load(v_factor, mask=some, other=1.0)
            # Of a name that starts as another's value the frontend carries the other through the loop.
            unit, most = of_values * 1.0, of_values * 1.0
        for step in range(span.blocks):
            mbarrier.wait(given.k_emptied.index(slot), phase)
            full = given.k_filled.index(slot)
            for chunk in gl.static_range(chunks):
                at = [k_row + step * block_n, k_column + chunk * width]
                tma.async_copy_global_to_shared(given.k, at, full, given.keys.index(slot * chunks + chunk))
            if casting:  # while the copies are under way
                next_unit, most = unit_of(most, of_values)
                set_numbers(given, slot, of_keys, next_unit, unit / next_unit)
                unit = next_unit
            # ``expect`` arrives, which makes the numbers visible; the copies may even have ended before it.
            mbarrier.expect(full, chunks * given.k.block_type.nbytes)
            mbarrier.wait(given.v_emptied.index(slot), phase)
            full = given.v_filled.index(slot)
            mbarrier.expect(full, chunks_v * given.v.block_type.nbytes)
            for chunk in gl.static_range(chunks_v):
                at = [v_row + chunk * height, v_column + step * block_n]
                tma.async_copy_global_to_shared(given.v, at, full, given.value_blocks.index(slot * chunks_v + chunk))
            if casting:  # the next block's, asked for before the waits
                ahead = gl.minimum(step + 1, span.blocks - 1) * apart
                of_keys = gl.load(k_factor + ahead, mask=some, other=1.0)
                of_values = gl.load(v_factor + ahead, mask=some, other=1.0)
            slot, phase = after(slot, phase, stages)
        place = following(place, tiles)
    publish_tile(given.board, tile_slot, tile_phase, 0, Tile(0, 0, 0, 0, 0, 0, 0, 0))
    end(tiles)


@gluon.jit
def _attend(
    which: gl.constexpr, given, tiles, block_n: gl.constexpr, stages: gl.constexpr, left: gl.constexpr,
    right: gl.constexpr, part: gl.constexpr, parts: gl.constexpr, turns: gl.constexpr, full_width: gl.constexpr,
    chunks: gl.constexpr, chunks_v: gl.constexpr, head_dim: gl.constexpr, casting: gl.constexpr,
    aligned: gl.constexpr, softcapped: gl.constexpr,
):  # fmt: skip
    """64 queries of every tile of this program."""
    block_m: gl.constexpr = CONSUMERS * ROWS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, part, 32])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 4)
    row = which * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    apart: gl.constexpr = casting and chunks * given.queries.shape[2] <= _APART
    copies: gl.constexpr = given.queries.shape[0] // (CONSUMERS * chunks)
    ahead: gl.constexpr = copies > 1
    slot, phase, turn_phase = 0, 0, 1 if which == 0 else 0
    copy, copy_phase = 0, 0
    tile_slot, tile_phase = 0, 0
    more = has_tile(given.board, tile_slot, tile_phase)
    if ahead:
        scores = gl.zeros([ROWS, block_n], gl.float32, s_layout)
        if more:
            mbarrier.wait(given.q_filled.index(which), 0)
            turn_phase = _await_turn(given.turn, turn_phase, which, turns)
            tile = rows_at(given.queries, which, chunks)
            coming = start_scores(tile, given.keys, given.k_filled, 0, 0, block_n, chunks, s_layout)
            _pass_turn(given.turn, which, turns)
            scores = warpgroup_mma_wait(0, [coming])
    while more:
        here = read_tile(given.board, tile_slot)
        lowest, highest = bounds(given.low, given.high, here.queries, here.keys, aligned)
        first, whole, parted, blocks = span_of_keys(
            here.top, here.queries, here.keys, lowest, highest, block_m, block_n, left, right
        )
        if not casting:
            factor, unit = factors_of_heads(given, here, tiles)
            if softcapped:  # what the scores are multiplied by before the tanh, and behind it
                inner, factor = factor / (given.softcap * LOG2_E), given.softcap * LOG2_E
        query = here.top + row
        since = query + lowest
        upto = gl.minimum(query + highest if right else query + here.keys, here.keys - 1)

        sums = ()
        for _part in gl.static_range(parts):
            sums = sums + (gl.zeros([ROWS, part], gl.float32, o_layout),)  # noqa: RUF005
        total = totals(gl.zeros([ROWS, block_n], gl.float32, s_layout))
        peak = gl.full([ROWS], MINUS_INFINITY, gl.float32, gl.SliceLayout(1, s_layout))

        own_copy = copy * CONSUMERS + which if ahead else which
        tile = rows_at(given.queries, own_copy, chunks)
        if not ahead:
            mbarrier.wait(given.q_filled.index(which), copy_phase)
            if casting:
                wide, tile = tile, ()
                for chunk in gl.static_range(chunks):
                    if apart:
                        part_of_tile = given.narrow.index(which * chunks + chunk)
                    else:
                        part_of_tile = wide[chunk]._reinterpret(
                            given.keys.dtype, [ROWS, given.keys.shape[2]], given.keys.layout
                        )
                    tile = tile + (part_of_tile,)  # noqa: RUF005
                own = cast_rows(wide, tile, head_dim, s_layout) * (given.scale * LOG2_E)
                if tiles is not None:
                    own = gl.where(query * 0 + here.keys > 0, own, 1.0)
                if apart:  # the next tile's may come
                    mbarrier.arrive(given.q_emptied.index(which), count=1)
            turn_phase = _await_turn(given.turn, turn_phase, which, turns)
            scores = start_scores(tile, given.keys, given.k_filled, slot, phase, block_n, chunks, s_layout)
            _pass_turn(given.turn, which, turns)
            scores = warpgroup_mma_wait(0, [scores])
        if casting:
            factor = at_least(own * number(given.of_keys.index(slot)))
            unit, less = number(given.units.index(slot)), number(given.changes.index(slot))
        mbarrier.arrive(given.k_emptied.index(slot), count=1)
        for step in range(blocks - 1):
            start = first + step * block_n
            next_slot, next_phase = after(slot, phase, stages)
            if softcapped:
                scores = soft_capped(scores, inner)
            p, decay, peak, total = block_weights(
                scores, start, whole, parted, since, upto, factor, peak, total, p_layout, left, casting
            )
            if casting:
                decay *= less
            turn_phase = _await_turn(given.turn, turn_phase, which, turns)
            mbarrier.wait(given.v_filled.index(slot), phase)
            sums = add_products(sums, p, decay, given.value_blocks, slot, part, parts, chunks_v, o_layout)
            coming = start_scores(tile, given.keys, given.k_filled, next_slot, next_phase, block_n, chunks, s_layout)
            _pass_turn(given.turn, which, turns)
            mbarrier.arrive(given.v_emptied.index(slot), count=1)
            if casting:  # read beneath the product, and behind the turn
                of_keys = number(given.of_keys.index(next_slot))
                unit, less = number(given.units.index(next_slot)), number(given.changes.index(next_slot))
            scores = warpgroup_mma_wait(0, [coming])
            if casting:
                factor = at_least(own * of_keys)
            mbarrier.arrive(given.k_emptied.index(next_slot), count=1)
            slot, phase = next_slot, next_phase
        if not apart:
            mbarrier.arrive(given.q_emptied.index(own_copy), count=1)
        start = first + (blocks - 1) * block_n
        if softcapped:
            scores = soft_capped(scores, inner)
        p, decay, peak, total = block_weights(
            scores, start, whole, parted, since, upto, factor, peak, total, p_layout, left, casting
        )
        if casting:
            decay *= less
        turn_phase = _await_turn(given.turn, turn_phase, which, turns)
        mbarrier.wait(given.v_filled.index(slot), phase)
        sums = add_products(sums, p, decay, given.value_blocks, slot, part, parts, chunks_v, o_layout)
        its_tile = tile_slot
        tile_slot, tile_phase = after(tile_slot, tile_phase, TILES_AHEAD)
        next_slot, next_phase = after(slot, phase, stages)
        next_copy, next_copy_phase = after(copy, copy_phase, copies)
        if ahead:
            more = has_tile(given.board, tile_slot, tile_phase)
            # after the last tile the last scores are computed again, and nothing reads them
            its_copy = gl.where(more, next_copy, copy) * CONSUMERS + which
            mbarrier.wait(given.q_filled.index(its_copy), gl.where(more, next_copy_phase, copy_phase))
            tile = rows_at(given.queries, its_copy, chunks)
            its_slot, its_phase = gl.where(more, next_slot, slot), gl.where(more, next_phase, phase)
            coming = start_scores(tile, given.keys, given.k_filled, its_slot, its_phase, block_n, chunks, s_layout)
        _pass_turn(given.turn, which, turns)
        mbarrier.arrive(given.v_emptied.index(slot), count=1)
        slot, phase, copy, copy_phase = next_slot, next_phase, next_copy, next_copy_phase

        # Read again, because registers are few.
        here = read_tile(given.board, its_tile)
        mbarrier.arrive(given.board.read.index(its_tile), count=1)
        store_tile(given, here, row, which, sums, total, peak, unit, s_layout, part, parts, full_width)
        if ahead:
            scores = warpgroup_mma_wait(0, [coming])
        else:
            more = has_tile(given.board, tile_slot, tile_phase)


@gluon.jit
def _await_turn(turn, phase, which: gl.constexpr, turns: gl.constexpr):
    if turns:
        mbarrier.wait(turn.index(which), phase)
    return phase ^ 1


@gluon.jit
def _pass_turn(turn, which: gl.constexpr, turns: gl.constexpr):
    if turns:
        mbarrier.arrive(turn.index((which + 1) % CONSUMERS), count=1)


@gluon.jit(
    do_not_specialize=[
        "q_by_batch", "q_by_head", "q_aside", "k_by_batch", "k_by_head", "k_aside",
        "q_factor_batch", "q_factor_head", "k_factor_batch", "k_factor_head", "v_factor_batch", "v_factor_head",
        "seqlen_q", "seqlen_kv", "heads", "group", "programs", "section", "low", "high",
    ]
)  # fmt: skip
def triton_fp8_attention_forward_hopper(
    q, k, v, out, lse, q_factors, k_factors, v_factors, tiles, scale, softcap,
    q_by_batch, q_by_head, q_aside, k_by_batch, k_by_head, k_aside,
    q_factor_batch, q_factor_head, k_factor_batch, k_factor_head, v_factor_batch, v_factor_head,
    seqlen_q, seqlen_kv, head_dim_v, heads, group, programs, section, low, high,
    stages: gl.constexpr, head_dim: gl.constexpr, chunks: gl.constexpr, chunks_v: gl.constexpr, part: gl.constexpr,
    turns: gl.constexpr, left: gl.constexpr, right: gl.constexpr, full_width: gl.constexpr, eights: gl.constexpr,
    registers: gl.constexpr, aligned: gl.constexpr, softcapped: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 queries of a head; each program takes every so many-th, as there are programs.

    The arguments are those of ``triton_fp8_attention_forward``, with V's keys interleaved; ``registers`` are a
    computing thread's.  Where Q has 16 bits the kernel casts it, nobody reads ``q_factors``, and ``k_factors`` and
    ``v_factors`` have a number for each block of keys, in order, or with ``tiles`` for each token.  A tile of ``tiles``
    takes longer to begin with: its row of the table is read first.

    Shapes in shared memory are powers of two, heads are not: the head dimension of Q and K comes in ``chunks`` of the
    width that their descriptors have, V's in ``chunks_v``, and P·V in parts of ``part`` columns.
    """
    if eights:  # Triton itself finds out of an argument only whether 16 divides it
        head_dim_v = head_dim_v // 8 * 8
    casting: gl.constexpr = q.dtype != k.dtype
    block_n: gl.constexpr = k.block_type.shape[0]
    block_d: gl.constexpr = k.block_type.shape[1]
    height: gl.constexpr = v.block_type.shape[0]
    apart: gl.constexpr = casting and chunks * block_d <= _APART
    parts: gl.constexpr = chunks_v * height // part
    q_copies: gl.constexpr = _COPIES if tiles is not None and parts == 1 and not casting else 1
    queries = gl.allocate_shared_memory(q.dtype, [q_copies * CONSUMERS * chunks, ROWS, block_d], q.layout)
    narrow = queries
    if apart:
        narrow = gl.allocate_shared_memory(k.dtype, [CONSUMERS * chunks, ROWS, block_d], k.layout)
    keys = gl.allocate_shared_memory(k.dtype, [stages * chunks, block_n, block_d], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [stages * chunks_v, height, block_n], v.layout)
    one: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    of_keys = gl.allocate_shared_memory(gl.float32, [stages, 1], one)
    units = gl.allocate_shared_memory(gl.float32, [stages, 1], one)
    changes = gl.allocate_shared_memory(gl.float32, [stages, 1], one)
    q_filled = gl.allocate_shared_memory(gl.int64, [q_copies * CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_emptied = gl.allocate_shared_memory(gl.int64, [q_copies * CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_filled = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    k_emptied = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    v_filled = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    v_emptied = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    # Barriers that nothing uses are left out: backward.hopper.shared.barrier_where says why.
    turn = q_filled
    if turns:
        turn = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(q_copies * CONSUMERS):
        mbarrier.init(q_filled.index(i), count=1)
        mbarrier.init(q_emptied.index(i), count=1)
    if turns:
        for i in gl.static_range(CONSUMERS):
            mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(stages):
        mbarrier.init(k_filled.index(i), count=1)
        mbarrier.init(k_emptied.index(i), count=CONSUMERS)
        mbarrier.init(v_filled.index(i), count=1)
        mbarrier.init(v_emptied.index(i), count=CONSUMERS)

    board = board_for(CONSUMERS)
    given = _Given(
        q, k, v, out, lse, q_factors, k_factors, v_factors, scale, softcap,
        queries, narrow, keys, values, of_keys, units, changes, board,
        q_filled, k_filled, v_filled, q_emptied, k_emptied, v_emptied, turn,
        q_by_batch, q_by_head, q_aside, k_by_batch, k_by_head, k_aside,
        q_factor_batch, q_factor_head, k_factor_batch, k_factor_head, v_factor_batch, v_factor_head,
        seqlen_q, seqlen_kv, programs, section, low, high, heads, group, head_dim_v,
    )  # fmt: skip
    # Written out, because a tuple that has a name keeps no constants.
    gl.warp_specialize([
        (_attend, (0, given, tiles, block_n, stages, left, right, part, parts, turns, full_width, chunks, chunks_v,
                   head_dim, casting, aligned, softcapped)),
        (_attend, (1, given, tiles, block_n, stages, left, right, part, parts, turns, full_width, chunks, chunks_v,
                   head_dim, casting, aligned, softcapped)),
        (_load, (given, tiles, block_n, stages, left, right, chunks, chunks_v, casting, aligned)),
    ], [4, 1], [registers, 24])  # fmt: skip
