"""Measures tiles for the fused quantisation on this machine's GPU: ``backends/triton/quantise/launch.py``.

    python tests/gpu/tune/tune_quantise.py [--seconds 120]

Candidates of a recipe take turns (ABBA), so that clocks and heat are the same for all.  Each prints its median in
every case, as a multiple of the time that the bytes take, the best mean first.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from functools import partial

import torch

from attnbench.backends.triton.quantise.launch import Request, Tiles, quantised_together, tiles_for
from attnbench.harness.measure.timing import Timer
from attnbench.problem.fp8 import Recipe

DEVICE = torch.device("cuda", 0)
BANDWIDTH = 4.27e12  # bytes a second: the most seen on an H200
HEAD_DIMS = (128, 64, 256)
_PAIRS = ((32, 32), (32, 64), (64, 64), (128, 64), (128, 128))  # tokens of a program: rows, and with a transposed copy
_FIRST = ((64, 4), (128, 8), (256, 8))  # and warps, in the pass over magnitudes


def cases(dim: int) -> dict[str, list[Request]]:
    """Q, K and V of 33.5 M bf16 elements each, as they lie in memory; V transposed beside its rows."""
    found = {}
    for batch, length, layout in ((1, 16384, "bhsd"), (1, 16384, "bshd"), (16, 1024, "bhsd")):
        heads = 2048 // dim
        shape = (batch, heads, length, dim) if layout == "bhsd" else (batch, length, heads, dim)
        q, k, v = (torch.randn(shape, device=DEVICE).to(torch.bfloat16) for _ in range(3))
        if layout == "bshd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found[f"{layout} {batch} × {length}, D={dim}"] = [Request(q), Request(k), Request(v, True, True)]
    return found


def floor(requests: list[Request], granularity: str) -> float:
    """Milliseconds that the bytes take at the H200's bandwidth."""
    passes = 2 if granularity in ("head", "tensor") else 1
    count = sum(
        r.x.numel() * (passes * r.x.element_size() + r.rows + r.transposed) for r in requests
    )  # scales are no more than a hundredth of that
    return count / BANDWIDTH * 1e3


def candidates(recipe: Recipe, dim: int) -> list[Tiles]:
    """The committed tiles and those to hold against them."""
    committed = tiles_for(recipe, dim)
    if recipe.granularity == "block":
        found = [committed._replace(warps=warps) for warps in (4, 8, 16)]
    elif recipe.granularity == "token":
        found = [Tiles(*pair, warps) for pair, warps in itertools.product(_PAIRS, (4, 8))]
    else:
        second_passes = ((32, 32, 4), (64, 64, 4), (64, 64, 8), (128, 32, 8), (128, 64, 4), (128, 128, 8))
        passes = itertools.product(second_passes, _FIRST)
        found = [Tiles(*second, *first) for second, first in passes]
    return list(dict.fromkeys([committed, *found]))


def measure(requests: list[Request], recipe: Recipe, seconds: float) -> dict[Tiles, float]:
    """Median milliseconds of each candidate that runs, the fastest first; prints what fails."""
    timer = Timer.for_device(DEVICE)
    requests = [request._replace(rotate=place < 2) for place, request in enumerate(requests)]  # Q and K, as V is not
    taken: dict[Tiles, list[float]] = {}
    for tiles in candidates(recipe, requests[0].x.shape[3]):
        try:
            timer.take(partial(quantised_together, requests, recipe, tiles))
            taken[tiles] = []
        except Exception as error:  # a candidate may fail in any way, and is then none
            print(f"   {tuple(tiles)}: {type(error).__name__}: {str(error).splitlines()[:1]}")
    ends = time.monotonic() + seconds
    while True:
        for tiles in (*taken, *reversed(taken)):
            taken[tiles] += timer.take(partial(quantised_together, requests, recipe, tiles)).device_ms
        if time.monotonic() > ends:
            break
    medians = {tiles: statistics.median(each) for tiles, each in taken.items()}
    return dict(sorted(medians.items(), key=lambda each: each[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="how long the measurements may take, about")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cold L2; columns as the cases are named")
    recipes = (Recipe("token"), Recipe("head"), Recipe("head", rotation="hadamard"), Recipe("block"))
    for dim in HEAD_DIMS:
        inputs = cases(dim)
        each = asked.seconds / (len(HEAD_DIMS) * len(recipes) * len(inputs))
        print("\n" + "\n".join(inputs))
        for recipe in recipes:
            granularity = recipe.granularity
            columns = [measure(requests, recipe, each) for requests in inputs.values()]
            floors = [floor(requests, granularity) for requests in inputs.values()]
            common = [tiles for tiles in columns[0] if all(tiles in column for column in columns)]
            means = {
                tiles: math.prod(c[tiles] / f for c, f in zip(columns, floors, strict=True)) ** (1 / len(columns))
                for tiles in common
            }
            print(f"\n{granularity}{', rotated' * (recipe.rotation != 'none')}, D={dim}")
            for tiles in sorted(means, key=means.__getitem__):
                times = " ".join(f"{column[tiles]:.4f}" for column in columns)
                mark = "<- committed" if tiles == tiles_for(recipe, dim) else ""
                print(f"   {tuple(tiles)!s:24} {means[tiles]:.3f} × floor: {times} {mark}")


if __name__ == "__main__":
    main()
