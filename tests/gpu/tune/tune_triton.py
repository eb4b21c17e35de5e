"""Measures tiles for ``triton``'s forward on this machine's GPU for ``backends/triton/forward/tiles.py``.

    python tests/gpu/tune/tune_triton.py [--seconds 200] [--processes 14]

It is not in the package, because it is only for committing the table: run it on an idle machine and review its
output.  Many processes compile the candidates into Triton's cache on the disk and run each once:
one that fails, hangs or does not agree with SDPA within the declared error is excluded.  Then this process alone
times those that are left, the candidates of a cell in turns (ABBA), so that clocks and heat are the same for all: all
at the middle length, the fastest at every length.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench import AttentionSpec, Mask
from attnbench.backends.triton import TritonForward
from attnbench.backends.triton.forward.tiles import DEFAULTS, HEAD_DIMS, Tile, TileKey
from attnbench.harness.measure.timing import Timer
from attnbench.kernels.contract import Inputs, Operands

LENGTHS = (1024, 4096, 16384)
MIDDLE = 4096
TOKENS, HIDDEN = 16384, 2048
FINALISTS = 5
COMPILING = 0.5  # share of the time after which what is not compiled is left out
_SHARED = 227 * 1024  # bytes of a Hopper multiprocessor that one program can have


def candidates(head_dim: int) -> list[Tile]:
    """The default, then what fits shared memory: tiles, stages, parts, promotions, registers, orders of keys."""
    shapes = {
        64: [(64, 128, 4), (64, 64, 4), (128, 128, 8), (128, 64, 8), (64, 256, 4)],
        128: [(64, 128, 4), (64, 64, 4), (128, 128, 8), (128, 64, 8), (64, 256, 4)],
        256: [(128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4)],
    }[head_dim]
    made = [DEFAULTS[head_dim]]
    for m, n, warps in shapes:
        for stages in (2, 3, 4):
            made += [Tile(m, n, warps, stages, parts=parts) for parts in (1, 2, 4) if head_dim // parts >= 32]
        # The promotion by the compiler, which adds within the product.
        made += [Tile(m, n, warps, stages, promotion=n) for stages in (2, 3)]
    first = shapes[0]
    made.append(Tile(*first, 3, parts=2, tma=False))
    if head_dim < 256:  # three programs of 128 threads on a multiprocessor, or four, by their registers
        bounds = (168,) if head_dim == 128 else (168, 128)
        made += [Tile(*first, 2, parts=parts, registers=bound) for bound in bounds for parts in (1, 2, 4)
                 if head_dim // parts >= 32]  # fmt: skip
        made += [Tile(64, 64, 4, stages, parts=2, registers=bound) for bound in bounds for stages in (2, 3)]
    fitting = [tile for tile in dict.fromkeys(made) if _shared(tile, head_dim) <= _SHARED]
    plain = fitting + [tile._replace(interleaved=True) for tile in fitting if tile.tma]
    hopper = [
        Tile(128, block_n, 4, stages, parts=parts, interleaved=True, hopper=True, turns=turns, alone_from=alone)
        for block_n, stages in ((256, 2), (128, 2), (128, 3), (64, 4))
        for parts in (1, 2, 4, 8)
        for turns in (False, True)
        for alone in (None, 0)
        if head_dim // parts >= 32 and head_dim // parts <= 128
    ]
    return plain + [tile for tile in hopper if _shared(tile, head_dim) <= _SHARED]


def _shared(tile: Tile, head_dim: int) -> int:
    return head_dim * (tile.block_m + 2 * tile.stages * tile.block_n)


def cells(capability: tuple[int, int]) -> list[TileKey]:
    """What the table is wanted for; the recipes with a scale for each key last."""
    return [
        TileKey(capability, head_dim, mask, per_key)
        for per_key in (False, True)
        for head_dim in (128, 64, 256)
        for mask in ("none", "causal")
    ]


def kernel_of(key: TileKey) -> TritonForward:
    return TritonForward("fp8-token" if key.per_key else "fp8")


def spec_of(key: TileKey, length: int) -> AttentionSpec:
    return AttentionSpec.make(
        batch=max(1, TOKENS // length),
        heads=HIDDEN // key.head_dim,
        seqlen_q=length,
        head_dim=key.head_dim,
        mask=Mask() if key.mask == "none" else Mask(right=0),
    )


@cache
def inputs_of(head_dim: int, length: int) -> tuple[Tensor, ...]:
    shape = (max(1, TOKENS // length), HIDDEN // head_dim, length, head_dim)
    generator = torch.Generator("cuda").manual_seed(0)
    return tuple(torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16) for _ in range(3))


@cache
def operands_of(key: TileKey, length: int) -> Operands:
    return kernel_of(key).prepare(Inputs.of(inputs_of(key.head_dim, length)), spec_of(key, length))


@cache
def exact_of(head_dim: int, mask: str) -> Tensor:
    return F.scaled_dot_product_attention(*inputs_of(head_dim, MIDDLE), is_causal=mask == "causal")


def call_of(key: TileKey, length: int, tile: Tile) -> Any:
    from attnbench.backends.triton.forward.launch import attend, retiled

    native = retiled(operands_of(key, length).native, tile)
    return lambda: attend(native)


def examine(key: TileKey, tile: Tile) -> str | None:
    """Compile and run a candidate in this process; what is wrong with it, or None."""
    try:
        out = call_of(key, MIDDLE, tile)().out
        exact = exact_of(key.head_dim, key.mask).float()
        error = float((out.float() - exact).norm() / exact.norm())
    except Exception as error:  # a candidate may fail in any way, and is then none
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
    allowed = kernel_of(key).declared_error
    return None if error <= allowed else f"is off by {error:.3g}, allowed {allowed}"


def examine_all(keys: Sequence[TileKey], processes: int, ends: float) -> dict[tuple[TileKey, Tile], str | None]:
    """What is wrong with each candidate, seen by many processes."""
    found: dict[tuple[TileKey, Tile], str | None] = {}
    longest = max(len(candidates(size)) for size in HEAD_DIMS)
    # By number, so that time that runs out takes the last candidates of every cell, not all of one.
    jobs = [(key, candidates(key.head_dim)[i]) for i in range(longest) for key in keys
            if i < len(candidates(key.head_dim))]  # fmt: skip
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures = {pool.submit(examine, *job): job for job in jobs}
        done, late = wait(futures, timeout=max(0.0, ends - time.monotonic()))
        for future in done:
            broken = future.exception()  # of a process that a candidate took along
            found[futures[future]] = future.result() if broken is None else f"its process died: {broken}"
        found |= {futures[future]: "no time left to compile it" for future in late}
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        if late:
            for worker in workers:
                worker.kill()
    return found


def time_tiles(key: TileKey, length: int, tiles: Sequence[Tile], rounds: int, ends: float) -> dict[Tile, float]:
    """Median milliseconds of each, in turns."""
    timer = replace(Timer.for_device(torch.device("cuda", 0)), visit=0.01)
    calls = {tile: call_of(key, length, tile) for tile in tiles}
    times: dict[Tile, list[float]] = {}
    for _ in range(rounds):
        for tile in (*calls, *reversed(calls)):
            if time.monotonic() < ends:
                times.setdefault(tile, []).extend(timer.take(calls[tile]).device_ms)
    return {tile: statistics.median(taken) for tile, taken in times.items()}


def choose_tile(by_length: Mapping[int, Mapping[Tile, float]]) -> Tile | None:
    """The tile that is fastest over all lengths, by the geometric mean; None where some length was not measured."""
    common = set.intersection(*(set(times) for times in by_length.values()))
    return min(common, key=lambda tile: math.prod(times[tile] for times in by_length.values()), default=None)


def entry(key: TileKey, tile: Tile) -> str:
    """The line of the table."""
    fields = [repr(value) for value in tile[:4]]
    fields += [
        f"{name}={value!r}"
        for name, value in tile._asdict().items()
        if name in Tile._field_defaults and value != Tile._field_defaults[name]
    ]
    return f'    TileKey({key.capability}, {key.head_dim}, "{key.mask}", {key.per_key}): Tile({", ".join(fields)}),'


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=200.0, help="how long it may take")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU")
    begun = time.monotonic()
    ends = begun + asked.seconds
    keys = cells(torch.cuda.get_device_capability())
    wrong = examine_all(keys, asked.processes, begun + COMPILING * asked.seconds)
    print(f"compiled {len(wrong)} candidates in {time.monotonic() - begun:.0f} s")
    lines = []
    for key in keys:
        sound = [tile for tile in candidates(key.head_dim) if wrong[key, tile] is None]
        by_length = {MIDDLE: time_tiles(key, MIDDLE, sound, 1, ends)}
        ranked = sorted(by_length[MIDDLE], key=by_length[MIDDLE].__getitem__)
        finalists = ranked[:FINALISTS]
        for length in LENGTHS:
            by_length[length] = by_length.get(length, {}) | time_tiles(key, length, finalists, 2, ends)
        best = choose_tile(by_length)
        print(f"\nD={key.head_dim}, mask {key.mask}, {'a scale for each key' if key.per_key else 'scales of heads'}")
        for tile in [*ranked, *(tile for tile in candidates(key.head_dim) if tile not in ranked)]:
            rates = [
                f"{spec_of(key, n).flops / by_length[n][tile] * 1e-9:6.0f}" if tile in by_length[n] else " " * 6
                for n in LENGTHS
            ]
            print("  ", *rates, entry(key, tile).partition(": ")[2], wrong[key, tile] or "",
                  "<- to commit" if tile == best else "")  # fmt: skip
        if best is not None:
            lines.append(entry(key, best))
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, cold L2, {TOKENS} tokens, TFLOPS at {LENGTHS}")
    print("TILES: dict[TileKey, Tile] = {", *lines, "}", sep="\n")


if __name__ == "__main__":
    main()
