"""Measures tiles for FlexAttention on this machine's GPU and prints the entries of ``backends/flex/tiles.py``.

    python tests/gpu/tune/tune_flex.py [--seconds 230] [--processes 14]

It is not in the package, because it is only for committing the table: run it on an idle machine and review its
output.  Every candidate is compiled once, in one of many processes that keep it; then the
processes are asked for samples one at a time, the candidates of a cell in turns (ABBA), so that clocks and heat are
the same for all.  All candidates run at the shorter length, the fastest of them at the longer one.  A
candidate must agree with SDPA within the kernel's declared error.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench import AttentionSpec, Mask
from attnbench.backends.flex import backend as flex
from attnbench.backends.flex.tiles import Options, TileKey
from attnbench.harness.measure.timing import Timer
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Operands, Saved

LENGTHS = (4096, 16384)
HEAD_DIMS = (64, 128, 256)
TOKENS, HIDDEN = 16384, 2048
FINALISTS = 3
LEAST_GAIN, MOST_LOSS = 0.02, 0.005  # of an entry: faster than torch's default over both lengths, slower at none
PATIENCE = 90.0  # seconds for one answer of a process; a candidate that hangs is given up with its process
COMPILING = (0.5, 0.8)  # shares of the time after which no more is compiled, at the shorter and the longer length


def forward(m: int, n: int, warps: int, stages: int, **more: bool) -> Options:
    return {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages, **more}


def backward(m1: int, n1: int, m2: int, n2: int, warps: int, stages: int) -> Options:
    return {"BLOCK_M1": m1, "BLOCK_N1": n1, "BLOCK_M2": m2, "BLOCK_N2": n2, "num_warps": warps, "num_stages": stages}


# The default, {}, comes first.  128 is the most: blocks of the mask hold whole tiles.
_WIDE = {
    64: [
        *(forward(128, 128, 8, stages) for stages in (2, 3)),
        *(forward(128, 64, 4, stages) for stages in (2, 3)),
        forward(64, 128, 4, 3),
        forward(64, 64, 4, 3),
        forward(128, 128, 8, 3, USE_TMA=True),
        forward(128, 64, 4, 3, USE_TMA=True),
    ],
    128: [
        *(forward(128, 128, 8, stages) for stages in (2, 3)),
        *(forward(128, 64, 8, stages) for stages in (2, 4)),
        forward(128, 64, 4, 3),
        forward(64, 128, 4, 2),
        forward(64, 64, 4, 3),
        forward(128, 128, 8, 2, USE_TMA=True),
        forward(128, 64, 8, 3, USE_TMA=True),
    ],
    256: [
        *(forward(128, 64, 8, stages) for stages in (1, 2)),
        *(forward(128, 32, 8, stages) for stages in (2, 3)),
        *(forward(64, 64, 4, stages) for stages in (2, 3)),
        forward(128, 64, 8, 2, USE_TMA=True),
    ],
}
_NARROW = [
    *(forward(64, 128, 4, stages) for stages in (2, 3, 4)),
    *(forward(128, 128, 8, stages) for stages in (2, 3)),
    forward(128, 64, 4, 3),
    forward(128, 64, 8, 3),
    forward(128, 128, 4, 3),
]
_BACKWARD = {
    64: [
        *(backward(64, 128, 128, 64, 8, stages) for stages in (2, 3)),
        *(backward(64, 128, 128, 64, 4, stages) for stages in (2, 3)),
        backward(64, 64, 64, 64, 4, 3),
        backward(128, 128, 128, 128, 8, 2),
    ],
    128: [
        *(backward(64, 128, 128, 64, 8, stages) for stages in (1, 2, 3)),
        *(backward(64, 64, 64, 64, 4, stages) for stages in (2, 3)),
        backward(128, 128, 128, 128, 8, 1),
    ],
    256: [
        *(backward(64, 64, 64, 64, 8, stages) for stages in (1, 2)),
        *(backward(64, 64, 64, 64, 4, stages) for stages in (1, 2)),
        backward(32, 64, 64, 32, 4, 2),
        backward(32, 128, 128, 32, 8, 1),
    ],
}


def cells(capability: tuple[int, int]) -> list[TileKey]:
    """What the table is wanted for, the costliest to compile first."""
    passes = (("bf16", "backward"), ("bf16", "forward"), ("fp8", "forward"))
    return [
        TileKey(capability, precision, head_dim, mask, direction)
        for precision, direction in passes
        for head_dim in HEAD_DIMS
        for mask in ("none", "causal")
    ]


def candidates(key: TileKey) -> list[Options]:
    """Torch's default and the tiles to hold against it."""
    if key.direction == "backward":
        return [{}, *_BACKWARD[key.head_dim]]
    return [{}, *(_NARROW if key.precision == "fp8" else _WIDE[key.head_dim])]


class Job(NamedTuple):
    """A candidate at a length: what a process compiles, keeps and times."""

    key: TileKey
    length: int
    number: int  # among the candidates of the key


class Bench:
    """The candidates that one process has compiled."""

    def __init__(self, device: torch.device, tokens: int, hidden: int) -> None:
        self.device, self.tokens, self.hidden = device, tokens, hidden
        self.timer = replace(Timer.for_device(device), visit=0.02)
        self.calls: dict[Job, Any] = {}
        self.inputs: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self.operands: dict[tuple[TileKey, int], Operands] = {}

    def compile(self, job: Job, options: Options) -> float:
        """Compile, run and keep a candidate; the relative L2 to SDPA.  Raises what the library raises."""
        kernel, spec = _kernel(ForwardKernel, job.key), self._spec(job)
        q, k, v, grad_out = self._inputs(job)
        prepared = self.operands.get(job[:2])
        if prepared is None:
            prepared = self.operands[job[:2]] = kernel.prepare(Inputs(q, k, v), spec)
        prefix = "fwd_" if job.key.direction == "forward" else "bwd_"
        named = {prefix + name: value for name, value in options.items()}
        operands = replace(prepared, native=replace(prepared.native, options=named))
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(spec.training) for x in (q, k, v)]
            exact = F.scaled_dot_product_attention(*leaves, is_causal=job.key.mask == "causal")
        result = kernel.run(operands)
        if job.key.direction == "forward":
            error = _distance([result.out], [exact.detach()])
            self.calls[job] = lambda: kernel.run(operands)
            return error / kernel.declared_error
        follower, saved = _kernel(BackwardKernel, job.key), Saved(operands, *result)
        error = _distance(follower.run(saved, grad_out), torch.autograd.grad(exact, leaves, grad_out))
        self.calls[job] = lambda: follower.run(saved, grad_out)
        return error / follower.declared_error

    def time(self, job: Job) -> list[float]:
        """Milliseconds of a visit."""
        return self.timer.take(self.calls[job]).device_ms

    def _spec(self, job: Job) -> AttentionSpec:
        return AttentionSpec.make(
            batch=max(1, self.tokens // job.length),
            heads=self.hidden // job.key.head_dim,
            seqlen_q=job.length,
            head_dim=job.key.head_dim,
            mask=Mask() if job.key.mask == "none" else Mask(right=0),
            direction="training" if job.key.direction == "backward" else "forward",
        )

    def _inputs(self, job: Job) -> tuple[Tensor, ...]:
        place = (job.key.head_dim, job.length)
        if place not in self.inputs:
            spec = self._spec(job)
            shape = (spec.batch, spec.heads, spec.seqlen_q, spec.head_dim)
            generator = torch.Generator(self.device).manual_seed(0)
            self.inputs[place] = tuple(
                torch.randn(shape, generator=generator, device=self.device).to(torch.bfloat16) for _ in range(4)
            )
        return self.inputs[place]


def _kernel(kind: type, key: TileKey) -> Any:
    return next(
        each for each in flex.BACKEND.kernels if isinstance(each, kind) and each.name == f"flex:{key.precision}"
    )


def _distance(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    pairs = zip(found, wanted, strict=True)
    worst = max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in pairs)
    return worst if math.isfinite(worst) else math.inf


def serve(pipe: Connection, device: str, tokens: int, hidden: int) -> None:
    """A process's life: (what, job, options) in, (answer, error) out, until the pipe closes."""
    bench = Bench(torch.device(device), tokens, hidden)
    while True:
        try:
            what, job, options = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((bench.compile(job, options) if what == "compile" else bench.time(job), None))
        except Exception as error:  # a candidate may fail in any way, and is then none
            pipe.send((None, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"))


class Process:
    """One such process, seen from the one that asks."""

    def __init__(self, device: str, tokens: int, hidden: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, device, tokens, hidden), daemon=True)
        self.process.start()
        theirs.close()
        self.lost = False

    def ask(self, what: str, job: Job, options: Options | None = None) -> tuple[Any, str | None]:
        """(answer, None) or (None, what went wrong)."""
        if self.lost:
            return None, "its process was lost"
        try:
            self.pipe.send((what, job, options))
            if self.pipe.poll(PATIENCE):
                answer, reason = self.pipe.recv()
                if reason is None or "CUDA error" not in reason:
                    return answer, reason  # after a CUDA error all that follows would fail too
        except (EOFError, OSError):
            pass
        self.lost = True
        self.process.kill()
        return None, "its process died, lost the GPU or gave no answer"


@dataclass
class Tuning:
    """The measurements, and the process of each candidate."""

    processes: Sequence[Process]
    ends: float
    seconds: float
    owners: dict[Job, Process] = field(default_factory=dict)
    times: dict[Job, list[float]] = field(default_factory=dict)
    failed: dict[Job, str] = field(default_factory=dict)

    def compile(self, jobs: Iterable[Job], share: float) -> None:
        """Each job in whichever process is free, none begun after this share of the time."""
        waiting, limit = deque(jobs), self.ends - self.seconds * (1 - share)

        def work(process: Process) -> None:
            while not process.lost:
                try:
                    job = waiting.popleft()
                except IndexError:
                    return
                if time.monotonic() > limit:
                    self.failed[job] = "no time left to compile it"
                    continue
                error, reason = process.ask("compile", job, candidates(job.key)[job.number])
                if reason is None and not error <= 1:
                    reason = f"off by {error:.3g} times the declared error"
                if reason is None:
                    self.owners[job] = process
                else:
                    self.failed[job] = reason

        threads = [threading.Thread(target=work, args=(each,)) for each in self.processes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def measure(self, key: TileKey, length: int, rounds: int) -> None:
        """The compiled candidates of a cell in turns, as long as there is time."""
        order = [job for job in self.owners if job.key == key and job.length == length]
        for _ in range(rounds):
            for job in (*order, *order[::-1]):
                if job in self.failed or time.monotonic() > self.ends:
                    continue
                taken, reason = self.owners[job].ask("time", job)
                if reason is None:
                    self.times.setdefault(job, []).extend(taken)
                else:
                    self.failed[job] = reason

    def medians(self, key: TileKey, length: int) -> dict[int, float]:
        """Milliseconds by the candidate's number."""
        return {
            job.number: statistics.median(taken)
            for job, taken in self.times.items()
            if (job.key, job.length) == (key, length) and job not in self.failed
        }


def finalists(medians: Mapping[int, float]) -> list[int]:
    """The default and the fastest others; none where the default has no time."""
    if 0 not in medians:
        return []
    return [0, *sorted((number for number in medians if number), key=medians.__getitem__)[:FINALISTS]]


def choose_candidate(by_length: Sequence[Mapping[int, float]]) -> int | None:
    """The candidate to commit: the fastest over all lengths, if it gains enough on the default and loses nowhere."""
    if any(0 not in medians for medians in by_length):
        return None
    ratios = {
        number: [medians[number] / medians[0] for medians in by_length]
        for number in by_length[0]
        if number and all(number in medians for medians in by_length)
    }
    fair = {number: math.prod(each) ** (1 / len(each)) for number, each in ratios.items() if max(each) <= 1 + MOST_LOSS}
    best = min(fair, key=fair.__getitem__, default=None)
    return best if best is not None and fair[best] <= 1 - LEAST_GAIN else None


def entry(key: TileKey, options: Options) -> str:
    """The line of the table."""
    fields = ", ".join(f'"{name}": {value}' for name, value in options.items())
    place = f'{key.capability}, "{key.precision}", {key.head_dim}, "{key.mask}", "{key.direction}"'
    return f"    TileKey({place}): {{{fields}}},"


def tune(keys: Sequence[TileKey], lengths: tuple[int, int], tuning: Tuning) -> list[str]:
    """The table's lines; prints every time on the way."""
    short, long = lengths
    most = max(len(candidates(key)) for key in keys)
    # By number, so that time that runs out takes the last candidates of every cell, not all of one.
    jobs = [Job(key, short, number) for number in range(most) for key in keys if number < len(candidates(key))]
    tuning.compile(jobs, COMPILING[0])
    for key in keys:
        tuning.measure(key, short, 1)
    best = {key: finalists(tuning.medians(key, short)) for key in keys}
    tuning.compile([Job(key, long, number) for key in keys for number in best[key]], COMPILING[1])
    for key in keys:
        tuning.measure(key, long, 2)
    lines = []
    for key in keys:
        both = [tuning.medians(key, length) for length in lengths]
        number = choose_candidate(both)
        print(f"\n{key.precision} {key.direction}, D={key.head_dim}, mask {key.mask}")
        for each, options in enumerate(candidates(key)):
            columns = [f"{medians[each]:8.4f} ms" if each in medians else " " * 11 for medians in both]
            reasons = [tuning.failed[job] for job in (Job(key, x, each) for x in lengths) if job in tuning.failed]
            mark = "<- to commit" if each == number else ""
            print("  ", *columns, dict(options) or "torch's default", *reasons, mark)
        if number is not None:
            lines.append(entry(key, candidates(key)[number]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=230.0, help="how long it may take")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU")
    # One process a core already: inductor's own pool would only contend with them.
    os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="1", OMP_NUM_THREADS="1")
    ends = time.monotonic() + asked.seconds
    processes = [Process("cuda", TOKENS, HIDDEN) for _ in range(asked.processes)]
    tuning = Tuning(processes, ends, asked.seconds)
    lines = tune(cells(torch.cuda.get_device_capability()), LENGTHS, tuning)
    print(
        f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, cold L2, {TOKENS} tokens, hidden size {HIDDEN}"
    )
    print("TILES: dict[TileKey, Options] = {", *lines, "}", sep="\n")
    for each in processes:
        each.pipe.close()


if __name__ == "__main__":
    main()
