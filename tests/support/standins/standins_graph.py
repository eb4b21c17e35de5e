"""Stand-ins for ``flash_attn.cute.interface`` and ``cudnn``: the same signatures, dense FP64 inside, nothing tolerated.

They take only what the real ones take (dtypes, layouts, strides, alignment, shapes of scales), so that a wrong call
fails on a machine without a GPU.  FP8 values are rounded and saturated where the real kernels round.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from standins_packed import STARTS, checked_starts, each_sequence
from torch import Tensor

from attnbench.backends.cudnn import backend, graphs

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
    """P from the LSE that it is given, D from out."""
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


# --- cudnn, version 1.32.0, on Hopper ---------------------------------------------------------------------------------


class GraphNotSupportedError(Exception):
    """``cudnn.cudnnGraphNotSupportedError``."""


class Port:
    """A tensor of a graph."""

    def __init__(self, **facts: object) -> None:
        self.facts = facts

    def set_uid(self, value: int) -> Port:
        return self._set(uid=value)

    def set_output(self, value: bool) -> Port:
        return self._set(output=value)

    def set_dim(self, value: list[int]) -> Port:
        return self._set(dim=value)

    def set_stride(self, value: list[int]) -> Port:
        return self._set(stride=value)

    def set_data_type(self, value: torch.dtype) -> Port:
        return self._set(data_type=value)

    def set_ragged_offset(self, value: Port) -> Port:
        assert value.facts["data_type"] == torch.int64
        return self._set(ragged=value)

    def _set(self, **facts: object) -> Port:
        self.facts |= facts
        return self


class PyGraph:
    """``cudnn.pygraph`` with the four attention nodes, and Hopper's limits on them."""

    built = 0
    selected_engine = None
    lengths: tuple[Port, Port] | None = None
    totals: tuple[int | None, int | None] = (None, None)

    def __init__(
        self, *, io_data_type: object, intermediate_data_type: object, compute_data_type: object, handle: object
    ) -> None:
        assert intermediate_data_type is compute_data_type is torch.float32
        assert isinstance(handle, Handle)
        self.node = None

    def tensor(self, *, uid: int, name: str, dim: list[int], stride: list[int], data_type: torch.dtype) -> Port:
        assert len(dim) == len(stride) == 4
        return Port(uid=uid, name=name, dim=dim, stride=stride, data_type=data_type)

    def sdpa(self, *, q: Port, k: Port, v: Port, attn_scale: float, generate_stats: bool, name: str,
             diagonal_alignment: str = "TOP_LEFT", diagonal_band_left_bound: int | None = None,
             diagonal_band_right_bound: int | None = None, **lengths: Any) -> list[Port]:  # fmt: skip
        assert generate_stats
        self._pad(**lengths)
        bounds = (diagonal_alignment, diagonal_band_left_bound, diagonal_band_right_bound)
        return self._take("sdpa", {"q": q, "k": k, "v": v}, ("o", "stats"), attn_scale, *bounds)

    def sdpa_backward(self, *, q: Port, k: Port, v: Port, o: Port, dO: Port, stats: Port,  # noqa: N803
                      attn_scale: float, name: str, diagonal_alignment: str = "TOP_LEFT",
                      diagonal_band_left_bound: int | None = None,
                      diagonal_band_right_bound: int | None = None, max_total_seq_len_q: int | None = None,
                      max_total_seq_len_kv: int | None = None, **lengths: Any) -> list[Port]:  # fmt: skip
        self._pad(**lengths)
        self.totals = max_total_seq_len_q, max_total_seq_len_kv
        assert (None in self.totals) == (self.lengths is None)
        ports = {"q": q, "k": k, "v": v, "o": o, "dO": dO, "stats": stats}
        bounds = (diagonal_alignment, diagonal_band_left_bound, diagonal_band_right_bound)
        return self._take("sdpa_backward", ports, ("dQ", "dK", "dV"), attn_scale, *bounds)

    def sdpa_fp8(self, *, attn_scale: float, generate_stats: bool, name: str, diagonal_alignment: str = "TOP_LEFT",
                 left_bound: int | None = None, right_bound: int | None = None,
                 **ports: Port) -> list[Port]:  # fmt: skip
        assert generate_stats
        assert set(ports) == {"q", "k", "v", "descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"}
        outputs = ("o", "stats", "amax_s", "amax_o")
        return self._take("sdpa_fp8", ports, outputs, attn_scale, diagonal_alignment, left_bound, right_bound)

    def sdpa_fp8_backward(self, *, attn_scale: float, name: str, diagonal_alignment: str = "TOP_LEFT",
                          left_bound: int | None = None, right_bound: int | None = None,
                          **ports: Port) -> list[Port]:  # fmt: skip
        scales = {f"descale_{x}" for x in ("q", "k", "v", "o", "dO", "s", "dP")}
        scales |= {f"scale_{x}" for x in ("s", "dQ", "dK", "dV", "dP")}
        assert set(ports) == {"q", "k", "v", "o", "dO", "stats"} | scales
        outputs = ("dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV", "amax_dP")
        return self._take("sdpa_fp8_backward", ports, outputs, attn_scale, diagonal_alignment, left_bound, right_bound)

    def _pad(self, use_padding_mask: bool = False, seq_len_q: Port | None = None, seq_len_kv: Port | None = None
             ) -> None:  # fmt: skip
        assert use_padding_mask == (seq_len_q is not None) == (seq_len_kv is not None)
        self.lengths = (seq_len_q, seq_len_kv) if use_padding_mask else None

    def deselect_engines(self, names: list[str]) -> PyGraph:
        assert all(isinstance(name, str) for name in names)
        return self

    def build(self, heuristics: list[str]) -> None:
        PyGraph.built += 1
        dims = {name: port.facts["dim"] for name, port in self.ports.items()}
        types = {name: port.facts["data_type"] for name, port in self.ports.items()}
        (_, _, sq, d), (_, _, skv, dv) = dims["q"], dims["v"]
        alignment, left, right = self.bounds
        fp8 = "fp8" in self.node
        if alignment == "BOTTOM_RIGHT" and right is not None and (fp8 or sq > skv):
            raise GraphNotSupportedError("Bottom right causal mask")
        if left is not None and (left <= 0 or sq > skv):
            raise GraphNotSupportedError("Sliding window attention")
        most = 2**31 if self.node == "sdpa" else 256
        if max(d, dv) > most or d % (16 if fp8 else 8) or dv % (16 if fp8 else 8):
            raise GraphNotSupportedError("hidden_dim")
        if self.node == "sdpa_fp8" and sq == 1:
            raise GraphNotSupportedError("no plan for one query")
        assert dv <= d or self.node != "sdpa_fp8", "cuDNN reads memory that is not its own"
        if self.node == "sdpa_fp8_backward" and (d, dv) != (128, 128):
            raise GraphNotSupportedError("hidden_dim shoud be equal to 128")
        assert self.node != "sdpa_fp8_backward" or sq % 16 == 0, "cuDNN gets the last rows of dQ wrong"
        gradients = types.keys() & {"dQ", "dK", "dV", "o"}
        assert all((types[name] in HALF_TYPES) != fp8 for name in gradients), types

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, buffers: dict[int, Tensor], workspace: Tensor, *, handle: object) -> None:
        assert isinstance(handle, Handle)
        assert workspace.dtype == torch.uint8
        if self.lengths is not None:
            for own in self._sequences(buffers):
                getattr(self, f"_{self.node}")(own)
            return
        tensors = {}
        for name, port in self.ports.items():
            x = tensors[name] = buffers[port.facts["uid"]]
            assert list(x.shape) == port.facts["dim"], name
            assert list(x.stride()) == port.facts["stride"], name
            assert x.dtype == port.facts["data_type"], name
            if x.numel() > 1 and name != "stats":
                readable(x)
            if "scale" in name or "amax" in name:
                assert x.shape == (1, 1, 1, 1)
                assert x.dtype == torch.float32
        getattr(self, f"_{self.node}")(tensors)

    def _sequences(self, buffers: dict[int, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Each sequence's (1, H, S, D) parts of memory that lies end to end."""
        counts = []
        for port, total, name in zip(self.lengths, self.totals, "qk", strict=True):
            seen, longest = buffers[port.facts["uid"]], self.ports[name].facts["dim"][2]
            assert (list(seen.shape), seen.dtype) == (port.facts["dim"], torch.int32)
            assert seen.shape[0] == self.ports[name].facts["dim"][0]
            assert int(seen.max()) <= longest
            assert total is None or int(seen.sum()) <= total
            counts.append(seen.flatten().tolist())
        for number, (queries, keys) in enumerate(zip(*counts, strict=True)):
            assert (queries == 0) == (keys == 0), "rows without a key are not defined"
            if not queries:
                continue
            own = {}
            for name, port in self.ports.items():
                x, offsets = buffers[port.facts["uid"]], buffers[port.facts["ragged"].facts["uid"]]
                assert x.is_contiguous()
                assert x.dtype == port.facts["data_type"], name
                assert list(offsets.shape) == port.facts["ragged"].facts["dim"] == [len(counts[0]) + 1, 1, 1, 1]
                _, heads, _, size = port.facts["dim"]
                count = keys if name in ("k", "v", "dK", "dV") else queries
                first, last = int(offsets[number]), int(offsets[number + 1])
                assert last - first == count * heads * size, name
                own[name] = x.flatten()[first:last].as_strided((1, heads, count, size), port.facts["stride"])
                assert own[name].stride()[1:] == (size, heads * size, 1)
            yield own

    def _take(self, node: str, ports: dict[str, Port], outputs: tuple[str, ...], scale: float, *bounds: object
              ) -> list[Port]:  # fmt: skip
        self.node, self.scale, self.bounds = node, scale, bounds
        made = {name: Port(name=name) for name in outputs}
        self.ports = {**ports, **made}
        return list(made.values())

    def _sees(self, sq: int, skv: int) -> Tensor:
        alignment, left, right = self.bounds
        offset = skv - sq if alignment == "BOTTOM_RIGHT" else 0
        low = -math.inf if left is None else offset - left + 1  # column > row - left_bound
        return band(sq, skv, low, math.inf if right is None else offset + right)

    def _sdpa(self, x: dict[str, Tensor]) -> None:
        group = x["q"].shape[1] // x["k"].shape[1]
        k, v = (x[name].double().repeat_interleave(group, 1) for name in "kv")
        _, lse, p = scores_of(x["q"].double(), k, self._sees(x["q"].shape[2], k.shape[2]), self.scale)
        x["o"].copy_(p @ v)
        x["stats"].copy_(lse.unsqueeze(-1))

    def _sdpa_backward(self, x: dict[str, Tensor]) -> None:
        wide = [x[name].double() for name in ("q", "k", "v", "o", "dO")]
        sees = self._sees(x["q"].shape[2], x["k"].shape[2])
        found = backward(*wide, x["stats"].squeeze(-1).double(), sees, self.scale, 0.0)
        for name, each in zip(("dQ", "dK", "dV"), found, strict=True):
            x[name].copy_(each)

    def _sdpa_fp8(self, x: dict[str, Tensor]) -> None:
        group = x["q"].shape[1] // x["k"].shape[1]
        q = x["q"].double() * x["descale_q"].double()
        k = (x["k"].double() * x["descale_k"].double()).repeat_interleave(group, 1)
        v = (x["v"].double() * x["descale_v"].double()).repeat_interleave(group, 1)
        s, lse, _ = scores_of(q, k, self._sees(q.shape[2], k.shape[2]), self.scale)
        p = torch.exp(s - s.amax(-1, keepdim=True))  # the sum is of what was not rounded yet
        narrow = rounded(p * x["scale_s"].double(), torch.float8_e4m3fn) * x["descale_s"].double()
        self._write(x, "o", narrow @ v / p.sum(-1, keepdim=True), x["scale_o"], "amax_o")
        x["amax_s"].fill_(p.max())
        x["stats"].copy_(lse.unsqueeze(-1))

    def _sdpa_fp8_backward(self, x: dict[str, Tensor]) -> None:
        group = x["q"].shape[1] // x["k"].shape[1]
        q, k, v, o, grad = (x[n].double() * x[f"descale_{n}"].double() for n in ("q", "k", "v", "o", "dO"))
        wide_k, wide_v = (y.repeat_interleave(group, 1) for y in (k, v))
        s, _, _ = scores_of(q, wide_k, self._sees(q.shape[2], k.shape[2]), self.scale)
        p = torch.exp(s - x["stats"].double())
        ds = p * (grad @ wide_v.mT - (grad * o).sum(-1, keepdim=True)) * self.scale
        x["amax_dP"].fill_(ds.abs().max())
        p = rounded(p * x["scale_s"].double(), x["q"].dtype) * x["descale_s"].double()
        ds = rounded(ds * x["scale_dP"].double(), x["dO"].dtype) * x["descale_dP"].double()
        dk, dv = ((y.mT @ z).unflatten(1, (k.shape[1], group)).sum(2) for y, z in ((ds, q), (p, grad)))
        for name, value in {"dQ": ds @ wide_k, "dK": dk, "dV": dv}.items():
            self._write(x, name, value, x[f"scale_{name}"], f"amax_{name}")

    @staticmethod
    def _write(x: dict[str, Tensor], name: str, value: Tensor, scale: Tensor, amax: str) -> None:
        x[amax].fill_(value.abs().max())
        scaled = value * scale.double()
        # Twice the limit, and not the limit: what rounding adds to a mean of V saturates, a wrong scale must not pass.
        assert scaled.abs().max() <= 2 * LARGEST[x[name].dtype]
        x[name].copy_(rounded(scaled, x[name].dtype).to(x[name].dtype))


class Handle:
    """``cudnn.Handle``."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.stream: int | None = None
        self.number = next(self.numbers)


def set_stream(handle: Handle, stream: int) -> None:
    """``cudnn.set_stream``."""
    handle.stream = stream


CUDNN = SimpleNamespace(
    pygraph=PyGraph,
    create_handle=Handle,
    set_stream=set_stream,
    cudnnGraphNotSupportedError=GraphNotSupportedError,
    heur_mode=SimpleNamespace(A="A", FALLBACK="FALLBACK"),
    diagonal_alignment=SimpleNamespace(TOP_LEFT="TOP_LEFT", BOTTOM_RIGHT="BOTTOM_RIGHT"),
    data_type=SimpleNamespace(
        HALF=torch.float16,
        BFLOAT16=torch.bfloat16,
        FLOAT=torch.float32,
        FP8_E4M3=torch.float8_e4m3fn,
        FP8_E5M2=torch.float8_e5m2,
        INT32=torch.int32,
        INT64=torch.int64,
    ),
)
INTERFACE = SimpleNamespace(_flash_attn_fwd=flash_attn_fwd, _flash_attn_bwd=flash_attn_bwd)


def install_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in of cuDNN's front end until the test ends, with no graph kept from another test or for one."""
    monkeypatch.setitem(sys.modules, "cudnn", CUDNN)
    monkeypatch.setattr(graphs, "_stream", lambda device: 7)
    monkeypatch.setattr(graphs, "_on", lambda device: nullcontext())
    monkeypatch.setattr(graphs, "_of_thread", threading.local())
    kept = lru_cache(graphs.graph_of.cache_info().maxsize)
    monkeypatch.setattr(backend, "graph_of", kept(graphs.graph_of.__wrapped__))
