"""Measures tiles for the FP8 backward on this machine's GPU and prints the entries of ``backward.tiles.TILES``.

    python tests/gpu/tune/tune_triton_backward.py [--seconds 280] [--precision fp8,fp8-all] [--head-dims 128,64]

It is only for committing the table: run it on an idle machine.  Many processes compile the candidates, tiles
of the plain kernels and rings of the Hopper ones, into Triton's cache on the disk, and launch nothing.  Then a process
times the kernels of each cell, dK with dV, dQ, and the one for all three, each by itself, the candidates in turns
(ABBA), so that clocks and heat are the same for all.  All candidates run at the shorter length, the fastest tiles and
the fastest rings at the longer one.  A candidate is excluded if its gradients differ from those of the first, a plain
tile, by more than rounding, or if it is silent for 20 seconds or ends its process; another process then continues
without it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.extend(str(Path(__file__).parents[2] / "support" / each) for each in ("gluon", "processes"))

from compiled_for_hopper import Program, compiled
from hopper_backward import PLAIN, RINGS, SAME, Kind, run, sums_off
from supervised_work import ItemDone, ItemStarted, run_one_by_one

from attnbench import AttentionSpec, Mask
from attnbench.backends.triton.backward.tiles import DEFAULT, Tile, TileKey, Tiles
from attnbench.harness.measure.timing import Timer
from attnbench.problem.fp8 import Recipe, quantise

LENGTHS = (4096, 16384)
TOKENS, HIDDEN = 16384, 2048
FINALISTS = 3  # of the plain tiles, and of the rings
COMPILING = 0.5  # share of the time after which no more is compiled
PATIENCE = 20.0  # seconds of silence after which a process is killed

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
KINDS: tuple[Kind, ...] = ("keys", "queries", "all")


class Job(NamedTuple):
    """One candidate of one kernel of one cell."""

    key: TileKey
    kind: Kind
    tile: Tile


class InvalidCandidate(NamedTuple):
    """A candidate that is none."""

    reason: str


Times = dict[int, float]  # milliseconds by length


def candidates(key: TileKey, kind: Kind) -> list[Job]:
    """The default, the rings and the tiles to hold against it."""
    default: Tile = getattr(DEFAULT, kind, PLAIN)
    rings = RINGS.get((kind, key.head_dim, key.narrow), ())
    more = {"keys": KEYS, "queries": QUERIES, "all": []}[kind]
    tiles = [default, *(default._replace(hopper=ring) for ring in rings), *more] if rings else []
    return [Job(key, kind, tile) for tile in dict.fromkeys(tiles)]


def spec_of(key: TileKey, length: int) -> AttentionSpec:
    """Of 16,384 tokens and the hidden size 2048."""
    return AttentionSpec.make(
        batch=max(1, TOKENS // length), heads=HIDDEN // key.head_dim, seqlen_q=length, head_dim=key.head_dim,
        mask=Mask() if key.mask == "none" else Mask(right=0), direction="training",
    )  # fmt: skip


class Bench:
    """The inputs of a cell at a length, and both kernels on them."""

    def __init__(self, key: TileKey, length: int, device: str) -> None:
        from attnbench.backends.triton.backward import launch as backward_launch

        self.key = key
        spec = spec_of(key, length)
        shape = (spec.batch, spec.heads, spec.seqlen_q, spec.head_dim)
        generator = None if device == "meta" else torch.Generator(device).manual_seed(0)
        q, k, v, out, grad = (torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(5))
        # As large as those of real scores, so that P is neither 0 nor saturated.
        lse = torch.full(shape[:3], math.log(length) + 0.5, device=device)
        recipe = Recipe("head", rotation="hadamard")
        operands = [quantise(x, recipe, rotate=each < 2) for each, x in enumerate((q, k, v))]
        plain = DEFAULT
        ringed = Tiles(plain.keys._replace(hopper=RINGS["keys", key.head_dim, key.narrow][0]),
                       plain.queries._replace(hopper=RINGS["queries", key.head_dim, key.narrow][0]))  # fmt: skip
        self.plain, self.ringed, self.fused = (
            backward_launch.prepared(spec, *operands, out * 0.02, lse, grad, key.narrow, tiles, fused=fused)
            for tiles, fused in ((plain, False), (ringed, False), (ringed, not key.narrow))
        )

    def call(self, job: Job) -> Callable[[], tuple[Tensor, ...]]:
        """One kernel with one tile."""
        given = self.plain if job.tile.hopper is None else self.fused if job.kind == "all" else self.ringed
        return partial(run, given, job.kind, job.tile, torch.bfloat16, self.key.narrow)


def launch(job: Job) -> None:
    """At both lengths, on tensors without memory: whether a size is 1 or a multiple of 16 makes another program."""
    for length in LENGTHS:
        Bench(job.key, length, "meta").call(job)()


def relative(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest relative L2 between what two tiles computed."""
    worst = max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(found, wanted, strict=True))
    return worst if math.isfinite(worst) else math.inf


def measure(ends: float, jobs: list[Job], say: Callable[[Any], None]) -> None:
    """Sends ``Times`` or an ``InvalidCandidate`` for each job, cell by cell; runs in the process that may be lost."""
    timer = replace(Timer.for_device(torch.device("cuda")), visit=0.02)
    for _, group in itertools.groupby(jobs, key=lambda job: job[:2]):
        if time.monotonic() > ends:
            return
        cell = sorted(group, key=lambda job: job.tile.hopper is not None)
        wrong: dict[Job, str] = {}
        by_length: dict[int, Mapping[Job, float]] = {}
        running = cell
        for length, rounds in zip(LENGTHS, (1, 2), strict=True):
            by_length[length] = times(running, length, timer, rounds, say, wrong)
            running = finalists(by_length[length])
        for job in cell:
            taken = {length: each[job] for length, each in by_length.items() if job in each}
            say(ItemDone(job, InvalidCandidate(wrong[job]) if job in wrong else taken))


def times(
    jobs: Sequence[Job], length: int, timer: Timer, rounds: int, say: Callable[[Any], None], wrong: dict[Job, str]
) -> dict[Job, float]:
    """Median milliseconds of the candidates that run and agree with the first plain one; ``wrong`` gets the others."""
    calls: dict[Job, Callable[[], tuple[Tensor, ...]]] = {}
    bench = wanted = None
    for job in jobs:
        say(ItemStarted(job))
        bench = bench or Bench(job.key, length, "cuda")
        call = bench.call(job)
        try:
            found = call()
            torch.cuda.synchronize()
        except Exception as error:  # too many registers, most often
            torch.cuda.synchronize()  # raises where the GPU is lost to this process
            wrong[job] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
            continue
        if wanted is None and not job.tile.hopper:
            wanted = found
        distance = math.inf if wanted is None else relative(found, wanted)
        if distance > SAME + (sums_off(spec_of(job.key, length)) if job.kind == "all" else 0.0):
            wrong[job] = f"is off by {distance:.3g} at {length}"
        else:
            calls[job] = call
    taken: dict[Job, list[float]] = {job: [] for job in calls}
    for _ in range(rounds):
        for job in (*calls, *list(calls)[::-1]):
            say(ItemStarted(job))
            taken[job] += timer.take(calls[job]).device_ms
    return {job: statistics.median(each) for job, each in taken.items()}


def finalists(first: Mapping[Job, float]) -> list[Job]:
    """The fastest plain tiles, and then the fastest rings."""
    ranked = sorted(first, key=first.__getitem__)
    return [job for ring in (False, True) for job in [x for x in ranked if bool(x.tile.hopper) == ring][:FINALISTS]]


def choose_tile(found: Mapping[Job, Times]) -> tuple[Tile, Times] | None:
    """The tile with the least product of times over both lengths; behind a ring stands the best plain tile."""
    through = {job.tile: math.prod(each.values()) for job, each in found.items() if len(each) == len(LENGTHS)}
    by_tile = {job.tile: each for job, each in found.items()}
    plain = min((tile for tile in through if not tile.hopper), key=through.__getitem__, default=None)
    if plain is None:
        return None
    best = min(through, key=through.__getitem__)
    return plain._replace(hopper=best.hopper), by_tile[best]


def tile_source(tile: Tile) -> str:
    """As it is written in the table."""
    ring = () if tile.hopper is None else (f"Ring{tuple(tile.hopper)}",)
    return f"Tile({', '.join((*map(str, tile[:4]), *ring))})"


def entry(key: TileKey, keys: tuple[Tile, Times], queries: tuple[Tile, Times], fused: Times | None) -> str:
    """The lines of the table, milliseconds first; ``fused``: of the kernel that computes all, if it ran."""
    took = ", ".join(f"{keys[1][length]:.2f} and {queries[1][length]:.2f}" for length in LENGTHS)
    more = ""
    if fused is not None:
        took += f"; all at once {', '.join(f'{fused[length]:.2f}' for length in LENGTHS)}"
        apart = math.prod(keys[1][length] + queries[1][length] for length in LENGTHS)
        more = ", fused=True" if math.prod(fused.values()) < apart else ""
    place = f'{key.capability}, {key.narrow}, {key.head_dim}, "{key.mask}"'
    return f"    # {took}\n    TileKey({place}): Tiles({tile_source(keys[0])}, {tile_source(queries[0])}{more}),"


def compile_all(jobs: Sequence[Job], processes: int, ends: float) -> dict[Job, Program]:
    """By number within the cell, so that time that runs out takes the last candidates of each, not all of one."""
    places = {job: len([x for x in jobs[: jobs.index(job)] if x[:2] == job[:2]]) for job in jobs}
    begun = time.monotonic()
    programs = compiled(launch, sorted(jobs, key=places.__getitem__), processes, ends)
    sound = sum(program.problem is None for program in programs.values())
    print(f"{sound} of {len(jobs)} candidates compiled in {time.monotonic() - begun:.0f} s", flush=True)
    return programs


def show(jobs: Sequence[Job], found: Mapping[Job, Any]) -> None:
    """Every candidate of a cell, the fastest first, with milliseconds and TFLOPS as if it were the whole backward."""
    key, kind, _ = jobs[0]
    print(f"\n{'FP8' if key.narrow else 'bf16'} sums, D={key.head_dim}, mask {key.mask}, {kind}")
    timed = {job: x for job in jobs if isinstance(x := found.get(job), dict)}
    for job in sorted(jobs, key=lambda job: timed.get(job, {}).get(LENGTHS[0], math.inf)):
        rates = [
            f"{ms:8.3f} ms ({spec_of(key, length).flops * 2.5 / 3.5 / ms / 1e9:5.0f})"
            for length, ms in timed.get(job, {}).items()
        ]
        reason = "" if job in timed else getattr(found.get(job), "reason", "not measured in time")
        print(f"    {tile_source(job.tile):36}", *rates, reason, flush=True)


def give_up(lost: Sequence[Job], job: Job) -> bool:
    """Whether the same tile was lost with another mask, or two rings of the same kernel were."""
    alike = {x.tile for x in lost if (x.kind, x.key.head_dim) == (job.kind, job.key.head_dim)}
    return job.tile in alike or (job.tile.hopper is not None and sum(tile.hopper is not None for tile in alike) >= 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=280.0, help="how long it may take")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--precision", default="fp8,fp8-all")
    parser.add_argument("--head-dims", default="128,64")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU")
    ends = time.monotonic() + asked.seconds
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        parser.error(f"compiles for Hopper, and this GPU has compute capability {capability}")
    keys = [
        TileKey(capability, precision == "fp8-all", int(head_dim), mask)
        for precision, head_dim in itertools.product(asked.precision.split(","), asked.head_dims.split(","))
        for mask in ("none", "causal")
    ]
    jobs = [job for key in keys for kind in KINDS for job in candidates(key, kind)]
    programs = compile_all(jobs, asked.processes, ends - (1 - COMPILING) * asked.seconds)
    wrong = {job: InvalidCandidate(program.problem) for job, program in programs.items() if program.problem}
    sound, limit = [job for job in jobs if job not in wrong], ends - time.monotonic() + PATIENCE
    found = wrong | run_one_by_one(partial(measure, ends), sound, patience=PATIENCE, limit=limit, give_up=give_up)
    for _, cell in itertools.groupby(jobs, key=lambda job: job[:2]):
        show(list(cell), found)
    lines = []
    for key in keys:
        timed = {job: x for job, x in found.items() if job.key == key and isinstance(x, dict)}
        best = [choose_tile({job: x for job, x in timed.items() if job.kind == kind}) for kind in ("keys", "queries")]
        fused = next((x for job, x in timed.items() if job.kind == "all" and job.tile.hopper), None)
        if best[0] and best[1]:
            lines.append(entry(key, best[0], best[1], fused if fused and len(fused) == len(LENGTHS) else None))
    print(
        f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, cold L2, {TOKENS} tokens, hidden size {HIDDEN}"
    )
    print("TILES: dict[TileKey, Tiles] = {", *lines, "}", sep="\n")


if __name__ == "__main__":
    main()
