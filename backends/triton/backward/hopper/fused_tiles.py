"""What the fused kernel for Hopper does with a tile beside its products: clears, widens, stages, adds, stores."""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .shared import CONSUMERS, ROWS, store, turned

__all__ = ["STAGED", "add_queries", "clear_behind", "first_rows", "store_whole", "times", "turn_back", "widen"]

STAGED = gl.constexpr(2)  # blocks of a warpgroup's dQ under way, a power of two


@gluon.jit
def clear_behind(tile, count):
    """Zeros instead of a tile's rows from ``count`` on, which may be another sequence's."""
    size: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [512 // size, size // 16], [4, 1], [1, 0])
    own = (gl.arange(0, ROWS, gl.SliceLayout(1, layout)) < count)[:, None]
    bits = gl.where(own, tile.load(layout).to(gl.int8, bitcast=True), 0)
    tile.store(bits.to(tile.dtype, bitcast=True))


@gluon.jit
def widen(keys, wide_keys, which: gl.constexpr):
    """Lays a warpgroup's keys down in bf16, which is exact: as its rows of each part of the columns."""
    parts: gl.constexpr = wide_keys.shape[0]
    part: gl.constexpr = wide_keys.shape[2]
    # 16 columns to a thread, so that it reads and writes whole vectors.
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [512 // part, part // 16], [4, 1], [1, 0])
    for i in gl.static_range(parts):
        tile = keys.slice(i * part, part, 1).load(layout).to(gl.bfloat16)
        wide_keys.index(i).slice(which * ROWS, ROWS, 0).store(tile)


@gluon.jit
def turn_back(keys, wide_keys, turn, which: gl.constexpr):
    """As ``widen``, of rotated keys, with the rotation undone but for its factor; rounded to bf16."""
    parts: gl.constexpr = wide_keys.shape[0]
    part: gl.constexpr = wide_keys.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, part, 16])
    rows = keys.load(layout).to(gl.bfloat16)
    for i in gl.static_range(parts):
        tile = turned(rows, turn.slice(i * part, part, 1), part, layout)
        wide_keys.index(i).slice(which * ROWS, ROWS, 0).store(tile.to(gl.bfloat16))


@builtin
def _add_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """Starts to add a block of shared memory to the tensor from ``coord`` on; ``tma.store_wait`` waits for the reads.

    Gluon's language has the copy alone, its compiler the addition too.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def add_queries(sums, dq, staged, turn, row, column, which: gl.constexpr):
    """Adds a warpgroup's part of a block's dQ to the sums from ``row`` and ``column`` on."""
    each: gl.constexpr = staged.shape[0] // CONSUMERS
    place = staged.index(which * each + (turn & (STAGED - 1)))
    tma.store_wait(STAGED - 1)
    place.store(dq.to(sums.dtype))
    fence_async_shared()
    _add_shared_to_global(sums, [row, column], place)


@gluon.jit
def first_rows(dq, count):
    """dQ of a block, and 0 instead of its rows from ``count`` on."""
    own = gl.arange(0, dq.shape[0], gl.SliceLayout(1, dq.type.layout)) < count
    return gl.where(own[:, None], dq, 0.0)


@gluon.jit
def times(p, factor):
    """p · factor in bf16; p is in bf16, the factor in FP32 and is rounded first.

    Two numbers an instruction: Triton's own product of bf16 unpacks every pair.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 pair;
        cvt.rn.bf16x2.f32 pair, $3, $2;
        mul.rn.bf16x2 $0, $1, pair;
        }
        """,
        "=r,r,f,f",
        [p, factor],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def store_whole(out, x, staged, which: gl.constexpr, at, top, length, first, size):
    """As ``shared.store``, through a warpgroup's part of ``staged``.

    In registers a thread has pairs of columns; what it takes out of shared memory are 16 bytes that lie together.  FP32
    does not fit there, and is stored out of registers.
    """
    if out.dtype.element_ty == gl.float32:
        layout: gl.constexpr = x.type.layout
        store(out, x, at, top, length, first, size, layout)
    else:
        columns: gl.constexpr = x.shape[1]
        each: gl.constexpr = staged.shape[0] * staged.shape[1] * staged.shape[2] // (CONSUMERS * ROWS * columns)
        room: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=min(2 * columns, 128), element_bitwidth=16, rank=2)
        place = staged._reinterpret(out.dtype.element_ty, [CONSUMERS * each, ROWS, columns], room).index(which * each)
        place.store(x.to(out.dtype.element_ty))
        vectors: gl.constexpr = gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])
        store(out, place.load(vectors), at, top, length, first, size, vectors)
