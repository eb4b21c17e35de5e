"""Stand-ins of the FlashAttention libraries: operators of the same schema that compute densely in FP64 on the CPU.

Each checks what the C++ checks (dtype, shapes, strides, alignment, descales) and reads windows as the C++ does,
by rules written down from hopper/flash_api.cpp and csrc/flash_attn/flash_api.cpp and not from the package.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from standins_graph import INTERFACE, backward, band, scores_of
from standins_packed import each_sequence
from torch import Tensor

from attnbench.backends.flash_attention import fa3, fa4
from attnbench.backends.flash_attention.fa3_operator import FORWARD, bound
from attnbench.backends.flash_attention.fa3_origins import Library

_HEAD = (
    "Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
)
_TAIL = "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
FWD = {
    "sgl_kernel": _HEAD + "float? softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "int attention_chunk, float softcap, " + _TAIL + "Tensor? sinks",
    "flash_attn_3": _HEAD + "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False, "
    "Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0",
    "fa3_fwd": _HEAD + "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False, "
    "Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0",
    "_vllm_fa3_C": _HEAD + "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, " + _TAIL + "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k",
}
BWD = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, "
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "float softcap = 0.0, bool deterministic = False, int sm_margin = 0"
)
_defined: list[torch.library.Library] = []


def define() -> None:
    """Defines the operators, once per process."""
    if _defined:
        return
    for namespace, arguments in FWD.items():
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(f"fwd({arguments}) -> Tensor[]")
        names = [part.split()[1] for part in arguments.replace(" = ", "=").split(", ")]
        names = [name.partition("=")[0] for name in names]
        library.impl("fwd", _named(names), "CPU")
        if namespace == "flash_attn_3":
            library.define(f"bwd({BWD}) -> Tensor[]")
            library.impl("bwd", fa3_backward, "CPU")
        _defined.append(library)


def install_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's FlashAttention-3, which has no backward, and FlashAttention-4, until the test ends."""
    define()
    operator = bound(torch.ops.sgl_kernel.fwd.default, FORWARD)
    monkeypatch.setattr(fa3, "library", lambda: Library(operator, None))
    monkeypatch.setattr(fa4, "_library", lambda: fa4._Library(INTERFACE._flash_attn_fwd, INTERFACE._flash_attn_bwd))


@contextmanager
def modules(**found: dict[str, object]) -> Iterator[None]:
    """Makes modules with this content importable in the block; ``__`` in a name stands for a dot."""
    before = {name.replace("__", "."): sys.modules.get(name.replace("__", ".")) for name in found}
    try:
        for name, content in zip(before, found.values(), strict=True):
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            module.__dict__.update(content)
            sys.modules[name] = module
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def _named(names: list[str]):
    # torch leaves out what equals its default at the end of the schema.
    return lambda *values: fa3_forward(**(dict.fromkeys(names) | dict(zip(names, values, strict=False))))


def fa3_forward(*, q: Tensor, k: Tensor, v: Tensor, **rest: object) -> list[Tensor]:
    """mha_fwd of hopper/flash_api.cpp."""
    neutral = {
        "is_rotary_interleaved", "num_splits", "softmax_scale", "is_causal", "window_size_left", "window_size_right",
        "softcap", "q_descale", "k_descale", "v_descale", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
        "max_seqlen_k", "cp_world_size",
    }  # fmt: skip
    assert all(value in (None, 0) for name, value in rest.items() if name not in neutral), rest
    assert not rest["num_splits"]  # the dispatcher leaves out what is the default
    assert rest.get("cp_world_size", 1) == 1
    if rest["cu_seqlens_q"] is None:
        assert rest["cu_seqlens_k"] is None
        out, lse = _fa3(q, k, v, rest)
    else:
        descales = {name: rest.pop(f"{name}_descale") for name in "qkv"}

        def alone(number: int, *own: Tensor) -> tuple[Tensor, Tensor]:
            scales = {f"{name}_descale": None if x is None else x[number, None] for name, x in descales.items()}
            return _fa3(*own, rest | scales)

        out, lse = each_sequence(alone, (q, k, v), rest)
    return [out, lse, out.new_empty(0), lse.new_empty(0)]


def _fa3(q: Tensor, k: Tensor, v: Tensor, rest: dict) -> tuple[Tensor, Tensor]:
    fp8 = q.dtype == torch.float8_e4m3fn
    assert fp8 or q.dtype in (torch.bfloat16, torch.float16)
    assert q.dtype == k.dtype == v.dtype
    step = 16 // q.element_size()
    for x in (q, k, v):
        assert x.stride(-1) == 1
        assert all(s > 0 and s % step == 0 for s in x.stride()[:-1]), x.stride()
        assert x.data_ptr() % 16 == 0
    (b, sq, h, d), (bk, skv, hk, dk), dv = q.shape, k.shape, v.shape[-1]
    assert (b, d, (b, skv, hk)) == (bk, dk, tuple(v.shape[:3]))
    assert h % hk == 0
    assert d % step == dv % step == 0
    assert max(d, dv) <= 256
    if d != dv:
        assert 128 < d <= 192  # the other pairs are never asked for; in FP8 the library would misread them
        assert 96 < dv <= 128
    scales = [rest[f"{name}_descale"] for name in "qkv"]
    for scale in scales:
        assert (scale is not None) == fp8
        if scale is not None:
            assert scale.shape == (b, hk)
            assert scale.dtype == torch.float32
    wide = [x.double().transpose(1, 2) for x in (q, k, v)]
    if fp8:
        wide[0] = wide[0] * scales[0].double().repeat_interleave(h // hk, 1)[..., None, None]
        wide[1:] = [x * s.double()[..., None, None] for x, s in zip(wide[1:], scales[1:], strict=True)]
    left, right = rest["window_size_left"], rest["window_size_right"]
    left = -1 if left >= skv - 1 else left
    right = -1 if right >= sq - 1 else right
    causal = rest["is_causal"] and not (sq == 1 and left == right == -1)
    sees = bottom_right(sq, skv, left, 0 if causal else right)
    out, lse = dense(*wide, sees, rest["softmax_scale"], rest["softcap"])
    out = out.transpose(1, 2).to(torch.bfloat16 if fp8 else q.dtype).contiguous()
    return out, lse.float()


def fa3_backward(
    dout, q, k, v, out, lse, dq=None, dk=None, dv=None, cu_q=None, cu_k=None, used_q=None, used_k=None, max_q=None,
    max_k=None, scale=None, causal=False, left=-1, right=-1, softcap=0.0, deterministic=False, sm_margin=0,
) -> list[Tensor]:  # fmt: skip
    """mha_bwd of hopper/flash_api.cpp."""
    assert not any(x is not None for x in (cu_q, cu_k, used_q, used_k, max_q, max_k))
    assert not deterministic
    assert sm_margin == 0
    for x in (dout, q, k, v, out):
        assert x.dtype == q.dtype
        assert x.dtype in (torch.bfloat16, torch.float16)
        assert x.shape[-1] == q.shape[-1]
        assert x.shape[-1] % 8 == 0
        assert all(s > 0 and s % 8 == 0 for s in x.stride()[:-1])
        assert x.stride(-1) == 1
    left = -1 if left >= k.shape[1] - 1 else left
    right = -1 if right >= q.shape[1] - 1 else right
    sees = bottom_right(q.shape[1], k.shape[1], left, 0 if causal else right)
    _backward(dout, q, k, v, out, lse, (dq, dk, dv), sees, scale, softcap, empty=-math.inf)
    return [lse.new_empty(0)] * 5


def fa2_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
) -> tuple[Tensor, ...]:  # fmt: skip
    """mha_fwd of csrc/flash_attn/flash_api.cpp, behind _flash_attn_forward."""
    assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
    sees = _fa2_checked(q, k, v, causal, window_size_left, window_size_right)
    out, lse = dense(*(x.double().transpose(1, 2) for x in (q, k, v)), sees, softmax_scale, softcap)
    lse = lse.masked_fill(lse == -math.inf, math.inf).float()
    return out.transpose(1, 2).to(q.dtype), lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


def fa2_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
    window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
) -> Tensor:  # fmt: skip
    """mha_bwd of csrc/flash_attn/flash_api.cpp, behind _flash_attn_backward."""
    assert (dropout_p, alibi_slopes, deterministic, rng_state) == (0.0, None, False, None)
    sees = _fa2_checked(q, k, v, causal, window_size_left, window_size_right)
    for x in (dout, out):
        assert x.shape == q.shape
        assert x.dtype == q.dtype
        assert x.stride(-1) == 1
    _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), sees, softmax_scale, softcap, empty=math.inf)
    return softmax_lse


def _fa2_checked(q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int, right: int) -> Tensor:
    (b, sq, h, d), (skv, hk) = q.shape, k.shape[1:3]
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert k.shape == v.shape == (b, skv, hk, d)
    assert d % 8 == 0
    assert d <= 256
    assert h % hk == 0
    for x in (q, k, v):
        assert x.stride(-1) == 1
        assert not any(s % 8 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)
        assert x.data_ptr() % 16 == 0
    left, right = (-1 if side >= skv else side for side in (left, right))
    right = 0 if causal and sq > 1 else right
    left, right = (skv if left < 0 <= right else left), (skv if right < 0 <= left else right)
    return bottom_right(sq, skv, left, right)


def bottom_right(sq: int, skv: int, left: int, right: int) -> Tensor:
    """(Sq, Skv): which query attends to which key, by FlashAttention's documentation; negative is unlimited."""
    offset = skv - sq
    return band(sq, skv, -math.inf if left < 0 else offset - left, math.inf if right < 0 else offset + right)


def dense(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """(out, lse) in FP64 of (B, H, S, D) tensors; rows without a key are 0 and minus infinity."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    _, lse, p = scores_of(q, k, sees, scale, softcap)
    return p @ v, lse


def _backward(dout, q, k, v, out, lse, gradients, sees, scale, softcap, *, empty: float) -> None:
    """Computes gradients from the given out and log-sum-exp into the given tensors, as the kernels do."""
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert torch.equal(lse == empty, (~sees.any(1)).expand_as(lse))
    wide = [x.double().transpose(1, 2) for x in (q, k, v, out, dout)]
    found = backward(*wide, lse.double().masked_fill(lse == empty, -math.inf), sees, scale, softcap)
    for place, value in zip(gradients, found, strict=True):
        assert place.shape == value.transpose(1, 2).shape
        place.copy_(value.transpose(1, 2))
