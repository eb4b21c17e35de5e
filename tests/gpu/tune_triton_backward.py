"""Measures tiles for the FP8 backward on this machine's GPU and prints the entries of ``backward_tiles.TILES``.

    python tests/gpu/tune_triton_backward.py [--seconds 280] [--processes 14] [--precision fp8,fp8-all]

For whoever commits the table, on a machine that nobody else computes on.  Every candidate is compiled in one of many
processes, which leave it in Triton's cache on the disk; then this process times the two kernels of each cell, dK with
dV and dQ, each by itself, the candidates in turns (ABBA), so that clocks and heat are the same for all.  All
candidates run at the shorter length, the fastest of them at the longer one.  A candidate whose gradients are not
those of the first, within what rounding explains, is none.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as OutOfTime  # the builtin one only from Python 3.11 on
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnbench import AttentionSpec, Mask
from attnbench.backends.triton.backward_tiles import DEFAULTS, Tile, TileKey, Tiles
from attnbench.fp8 import Recipe, quantise
from attnbench.harness.timing import Timer

LENGTHS = (4096, 16384)
TOKENS, HIDDEN = 16384, 2048
FINALISTS = 4
SAME = 0.02  # relative L2 between two tiles: blocks of dS have scales of their own where it is e4m3
COMPILING = 0.5  # share of the time after which no more is compiled

# The default of a cell comes first, whether it is here or not.
KEYS = [
    Tile(m, n, warps, stages)
    for m, n, warps in ((64, 128, 8), (64, 64, 4), (32, 128, 8), (128, 64, 4), (128, 64, 8), (128, 128, 8), (32, 64, 4))
    for stages in (2, 3)
]
QUERIES = [
    Tile(m, n, warps, stages)
    for m, n, warps in ((128, 64, 8), (64, 64, 4), (128, 128, 8), (64, 128, 4), (128, 32, 8), (64, 32, 4))
    for stages in (2, 3)
]
KINDS = ("keys", "queries")


class Job(NamedTuple):
    """One candidate of one kernel of one cell."""

    key: TileKey
    length: int
    kind: str
    tile: Tile


def candidates(key: TileKey, kind: str) -> list[Tile]:
    """The default and the tiles to hold against it."""
    default: Tile = getattr(DEFAULTS[key.narrow, key.head_dim], kind)
    return list(dict.fromkeys([default, *(KEYS if kind == "keys" else QUERIES)]))


def spec_of(key: TileKey, length: int) -> AttentionSpec:
    """Of 16,384 tokens and the hidden size 2048."""
    return AttentionSpec.make(
        batch=max(1, TOKENS // length), heads=HIDDEN // key.head_dim, seqlen_q=length, head_dim=key.head_dim,
        mask=Mask() if key.mask == "none" else Mask(right=0), direction="training",
    )  # fmt: skip


class Bench:
    """The inputs of a cell at a length, and both kernels on them."""

    def __init__(self, key: TileKey, length: int) -> None:
        from attnbench.backends.triton import backward_launch

        self.library, self.key = backward_launch, key
        spec = spec_of(key, length)
        shape = (spec.batch, spec.heads, spec.seqlen_q, spec.head_dim)
        generator = torch.Generator("cuda").manual_seed(0)
        q, k, v, out, grad = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(5))
        # As large as those of real scores, so that P is neither 0 nor saturated.
        lse = torch.full(shape[:3], math.log(length) + 0.5, device="cuda")
        recipe = Recipe("head", rotation="hadamard")
        operands = [quantise(x, recipe, rotate=each < 2) for each, x in enumerate((q, k, v))]
        self.given = backward_launch.prepared(spec, *operands, out * 0.02, lse, grad, key.narrow)

    def call(self, kind: str, tile: Tile) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        """One kernel with one tile."""
        run = self.library.run_keys if kind == "keys" else self.library.run_queries
        return lambda: run(self.given, tile, self.key.narrow, torch.bfloat16)


def compile_one(job: Job) -> str | None:
    """Compile and run a candidate in a process of its own; what went wrong, or None.

    On the very tensors that are timed later: whether a size is 1 or a multiple of 16 makes another program.
    """
    try:
        Bench(job.key, job.length).call(job.kind, job.tile)()
        torch.cuda.synchronize()
    except Exception as error:  # a candidate may fail in any way, and is then none
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
    return None


def compiled(jobs: Iterable[Job], processes: int, ends: float) -> dict[Job, str | None]:
    """What came of each job; those for which there was no time left are missing."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context)
    found: dict[Job, str | None] = {}
    waiting = {pool.submit(compile_one, job): job for job in jobs}
    try:
        for future in as_completed(waiting, timeout=max(1.0, ends - time.monotonic())):
            found[waiting[future]] = str(error) if (error := future.exception()) else future.result()
    except OutOfTime:
        pass
    pool.shutdown(wait=False, cancel_futures=True)
    return found


def relative(found: Tensor | tuple[Tensor, ...], wanted: Tensor | tuple[Tensor, ...]) -> float:
    """The largest relative L2 between what two tiles computed."""
    pairs = zip(*((x,) if isinstance(x, Tensor) else x for x in (found, wanted)), strict=True)
    worst = max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in pairs)
    return worst if math.isfinite(worst) else math.inf


def times(bench: Bench, kind: str, tiles: Sequence[Tile], timer: Timer, rounds: int) -> dict[Tile, float]:
    """Median milliseconds of the tiles that run and agree with the first."""
    calls, wanted = {}, None
    for tile in tiles:
        call = bench.call(kind, tile)
        try:
            found = call()
            torch.cuda.synchronize()
        except Exception as error:  # too much shared memory, most often
            print(f"    {tuple(tile)} failed: {type(error).__name__}: {str(error)[:120]}")
            continue
        wanted = found if wanted is None else wanted
        if (distance := relative(found, wanted)) > SAME:
            print(f"    {tuple(tile)} is off by {distance:.3g}")
            continue
        calls[tile] = call
    taken: dict[Tile, list[float]] = {tile: [] for tile in calls}
    for _ in range(rounds):
        for tile in (*calls, *list(calls)[::-1]):
            taken[tile] += timer.take(calls[tile]).device_ms
    return {tile: statistics.median(each) for tile, each in taken.items()}


def chosen(key: TileKey, kind: str, usable: Sequence[Tile], timer: Timer) -> Tile | None:
    """The tile with the least product of times over both lengths; prints them all."""
    short, long = LENGTHS
    first = times(Bench(key, short), kind, usable, timer, 1)
    best = sorted(first, key=first.__getitem__)[:FINALISTS]
    second = times(Bench(key, long), kind, best, timer, 2)
    flops = [spec_of(key, length).flops * 2.5 / 3.5 for length in LENGTHS]
    for tile in sorted(first, key=first.__getitem__):
        said = [f"{each[tile]:8.3f} ms ({work / each[tile] / 1e9:5.0f})" if tile in each else ""
                for each, work in zip((first, second), flops, strict=True)]  # fmt: skip
        print("   ", tuple(tile), *said)
    return min(second, key=lambda tile: first[tile] * second[tile], default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=280.0, help="how long it may take")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--precision", default="fp8,fp8-all")
    parser.add_argument("--head-dims", default="128,64")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU")
    started = time.monotonic()
    keys = [
        TileKey(torch.cuda.get_device_capability(), precision == "fp8-all", int(head_dim), mask)
        for precision, head_dim in itertools.product(asked.precision.split(","), asked.head_dims.split(","))
        for mask in ("none", "causal")
    ]
    jobs = [Job(key, LENGTHS[0], kind, tile) for key in keys for kind in KINDS for tile in candidates(key, kind)]
    came = compiled(jobs, asked.processes, started + COMPILING * asked.seconds)
    print(f"{len(came)} of {len(jobs)} candidates compiled in {time.monotonic() - started:.0f} s")
    timer = replace(Timer.for_device(torch.device("cuda")), visit=0.02)
    lines = []
    for key in keys:
        found: dict[str, Tile] = {}
        for kind in KINDS:
            print(f"\n{'FP8' if key.narrow else 'bf16'} sums, D={key.head_dim}, mask {key.mask}, {kind} "
                  "(TFLOPS as if it were the whole backward)")  # fmt: skip
            if time.monotonic() - started > asked.seconds:
                print("    no time left")
                continue
            usable = []
            for tile in candidates(key, kind):
                said = came.get(Job(key, LENGTHS[0], kind, tile), "not compiled in time")
                if said is None:
                    usable.append(tile)
                else:
                    print(f"    {tuple(tile)}: {said}")
            tile = chosen(key, kind, usable, timer) if usable else None
            if tile is not None:
                found[kind] = tile
        if len(found) == len(KINDS):
            place = f'{key.capability}, {key.narrow}, {key.head_dim}, "{key.mask}"'
            keys_tile, queries_tile = (f"Tile{tuple(found[kind])}" for kind in KINDS)
            lines.append(f"    TileKey({place}): {Tiles.__name__}({keys_tile}, {queries_tile}),")
    print(
        f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, cold L2, {TOKENS} tokens, hidden size {HIDDEN}"
    )
    print("TILES: dict[TileKey, Tiles] = {", *lines, "}", sep="\n")


if __name__ == "__main__":
    main()
