#!/usr/bin/env python
"""Context parallelism on two GPUs: our ring in FP8 and 16 bits, torch's own, and one GPU alone; forward and backward.

    torchrun --standalone --nproc-per-node 2 results/ring.py --out ring.json

Each time is that of the slowest rank; the ring's errors are against one GPU in 16 bits.  What the limit leaves no time
for is a row without times.  On a CPU it runs over gloo: --lengths 64 --heads 4 --kv-heads 2 --head-dim 32 --fp8
emulated:fp8.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel as torchs_context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnbench import AttentionSpec, attention, explain
from attnbench.integrations.context_parallel import context_parallel, shard
from attnbench.integrations.context_parallel import explain as explain_parts
from attnbench.problem.mask import Mask

_WARM = 2  # passes that are not timed: the first compile
Row = dict[str, Any]
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
TORCHS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def main() -> None:
    """Measure, print a table and write the rows."""
    asked = _arguments()
    cuda = torch.cuda.is_available() and asked.device != "cpu"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=max(60, asked.limit)))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    bench = Bench(asked, device, mesh, time.monotonic() + asked.limit)
    for length in asked.lengths:
        bench.measure(length)
    if dist.get_rank() == 0:
        found = bench.report()
        print(_text(found))
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("ring.json"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 131072], help="tokens of all ranks together")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--fp8", default="triton:fp8>triton:fp8", help="the FP8 plan, or auto within its budget")
    parser.add_argument("--repeat", type=int, default=5, help="timed passes")
    parser.add_argument("--limit", type=float, default=140, help="seconds after which nothing new is begun")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    return parser.parse_args()


class Bench:
    """All rows of a run."""

    def __init__(self, asked: argparse.Namespace, device: torch.device, mesh: DeviceMesh, until: float) -> None:
        self.asked, self.device, self.mesh, self.until = asked, device, mesh, until
        self.ranks, self.rank = mesh.size(), dist.get_rank()
        self.rows: list[Row] = []

    def measure(self, length: int) -> None:
        """All arms at one length."""
        whole = self._inputs(length)
        own = [shard(self.mesh, x, 2) for x in whole]
        fp8 = {"dtype": "fp8"} if self.asked.fp8 == "auto" else {"backend": self.asked.fp8}
        reference = self._alone("bf16", length, whole, {})
        self._alone("fp8", length, whole, fp8)
        self._shared("bf16", length, own, {}, reference)
        self._shared("fp8", length, own, fp8, reference)
        del reference
        for name, backend in TORCHS.items():
            self._row(f"torch {name}, ring", length, own, _torchs, partial(_torchs_ring, self.mesh, backend))

    def _alone(self, name: str, length: int, whole: list[Tensor], named: dict[str, str]) -> list[Tensor] | None:
        """One GPU with all tokens; what this rank's places are of out and gradients."""
        row, answers = self._row(f"{name}, one", length, whole, _ours(named), nullcontext)
        row["plans"] = _plan_names(lambda: [explain(*_leaves(whole), is_causal=True, **named)])
        return None if answers is None else [shard(self.mesh, x, 2) for x in answers]

    def _shared(
        self, name: str, length: int, own: list[Tensor], named: dict[str, str], reference: list[Tensor] | None
    ) -> None:
        opened: list[Any] = []
        row, answers = self._row(f"{name}, ring", length, own, _ours(named), partial(_ring, self.mesh, opened))
        row["plans"] = _plan_names(
            lambda: list(explain_parts(*_leaves(own), ranks=self.ranks, is_causal=True, **named).values())
        )
        row["sent"] = sorted({kind for group in opened for kind in group.sent})
        if answers is not None and reference is not None:
            pairs = zip(("out", "dq", "dk", "dv"), answers, reference, strict=True)
            row["error"] = {name: self._relative(one, other) for name, one, other in pairs}

    def _inputs(self, length: int) -> list[Tensor]:
        """q, k, v and dO (1, heads, S, D) in bf16, the same on all ranks."""
        generator = torch.Generator(self.device).manual_seed(length)
        asked = self.asked
        return [
            torch.randn(1, heads, length, asked.head_dim, generator=generator, device=self.device, dtype=torch.bfloat16)
            for heads in (asked.heads, asked.kv_heads, asked.kv_heads, asked.heads)
        ]

    def _row(
        self,
        what: str,
        length: int,
        tensors: list[Tensor],
        call: Call,
        within: Callable[[], AbstractContextManager[Any]],
    ) -> tuple[Row, list[Tensor] | None]:
        """An arm's row, and out and gradients of its last pass."""
        row: Row = {"what": what, "length": length, "status": "ok", "samples_ms": []}
        self.rows.append(row)
        answers = None
        try:
            with within():
                for each in range(_WARM + self.asked.repeat):
                    if self._spent():
                        row["status"] = "limit"
                        break
                    answers, taken = self._pass(call, _leaves(tensors), tensors[3])
                    if each >= _WARM:
                        row["samples_ms"].append(round(taken, 4))
        except (RuntimeError, NotImplementedError, AssertionError, ValueError) as error:  # of torch's ring, on a CPU
            row["status"], row["reason"] = "error", _first_line(error)
        return row, answers

    def _spent(self) -> bool:
        """Whether the limit is over for any rank."""
        over = torch.tensor(float(time.monotonic() > self.until), device=self.device)
        dist.all_reduce(over, dist.ReduceOp.MAX)
        return bool(over)

    def _pass(self, call: Call, leaves: list[Tensor], grad_out: Tensor) -> tuple[list[Tensor], float]:
        """Out and gradients, and the milliseconds of the slowest rank."""
        self._settle()
        began = time.perf_counter()
        out = call(*leaves)
        answers = [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
        self._settle(barrier=False)
        taken = torch.tensor(1e3 * (time.perf_counter() - began), device=self.device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return answers, float(taken)

    def _settle(self, barrier: bool = True) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if barrier:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def _relative(self, one: Tensor, other: Tensor) -> float:
        """The relative L2 distance over all ranks."""
        sums = torch.stack([(one.float() - other.float()).square().sum(), other.float().square().sum()])
        dist.all_reduce(sums)
        return round(float((sums[0] / sums[1]).sqrt()), 6)

    def report(self) -> dict[str, Any]:
        """Conditions, rows with medians and TFLOPS a GPU, and ratios by length."""
        asked = self.asked
        for row in self.rows:
            if not row["samples_ms"]:
                continue
            row["median_ms"] = statistics.median(row["samples_ms"])
            spec = AttentionSpec.make(
                batch=1, heads=asked.heads, kv_heads=asked.kv_heads, seqlen_q=row["length"], head_dim=asked.head_dim,
                mask=Mask(right=0), direction="training",
            )  # fmt: skip
            gpus = 1 if row["what"].endswith("one") else self.ranks
            row["tflops_a_gpu"] = round(spec.flops / row["median_ms"] / 1e9 / gpus, 1)
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"
        return {
            "device": name, "ranks": self.ranks, "torch": torch.__version__, "heads": asked.heads,
            "kv_heads": asked.kv_heads, "head_dim": asked.head_dim, "dtype": "bf16", "mask": "causal",
            "rows": self.rows, "ratios": [self._ratios(length) for length in asked.lengths],
        }  # fmt: skip

    def _ratios(self, length: int) -> Row:
        times = {row["what"]: row["median_ms"] for row in self.rows if row["length"] == length and "median_ms" in row}
        torchs = [taken for what, taken in times.items() if what.startswith("torch")]
        times["torch"] = min(torchs) if torchs else None
        fp8, bf16 = times.get("fp8, ring"), times.get("bf16, ring")
        return {
            "length": length,
            "bf16 ring / fp8 ring": _over(bf16, fp8),
            "torch ring / fp8 ring": _over(times["torch"], fp8),
            "torch ring / bf16 ring": _over(times["torch"], bf16),
            "scaling fp8": _over(times.get("fp8, one"), fp8, self.ranks),
            "scaling bf16": _over(times.get("bf16, one"), bf16, self.ranks),
        }


def _over(one: float | None, other: float | None, ranks: int = 1) -> float | None:
    return None if one is None or other is None else round(one / other / ranks, 4)


def _leaves(tensors: list[Tensor]) -> list[Tensor]:
    """q, k and v, which gradients are asked of."""
    return [x.detach().requires_grad_() for x in tensors[:3]]


def _ours(named: dict[str, str]) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v, is_causal=True, **named)
        assert isinstance(out, Tensor)
        return out

    return call


def _torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # Of this name, which torch replaces while its context is open; heads are repeated, as its ring has none in groups.
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@contextmanager
def _ring(mesh: DeviceMesh, opened: list[Any]) -> Iterator[None]:
    with context_parallel(mesh) as group:
        opened.append(group)
        yield


@contextmanager
def _torchs_ring(mesh: DeviceMesh, backend: SDPBackend) -> Iterator[None]:
    unused = torch.zeros(2 * mesh.size(), device=mesh.device_type)  # it wants something to shard
    with (
        sdpa_kernel(backend),
        torchs_context_parallel(mesh, buffers=[unused], buffer_seq_dims=[0], no_restore_buffers={unused}),
    ):
        yield


def _plan_names(choices: Callable[[], list[Any]]) -> list[str]:
    """The plans chosen, or why none was."""
    try:
        return [str(choice.plan) for choice in choices()]
    except RuntimeError as error:
        return [_first_line(error)]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


def _text(found: dict[str, Any]) -> str:
    lines = [f"{found['ranks']} x {found['device']}, torch {found['torch']}, causal, forward and backward"]
    for row in found["rows"]:
        taken = f"{row['median_ms']:10.2f} ms {row['tflops_a_gpu']:7.1f} TFLOPS a GPU" if "median_ms" in row else ""
        more = " ".join([*dict.fromkeys(row.get("plans", [])), *row.get("sent", [])])
        error = " ".join(f"{name} {each:.3g}" for name, each in row.get("error", {}).items())
        lines.append(
            f"{row['length']:7} {row['what']:18} {row['status']:6}{taken} {more} {error}{row.get('reason', '')}"
        )
    return "\n".join([*lines, *(f"{ratios}" for ratios in found["ratios"])])


if __name__ == "__main__":
    main()
