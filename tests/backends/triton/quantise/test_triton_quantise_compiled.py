"""The quantise kernels compile for Hopper: what Triton's interpreter takes its compiler may refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import SUPPORT

pytest.importorskip("triton", minversion="3.6")

# Compiles the launches of (recipe, rotation, dtype, head dimension, block) on stdin in json; says how many there were.
COMPILE = """
import json, sys
sys.path[:0] = sys.argv[1].split(":")
import torch
from compiled_for_hopper import compiling
from attnbench.backends.triton.quantise.launch import Request, quantised_together
from attnbench.problem.fp8 import Recipe

counts = []
for granularity, rotation, dtype, head_dim, block in json.load(sys.stdin):
    x = torch.empty(1, 2, 512, head_dim, dtype=getattr(torch, dtype), device="meta")
    wanted = Request(x, rotate=True), Request(x, rotate=True, smooth=True), Request(x, False, True, interleaved=True)
    with compiling() as made:
        quantised_together(wanted, Recipe(granularity, rotation=rotation), block=block)
    counts.append(len(made))
print(json.dumps(counts))
"""


CASES = [("head", "hadamard", "bfloat16", 128, 128)]
OTHERS = [
    ("block", "none", "float16", 256, 128),
    ("token", "hadamard", "float32", 80, 128),
    ("head", "none", "float16", 64, 128),
    ("block", "none", "bfloat16", 128, 256),
    ("block", "hadamard", "float32", 256, 128),
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(OTHERS, marks=pytest.mark.exhaustive)], ids=["heads", "others"])
def test_every_recipe_compiles(cases: list[tuple[str, str, str, int, int]], tmp_path: Path) -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, SUPPORT], input=json.dumps(cases), capture_output=True, text=True,
        check=False, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [2 if case[0] == "head" else 1 for case in cases]
