"""A stand-in for ``flash_attn.cute.interface``, and dense FP64 attention for all stand-ins; argument checks are strict.

It takes only what the real one takes (dtypes, layouts, strides, alignment, shapes of scales), so that a wrong call
fails on a machine without a GPU.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from standins_packed import STARTS, checked_starts, each_sequence
from torch import Tensor

HALF_TYPES = (torch.bfloat16, torch.float16)
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def readable(x: Tensor) -> None:
    """Rows contiguous, everything on 16 bytes, no stride of 0."""
    step = 16 // x.element_size()
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    assert x.stride(-1) == 1, x.stride()
    assert all(stride % step == 0 and stride > 0 for stride in strides), x.stride()
    assert x.data_ptr() % 16 == 0
    assert not x.requires_grad


def band(sq: int, skv: int, low: float, high: float) -> Tensor:
    """(Sq, Skv): whether i + low <= j <= i + high."""
    distance = torch.arange(skv)[None, :] - torch.arange(sq)[:, None]
    return (distance >= low) & (distance <= high)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in an FP8 dtype, saturated, as numbers."""
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).double()


def scores_of(q: Tensor, k: Tensor, sees: Tensor, scale: float, softcap: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """(scores, lse, p) of q (B, H, Sq, D) and k of as many heads."""
    s = q @ k.mT * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~sees, -math.inf)
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    return s, lse, p


# --- flash_attn.cute.interface, version 4.0.0b36 ----------------------------------------------------------------------


def _fa4_band(causal: bool, left: int | None, right: int | None, sq: int, skv: int) -> Tensor:
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    right = 0 if causal else right
    offset = skv - sq
    return band(sq, skv, -math.inf if left is None else offset - left, math.inf if right is None else offset + right)


def _fa4_check(q: Tensor, k: Tensor, v: Tensor, step: int) -> None:
    """``step``: of the head dimensions at which 4.0.0b36 was right on an H200, which are equal but for one pair."""
    (b, _, h, d), (skv, hkv) = q.shape, k.shape[1:3]
    assert k.shape == (b, skv, hkv, d)
    assert v.shape == (b, skv, hkv, v.shape[-1])
    assert h % hkv == 0
    assert q.dtype == k.dtype == v.dtype
    for x in (q, k, v):
        readable(x)
        assert 8 <= x.shape[-1] <= 256
        assert x.shape[-1] % step == 0
    assert d == v.shape[-1] or (d, v.shape[-1]) == (192, 128)


def flash_attn_fwd(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> tuple[Tensor | None, ...]:
    """``_flash_attn_fwd``: (B, S, H, D), or packed (T, H, D) with the log-sum-exp (H, T)."""
    starts = {name: rest.pop(name) for name in STARTS if name in rest}
    if not starts:
        return _fa4_forward(q, k, v, **rest)
    out, lse = each_sequence(lambda _, *own: _fa4_forward(*own, **rest)[:2], (q, k, v), starts)
    return out, lse, None, None, None


def _fa4_forward(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None, causal: bool = False,
    softcap: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
    return_lse: bool = False, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, None, None, None]:  # fmt: skip
    """Bottom-right, descales (B, Hkv) for FP8 alone."""
    _fa4_check(q, k, v, step=16)
    (b, sq, h, _), (skv, hkv) = q.shape, k.shape[1:3]
    fp8 = v.dtype == torch.float8_e4m3fn
    values = []
    for x, descale in ((q, q_descale), (k, k_descale), (v, v_descale)):
        wide = x.double().transpose(1, 2)
        assert (descale is not None) == fp8
        if descale is not None:
            assert descale.shape == (b, hkv)
            assert descale.dtype == torch.float32
            assert descale.is_contiguous()
            wide = wide * descale.double().repeat_interleave(wide.shape[1] // hkv, 1)[..., None, None]
        values.append(wide.repeat_interleave(h // wide.shape[1], 1))
    wide_q, wide_k, wide_v = values
    sees = _fa4_band(causal, window_size_left, window_size_right, sq, skv)
    _, lse, p = scores_of(wide_q, wide_k, sees, softmax_scale or q.shape[-1] ** -0.5, softcap or 0.0)
    out = (p @ wide_v).transpose(1, 2).contiguous().to(torch.bfloat16 if fp8 else q.dtype)
    return out, lse.float() if return_lse else None, None, None, None


def flash_attn_bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """``_flash_attn_bwd``, of (B, S, H, D) or packed tensors."""
    starts = {name: rest.pop(name) for name in STARTS if name in rest}
    if not starts:
        return _fa4_backward(q, k, v, out, dout, lse, **rest)
    assert lse.shape == (q.shape[1], q.shape[0])
    assert lse.is_contiguous()
    found = tuple(torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
    for queries, keys in checked_starts(starts, q.device):
        if queries.start < queries.stop and keys.start < keys.stop:
            own = (q[None, queries], k[None, keys], v[None, keys], out[None, queries], dout[None, queries])
            places = (found[0][queries], found[1][keys], found[2][keys])
            for place, each in zip(
                places, _fa4_backward(*own, lse[None, :, queries].contiguous(), **rest), strict=True
            ):
                place.copy_(each[0])
    return found


def _fa4_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float | None = None,
    causal: bool = False, softcap: float = 0.0, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """P is computed from the given LSE, D from out."""
    _fa4_check(q, k, v, step=32)
    readable(out)
    readable(dout)
    assert q.dtype in HALF_TYPES
    assert q.dtype == out.dtype == dout.dtype
    (b, sq, h, _), skv = q.shape, k.shape[1]
    assert out.shape == dout.shape == (b, sq, h, v.shape[-1])
    assert lse.shape == (b, h, sq)
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    sees = _fa4_band(causal, window_size_left, window_size_right, sq, skv)
    wide = [x.double().transpose(1, 2) for x in (q, k, v, out, dout)]
    gradients = backward(*wide, lse.double(), sees, softmax_scale or q.shape[-1] ** -0.5, softcap)
    dq, dk, dv = (x.transpose(1, 2).contiguous().to(q.dtype) for x in gradients)
    return dq, dk, dv


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, sees: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention's backward in FP64 on (B, H, S, D)."""
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
    s, _, _ = scores_of(q, wide_k, sees, scale, softcap)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    ds = p * (dout @ wide_v.mT - (dout * out).sum(-1, keepdim=True))
    if softcap:
        ds = ds * (1 - (s.masked_fill(~sees, 0.0) / softcap) ** 2)
    ds = ds * scale
    folded = (q.shape[0], k.shape[1], group)
    dk, dv = ((x.mT @ y).unflatten(1, folded[1:]).sum(2) for x, y in ((ds, q), (p, dout)))
    return ds @ wide_k, dk, dv


INTERFACE = SimpleNamespace(_flash_attn_fwd=flash_attn_fwd, _flash_attn_bwd=flash_attn_bwd)
