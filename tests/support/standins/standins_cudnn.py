"""A stand-in for cuDNN's front end: the same signatures in dense FP64, with strict argument checks.

It takes only what the real one takes (dtypes, layouts, strides, alignment, shapes of scales), so that a wrong call
fails on a machine without a GPU.  FP8 values are rounded and saturated where the real kernels round.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache, partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from standins_graph import HALF_TYPES, LARGEST, backward, band, readable, rounded, scores_of
from torch import Tensor

from attnbench.backends.cudnn import backend, graphs


class GraphNotSupportedError(Exception):
    """``cudnn.cudnnGraphNotSupportedError``."""


class Port:
    """A tensor of a graph."""

    def __init__(self, **facts: object) -> None:
        self.facts = facts

    def _set(self, fact: str, value: object) -> Port:
        self.facts[fact] = value
        return self

    set_uid = partialmethod(_set, "uid")
    set_output = partialmethod(_set, "output")
    set_dim = partialmethod(_set, "dim")
    set_stride = partialmethod(_set, "stride")
    set_data_type = partialmethod(_set, "data_type")

    def set_ragged_offset(self, value: Port) -> Port:
        assert value.facts["data_type"] == torch.int64
        return self._set("ragged", value)


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
        """Each sequence's (1, H, S, D) views of packed memory."""
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


def install_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces cuDNN's front end by the stand-in until the test ends, without graphs cached across tests."""
    monkeypatch.setitem(sys.modules, "cudnn", CUDNN)
    monkeypatch.setattr(graphs, "_stream", lambda device: 7)
    monkeypatch.setattr(graphs, "_on", lambda device: nullcontext())
    monkeypatch.setattr(graphs, "_of_thread", threading.local())
    kept = lru_cache(graphs.graph_of.cache_info().maxsize)
    monkeypatch.setattr(backend, "graph_of", kept(graphs.graph_of.__wrapped__))
