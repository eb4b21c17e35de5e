"""A packed batch's launches compiled for Hopper: what the emulator cannot say of Triton's and Gluon's languages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import SUPPORT

pytest.importorskip("triton", minversion="3.6")

COMPILE = """
import json, sys
sys.path[:0] = sys.argv[1].split(":")
from types import SimpleNamespace
import torch
from compiled_for_hopper import SHARED_MEMORY, compiling, idle_barriers
from attnbench import AttentionSpec, Mask
from attnbench.backends.triton.backward import launch as backward
from attnbench.backends.triton.backward.tiles import tiles_of
from attnbench.backends.triton import TritonForward, TritonOnePass
from attnbench.backends.triton.forward.hopper import launch as hopper
from attnbench.backends.triton.forward.tiles import TILES, TileKey
from attnbench.kernels.contract import Inputs
from attnbench.problem.lengths import Lengths
from attnbench.problem.lengths_kind import LengthsKind

hopper._multiprocessors = lambda device: 132
lengths = torch.empty(9, dtype=torch.int32, device="meta")
lengths = Lengths("packed", lengths, lengths, 900, 900)
spec = AttentionSpec.make(batch=8, heads=4, kv_heads=2, seqlen_q=900, head_dim=128, direction="training",
                          mask=Mask(right=0, alignment="bottom-right"),
                          lengths=LengthsKind(batch="packed", total_q=3000, total_kv=3000))
q, k, v = (torch.empty(1, heads, 3000, 128, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
both = sys.argv[2] == "fp8"
forward = TritonForward("fp8", TILES[TileKey((9, 0), 128, "causal", False)]) if both else TritonOnePass()
with compiling() as made:
    operands = forward.prepare(Inputs(q, k, v, lengths), spec)
    result = forward.run(operands)
    if both:
        backward.launch(spec, operands.q, operands.k, operands.v, result.out, result.lse, torch.empty_like(q),
                        lambda spec, size, device: tiles_of(spec, size, (9, 0), False), False, lengths)
assert max(each.metadata.shared for each in made) <= SHARED_MEMORY
hoppers = [each for each in made if each.metadata.name.endswith("_hopper")]
assert not any(idle_barriers(each.asm["ttgir"]) for each in hoppers)
print(json.dumps([each.metadata.name for each in hoppers]))
"""


@pytest.mark.parametrize(
    ("forward", "kernels"),
    [
        ("fp8", ["triton_fp8_attention_forward_hopper", "all_gradients_hopper"]),
        # What Q of 16 bits changes is compiled in test_triton_hopper.py as well.
        pytest.param("onepass", ["triton_fp8_attention_forward_hopper"], marks=pytest.mark.exhaustive),
    ],
    ids=["fp8", "onepass"],
)
def test_the_kernels_of_a_packed_batch_compile(forward: str, kernels: list[str], tmp_path: Path) -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, SUPPORT, forward], capture_output=True, text=True, check=False,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == kernels
