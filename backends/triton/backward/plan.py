"""What backwards of tensors that lie alike have in common, and the passes over memory before the products."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.errors import InputError
from attnbench.graph_pools import permanent
from attnbench.problem.fp8 import Quantised, hadamard
from attnbench.problem.lengths import Lengths
from attnbench.problem.spec import AttentionSpec, Granularity

from ..blocks import Block, Memory, Part, Piece, Wanted
from ..descales import in_fp32, steps
from ..forward.hopper import launch as forward_hopper_launch
from ..launching import KEPT
from ..quantise.stored import Form, Stored
from ..tile_map import Tiled, one_sided, sequences_of, tile_map
from .copies import PADDING, TOKENS, Copies, Source, aligned, contiguous, copies_of, lay_out, padded
from .hopper import launch as hopper
from .layout import BLOCK, GradientPlan, gradient_plan, lay_out_gradient
from .operands import Extent, Layout, Prepared, turn_factor
from .tiles import Tiles

__all__ = ["prepared"]

_GRADIENT = 4  # places of dO's pass, the first in a block
_Sums = Literal["none", "within", "apart", "zeroed"]


class _Operand(NamedTuple):
    """An operand for a launch, its descale in fp32; ``aligned``: whether TMA may begin to read where it begins."""

    data: Tensor | Piece
    descale: Tensor | Piece
    form: Form
    aligned: bool


class _Plan(NamedTuple):
    """The layout, memory for what is used up within a call, and the two passes that fill it.

    ``sums`` of the fused kernel: ``within`` the block, where they are the last; or dQ itself, to which the pass over Q
    writes zeros (``apart``), or which has them before (``zeroed``), because that pass writes to slots.
    """

    layout: Layout
    block: Block
    gradient: GradientPlan
    copies: Copies
    sums: _Sums


def prepared(
    spec: AttentionSpec,
    q: Quantised,
    k: Quantised,
    v: Quantised,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    narrow: bool,
    tiles: Tiles,
    *,
    fused: bool = False,
    lengths: Lengths | None = None,
) -> Prepared:
    """The passes over memory before the products, in two launches; arguments as in ``Saved``.

    ``tiles`` say which kernels will run, because Hopper kernels read ``narrow`` transposed copies in another order.
    ``fused``: for the fused kernel, if it serves.
    """
    device, sequences = grad_out.device, None
    block = Memory(q.block) if type(q) is Stored else None
    operands = tuple([_operand(x, lengths is not None, block) for x in (q, k, v)])
    of_q, of_k, of_v = operands
    for x in (of_q.data, of_k.data, of_v.data, out, lse):
        if x.device != device:  # an address of another device's memory would be read as one of this
            raise InputError(
                f"what was saved for the backward came back on {x.device}, and its gradient is on {device}"
            )
    if lengths is not None:
        sequences = sequences_of(lengths, of_q.data.shape[0])
    # Of sequences with lengths of their own the Hopper kernels serve only all gradients at once.
    here = forward_hopper_launch.runs_on(device) and (fused or lengths is None)
    plan = _planned(
        spec, narrow, tiles, fused, here, sequences, of_q.form, of_k.form, of_v.form,
        (of_q.aligned, of_k.aligned, of_v.aligned),
        (grad_out.shape, grad_out.stride(), grad_out.dtype, aligned(grad_out)),
        (out.stride(), out.dtype), (lse.stride(), lse.dtype),
    )  # fmt: skip
    layout, memory = plan.layout, plan.block.memory(device)
    places = [None if part is None else Piece(memory, part) for part in plan.block.parts]
    by_query = by_queries = by_key = None
    if lengths is not None:
        by_query, by_queries, by_key = _tables(layout, lengths, device)
    descales = of_q.descale, of_k.descale, of_v.descale
    gradient = lay_out_gradient(plan.gradient, grad_out, out, lse, descales, places[:_GRADIENT], by_query)
    sums: Tensor | Piece | None = None
    if plan.sums == "within":
        sums = places.pop()
    elif plan.sums != "none":
        new = torch.zeros if plan.sums == "zeroed" else torch.empty
        sums = new(layout.sums, dtype=torch.bfloat16, device=device)
    tensors = of_q.data, of_k.data, of_v.data, gradient.laid.data
    unwritten = None if plan.sums == "zeroed" else sums
    laid_q, laid_k, laid_v, *laid_do = lay_out(
        plan.copies,
        tensors,
        places[_GRADIENT:],
        (unwritten, None, None, None),
        (by_queries, by_key, by_key, None),
        (of_q.descale, None, None, None),
        device,
    )
    if narrow:
        gradient = gradient._replace(laid=laid_do[0])
    turn = _turn(spec.head_dim, layout.pitch, device) if layout.rotated else None
    return Prepared(layout, laid_q, laid_k, laid_v, gradient, of_k.descale, of_v.descale, turn, sums, lengths)


def _operand(x: Quantised, unequal: bool, block: Memory | None) -> _Operand:
    """``unequal``: sequences have lengths of their own, and descales each token's place.  ``block``: Q's memory."""
    if type(x) is Stored and (not unequal or x.form.descale.shape[2] == x.form.data.shape[2]):
        data, scale = x.pieces(block)
        return _Operand(data, scale, x.form, aligned(data))
    whole, descale = x.data, in_fp32(x.descale)
    if unequal:
        descale = descale.expand(-1, -1, whole.shape[2], -1).contiguous()
    outline = whole.shape, whole.stride(), whole.dtype, descale.shape, descale.stride(), descale.dtype
    return _Operand(whole, descale, _form(*outline, x.granularity, x.rotated), aligned(whole))


@lru_cache(maxsize=KEPT)
def _form(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype,
    scale_shape: tuple[int, ...], scale_strides: tuple[int, ...], scale_dtype: torch.dtype,
    granularity: Granularity, rotated: bool,
) -> Form:  # fmt: skip
    data, descale = Part(0, 0, shape, strides, dtype), Part(0, 0, scale_shape, scale_strides, scale_dtype)
    return Form(data, descale, granularity, rotated)


def _tables(layout: Layout, lengths: Lengths, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """For dO's pass, and for copies of the queries and of the keys."""
    extent = layout.extent
    by_key = None
    if not layout.keys_in_place:
        by_key = tile_map(one_sided(lengths, "kv"), extent.batch, _tiles_of(extent.seqlen_kv), device)
    return (
        tile_map(lengths, extent.batch, _tiles_of_gradient(extent), device),
        tile_map(one_sided(lengths, "q"), extent.batch, _tiles_of(extent.seqlen_q), device),
        by_key,
    )


def _tiles_of_gradient(extent: Extent) -> Tiled:
    tiled = extent.tiled("q", BLOCK, whole=True)
    assert tiled is not None, "sequences of one length are copied whole"
    return tiled


def _tiles_of(stored: int) -> Tiled:
    """How the copies of tensors of so many tokens find their sequences."""
    return Tiled("q", TOKENS, (PADDING, PADDING), (stored, stored), whole=True)


@lru_cache(maxsize=KEPT)
def _planned(
    spec: AttentionSpec, narrow: bool, tiles: Tiles, fused: bool, here: bool, sequences: int | None,
    q: Form, k: Form, v: Form, readable: tuple[bool, bool, bool],
    grad: tuple[Any, ...], out: tuple[Any, ...], lse: tuple[Any, ...],
) -> _Plan:  # fmt: skip
    """``here``: on a GPU that runs the Hopper kernels; ``sequences``: how many have lengths of their own, or None.

    ``readable``: which operands TMA can read where they begin; ``grad``, ``out`` and ``lse`` as in ``gradient_plan``.
    """
    extent = tiled_q = tiled_kv = tiled_do = None
    if sequences is not None:
        shared = all(x.granularity in ("tensor", "head") for x in (q, k, v))
        extent = Extent(q.data.shape[0], q.data.shape[2], k.data.shape[2], sequences, shared)
        tiled_q, tiled_kv = ((sequences, _tiles_of(stored)) for stored in (extent.seqlen_q, extent.seqlen_kv))
        tiled_do = sequences, _tiles_of_gradient(extent)
    scales = tuple((x.descale.shape, x.descale.strides) for x in (q, k, v))
    lies = [(x.data.shape, x.data.strides, x.data.dtype, each) for x, each in zip((q, k, v), readable, strict=True)]
    # Only a kernel that makes all gradients hides what lies behind a sequence.
    there = fused and sequences is not None and all(map(_readable, lies[1:]))
    layout = _layout(spec, q.rotated, here, scales, extent, there, fused)
    fused, there = fused and layout.served, layout.keys_in_place
    place = _place_of_sums(layout, fused)
    gradient = gradient_plan(
        spec, grad, out, lse, [q.descale, k.descale, v.descale], narrow=narrow, pitch=layout.pitch_v,
        factor=layout.scale if fused else None, scaled_up=fused and layout.scaled_up,
        sequences=tiled_do, shared=layout.extent.shared,
    )  # fmt: skip
    scaled = None
    if fused and spec.group > 1:  # a sum over query heads is in one unit
        batch, _, tokens, _ = q.data.shape
        scaled = steps(*scales[0], batch, spec.heads, tokens)
    by_key, by_query = (narrow and layout.served and tile.hopper is not None for tile in tiles[:2])
    sources = [
        Source(
            *lies[0], layout.pitch, not narrow, narrow, by_key, place in ("within", "apart"), tiled_q, scaled=scaled
        ),
        Source(*lies[1], layout.pitch, not (narrow or fused), narrow, by_query, False, tiled_kv, in_place=there),
        Source(*lies[2], layout.pitch_v, sequences=tiled_kv, in_place=there),
    ]
    if narrow:
        _, heads, tokens, size = layout.do
        strides = heads * tokens * size, tokens * size, size, 1
        sources.append(Source(layout.do, strides, torch.float8_e4m3fn, True, size, False, True, by_key))
    copies = copies_of(sources)
    wanted = [*gradient.wanted, *copies.wanted]
    if place == "within":
        wanted.append(Wanted(layout.sums, torch.bfloat16))
    return _Plan(layout, Block(wanted), gradient, copies, place)


def _place_of_sums(layout: Layout, fused: bool) -> _Sums:
    if not fused:
        return "none"
    if not layout.summed_in_place:
        return "within"
    return "apart" if layout.extent.sequences is None else "zeroed"


def _readable(lies: tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]) -> bool:
    """Whether a kernel can read an operand's tokens where they lie."""
    shape, strides, _, begins = lies
    return begins and padded(shape[3]) == shape[3] and contiguous(shape, strides)


@lru_cache(maxsize=KEPT)
def _layout(
    spec: AttentionSpec, rotated: bool, here: bool, scales: tuple[tuple[Sequence[int], Sequence[int]], ...],
    extent: Extent | None = None, keys_in_place: bool = False, fused: bool = False,
) -> Layout:  # fmt: skip
    """``here``: on a GPU with the Hopper kernels; ``fused``: by that of all gradients; the rest as in ``Layout``."""
    per_token = any(shape[2] > 1 for shape, _ in scales) and not (extent is not None and extent.shared)
    served = here and hopper.serves(spec, per_token=per_token, rotated=rotated)
    pieces = hopper.pieces_of(spec, rotated=rotated) if served and fused else None
    return Layout(spec, rotated, served, scales, extent, keys_in_place, pieces)


@permanent
def _turn(size: int, padded_size: int, device: torch.device) -> Tensor:
    """The transpose of the rotation as signs and zeros in bf16, (padded_size, padded_size); see ``turn_factor``."""
    back = hadamard(size).mT
    signs = F.pad(back / turn_factor(size), (0, padded_size - size) * 2).round().to(torch.bfloat16).contiguous()
    return signs.to(device)
