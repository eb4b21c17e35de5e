"""What FlashAttention-3's kernels read: masks as windows, FP8 with a scale for each key head, layouts for TMA."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.errors import InputError
from attnbench.kernels.contract import Inputs, Operands
from attnbench.problem.fp8 import Quantised, Recipe, descale_of, quantise, quantise_with
from attnbench.problem.lengths import Lengths
from attnbench.problem.spec import AttentionSpec

from ..common.layout import padded, rounded_up
from ..common.windows import Window, window_of

__all__ = [
    "Native", "check_plain", "dimensions", "native", "prepared", "quantise_by_key_head", "readable", "refuse_spec",
    "shared",
]  # fmt: skip

Triple = tuple[Quantised, Quantised, Quantised]
Starts = tuple[Tensor | None, Tensor | None, int | None, int | None]


class Native(NamedTuple):
    """What ``run`` hands to the kernel: (B, S, H, D) tensors, descales (B, Hkv) in fp32 for FP8, the window.

    Tensors of a packed batch are (T, H, D), their descales (N, Hkv), and ``starts`` says where sequences start.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    descales: tuple[Tensor | None, Tensor | None, Tensor | None]
    window: Window
    starts: Starts


def refuse_spec(spec: AttentionSpec) -> list[str]:
    """Limits of every build of FlashAttention-3.

    The library lifts sides of a window that reach beyond all keys (mha_fwd in hopper/flash_api.cpp: left >= keys - 1,
    right >= queries - 1).
    """
    reasons = []
    found = window_of(spec)
    if isinstance(found, str):
        reasons.append(found)
    if spec.scale <= 0:  # the row's maximum is taken before the scale is applied (hopper/softmax.h)
        reasons.append(f"needs a positive scale, not {spec.scale}")
    return reasons


def dimensions(head_dim: int, head_dim_v: int, fp8: bool, backward: bool = False) -> tuple[int, int]:
    """The head dimensions that (q and k, v) are padded to.

    Rows must be multiples of 16 bytes; the library pads further itself.  V may have its own size only where such a
    kernel exists, (128, 192] with (96, 128]; otherwise both get the larger.
    """
    step = 16 if fp8 else 8
    d, dv = rounded_up(head_dim, step), rounded_up(head_dim_v, step)
    if not backward and 128 < d <= 192 and 96 < dv <= 128:
        return d, dv
    return max(d, dv), max(d, dv)


def quantise_by_key_head(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Triple:
    """Q, K and V in e4m3, with one scale for each (batch, key head): the query heads of a group share theirs."""
    recipe = Recipe("head")
    grouped = quantise(q.reshape(spec.batch, spec.kv_heads, spec.group * spec.seqlen_q, spec.head_dim), recipe)
    shared = Quantised(
        grouped.data.reshape(spec.batch, spec.heads, spec.seqlen_q, spec.head_dim),
        grouped.descale.repeat_interleave(spec.group, dim=1),
        "head",
    )
    return shared, quantise(k, recipe), quantise(v, recipe)


def quantise_sequences(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, lengths: Lengths) -> Triple:
    """The same of a packed batch (1, H, T, D), with one scale for each (sequence, key head) as a descale a token."""
    queries, keys = lengths.starts
    return _by_sequence(q, queries, spec.group), _by_sequence(k, keys, 1), _by_sequence(v, keys, 1)


def _by_sequence(x: Tensor, starts: Tensor, group: int) -> Quantised:
    count, tokens = starts.shape[0] - 1, x.shape[2]
    owner = torch.bucketize(torch.arange(tokens, device=x.device), starts[1:].contiguous(), right=True)
    owner.clamp_max_(count - 1)  # tokens behind the last sequence
    largest = x[0].abs().amax(-1).to(torch.float32).view(-1, group, tokens).amax(1)
    of_sequence = largest.new_zeros(largest.shape[0], count).scatter_reduce(
        1, owner.expand_as(largest), largest, "amax"
    )
    descale = descale_of(of_sequence, "e4m3")[:, owner].repeat_interleave(group, dim=0)[None, ..., None]
    return Quantised(quantise_with(x, descale, "e4m3"), descale, "token")


def prepared(inputs: Inputs, spec: AttentionSpec, precision: str) -> Operands:
    """Operands whose ``native`` is a ``Native``: e4m3 for the precision fp8, else the tensors as they are.

    Tensors that the caller quantised, with grouped heads and scales per head, may have a scale for each query head.
    The library has no room for these, so the key heads are then repeated.  Raises InputError if a tensor is rotated,
    smoothed or not e4m3.
    """
    if inputs.lengths is not None:
        return _packed(inputs, spec, inputs.lengths, precision)
    if precision != "fp8":
        q, k, v = inputs.unquantised()
        return Operands(spec, q, k, v, native(q, k, v, spec))
    given = inputs.quantised()
    made = given or quantise_by_key_head(*inputs.unquantised(), spec)
    return Operands(spec, *made, native(*made, spec, own_scales=given is None))


def _packed(inputs: Inputs, spec: AttentionSpec, lengths: Lengths, precision: str) -> Operands:
    """Operands of a packed batch."""
    q, k, v = inputs.unquantised()
    queries, keys = lengths.starts
    window = window_of(spec)
    if isinstance(window, str):
        raise InputError(window)
    starts = queries, keys, lengths.longest_q, lengths.longest_kv
    d, dv = dimensions(spec.head_dim, spec.head_dim_v, precision == "fp8")

    def tokens(x: Tensor, size: int) -> Tensor:
        return readable(padded(x, size))[0]

    if precision != "fp8":
        given = Native(tokens(q, d), tokens(k, d), tokens(v, dv), (None, None, None), window, starts)
        return Operands(spec, q, k, v, given, lengths)
    q8, k8, v8 = quantise_sequences(q, k, v, spec, lengths)
    descales = _firsts(q8, queries)[:, :: spec.group].contiguous(), _firsts(k8, keys), _firsts(v8, keys)
    given = Native(tokens(q8.data, d), tokens(k8.data, d), tokens(v8.data, dv), descales, window, starts)
    return Operands(spec, q8, k8, v8, given, lengths)


def _firsts(x: Quantised, starts: Tensor) -> Tensor:
    """The descales (N, H) of each sequence's first token; those of one without tokens are not used."""
    return x.descale[0, ..., 0][:, starts[:-1].clamp_max(x.data.shape[2] - 1)].mT.contiguous()


def native(
    q: Tensor | Quantised, k: Tensor | Quantised, v: Tensor | Quantised, spec: AttentionSpec, *, own_scales: bool = True
) -> Native:
    """The tensors (B, H, S, D) as the kernels read them: views where the strides allow it.

    ``own_scales``: Q's descales are equal within each group of query heads, as ``quantise_by_key_head`` makes them;
    otherwise the key heads are repeated, so that every query head has its own scale.  Raises InputError if FP8 tensors
    are not plain e4m3.
    """
    descales: tuple[Tensor | None, ...] = (None, None, None)
    tensors: tuple[Tensor, ...]
    if isinstance(q, Quantised) and isinstance(k, Quantised) and isinstance(v, Quantised):
        check_plain("FlashAttention-3", q, k, v)
        repeat = spec.group if q.granularity == "head" and not own_scales else 1
        scales = [_by_head(x, spec.batch) for x in (q, k, v)]
        if q.granularity == "head" and own_scales:
            scales[0] = scales[0][:, :: spec.group]
        heads = spec.kv_heads * repeat
        scales[1:] = [x.repeat_interleave(repeat if x.shape[1] > 1 else 1, dim=1) for x in scales[1:]]
        descales = tuple(x.expand(spec.batch, heads).contiguous() for x in scales)
        tensors = (q.data, *(_repeated(x.data, repeat) for x in (k, v)))
    else:
        tensors = tuple(x for x in (q, k, v) if isinstance(x, Tensor))
    window, d, dv = shared(spec, descales[0] is not None)
    q_, k_, v_ = tensors
    if window.keys < spec.seqlen_kv:
        k_, v_ = k_[:, :, : window.keys], v_[:, :, : window.keys]
    if d != spec.head_dim or dv != spec.head_dim_v:
        q_, k_, v_ = padded(q_, d), padded(k_, d), padded(v_, dv)
    of_each = descales[0], descales[1], descales[2]
    return Native(readable(q_), readable(k_), readable(v_), of_each, window, (None, None, None, None))


@lru_cache(maxsize=1024)
def shared(spec: AttentionSpec, fp8: bool) -> tuple[Window, int, int]:
    """What calls share: the window and the head dimensions of Q and K, and of V."""
    found = window_of(spec)
    if isinstance(found, str):
        raise InputError(found)
    return found, *dimensions(spec.head_dim, spec.head_dim_v, fp8)


def readable(x: Tensor) -> Tensor:
    """x (B, H, S, D) as (B, S, H, D) that TMA can load: a view if it can, else a contiguous copy.

    The last axis must be contiguous; every other stride, also of axes of one element, and the address must be positive
    multiples of 16 bytes (cuTensorMapEncodeTiled in the CUDA driver API).
    """
    step = 16 // x.element_size()
    batch, head, token, last = x.stride()
    fits = last == 1 and batch > 0 and head > 0 and token > 0 and not (batch % step or head % step or token % step)
    rows = x.transpose(1, 2)
    return rows if fits and not x.data_ptr() % 16 else rows.clone(memory_format=torch.contiguous_format)


def check_plain(library: str, q: Quantised, k: Quantised, v: Quantised) -> None:
    """Raise InputError unless the tensors are e4m3 with descales per tensor or head, neither rotated nor smoothed."""
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.data.dtype != torch.float8_e4m3fn:
            raise InputError(f"{library} computes in e4m3, {name} is {x.data.dtype}")
        if x.rotated or x.mean is not None:
            raise InputError(f"{library} takes descales alone, {name} is rotated or smoothed")
        if x.granularity not in ("tensor", "head"):
            raise InputError(f"{library} takes descales per tensor or head, {name}'s are per {x.granularity}")


def _repeated(x: Tensor, times: int) -> Tensor:
    """x (B, Hkv, S, D) with each head ``times`` times; through bytes, because float8 has few operators."""
    return x if times == 1 else x.view(torch.uint8).repeat_interleave(times, dim=1).view(x.dtype)


def _by_head(x: Quantised, batch: int) -> Tensor:
    """Its descales as (B, H) or (B, 1)."""
    descale = x.descale.to(torch.float32)
    return descale.reshape(1, 1).expand(batch, 1) if x.granularity == "tensor" else descale.reshape(batch, -1)
