"""TransformerEngine's fused attention below its modules: one call for each pass, with the implementation named.

The modules choose among implementations by environment variables; these calls take the given one, or raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnbench.graph_pools import recording
from attnbench.kernels.contract import gradient_dtype
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

from ..common.layout import padded

__all__ = [
    "Diagonal",
    "Library",
    "Narrow",
    "backward",
    "bshd",
    "delayed",
    "diagonal_of",
    "forward",
    "library",
    "seqlens_of",
    "widened",
]

_LAYOUT = "bshd_bshd_bshd"  # the one that both precisions have before cuDNN 9.21
_PACKED_LAYOUT = "thd_thd_thd"  # 16 bits only
_VECTOR = 16  # bytes that cuDNN reads at a time


class Library(NamedTuple):
    """What is used of ``transformer_engine``: the two passes, its enumerations, and how it names FP8 tensors."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    backends: Any
    dtypes: Any
    storage: Callable[..., Any]
    delayed: Callable[..., Any]
    current: Callable[..., Any]


@cache
def library() -> Library:
    """Imports it; raises ImportError or OSError where a part of it is missing or does not load."""
    attention = import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
    tensors = import_module("transformer_engine.pytorch.tensor.float8_tensor")
    storages = import_module("transformer_engine.pytorch.tensor.storage.float8_tensor_storage")
    return Library(
        forward=attention.fused_attn_fwd,
        backward=attention.fused_attn_bwd,
        backends=attention.FusedAttnBackend,
        dtypes=attention.DType,
        storage=storages.Float8TensorStorage,
        delayed=tensors.Float8Quantizer,
        current=tensors.Float8CurrentScalingQuantizer,
    )


class Diagonal(NamedTuple):
    """A mask as TransformerEngine takes it; -1 lifts a side of the window."""

    mask: str
    window: tuple[int, int]
    bottom_right: bool


def diagonal_of(mask: Mask) -> Diagonal:
    """Query i sees key j when ``i + o - window[0] <= j <= i + o + window[1]``, as in ``Mask``."""
    bottom_right = mask.alignment == "bottom-right"
    if mask.kind == "none":
        return Diagonal("no_mask", (-1, -1), False)
    if mask.kind == "causal":
        return Diagonal("causal_bottom_right" if bottom_right else "causal", (-1, 0), bottom_right)
    left, right = (-1 if side is None else side for side in (mask.left, mask.right))
    return Diagonal("no_mask", (left, right), bottom_right)


class Narrow(NamedTuple):
    """An FP8 tensor, dense (B, S, H, D) of ``float8``, that stands for ``data * descale``; descale is fp32 (1,)."""

    data: Tensor
    descale: Tensor

    @classmethod
    def of(cls, storage: Any) -> Narrow:
        """What TransformerEngine has quantised."""
        dtypes = library().dtypes
        e5m2 = storage._fp8_dtype == dtypes.kFloat8E5M2
        return cls(storage._data.view(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn), storage._scale_inv)

    @classmethod
    def quantised(cls, x: Tensor, *, e5m2: bool = False) -> Narrow:
        """x, dense (B, S, H, D) of 16 bits, on a scale from its own largest magnitude, by TransformerEngine's cast."""
        quantizer = library().current(_fp8(e5m2), x.device, rowwise=True, columnwise=False)
        quantizer.internal = True
        with _on(x.device):
            return cls.of(quantizer.quantize(x))

    def padded(self, size: int) -> Narrow:
        """With zeros behind the last head dimension."""
        return Narrow(padded(self.data, size), self.descale)

    def storage(self, dtype: torch.dtype) -> Any:
        """As TransformerEngine takes it; ``dtype`` is what it calls the tensor's nominal type."""
        return library().storage(
            data=self.data.view(torch.uint8),
            fp8_scale_inv=self.descale,
            fp8_dtype=_fp8(self.data.dtype == torch.float8_e5m2),
            fake_dtype=dtype,
        )


def delayed(scale: Tensor, amax: Tensor, *, e5m2: bool = False) -> Any:
    """How the kernel is to round something of its own: on ``scale`` (1,), its largest magnitude into ``amax`` (1,)."""
    quantizer = library().delayed(scale, amax, _fp8(e5m2), rowwise=True, columnwise=False)
    quantizer.internal = True
    return quantizer


def forward(
    spec: AttentionSpec, q: Any, k: Any, v: Any, seqlens: tuple[Tensor, Tensor], quantizers: Mapping[str, Any]
) -> tuple[Any, Tensor]:
    """Out (B, Sq, H, Dv) and the natural log-sum-exp (B, H, Sq); FP8 with quantizers for S and O, 16 bits without.

    Of packed tensors (T, H, D), in 16 bits, out is (T, H, Dv) and the log-sum-exp (1, H, T).  It runs as inference:
    without dropout that changes no number, and the head dimension is less limited.
    """
    device = seqlens[0].device
    with _on(device):
        out, aux, *_ = library().forward(
            False, spec.seqlen_q, spec.seqlen_kv, *seqlens, q, k, v, gradient_dtype(spec), _implementation(quantizers),
            rng_gen=_generator(device), **quantizers, **_common(spec, seqlens),
        )  # fmt: skip
    lse: Tensor = aux[0].squeeze(-1)
    return out, lse if spec.lengths is None else lse.mT[None]


def backward(
    spec: AttentionSpec, q: Any, k: Any, v: Any, out: Any, grad_out: Any, lse: Tensor, seqlens: tuple[Tensor, Tensor],
    quantizers: Mapping[str, Any],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """dQ, dK, dV in (B, S, H, D); ``lse`` (B, H, Sq) may come from another forward, since nothing is dropped out."""
    stats = lse.to(torch.float32).contiguous().unsqueeze(-1)
    random_state = torch.zeros(2, dtype=torch.int64, device=stats.device)
    with _on(stats.device):
        dq, dk, dv, *_ = library().backward(
            spec.seqlen_q, spec.seqlen_kv, *seqlens, q, k, v, out, grad_out, gradient_dtype(spec),
            [stats, random_state], _implementation(quantizers), do_format="bshd", dqkv_layout=_LAYOUT, **quantizers,
            **_common(spec, seqlens),
        )  # fmt: skip
    return dq, dk, dv


def widened(storage: Any, dtype: torch.dtype) -> Tensor:
    """What TransformerEngine has written in FP8, in ``dtype`` and logical order (B, H, S, D), by its own cast."""
    with _on(storage._data.device):
        wide: Tensor = storage.dequantize(dtype=dtype)
    return wide.transpose(1, 2)


def bshd(x: Tensor) -> Tensor:
    """x (B, H, S, D) as a dense, aligned (B, S, H, D): TransformerEngine hands on pointers and no strides."""
    x = x.detach().transpose(1, 2)
    if x.is_contiguous() and x.data_ptr() % _VECTOR == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def seqlens_of(spec: AttentionSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the sequences of Q and of K begin, int32 (B + 1,) each; all of one length here."""
    q, k = (
        torch.arange(0, (spec.batch + 1) * length, length, dtype=torch.int32, device=device)
        for length in (spec.seqlen_q, spec.seqlen_kv)
    )
    return q, k


def _common(spec: AttentionSpec, seqlens: tuple[Tensor, Tensor]) -> dict[str, Any]:
    diagonal = diagonal_of(spec.mask)
    layout: dict[str, Any] = {"qkv_layout": _LAYOUT, "o_format": "bshd"}
    if spec.lengths is not None:  # of as many keys as queries, where alignments are one
        mask = "padding_causal" if spec.mask.kind == "causal" else "padding"
        diagonal = Diagonal(mask, diagonal.window, False)
        places = dict(zip(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), seqlens, strict=True))
        layout = {"qkv_layout": _PACKED_LAYOUT, "o_format": "thd", **places}
    return {
        "attn_scale": spec.scale,
        "dropout": 0.0,
        **layout,
        "attn_bias_type": "no_bias",
        "attn_mask_type": diagonal.mask,
        "window_size": diagonal.window,
        "bottom_right_diagonal": diagonal.bottom_right,
        "cuda_graph": recording(),
    }


def _implementation(quantizers: Mapping[str, Any]) -> Any:
    return library().backends["FP8" if quantizers else "F16_arbitrary_seqlen"]


def _fp8(e5m2: bool) -> Any:
    dtypes = library().dtypes
    return dtypes.kFloat8E5M2 if e5m2 else dtypes.kFloat8E4M3


def _on(device: torch.device) -> AbstractContextManager[object]:
    """TransformerEngine allocates and launches on the current device, whatever the tensors' own is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _generator(device: torch.device) -> torch.Generator | None:
    """Our own generator, because the call advances it; torch's, the registered one, while a graph is recorded."""
    return None if recording() else _own_generator(device)


@lru_cache(maxsize=16)
def _own_generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device)
