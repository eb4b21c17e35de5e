"""cuDNN's attention graphs through ``nvidia-cudnn-frontend``: built once for a problem, kept, and executed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from attnbench.graph_pools import outside_pools

__all__ = ["OUTPUTS", "RAGGED", "Band", "Graph", "Question", "TensorLayout", "graph_of", "inputs_of", "laid_out"]

_KEPT = 64  # graphs in memory; one holds a compiled kernel's plan, which the next call would have to find again
_NOT_CUDNN = ("sdpa_fwd_", "sdpa_bwd_")  # how the front end's own engines are named (cudnn/engines/manifest.py)
_INPUTS: dict[str, tuple[str, ...]] = {
    "sdpa": ("q", "k", "v"),
    "sdpa_backward": ("q", "k", "v", "o", "dO", "stats"),
    "sdpa_fp8": ("q", "k", "v", "descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"),
    "sdpa_fp8_backward": (
        "q", "k", "v", "o", "dO", "stats", "descale_q", "descale_k", "descale_v", "descale_o", "descale_dO",
        "descale_s", "descale_dP", "scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP",
    ),
}  # fmt: skip
# Of a packed batch: where each sequence starts in each tensor, in elements, and its tokens.
RAGGED = ("offset_q", "offset_k", "offset_v", "offset_o", "offset_stats", "seq_q", "seq_kv")
_OFFSET_OF = {"dQ": "offset_q", "dK": "offset_k", "dV": "offset_v", "dO": "offset_o"}
# In the order in which the node returns them.
OUTPUTS: dict[str, tuple[str, ...]] = {
    "sdpa": ("o", "stats"),
    "sdpa_backward": ("dQ", "dK", "dV"),
    "sdpa_fp8": ("o", "stats", "amax_s", "amax_o"),
    "sdpa_fp8_backward": ("dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV", "amax_dP"),
}
_DATA_TYPES = {
    torch.float16: "HALF",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT",
    torch.float8_e4m3fn: "FP8_E4M3",
    torch.float8_e5m2: "FP8_E5M2",
    torch.int32: "INT32",
    torch.int64: "INT64",
}


@dataclass(frozen=True)
class TensorLayout:
    """A tensor's (B, H, S, D) shape, strides in elements and dtype: all that a graph knows of it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> TensorLayout:
        """The layout of x."""
        return cls(tuple(x.shape), x.stride(), x.dtype)

    @classmethod
    def rows(cls, batch: int, heads: int, length: int, size: int, dtype: torch.dtype) -> TensorLayout:
        """A dense tensor that lies in memory as (B, S, H, D)."""
        return cls((batch, heads, length, size), (length * heads * size, size, heads * size, 1), dtype)

    @classmethod
    def dense(cls, *shape: int, dtype: torch.dtype = torch.float32) -> TensorLayout:
        """A dense tensor that lies in memory as its shape says."""
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        return cls(shape, tuple(strides), dtype)

    def empty(self, device: torch.device) -> Tensor:
        """A tensor of this layout."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Band:
    """A mask in cuDNN's terms: query i sees key j when ``i + o - left_bound < j <= i + o + right_bound``.

    ``o`` is 0, or Skv − Sq for ``bottom_right``; None lifts a side.  A left bound counts the diagonal.
    """

    left_bound: int | None = None
    right_bound: int | None = None
    bottom_right: bool = False


@dataclass(frozen=True)
class Question:
    """What a graph computes: a node, the layout of every port in the node's order, scale, mask and device.

    ``totals``: bounds of the tokens of queries and keys of a packed batch, None for sequences of one length.
    """

    node: str
    inputs: tuple[TensorLayout, ...]
    outputs: tuple[TensorLayout, ...]
    scale: float
    band: Band
    device: torch.device
    totals: tuple[int, int] | None = None


def inputs_of(node: str, *, packed: bool = False) -> tuple[str, ...]:
    """The names of a node's inputs, in order."""
    return _INPUTS[node] + (RAGGED if packed else ())


class Graph:
    """A built graph.  ``run`` may be called from any thread and on any stream."""

    def __init__(self, question: Question, handle: Any) -> None:
        import cudnn

        self._question = question
        packed = question.totals is not None
        names = inputs_of(question.node, packed=packed)
        self._uids = {name: uid for uid, name in enumerate([*names, *OUTPUTS[question.node]], start=1)}
        self._lock = threading.Lock()
        graph = cudnn.pygraph(
            io_data_type=_data_type(question.inputs[0].dtype),
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=handle,
        )
        ports = {
            name: graph.tensor(
                uid=self._uids[name], name=name, dim=list(layout.shape), stride=list(layout.strides),
                data_type=_data_type(layout.dtype),
            )
            for name, layout in zip(names, question.inputs, strict=True)
        }  # fmt: skip
        given = {name: ports[name] for name in _INPUTS[question.node]}
        arguments = _arguments(question)
        if packed:
            arguments |= {"use_padding_mask": True, "seq_len_q": ports["seq_q"], "seq_len_kv": ports["seq_kv"]}
            for name, port in given.items():
                port.set_ragged_offset(ports[_OFFSET_OF.get(name, f"offset_{name}")])
        made = getattr(graph, question.node)(**given, **arguments)
        for name, port, layout in zip(OUTPUTS[question.node], made, question.outputs, strict=True):
            port.set_uid(self._uids[name]).set_output(True).set_dim(list(layout.shape))
            port.set_stride(list(layout.strides)).set_data_type(_data_type(layout.dtype))
            if packed:
                port.set_ragged_offset(ports[_OFFSET_OF.get(name, f"offset_{name}")])
        # Newer front ends rank kernels of their own, written in Python, beside cuDNN's.
        graph.deselect_engines(list(_NOT_CUDNN))
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        other = getattr(graph, "selected_engine", None)
        if other is not None:
            raise RuntimeError(f"the front end chose its own engine {other} and not cuDNN for {question.node}")
        self._graph = graph
        self._workspace = int(graph.get_workspace_size())

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Every output by name, on the current stream of the inputs' device; a packed graph is given their memory."""
        question = self._question
        with _on(question.device):
            found = dict(outputs or {}) or {
                name: layout.empty(question.device)
                for name, layout in zip(OUTPUTS[question.node], question.outputs, strict=True)
            }
            # torch's allocator hands a freed block to the same stream only, so a workspace is never shared by two.
            workspace = torch.empty(max(self._workspace, 1), dtype=torch.uint8, device=question.device)
            buffers = {self._uids[name]: x for name, x in {**inputs, **found}.items()}
            handle = _handle(question.device)
            with self._lock:
                self._graph.execute(buffers, workspace, handle=handle)
        return found


@lru_cache(maxsize=_KEPT)
def graph_of(question: Question) -> Graph:
    """The graph for the question, built on first use.  Raises cudnn.cudnnGraphNotSupportedError."""
    with _on(question.device):
        # In a thread of its own: where a heuristic declines, the front end (1.32) leaves its exception in a cycle with
        # the frames below it until Python collects garbage.  In this thread those would hold the call's tensors, and
        # torch would find them alive in a CUDA graph's pool.
        return outside_pools(partial(Graph, question, _handle(question.device)), question.device)


def laid_out(x: Tensor) -> Tensor:
    """x (B, H, S, D) without gradients and strides of 0, which graphs do not describe."""
    x = x.detach()
    return x.clone(memory_format=torch.contiguous_format) if 0 in x.stride() else x


def _arguments(question: Question) -> dict[str, Any]:
    import cudnn

    band = question.band
    arguments: dict[str, Any] = {"attn_scale": question.scale, "name": question.node}
    if band.left_bound is not None or band.right_bound is not None:
        alignment = cudnn.diagonal_alignment
        arguments["diagonal_alignment"] = alignment.BOTTOM_RIGHT if band.bottom_right else alignment.TOP_LEFT
    prefix = "" if "fp8" in question.node else "diagonal_band_"  # the nodes spell them differently
    for name, bound in {"left_bound": band.left_bound, "right_bound": band.right_bound}.items():
        if bound is not None:
            arguments[prefix + name] = bound
    if not question.node.endswith("backward"):
        arguments["generate_stats"] = True
    elif question.totals is not None:
        arguments["max_total_seq_len_q"], arguments["max_total_seq_len_kv"] = question.totals
    return arguments


def _data_type(dtype: torch.dtype) -> Any:
    import cudnn

    return getattr(cudnn.data_type, _DATA_TYPES[dtype])


_of_thread = threading.local()


def _handle(device: torch.device) -> Any:
    """This thread's cuDNN handle on the device, set to the current stream: a handle must not be used by two at once."""
    import cudnn

    handles = _of_thread.__dict__.setdefault("handles", {})
    if device not in handles:
        handles[device] = cudnn.create_handle()
    cudnn.set_stream(handles[device], _stream(device))
    return handles[device]


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream
