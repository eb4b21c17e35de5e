#!/usr/bin/env python
"""Decoding with MLA's absorbed form (576 columns of keys, of which the first 512 are the values), by what serves it.

    python results/absorbed.py OUT.json

One query a sequence, 16 heads (DeepSeek V2 Lite) or 128 (V3) on one key head, bf16.  FlashAttention-3 takes the columns
of the rotary embedding as q and k and the others as qv and v, which no plan of attnbench does: its operator is called
here.  Beside it run the plans that serve the same call.  Times are of replayed graphs of several calls, errors relative
L2 against exact attention in FP32.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from attnbench import attention
from attnbench.backends.flash_attention.fa3_operator import FORWARD, bound
from attnbench.backends.flash_attention.fa3_origins import chosen
from attnbench.errors import AttnbenchError

VALUES, ROTARY = 512, 64
SHAPES = [(batch, heads, keys) for heads in (16, 128) for batch, keys in ((64, 8192), (4, 131072))]
PLANS = "triton:fp8", "fa3:bf16", "fa4:bf16", "cudnn:bf16", "flex:bf16", "sdpa-efficient:bf16", "sdpa-math:bf16"
SCALE = 192**-0.5  # of the form that is not absorbed
CALLS, ROUNDS = 10, 20


def main(path: Path) -> None:
    """Measure all shapes and write the rows."""
    rows = []
    for batch, heads, keys in SHAPES:
        torch.manual_seed(0)
        q, k = (
            torch.randn(batch, each, length, VALUES + ROTARY, device="cuda", dtype=torch.bfloat16)
            for each, length in ((heads, 1), (1, keys))
        )
        truth = exact(q, k)
        for name, call in calls(q, k).items():
            row: dict[str, object] = {"batch": batch, "heads": heads, "keys": keys, "plan": name}
            try:
                out = call()
                row["error"] = float((out.float() - truth).norm() / truth.norm())
                row["samples"] = times_ms(call)
            except (AttnbenchError, RuntimeError) as problem:
                row["reason"] = str(problem).split("\n", maxsplit=1)[0]
            else:
                row["ms"] = statistics.median(row["samples"])
                row["terabytes_per_second"] = k.nbytes / row["ms"] / 1e9
            print({key: value for key, value in row.items() if key != "samples"}, flush=True)
            rows.append(row)
    path.write_text(json.dumps(rows))


def calls(q: Tensor, k: Tensor) -> dict[str, Callable[[], Tensor]]:
    """What computes (B, H, 1, 512) from q (B, H, 1, 576) and k (B, 1, S, 576), by name."""
    named: dict[str, Callable[[], Tensor]] = {"FlashAttention-3, qv": absorbed(q, k)}
    for plan in PLANS:
        named[plan] = lambda plan=plan: attention(q, k, k[..., :VALUES], scale=SCALE, backend=plan)
    return named


def absorbed(q: Tensor, k: Tensor) -> Callable[[], Tensor]:
    """FlashAttention-3's operator on views of q and k, (B, S, H, D) as it wants them."""
    queries, keys = q.transpose(1, 2), k.transpose(1, 2)
    given = queries[..., VALUES:].contiguous(), keys[..., VALUES:], keys[..., :VALUES]
    names, rest = (*FORWARD, "q_v"), (None, None, None, SCALE, False, -1, -1, 0.0, None, None, None, None)
    latent = queries[..., :VALUES].contiguous()

    def call() -> Tensor:
        build = chosen()
        if build is None:
            raise RuntimeError("FlashAttention-3 is not installed")
        return bound(build.load().fwd.default, names)(*given, *rest, latent)[0].transpose(1, 2)

    return call


def times_ms(call: Callable[[], Tensor]) -> list[float]:
    """Milliseconds of a call, from graphs of several that are replayed."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    spans = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / CALLS for start, end in spans[2:]]


def exact(q: Tensor, k: Tensor) -> Tensor:
    """Attention in FP32, one sequence at a time."""
    out = torch.empty(*q.shape[:3], VALUES, device=q.device)
    for i in range(q.shape[0]):
        keys = k[i, 0].float()
        out[i, :, 0] = (q[i, :, 0].float() @ keys.T * SCALE).softmax(-1) @ keys[:, :VALUES]
    return out


if __name__ == "__main__":
    main(Path(sys.argv[1]))
