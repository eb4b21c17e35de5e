"""The arithmetic of FP8 attention in plain torch: rounding, the tensor core's accumulator, both passes.

FP8 values are held in fp32, where every product of two is exact (also in TF32 and bf16, so matmul settings have no
effect).  Query rows are (Z, T, G, R, ·): Z = B·Hkv key heads, T tiles of R ≤ BLOCK queries, G query heads that share
the key head, so that K and V are not copied and the tiles that see a block of keys are one slice.  One (chunk of rows)
× (block of keys) is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.kernels.contract import gradient_dtype
from attnbench.problem.fp8 import BLOCK, LARGEST, Format, Quantised, Recipe, hadamard, quantise
from attnbench.problem.spec import AttentionSpec

__all__ = ["Accumulator", "attend", "gradients", "rounded"]

_STEP = 32  # how many products Hopper's wgmma adds at once in 8 bits (PTX ISA: wgmma .e4m3 has k = 32)
_PEAK = 256.0  # P's largest value in FP8: 2^8 as in FlashAttention-3 (hopper/softmax.h, Max_offset = 8)
_MANTISSA = {"e4m3": (3, 2.0**-9), "e5m2": (2, 2.0**-16)}  # mantissa bits and smallest subnormal (OFP8, table 1)
_EXPONENT = 0x7F800000  # the exponent's bits of an fp32 number
_TINY = torch.finfo(torch.float32).tiny
_ELEMENTS = {"cpu": 2**19, "cuda": 2**23}  # of one temporary: what a CPU's caches hold, what fills a GPU


@dataclass(frozen=True)
class Accumulator:
    """How a tensor core adds up the products of two FP8 matrices.

    ``bits`` None: in fp32.  Else each step takes 32 products and the running sum, aligns them to the largest exponent,
    truncates each below ``bits`` mantissa bits and adds; the sum is truncated too.  13 is Hopper's: a 1-8-13 register
    (SageAttention2, arXiv 2411.10958, section 3.3) with aligned, truncated products (DeepSeek-V3, arXiv 2412.19437,
    section 3.5.2).  On P·V with V of mean 0.5 that loses 33 % at 64k and 46 % at 128k keys, as FlashAttention-3 did on
    an H200; truncating only the sum would lose 4 % and 9 %.

    ``promote`` adds the accumulator of P·V into fp32 and clears it at every multiple of that many keys; None never.
    Sums over D never outlast one accumulator.  Sums over the sequence end with each part that has a scale of its own:
    P·V if V's descale differs between keys, and all sums of the backward.
    """

    bits: int | None = None
    promote: int | None = None

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b for FP8 values a (..., M, K) and b (..., K, N) held in fp32."""
        if self.bits is None:
            return a @ b
        return self.add(a.new_zeros(*a.shape[:-1], b.shape[-1]), a, b)

    def add(self, total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """total + a @ b, with ``total`` (..., M, N) in the same accumulator."""
        if self.bits is None:
            return total + a @ b
        kept = -(1 << 23 - self.bits)
        for first in range(0, a.shape[-1], _STEP):
            step = slice(first, first + _STEP)
            terms = a[..., step].movedim(-1, 0).unsqueeze(-1) * b[..., step, :].movedim(-2, 0).unsqueeze(-2)
            largest = torch.maximum(torch.maximum(terms.amax(0), -terms.amin(0)), total.abs())
            unit = _power_of_two(largest).mul_(2.0**-self.bits).clamp_min_(_TINY)
            # a cast to integers cuts toward zero and their sum is exact; what is not finite comes back as NaN by unit
            whole = terms.div_(unit).to(torch.int32).sum(0, dtype=torch.int32) + (total / unit).to(torch.int32)
            total = ((whole * unit).view(torch.int32) & kept).view(torch.float32) + unit * 0.0
        return total


def attend(
    q: Quantised, k: Quantised, v: Quantised, spec: AttentionSpec, recipe: Recipe, accumulator: Accumulator
) -> tuple[Tensor, Tensor]:
    """Out (B, H, Sq, Dv) in the gradients' dtype and lse (B, H, Sq) fp32 of FP8 q, k, v (B, H, S, D).

    Online softmax over blocks of BLOCK keys.  P is scaled by 256 and rounded to the recipe's format; row sums use P
    before rounding.  If V's descale differs between keys, P·descale is rounded, scaled by 256 over the largest descale
    that the row sees in the block, and each block's sum is scaled back as it is added in fp32.
    """
    tiles = _Tiles(spec, q.data.device, accumulator)
    scores = _Scores(q, k, spec, accumulator, tiles)
    values, descale = v.data.reshape(tiles.heads, -1, spec.head_dim_v), tiles.key_descale(v)
    varies = v.descale.shape[2] > 1
    out = q.data.new_empty(*tiles.shape, spec.head_dim_v, dtype=gradient_dtype(spec))
    lse = q.data.new_empty(*tiles.shape, 1, dtype=torch.float32)
    for z, t in tiles.chunks():
        chunk = scores.chunk(z, t)
        top = torch.full_like(chunk[1], -torch.inf)
        total = torch.zeros_like(top)
        partial = top.new_zeros(*top.shape[:-1], spec.head_dim_v)
        promoted = torch.zeros_like(partial) if accumulator.promote else None
        for keys, seen, mask in tiles.blocks(t):
            s, _ = scores.block(chunk, z, keys, seen, mask)
            peak = torch.maximum(top[:, seen], s.amax(-1, keepdim=True))
            base = peak.masked_fill(peak == -torch.inf, 0.0)
            p = s.sub_(base).exp_()
            fade = (top[:, seen] - base).exp_()
            top[:, seen] = peak
            total[:, seen] = total[:, seen] * fade + p.sum(-1, keepdim=True)
            kept, v8 = partial[:, seen].mul_(fade), values[z, keys].to(torch.float32)
            if varies:
                weight = descale[z, ..., keys]
                # only visible keys count, so that no later token reaches back through the scale
                reach = (weight.abs() if mask is None else weight.abs() * mask).amax(-1, keepdim=True)
                reach = reach.masked_fill(reach == 0, 1.0)
                p8 = rounded(p.mul_(weight / reach * _PEAK), recipe.format)
                partial[:, seen] = kept + accumulator.product(p8.flatten(1, 3), v8).view_as(kept) * reach
            else:
                p8 = rounded(p.mul_(_PEAK), recipe.format)
                partial[:, seen] = accumulator.add(kept.flatten(1, 3), p8.flatten(1, 3), v8).view_as(kept)
            if promoted is not None and accumulator.promote:
                promoted[:, seen] *= fade
                if keys.stop % accumulator.promote == 0:
                    promoted += partial
                    partial.zero_()
        if promoted is not None:
            partial += promoted
        if not varies:
            partial *= descale[z, ..., :1]
        out[z, t] = (partial / (total * _PEAK)).masked_fill_(total == 0, 0.0).to(out.dtype)
        lse[z, t] = top + total.log_()
    return tiles.unfold(out), tiles.unfold(lse).squeeze(-1) + _mean_score(q, k, spec)


def gradients(
    q: Quantised,
    k: Quantised,
    v: Quantised,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    spec: AttentionSpec,
    recipe: Recipe,
    accumulator: Accumulator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (B, H, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, Dv) in the gradients' dtype.

    ``out`` and ``lse`` (B, H, Sq) belong to these q, k, v.  grad_out (B, H, Sq, Dv) is quantised by the recipe.  P and
    dS are rounded with one scale for each tile of BLOCK × BLOCK, with the descale that differs along the sum.  delta =
    rowsum(dO∘O) takes the forward's O and the rounded dO: its rounding then cancels in dP - delta where V's values
    agree.
    """
    tiles = _Tiles(spec, q.data.device, accumulator)
    scores = _Scores(q, k, spec, accumulator, tiles)
    values, v_descale = v.data.reshape(tiles.heads, -1, spec.head_dim_v), tiles.key_descale(v)
    rotation = hadamard(spec.head_dim, q.data.device).mT if q.rotated else None
    do = quantise(grad_out, recipe)
    do_rows, do_descale = tiles.fold(do.data), tiles.row_descale(do)
    out_rows = tiles.fold(out)
    lse_rows = tiles.fold((lse - _mean_score(q, k, spec)).unsqueeze(-1))
    dtype = gradient_dtype(spec)
    dq = q.data.new_empty(*tiles.shape, spec.head_dim, dtype=dtype)
    dk, dv = (torch.empty(x.data.shape, dtype=dtype, device=x.data.device) for x in (k, v))
    dk_heads, dv_heads = dk.view(tiles.heads, -1, spec.head_dim), dv.view(tiles.heads, -1, spec.head_dim_v)
    for z in tiles.head_chunks():
        dk_sum = torch.zeros_like(dk_heads[z], dtype=torch.float32)
        dv_sum = torch.zeros_like(dv_heads[z], dtype=torch.float32)
        for t in tiles.row_chunks():
            chunk = scores.chunk(z, t)
            do8, do_scale = _fp32(do_rows[z, t]), do_descale[z, t]
            delta = (do8 * out_rows[z, t]).sum(-1, keepdim=True) * do_scale
            base = lse_rows[z, t].masked_fill(lse_rows[z, t] == -torch.inf, torch.inf)
            dq_sum = torch.zeros_like(chunk[0])
            for keys, seen, mask in tiles.blocks(t):
                s, slope = scores.block(chunk, z, keys, seen, mask)
                p = s.sub_(base[:, seen]).exp_()
                v8 = values[z, keys].to(torch.float32)
                dp = accumulator.product(do8[:, seen].flatten(1, 3), v8.mT).view_as(p)
                ds = dp.mul_(do_scale[:, seen]).mul_(v_descale[z, ..., keys]).sub_(delta[:, seen]).mul_(p)
                if slope is not None:
                    ds *= slope
                p8, scale = _narrowed(p.mul_(do_scale[:, seen]), recipe)
                dv_sum[:, keys] += (accumulator.product(p8.mT, do8[:, seen]) * scale).sum((1, 2))
                ds8, scale = _narrowed(ds * chunk[1][:, seen], recipe)
                dk_sum[:, keys] += (accumulator.product(ds8.mT, chunk[0][:, seen]) * scale).sum((1, 2))
                ds8, scale = _narrowed(ds.mul_(scores.k_descale[z, ..., keys]), recipe)
                k8 = scores.k[z, keys].to(torch.float32)
                dq_sum[:, seen] += accumulator.product(ds8.flatten(1, 3), k8).view_as(dq_sum[:, seen]) * scale
            dq[z, t] = (dq_sum * spec.scale if rotation is None else dq_sum * spec.scale @ rotation).to(dtype)
        dk_heads[z] = (dk_sum * spec.scale if rotation is None else dk_sum * spec.scale @ rotation).to(dtype)
        dv_heads[z] = dv_sum.to(dtype)
    return tiles.unfold(dq), dk, dv


def rounded(x: Tensor, format: Format) -> Tensor:
    """The fp32 values of x (fp32) cast to ``format``, saturating, as ``quantise_with(x, 1)``; faster than torch's
    casts.
    """
    mantissa, smallest = _MANTISSA[format]
    x = x.clamp(-LARGEST[format], LARGEST[format])
    unit = _power_of_two(x).mul_(2.0**-mantissa).clamp_min_(smallest)
    return x.div_(unit).round_().mul_(unit)


class _Tiles:
    """How query rows and keys are laid out, walked through and masked."""

    def __init__(self, spec: AttentionSpec, device: torch.device, accumulator: Accumulator) -> None:
        self.spec, self.device = spec, device
        self.heads, self.group = spec.batch * spec.kv_heads, spec.group
        self.rows = min(BLOCK, spec.seqlen_q)
        self.count = -(-spec.seqlen_q // self.rows)
        self.shape = (self.heads, self.count, self.group, self.rows)
        width = max(BLOCK, spec.head_dim, spec.head_dim_v)
        budget = _ELEMENTS[device.type] // (1 if accumulator.bits is None else _STEP)
        tile = self.group * self.rows * width
        self._rows_at_once = min(self.count, max(1, budget // tile))
        wide = max(tile * self._rows_at_once, BLOCK * width, width * spec.seqlen_kv // 16)
        self._heads_at_once = max(1, budget // wide)

    def fold(self, x: Tensor) -> Tensor:
        """(B, H, Sq, ·) as (Z, T, G, R, ·), the last tile filled up with zeros."""
        x = x.reshape(self.heads, self.group, self.spec.seqlen_q, x.shape[-1])
        if missing := self.count * self.rows - self.spec.seqlen_q:
            filling = torch.zeros((), dtype=x.dtype, device=x.device).expand(*x.shape[:2], missing, x.shape[-1])
            x = torch.cat([x, filling], 2)
        return x.view(self.heads, self.group, self.count, self.rows, x.shape[-1]).transpose(1, 2)

    def unfold(self, x: Tensor) -> Tensor:
        """(Z, T, G, R, ·) as (B, H, Sq, ·)."""
        x = x.transpose(1, 2).flatten(2, 3)[:, :, : self.spec.seqlen_q]
        return x.reshape(self.spec.batch, self.spec.heads, self.spec.seqlen_q, x.shape[-1])

    def row_descale(self, x: Quantised) -> Tensor:
        """The descale of each query row, (Z, T, G, R, 1)."""
        return self.fold(x.descale.expand(*x.data.shape[:3], 1))

    def key_descale(self, x: Quantised) -> Tensor:
        """The descale of each key, (Z, 1, 1, 1, Skv)."""
        return x.descale.expand(*x.data.shape[:3], 1).reshape(self.heads, 1, 1, 1, -1)

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """Every chunk of query rows: key heads × tiles."""
        for z in self.head_chunks():
            for t in self.row_chunks():
                yield z, t

    def head_chunks(self) -> Iterator[slice]:
        """The key heads, as many at once as memory allows."""
        return _slices(self.heads, self._heads_at_once)

    def row_chunks(self) -> Iterator[slice]:
        """The tiles of query rows, as many at once as memory allows."""
        return _slices(self.count, self._rows_at_once)

    def blocks(self, t: slice) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Blocks of keys that the tiles ``t`` see: (keys, slice of those tiles from ``t.start``, mask or None if all is
        visible).

        The mask is (tiles, 1, R, keys), True where visible.
        """
        mask, length = self.spec.mask, self.spec.seqlen_q
        offset = mask.offset(length, self.spec.seqlen_kv)
        for keys in _slices(self.spec.seqlen_kv, BLOCK):
            first, last = t.start * self.rows, min(t.stop * self.rows, length) - 1
            if mask.right is not None:
                first = max(first, keys.start - offset - mask.right)
            if mask.left is not None:
                last = min(last, keys.stop - 1 - offset + mask.left)
            if first > last:
                continue
            begin, end = first // self.rows, last // self.rows + 1
            least, most = begin * self.rows + offset, min(end * self.rows, length) - 1 + offset
            ahead = mask.right is not None and least + mask.right < keys.stop - 1
            behind = mask.left is not None and most - mask.left > keys.start
            visible = None
            if ahead or behind:
                rows = torch.arange(begin * self.rows, end * self.rows, device=self.device)
                columns = torch.arange(keys.start, keys.stop, device=self.device)
                hidden = mask.hidden(rows, columns, length, self.spec.seqlen_kv)
                visible = None if hidden is None else hidden.logical_not_().view(end - begin, 1, self.rows, -1)
            yield keys, slice(begin - t.start, end - t.start), visible


class _Scores:
    """The scores of FP8 queries and keys, the same in both passes, without the part that the mean of K adds."""

    def __init__(
        self, q: Quantised, k: Quantised, spec: AttentionSpec, accumulator: Accumulator, tiles: _Tiles
    ) -> None:
        self.spec, self.accumulator = spec, accumulator
        self.q, self.q_descale = tiles.fold(q.data), tiles.row_descale(q)
        self.k, self.k_descale = k.data.reshape(tiles.heads, -1, spec.head_dim), tiles.key_descale(k)

    def chunk(self, z: slice, t: slice) -> tuple[Tensor, Tensor]:
        """The queries of a chunk in fp32 and their descales."""
        return _fp32(self.q[z, t]), self.q_descale[z, t]

    def block(
        self, chunk: tuple[Tensor, Tensor], z: slice, keys: slice, seen: slice, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Scores (z, tiles, G, R, keys), minus infinity where masked, and the softcap's slope or None."""
        q8, descale = chunk[0][:, seen], chunk[1][:, seen]
        s = self.accumulator.product(q8.flatten(1, 3), self.k[z, keys].to(torch.float32).mT)
        s = s.view(*q8.shape[:-1], -1).mul_(descale * self.spec.scale).mul_(self.k_descale[z, ..., keys])
        slope = None
        if self.spec.softcap:
            capped = s.div_(self.spec.softcap).tanh_()
            slope = 1.0 - capped * capped
            s = capped * self.spec.softcap
        return (s if mask is None else s.masked_fill_(~mask, -torch.inf)), slope


def _mean_score(q: Quantised, k: Quantised, spec: AttentionSpec) -> Tensor | float:
    """What the mean that smoothing took from K adds to each row's scores, (B, H, Sq)."""
    if k.mean is None:
        return 0.0
    rows = q.dequantised(torch.float32).reshape(spec.batch, spec.kv_heads, -1, spec.head_dim)
    return (rows @ k.mean.mT).view(spec.batch, spec.heads, spec.seqlen_q) * spec.scale


def _narrowed(x: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Tiles x (..., R, keys) rounded to the format with one scale each: (values, scale (..., 1, 1))."""
    scale = (x.abs().amax((-2, -1), keepdim=True) / LARGEST[recipe.format]).clamp_min_(_TINY)
    return rounded(x / scale, recipe.format), scale


def _power_of_two(x: Tensor) -> Tensor:
    """The largest power of two not above |x| (fp32), 0 below the smallest normal, infinity for what is not finite."""
    return (x.view(torch.int32) & _EXPONENT).view(torch.float32)


def _fp32(x: Tensor) -> Tensor:
    return x.to(torch.float32, memory_format=torch.contiguous_format)


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))
