#!/usr/bin/env python
"""A training step of gpt-oss's attention with its sinks by each plan in turn, and its errors.

    python results/sinks.py OUT.json

64 query and 8 key heads of 64, two sequences of 8,192 tokens, causal and with a window of 128.  A step is
``attention(..., sinks=)`` and its backward, between two events of the device.  Errors are relative L2 against exact
attention in FP32.  "eager" is the attention that transformers runs for this model, on one of the sequences, because its
scores take 8.6 GB a sequence and copy.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from attnbench import attention
from attnbench.errors import AttnbenchError

BATCH, HEADS, KV_HEADS, LENGTH, DIM = 2, 64, 8, 8192, 64
PLANS = (
    *("triton:fp8>triton:fp8", "triton:fp8-head>triton:fp8", "fa3:bf16>fa4:bf16", "fa4:bf16>fa4:bf16"),
    *("cudnn:bf16>cudnn:bf16", "te:bf16>te:bf16", "sdpa-flash:bf16>sdpa-flash:bf16"),
)
NAMES = "out", "dq", "dk", "dv", "dsinks"
ROUNDS, WARM = 30, 3
Span = tuple[torch.cuda.Event, torch.cuda.Event]


def main(path: Path) -> None:
    """Measure both masks and write the rows."""
    torch.manual_seed(0)
    shapes = (BATCH, HEADS), (BATCH, KV_HEADS), (BATCH, KV_HEADS), (BATCH, HEADS)
    *inputs, grad = (torch.randn(*each, LENGTH, DIM, device="cuda", dtype=torch.bfloat16) for each in shapes)
    inputs.append(torch.randn(HEADS, device="cuda"))
    rows = [row for window in (None, (127, 0)) for row in by_plans(inputs, grad, window)]
    one = [each[:1] for each in (*inputs[:3], grad)]
    leaves = [each.clone().requires_grad_() for each in (*one[:3], inputs[3])]
    taken = [elapsed_ms(enclosed(lambda: eager(*leaves).backward(one[3]))) for _ in range(4)]
    rows.append({"window": None, "plan": "eager, one sequence", "step_ms": statistics.median(taken[1:])})
    path.write_text(json.dumps(rows))


def by_plans(inputs: list[Tensor], grad: Tensor, window: tuple[int, int] | None) -> list[dict[str, object]]:
    """A row for each plan that serves: median step, its samples, errors."""
    truth = exact(inputs, grad, window)
    leaves = [each.clone().requires_grad_() for each in inputs]

    def step(plan: str) -> Tensor:
        for each in leaves:
            each.grad = None
        q, k, v, sinks = leaves
        out = attention(q, k, v, is_causal=window is None, window=window, backend=plan, sinks=sinks)
        out.backward(grad)
        return out

    errors: dict[str, list[float]] = {}
    for plan in PLANS:
        try:
            found = [step(plan) for _ in range(WARM)][-1]
        except AttnbenchError as error:
            print(f"{plan}: {error}", file=sys.stderr)
            continue
        results = [found.detach(), *(each.grad for each in leaves if each.grad is not None)]
        errors[plan] = [float((a.float() - b).norm() / b.norm()) for a, b in zip(results, truth, strict=True)]
    spans: dict[str, list[Span]] = {plan: [] for plan in errors}
    for _ in range(ROUNDS):
        for plan, own in spans.items():
            own.append(enclosed(partial(step, plan)))
    samples = {plan: [elapsed_ms(span) for span in own[WARM:]] for plan, own in spans.items()}
    return [
        {"window": window, "plan": plan, "step_ms": statistics.median(own), "samples": own,
         "errors": dict(zip(NAMES, errors[plan], strict=True))}
        for plan, own in samples.items()
    ]  # fmt: skip


def enclosed(call: Callable[[], object]) -> Span:
    """The events before and after what a call does on the device, for which nothing waits."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    return start, end


def elapsed_ms(span: Span) -> float:
    """Milliseconds between the events, once the device is there."""
    span[1].synchronize()
    return span[0].elapsed_time(span[1])


def hidden(window: tuple[int, int] | None) -> Tensor:
    """Which keys (columns) each query does not see."""
    at = torch.arange(LENGTH, device="cuda")
    later = at[None] > at[:, None]
    return later if window is None else later | (at[None] < at[:, None] - window[0])


def exact(inputs: list[Tensor], grad: Tensor, window: tuple[int, int] | None) -> list[Tensor]:
    """O, dQ, dK, dV and the sinks' gradient in FP32, one head at a time."""
    q, k, v, sinks = inputs
    found = [torch.zeros_like(each, dtype=torch.float32) for each in (q, q, k, v, sinks)]
    outside = hidden(window)
    for b in range(BATCH):
        for h in range(HEADS):
            group = h * KV_HEADS // HEADS
            own = [x.float().requires_grad_() for x in (q[b, h], k[b, group], v[b, group], sinks[h])]
            scores = (own[0] @ own[1].T * DIM**-0.5).masked_fill(outside, -torch.inf)
            out = torch.cat([scores, own[3].expand(LENGTH, 1)], 1).softmax(1)[:, :-1] @ own[2]
            out.backward(grad[b, h].float())
            found[0][b, h] = out.detach()
            for into, each in zip(
                (found[1][b, h], found[2][b, group], found[3][b, group], found[4][h]), own, strict=True
            ):
                into += each.grad
    return found


def eager(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Causal attention with sinks as transformers' gpt-oss computes it."""
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
    bias = torch.zeros(LENGTH, LENGTH, device="cuda", dtype=q.dtype).masked_fill(hidden(None), -torch.inf)
    scores = q @ k.mT * DIM**-0.5 + bias
    column = sinks.to(q.dtype)[None, :, None, None].expand(len(q), HEADS, LENGTH, 1)
    both = torch.cat([scores, column], -1)
    return (both - both.amax(-1, keepdim=True)).softmax(-1)[..., :-1] @ v


if __name__ == "__main__":
    main(Path(sys.argv[1]))
