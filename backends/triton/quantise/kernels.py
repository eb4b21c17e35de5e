"""The kernels behind ``quantise``: one for the largest magnitudes, one for scales, cast and transposition.

Each launch serves any number of tensors (``jobs``), so that Q, K and V share one grid and one tail.  A program has a
tile of tokens of one head in its registers.  Where a transposed copy is wanted, it holds every fourth token in one
sub-tile, or the tokens that an interleaved copy has four places apart: four of those give, without leaving the
thread, 32-bit words of four tokens' bytes, and words cross the shared memory on their way to rows of tokens where
single bytes would take four times the instructions.

Where sequences have lengths of their own (``Job.tiles``), a program has the tile that a row of the table names, scales
of heads and tensors are each sequence's, every token has its scale written down, and the transposed copy consists of
the sequences' slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..tile_rows import ROW
from .jobs import Size
from .numbers import INFINITY, descale_of, divided, magnitude, narrow, turned_words

__all__ = ["PADDING", "cast", "largest_magnitudes"]

PADDING = 128  # tokens of a transposed copy come in multiples of this: the longest tile of keys that a forward takes

_PADDING = tl.constexpr(PADDING)
_LANES = tl.constexpr(256)  # partial magnitudes read at once
_CHUNK = tl.constexpr(64)  # of the head dimension, in one product of the rotation
# The interpreter's products of bf16 multiply bit patterns.
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _decoded(code):
    return Size(
        (code.first - 3) >> 1,
        (code.programs - 3) >> 1,
        (code.heads - 3) >> 1,
        (code.seqlen - 3) >> 1,
        (code.tiles - 3) >> 1,
        (code.chunks - 3) >> 1,
        (code.beside - 3) >> 1,
        (code.inner - 3) >> 1,
        (code.outer - 3) >> 1,
        (code.share - 3) >> 1,
    )


@triton.jit
def _own_tile(job, size, number):
    """Batch entry, head, first token in the sequence, where that starts, its length, and its slot.

    Where all lengths are alike the sequence is the batch entry.
    """
    _, head, tile = _program_position(number, size)
    row = job.tiles + (1 + tile) * ROW
    return tl.load(row), head, tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 6)


@triton.jit
def _exists(job, size, number):
    """Whether the program has a tile: there may be more programs than tiles."""
    there = (number >= 0) & (number < size.programs)
    if job.tiles is not None:
        there = there & (_program_position(number, size)[2] < tl.load(job.tiles))
    return there


@triton.jit
def _stride(stride, job):
    """A stride of the tensor; where ``job.eights`` says so, one that the compiler knows to be a multiple of 8."""
    return stride if job.eights is None else stride // 8 * 8


@triton.jit
def _places(job, row, d):
    """Where the elements (row, d) of a tile lie, from its first: in 32 bits, which take half the registers, or 64."""
    if job.far is not None:
        row, d = row.to(tl.int64), d.to(tl.int64)
    return row[:, None] * _stride(job.stride_s, job) + d[None, :] * job.stride_d


@triton.jit
def _turned_about(x, row, inside, job, dim: tl.constexpr, width: tl.constexpr):
    """x @ signs for rows of x, in fp32.  Such products are exact, so 16 bits go to the tensor cores as they are."""
    chunk: tl.constexpr = min(_CHUNK, width)
    total = tl.zeros([row.shape[0], width], tl.float32)
    out = tl.arange(0, width)
    for start in tl.static_range(0, dim, chunk):
        k = start + tl.arange(0, chunk)
        place = _places(job, row, k)
        a = tl.load(x + place, inside[:, None] & (k < dim)[None, :], 0.0)
        b = tl.load(job.signs + k[:, None] * dim + out[None, :], (k < dim)[:, None] & (out < dim)[None, :], 0.0)
        if _INTERPRETED:
            total = tl.dot(a.to(tl.float32), b.to(tl.float32), total)
        else:
            total = tl.dot(a, b, total, input_precision="tf32x3")
    return total


@triton.jit
def _program_position(number, size):
    """Batch entry, head and part of the head that a program has."""
    # A division of integers takes 20 instructions, of unsigned ones 15: there are two.
    slow = number.to(tl.uint32) // size.inner.to(tl.uint32)
    fast = (number - slow.to(tl.int32) * size.inner).to(tl.int32)
    batch = (slow // size.outer.to(tl.uint32)).to(tl.int32)
    slow = slow.to(tl.int32) - batch * size.outer
    return batch, tl.where(size.beside == 1, fast, slow), tl.where(size.beside == 1, slow, fast)


@triton.jit
def _values(
    job, size, batch, head, start, row, inside, dim: tl.constexpr, begin: tl.constexpr, width: tl.constexpr,
    turn: tl.constexpr, policy: tl.constexpr,
):  # fmt: skip
    """Rows ``start + row`` of a head, ``width`` columns from ``begin`` on, as they are, or in fp32 less the mean or,
    with ``turn``, all columns times ``signs``.

    Zero where not ``inside``.  Numbers of 16 bits stay such while a scale is looked for: half as many registers.
    """
    # 64 bits for what may lie far away; within a tile 32 mostly do.
    x = job.x + batch.to(tl.int64) * _stride(job.stride_b, job) + head.to(tl.int64) * _stride(job.stride_h, job)
    x += start.to(tl.int64) * _stride(job.stride_s, job)
    d = begin + tl.arange(0, width)
    mask = inside[:, None]
    if dim < begin + width:
        mask = mask & (d < dim)[None, :]
    if turn:
        value, means = _turned_about(x, row, inside, job, dim, width), job.moved
    else:
        value = tl.load(x + _places(job, row, d), mask, 0.0, eviction_policy=policy)
        means = job.mean
    if means is not None:
        mean = tl.load(means + (batch * size.heads + head).to(tl.int64) * dim + d, d < dim, 0.0)
        value = tl.where(mask, value.to(tl.float32) - mean[None, :], 0.0)
    return value


@triton.jit
def _in_full(bits, job):
    """Bits of a magnitude, given those of it less the factor that a rotation's signs lack."""
    if job.signs is not None:
        bits = magnitude(bits.to(tl.float32, bitcast=True) * job.factor)
    return bits


@triton.jit
def _shared_magnitude(job, size, head):
    """The largest of the partial magnitudes that the first pass left for this head and those that share with it."""
    base = job.partial + (head // size.share * size.share).to(tl.int64) * size.chunks
    lane = tl.arange(0, _LANES)
    bits = tl.zeros([_LANES], tl.int32)
    start = 0
    while start < size.share * size.chunks:  # the interpreter's ranges take no argument for a bound
        bits = tl.maximum(bits, tl.load(base + start + lane, start + lane < size.share * size.chunks, 0))
        start += _LANES
    return tl.max(bits, 0)


@triton.jit
def _sequence_magnitude(job, size, head, slot):
    """Where the largest magnitude of a sequence's head, or of the heads that share its scale, is collected."""
    return job.partial + (head // size.share).to(tl.int64) * (job.slots // _PADDING) + slot // _PADDING


@triton.jit
def _most(value):
    """Bits of the largest magnitude in fp32, of values in fp32 or 16 bits: such need not be widened one by one."""
    if value.dtype == tl.float32:
        most = tl.max(magnitude(value))
    else:
        half = tl.max(value.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int16)
        most = magnitude(half.to(value.dtype, bitcast=True).to(tl.float32))
    return most


@triton.jit
def _widened(value):
    return value.to(tl.float32)


@triton.jit
def _cast_tile(
    job,
    size,
    number,
    dim: tl.constexpr,
    rest: tl.constexpr,
    granularity: tl.constexpr,
    largest: tl.constexpr,
    rows: tl.constexpr,
    step: tl.constexpr,
    interleaved: tl.constexpr,
):
    """Scales, cast and copies of ``rows`` tokens of a head, in ``step`` sub-tiles, 4 with a transposed copy, else 1.

    ``rest``: columns of a second part, behind half of the padded ones; 0 where there is one part, as with a transposed
    copy.  A word of that copy holds a token of each sub-tile.  Interleaved, the words of 16 tokens begin with the
    tokens 0 2 4 6, and after the one they begin with they hold the next one, the eighth and the ninth.
    """
    if job.tiles is None:
        batch, h, tile = _program_position(number, size)
        start, length = tile * rows, size.seqlen
        origin, at = 0, start
    else:
        batch, h, start, origin, length, slot = _own_tile(job, size, number)
        at = origin + start
    head = batch * size.heads + h
    pitch: tl.constexpr = (dim + 15) // 16 * 16
    dtype: tl.constexpr = (job.data if job.flipped is None else job.flipped).dtype.element_ty
    part: tl.constexpr = rows // step
    width: tl.constexpr = max(16, triton.next_power_of_2(dim))
    parts: tl.constexpr = 1 if rest == 0 else 2
    half: tl.constexpr = width // parts
    turn: tl.constexpr = job.signs is not None
    place = tl.arange(0, part)
    first_token = (place // 4) * 16 + (place % 4) * 2 if interleaved else place * step

    tokens, values = (), ()
    for j in tl.static_range(step):
        token = first_token + (j % 2 + j // 2 * 8 if interleaved else j)
        tokens += (token,)
        inside = start + token < length
        for c in tl.static_range(parts):
            values += (
                _values(
                    job, size, batch, h, at, token, inside, dim, c * half, rest if c else half, turn, "evict_first"
                ),
            )

    if granularity == "head" or granularity == "tensor":
        if job.tiles is None:
            descale = descale_of(_shared_magnitude(job, size, head), largest)
            group = head // size.share if granularity == "tensor" else head
            tl.store(job.descale + group, descale, (tile == 0) & ((granularity == "head") | (head == 0)))
        else:
            descale = descale_of(tl.load(_sequence_magnitude(job, size, h, slot)), largest)
    if granularity == "block":
        bits = tl.zeros([], tl.int32)
        for i in tl.static_range(step * parts):
            bits = tl.maximum(bits, _most(values[i]))
        descale = descale_of(_in_full(bits, job), largest)
        if job.tiles is None:
            blocks = (size.seqlen + rows - 1) // rows
            tl.store(job.descale + head.to(tl.int64) * blocks + tile, descale, tile < blocks)
    first = head.to(tl.int64) * size.seqlen + at
    if granularity != "token" and job.tiles is not None:
        whole = tl.arange(0, rows)
        tl.store(job.descale + first + whole, tl.zeros([rows], tl.float32) + descale, start + whole < length)

    quotients = ()
    for j in tl.static_range(step):
        if granularity == "token":
            most = tl.max(magnitude(_widened(values[j * parts])), 1)
            for c in tl.static_range(1, parts):
                most = tl.maximum(most, tl.max(magnitude(_widened(values[j * parts + c])), 1))
            descale = descale_of(_in_full(most, job), largest)
            tl.store(job.descale + first + tokens[j], descale, start + tokens[j] < length)
        for c in tl.static_range(parts):
            wide = _widened(values[j * parts + c])
            if granularity == "token":
                each = tl.broadcast_to(descale[:, None], [part, rest if c else half])
                quotient = divided(wide, each, 1.0 / each)
            else:
                quotient = divided(wide, descale, 1.0 / descale)
            if turn:  # the factor last: infinite before it, a quotient would be NaN
                quotient *= job.factor
            quotients += (quotient,)

    made = narrow(quotients, dtype) if job.flipped is None else turned_words(quotients, dtype)
    if job.data is not None:
        data = job.data.to(tl.pointer_type(tl.uint8)) + first * pitch
        for i in tl.static_range(step * parts):
            token = tokens[i // parts]
            d = i % parts * half + tl.arange(0, rest if i % parts else half)
            mask = (start + token < length)[:, None]
            if dim < i % parts * rest + half:
                mask = mask & (d < dim)[None, :]
            tl.store(data + (token[:, None] * pitch + d[None, :]), made[i], mask)
    if job.flipped is not None:
        # Words of a row of the transposed copy.
        if job.tiles is None:
            words = (size.seqlen + _PADDING - 1) // _PADDING * (_PADDING // 4)
            column, place_of_head = start // 4 + place, head
        else:
            words = job.slots // 4
            column, place_of_head = (slot + start) // 4 + place, h
        base = job.flipped.to(tl.pointer_type(tl.int32)) + place_of_head.to(tl.int64) * dim * words
        mask = (column < words)[None, :]
        d = tl.arange(0, width)
        if dim != width:
            mask = mask & (d < dim)[:, None]
        tl.store(base + d[:, None] * words + column[None, :], tl.trans(made[4]), mask)


@triton.jit
def cast(
    jobs,
    sizes,
    dims: tl.constexpr,
    rests: tl.constexpr,
    granularity: tl.constexpr,
    largest: tl.constexpr,
    rows: tl.constexpr,
    rows_flipped: tl.constexpr,
    interleaved: tl.constexpr,
    in_turns: tl.constexpr,
):
    """e4m3 or e5m2 data, transposed copies and scales of every job, ``rows`` tokens a program.

    Scales per head or tensor come from ``largest_magnitudes``, whose last tiles are this launch's first: the L2 still
    has them.  ``in_turns``: all jobs have as many programs, and those of the same number run together, so that a
    multiprocessor has one that waits for memory beside one that transposes.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    if in_turns:
        program = program % len(dims) * (tl.num_programs(0) // len(dims)) + program // len(dims)
    for i in tl.static_range(len(dims)):
        job, size = jobs[i], _decoded(sizes[i])
        number = program - size.first
        if _exists(job, size, number):
            if job.flipped is None:
                _cast_tile(job, size, number, dims[i], rests[i], granularity, largest, rows, 1, False)
            else:
                _cast_tile(job, size, number, dims[i], rests[i], granularity, largest, rows_flipped, 4, interleaved[i])


@triton.jit
def _block_sums(value, dim: tl.constexpr):
    """What no magnitude of value @ signs exceeds, for each row and block of the rotation."""
    block: tl.constexpr = dim & -dim
    value = tl.abs(value) * (0.5 / block)  # attnbench.problem.fp8.rotation_shrink
    if block == value.shape[1]:
        sums = tl.sum(value, 1)
    else:
        sums = tl.sum(tl.reshape(value, [value.shape[0], value.shape[1] // block, block]), 2)
    return sums


@triton.jit
def _chunk_magnitude(job, size, number, dim: tl.constexpr, rows: tl.constexpr):
    width: tl.constexpr = max(16, triton.next_power_of_2(dim))
    batch, h, chunk = _program_position(number, size)
    each = (size.tiles + size.chunks - 1) // size.chunks
    tile = chunk * each
    end = tl.minimum(tile + each, size.tiles)
    peak = tl.zeros([], tl.int32)
    while tile < end:
        row = tl.arange(0, rows)
        inside = tile * rows + row < size.seqlen
        value = _values(job, size, batch, h, tile * rows, row, inside, dim, 0, width, False, "")
        if job.signs is not None:
            value = _block_sums(value.to(tl.float32), dim)
        peak = tl.maximum(peak, _most(value))
        tile += 1
    tl.store(job.partial + (batch * size.heads + h) * size.chunks + chunk, _finite(peak, job))


@triton.jit
def _finite(peak, job):
    """Bits of the bound on a rotated magnitude, given those of it less the factor: what is finite stays so."""
    if job.signs is not None:
        peak = tl.where(peak < INFINITY, tl.minimum(_in_full(peak, job), INFINITY - 1), peak)
    return peak


@triton.jit
def _tile_magnitude(job, size, number, dim: tl.constexpr, rows: tl.constexpr):
    """Of one tile, into what the sequence's tiles have in common: a maximum of integers, the same in any order."""
    width: tl.constexpr = max(16, triton.next_power_of_2(dim))
    batch, h, start, origin, length, slot = _own_tile(job, size, number)
    row = tl.arange(0, rows)
    value = _values(job, size, batch, h, origin + start, row, start + row < length, dim, 0, width, False, "")
    if job.signs is not None:
        value = _block_sums(value.to(tl.float32), dim)
    tl.atomic_max(_sequence_magnitude(job, size, h, slot), _finite(_most(value), job), sem="relaxed")


@triton.jit
def largest_magnitudes(jobs, sizes, dims: tl.constexpr, rows: tl.constexpr):
    """For every job the bits of the largest magnitude in each chunk of each head: a program has one chunk.

    Of what will be rotated, those of the bound that ``problem.fp8.quantise`` puts in its place, and nothing is
    rotated here.  The tiles of a head are shared out evenly among its chunks.
    """
    program = tl.program_id(0)
    for i in tl.static_range(len(dims)):
        job, size = jobs[i], _decoded(sizes[i])
        number = program - size.first
        if _exists(job, size, number):
            if job.tiles is None:
                _chunk_magnitude(job, size, number, dims[i], rows)
            else:
                _tile_magnitude(job, size, number, dims[i], rows)
