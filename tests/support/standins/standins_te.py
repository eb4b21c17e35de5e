"""A stand-in for ``transformer_engine`` 2.20.2: the used signatures in dense FP64, with strict checks.

It takes only what the real one takes on sm90 with cuDNN 9.19 (layouts, contiguity, alignment, shapes of scales, head
dimensions, masks), so that a wrong call fails on a machine without a GPU.  FP8 values are rounded and saturated where
the real kernels round, and the largest magnitudes are reported as they report them.
"""

from __future__ import annotations

import itertools
import math
from enum import IntEnum

import pytest
import torch
from standins_graph import HALF_TYPES, LARGEST, backward, band, rounded, scores_of
from torch import Tensor

from attnbench.backends.te import backend, history, library

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class DType(IntEnum):
    kFloat8E4M3 = 7  # noqa: N815
    kFloat8E5M2 = 8  # noqa: N815


class FusedAttnBackend(IntEnum):
    F16_arbitrary_seqlen = 1
    FP8 = 2


TORCH = {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2}


class Storage:
    """``Float8TensorStorage``: bytes and the reciprocal of a scale."""

    def __init__(self, *, data: Tensor, fp8_scale_inv: Tensor, fp8_dtype: DType, fake_dtype: torch.dtype) -> None:
        assert data.dtype == torch.uint8
        assert fp8_scale_inv.dtype == torch.float32
        assert fp8_scale_inv.shape == (1,)
        self._data, self._scale_inv, self._fp8_dtype, self._dtype = data, fp8_scale_inv, fp8_dtype, fake_dtype

    @property
    def type(self) -> torch.dtype:
        return TORCH[self._fp8_dtype]

    def value(self) -> Tensor:
        return self._data.view(self.type).double() * self._scale_inv.double()

    def dequantize(self, *, dtype: torch.dtype) -> Tensor:
        return self.value().to(dtype)


class Quantizer:
    """The common part of both quantizers."""

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        assert rowwise
        assert not columnwise, "a transposed copy would be made for nothing"
        self.internal = False


class Delayed(Quantizer):
    """``Float8Quantizer``."""

    def __init__(self, scale: Tensor, amax: Tensor, fp8_dtype: DType, **usage: bool) -> None:
        super().__init__(**usage)
        for x in (scale, amax):
            assert x.dtype == torch.float32
            assert x.shape == (1,)
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype

    def made(self, x: Tensor, nominal: torch.dtype) -> Storage:
        """The kernel's FP8 output: rounded with the scale and saturated; records the largest magnitude."""
        assert self.internal
        self.amax.fill_(max(self.amax.item(), x.abs().max().item()))
        data = rounded(x * self.scale.double(), TORCH[self.dtype]).to(TORCH[self.dtype])
        return Storage(data=data.contiguous().view(torch.uint8), fp8_scale_inv=self.scale.reciprocal(),
                       fp8_dtype=self.dtype, fake_dtype=nominal)  # fmt: skip

    def inside(self, x: Tensor) -> Tensor:
        """The same for values inside the kernel."""
        self.amax.fill_(max(self.amax.item(), x.abs().max().item()))
        return rounded(x * self.scale.double(), TORCH[self.dtype]) / self.scale.double()


class Current(Quantizer):
    """``Float8CurrentScalingQuantizer``."""

    def __init__(self, fp8_dtype: DType, device: torch.device, **usage: bool) -> None:
        super().__init__(**usage)
        self.dtype = fp8_dtype

    def quantize(self, x: Tensor) -> Storage:
        assert self.internal
        assert x.is_contiguous()
        assert x.dtype in HALF_TYPES
        amax = x.abs().max().float().reshape(1)
        scale = torch.where(amax > 0, LARGEST[TORCH[self.dtype]] / amax, 1.0)
        data = rounded(x.double() * scale.double(), TORCH[self.dtype]).to(TORCH[self.dtype])
        return Storage(data=data.view(torch.uint8), fp8_scale_inv=scale.reciprocal(), fp8_dtype=self.dtype,
                       fake_dtype=x.dtype)  # fmt: skip


def _sees(sq: int, skv: int, mask: str, window: tuple[int, int], bottom_right: bool) -> Tensor:
    assert bottom_right == (mask == "causal_bottom_right") or mask == "no_mask"
    assert window == (-1, 0) or mask == "no_mask"
    offset, (left, right) = skv - sq if bottom_right else 0, window
    return band(sq, skv, -math.inf if left < 0 else offset - left, math.inf if right < 0 else offset + right)


def _check(b: int, sq: int, skv: int, seqlens: tuple[Tensor, Tensor], tensors: list[Tensor]) -> None:
    for cu, length in zip(seqlens, (sq, skv), strict=True):
        assert cu.dtype == torch.int32
        assert cu.tolist() == [i * length for i in range(b + 1)]
    for x in tensors:
        assert x.is_contiguous(), "only pointers are handed on"
        assert x.data_ptr() % 16 == 0
        assert not x.requires_grad


def _places(longest_q: int, longest_kv: int, starts_q: Tensor, starts_kv: Tensor, offsets_q: Tensor | None,
            offsets_kv: Tensor | None) -> list[tuple[Tensor, slice]]:  # fmt: skip
    """Each sequence's own starts and token positions; requires equal queries and keys and no gaps between sequences."""
    assert torch.equal(starts_q, starts_kv)
    assert offsets_q is not None, "the kernel reads it"
    assert offsets_kv is not None, "the kernel reads it"
    assert torch.equal(offsets_q, starts_q)
    assert torch.equal(offsets_kv, starts_kv)
    assert starts_q.dtype == torch.int32
    assert longest_q == longest_kv >= starts_q.diff().max()
    pairs = itertools.pairwise(starts_q.tolist())
    return [(torch.tensor([0, b - a], dtype=torch.int32), slice(a, b)) for a, b in pairs if a < b]


def _supported(fp8: bool, training: bool, sq: int, skv: int, d: int, dv: int, mask: str, window: tuple[int, int]
               ) -> None:  # fmt: skip
    """``nvte_get_fused_attn_backend`` on sm90 with cuDNN 9.19."""
    if fp8:
        good = max(d, dv) <= 256 and not (d % 16 or dv % 16) and mask in ("no_mask", "causal")
        good &= not training or (d, dv) == (128, 128)
        assert window == ((-1, -1) if mask == "no_mask" else (-1, 0)), "it would be ignored"
    else:
        good = (
            max(d, dv) <= (256 if training else 2**31)
            and not (d % 8 or dv % 8)
            and not (mask == "causal_bottom_right" and sq > skv)
        )
        good &= sq <= skv or window in ((-1, -1), (-1, 0))
        good &= not (training and min(d, dv) >= 128 and d != dv and (d, dv) != (192, 128))
    if not good:
        raise RuntimeError("Invalid combination of data type and sequence length for fused attention.")


def fused_attn_fwd(
    is_training: bool, max_seqlen_q: int, max_seqlen_kv: int, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, q: Tensor,
    k: Tensor, v: Tensor, fake_dtype: torch.dtype, fused_attention_backend: FusedAttnBackend,
    s_quantizer: Delayed | None = None, o_quantizer: Delayed | None = None, attn_scale: float | None = None,
    dropout: float = 0.0, qkv_layout: str = "sbh3d", o_format: str = "sbhd", attn_bias_type: str = "no_bias",
    attn_mask_type: str = "padding", window_size: tuple[int, int] = (-1, -1), bottom_right_diagonal: bool | None = None,
    rng_gen: torch.Generator | None = None, cuda_graph: bool = False, cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
) -> tuple[object, list[Tensor]]:  # fmt: skip
    if qkv_layout == "thd_thd_thd":
        places = _places(max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
                         cu_seqlens_kv_padded)  # fmt: skip
        assert (o_format, dropout, s_quantizer, o_quantizer) == ("thd", 0.0, None, None)
        unpadded = {"padding": "no_mask", "padding_causal": "causal"}[attn_mask_type]
        assert fused_attention_backend is FusedAttnBackend.F16_arbitrary_seqlen
        lse = torch.full((*q.shape[:2], 1), math.nan)
        whole = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype)
        for starts, tokens in places:
            out, aux = fused_attn_fwd(
                is_training, *[len(q[tokens])] * 2, starts, starts, *(x[None, tokens].contiguous() for x in (q, k, v)),
                fake_dtype, fused_attention_backend, attn_scale=attn_scale, qkv_layout="bshd_bshd_bshd",
                o_format="bshd", attn_mask_type=unpadded, window_size=window_size,
                bottom_right_diagonal=bottom_right_diagonal, rng_gen=rng_gen,
            )  # fmt: skip
            whole[tokens], lse[tokens] = out[0], aux[0][0].transpose(0, 1)
        return whole, [lse, torch.zeros(2, dtype=torch.int64)]
    assert (qkv_layout, o_format, dropout) == ("bshd_bshd_bshd", "bshd", 0.0)
    assert rng_gen is not None
    fp8 = isinstance(q, Storage)
    assert fused_attention_backend is (FusedAttnBackend.FP8 if fp8 else FusedAttnBackend.F16_arbitrary_seqlen)
    raw = [x._data if isinstance(x, Storage) else x for x in (q, k, v)]
    (b, sq, h, d), (_, skv, hkv, dv) = raw[0].shape, raw[2].shape
    assert (max_seqlen_q, max_seqlen_kv) == (sq, skv)
    _check(b, sq, skv, (cu_seqlens_q, cu_seqlens_kv), raw)
    _supported(fp8, is_training, sq, skv, d, dv, attn_mask_type, window_size)
    wide = [(x.value() if fp8 else x.double()).transpose(1, 2) for x in (q, k, v)]
    wide_k, wide_v = (x.repeat_interleave(h // hkv, 1) for x in wide[1:])
    sees = _sees(sq, skv, attn_mask_type, window_size, bottom_right_diagonal)
    s, lse, p = scores_of(wide[0], wide_k, sees, attn_scale)
    if fp8:
        assert fake_dtype in HALF_TYPES
        p = torch.exp(s - s.amax(-1, keepdim=True))  # the sum is of what was not rounded yet
        value = s_quantizer.inside(p) @ wide_v / p.sum(-1, keepdim=True)
        out = o_quantizer.made(value.transpose(1, 2), fake_dtype)
    else:
        assert s_quantizer is o_quantizer is None
        assert fake_dtype == q.dtype
        out = (p @ wide_v).transpose(1, 2).contiguous().to(q.dtype)
    return out, [lse.float().unsqueeze(-1), torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(
    max_seqlen_q: int, max_seqlen_kv: int, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, q: Tensor, k: Tensor, v: Tensor,
    o: Tensor, d_o: Tensor, fake_dtype: torch.dtype, aux_ctx_tensors: list[Tensor],
    fused_attention_backend: FusedAttnBackend, s_quantizer: Delayed | None = None, dp_quantizer: Delayed | None = None,
    dqkv_quantizer: Delayed | None = None, attn_scale: float | None = None, dropout: float = 0.0,
    qkv_layout: str = "sbh3d", o_format: str = "sbhd", do_format: str = "sbhd", dqkv_layout: str = "sbh3d",
    attn_bias_type: str = "no_bias", attn_mask_type: str = "padding", window_size: tuple[int, int] = (-1, -1),
    bottom_right_diagonal: bool | None = None, cuda_graph: bool = False,
) -> tuple[object, ...]:  # fmt: skip
    assert (qkv_layout, dqkv_layout) == ("bshd_bshd_bshd",) * 2
    assert (o_format, do_format, dropout) == ("bshd", "bshd", 0.0)
    fp8 = isinstance(q, Storage)
    assert fused_attention_backend is (FusedAttnBackend.FP8 if fp8 else FusedAttnBackend.F16_arbitrary_seqlen)
    raw = [x._data if isinstance(x, Storage) else x for x in (q, k, v, o, d_o)]
    (b, sq, h, d), (_, skv, hkv, dv) = raw[0].shape, raw[2].shape
    _check(b, sq, skv, (cu_seqlens_q, cu_seqlens_kv), raw)
    _supported(fp8, True, sq, skv, d, dv, attn_mask_type, window_size)
    stats, random_state = aux_ctx_tensors
    assert stats.shape == (b, h, sq, 1)
    assert stats.dtype == torch.float32
    assert stats.is_contiguous()
    assert random_state.shape == (2,)
    assert random_state.dtype == torch.int64
    sees = _sees(sq, skv, attn_mask_type, window_size, bottom_right_diagonal)
    wide = [(x.value() if fp8 else x.double()).transpose(1, 2) for x in (q, k, v, o, d_o)]
    if not fp8:
        assert {x.dtype for x in raw} == {fake_dtype}
        found = backward(*wide, stats.squeeze(-1).double(), sees, attn_scale, 0.0)
        return (*(x.transpose(1, 2).contiguous().to(q.dtype) for x in found), None, None)
    assert [x.type for x in (q, k, v, o, d_o)] == [E4M3] * 4 + [E5M2]
    wide_q, wide_k, wide_v, wide_o, grad = wide
    group = h // hkv
    s, _, _ = scores_of(wide_q, wide_k.repeat_interleave(group, 1), sees, attn_scale)
    p = torch.exp(s - stats.double())
    ds = p * (grad @ wide_v.repeat_interleave(group, 1).mT - (grad * wide_o).sum(-1, keepdim=True)) * attn_scale
    p, ds = s_quantizer.inside(p), dp_quantizer.inside(ds)
    dk, dv_ = ((y.mT @ z).unflatten(1, (hkv, group)).sum(2) for y, z in ((ds, wide_q), (p, grad)))
    gradients = (ds @ wide_k.repeat_interleave(group, 1), dk, dv_)
    return (*(dqkv_quantizer.made(x.transpose(1, 2), fake_dtype) for x in gradients), None, None)


def install_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the library by the stand-in until the test ends, without history shared across tests."""
    standin = library.Library(fused_attn_fwd, fused_attn_bwd, FusedAttnBackend, DType, Storage, Delayed, Current)
    monkeypatch.setattr(library, "library", lambda: standin)
    monkeypatch.setattr(backend, "_gradients", history.Histories(roles=2))
