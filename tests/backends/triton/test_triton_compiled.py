"""Launches compiled for Hopper: compilers may reject code that the interpreter and the emulator accept."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_for_hopper import SHARED_MEMORY, json_output_of

pytest.importorskip("triton", minversion="3.6")

# Compiles the launches of (recipe, rotation, dtype, head dimension, block) on stdin in json; says how many there were.
QUANTISE = """
import json, sys
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
    ("head", "none", "float16", 96, 128),
    ("block", "none", "bfloat16", 128, 256),
    ("block", "hadamard", "float32", 256, 128),
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(OTHERS, marks=pytest.mark.exhaustive)], ids=["heads", "others"])
def test_quantisation_kernels_of_every_recipe_compile(
    cases: list[tuple[str, str, str, int, int]], tmp_path: Path
) -> None:
    assert json_output_of(QUANTISE, folder=tmp_path, stdin=cases) == [2 if case[0] == "head" else 1 for case in cases]


PACKED = """
import json, sys
from types import SimpleNamespace
import torch
from compiled_for_hopper import SHARED_MEMORY, compiling, idle_barriers
from attnbench import AttentionSpec, Mask
from attnbench.backends.triton.backward import launch as backward
from attnbench.backends.triton.backward.tiles import tiles_of
from attnbench.backends.triton import TritonForward, TritonOnePass
from attnbench.backends.triton.forward.hopper import launch as hopper
from attnbench.backends.triton.forward.tiles import tile_of
from attnbench.kernels.contract import Inputs
from attnbench.problem.lengths import Lengths
from attnbench.problem.lengths_kind import LengthsKind

hopper._multiprocessors = lambda device: 132
lengths = torch.empty(9, dtype=torch.int32, device="meta")
lengths = Lengths("packed", lengths, lengths, 900, 900)
recipe, size, size_v = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
spec = AttentionSpec.make(batch=8, heads=4, kv_heads=2, seqlen_q=900, head_dim=size, head_dim_v=size_v,
                          direction="training", mask=Mask(right=0, alignment="bottom-right"),
                          lengths=LengthsKind(batch="packed", total_q=3000, total_kv=3000))
q, k, v, grad = (torch.empty(1, heads, 3000, each, dtype=torch.bfloat16, device="meta")
                 for heads, each in ((4, size), (2, size), (2, size_v), (4, size_v)))
both = recipe != "onepass"
forward = TritonForward(recipe, tile_of(spec, (9, 0), per_key=False)) if both else TritonOnePass()
with compiling() as made:
    operands = forward.prepare(Inputs(q, k, v, lengths), spec)
    result = forward.run(operands)
    if both:
        backward.launch(spec, operands.q, operands.k, operands.v, result.out, result.lse, grad,
                        lambda spec, size, device: tiles_of(spec, size, (9, 0), False), False, lengths)
assert max(each.metadata.shared for each in made) <= SHARED_MEMORY
hoppers = [each for each in made if each.metadata.name.endswith("_hopper")]
assert not any(idle_barriers(each.asm["ttgir"]) for each in hoppers)
assert not any("global.b16" in each.asm["ptx"] for each in made), "numbers of 16 bits, one by one"
print(json.dumps([each.metadata.name for each in hoppers]))
"""

APART = ["all_gradients_in_pieces_hopper", "value_gradients_hopper"]


@pytest.mark.parametrize(
    ("recipe", "size", "size_v", "backward"),
    [
        ("fp8-head", 72, 72, ["all_gradients_in_pieces_hopper"]),
        pytest.param("fp8", 128, 128, ["all_gradients_hopper"], marks=pytest.mark.exhaustive),
        # What Q of 16 bits changes is compiled in test_triton_hopper.py as well.
        pytest.param("onepass", 128, 128, [], marks=pytest.mark.exhaustive),
        pytest.param("fp8-head", 192, 128, APART, marks=pytest.mark.exhaustive),
        pytest.param("fp8-head", 192, 192, APART, marks=pytest.mark.exhaustive),
    ],
)
def test_the_kernels_of_a_packed_batch_compile(
    recipe: str, size: int, size_v: int, backward: list[str], tmp_path: Path
) -> None:
    made = json_output_of(PACKED, recipe, str(size), str(size_v), folder=tmp_path)
    assert made == ["triton_fp8_attention_forward_hopper", *backward]


# The plain kernels over tokens, for sequences of each length on stdin in json.
LENGTHS = """
import json, sys
import torch
from compiled_for_hopper import compiling
from attnbench import AttentionSpec
from attnbench.backends.triton.backward import launch as backward
from attnbench.backends.triton.backward.tiles import DEFAULT
from attnbench.problem.fp8 import Quantised

found = []
for length in json.load(sys.stdin):
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=length, head_dim=64, direction="training")
    x = torch.empty(1, 2, length, 64, dtype=torch.bfloat16, device="meta")
    operand = Quantised(x.to(torch.float8_e4m3fn), torch.empty(1, 2, 1, 1, device="meta"), "head")
    with compiling() as made:
        backward.launch(spec, *[operand] * 3, x, torch.empty(1, 2, length, device="meta"), x,
                        lambda spec, size, device: DEFAULT, True, None)
    found.append([each.asm["ptx"] for each in made if each.metadata.name in ("key_gradients", "query_gradients")])
print(json.dumps(found))
"""


def test_one_token_compiles_as_three_do(tmp_path: Path) -> None:
    """Of the length 1 Triton may make a constant, and of a loop no loop: such code read beyond memory on an H200."""
    one, three = json_output_of(LENGTHS, folder=tmp_path, stdin=[1, 3])
    assert len(one) == 2
    assert one == three


# Where the Hopper kernel was to compute and does not serve: a scale for each key.
DEFAULT_TILES = """
import json, sys
import torch
from compiled_for_hopper import compiling
from attnbench import AttentionSpec
from attnbench.backends.triton import TritonForward
from attnbench.backends.triton.forward.tiles import ONE_PASS
from attnbench.kernels.contract import Inputs

found = []
for recipe, head_dim, head_dim_v, softcap in json.load(sys.stdin):
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=512, head_dim=head_dim, head_dim_v=head_dim_v, softcap=softcap)
    inputs = Inputs(*(torch.empty(1, 2, 512, d, dtype=torch.bfloat16, device="meta")
                      for d in (head_dim, head_dim, head_dim_v)))
    with compiling() as made:
        forward = TritonForward(recipe, ONE_PASS[256, True])
        forward.run(forward.prepare(inputs, spec))
    found.append([made[-1].metadata.name, made[-1].metadata.shared])
print(json.dumps(found))
"""
LARGEST = [("fp8-token", 256, 256, cap) for cap in (0, 50)]
SMALLER = [(*kind, cap) for kind in (("fp8-token", 192, 128), ("fp8-token", 128, 128), ("fp8-token", 64, 64))
           for cap in (0, 50)]  # fmt: skip


@pytest.mark.parametrize("cases", [LARGEST, pytest.param(SMALLER, marks=pytest.mark.exhaustive)], ids=["256", "others"])
def test_tiles_that_stand_in_for_the_hopper_kernels_fit(cases: list[tuple[str, int, int, int]], tmp_path: Path) -> None:
    for name, shared in json_output_of(DEFAULT_TILES, folder=tmp_path, stdin=cases):
        assert name == "triton_fp8_attention_forward"
        assert 0 < shared <= SHARED_MEMORY


HASH = """
import json, sys
from attnbench.backends.triton.backward import copies, keys, layout, queries, sums
from attnbench.backends.triton.backward.hopper import fused, narrow_keys
from attnbench.backends.triton.launching import Launch
from triton.runtime.jit import JITFunction

kernels = [fused.all_gradients_hopper, narrow_keys.narrow_key_gradients_hopper]
kernels += [each for module in (copies, keys, layout, queries, sums)
            for each in vars(module).values() if isinstance(each, JITFunction)]
found = {}
for kernel in kernels[::int(sys.argv[1])]:
    Launch(kernel, (1, 1, 1), (), {})  # which starts nothing yet
    found[kernel.__module__ + kernel.__name__] = kernel.cache_key
print(json.dumps(found))
"""


def test_a_kernels_hash_does_not_depend_on_earlier_runs(tmp_path: Path) -> None:
    """By which compiled code is found on the disk."""
    forwards, backwards = (json_output_of(HASH, step, folder=tmp_path) for step in ("1", "-1"))
    assert len(forwards) > 10
    assert forwards == backwards


# Registers, bytes in memory and threads of the passes over memory in steps by (recipe, head dimensions).
PASSES = """
import json, re, subprocess, sys
from pathlib import Path
import torch, triton
from compiled_for_hopper import compiling
from attnbench import AttentionSpec, Mask
from attnbench.backends.triton import TritonForward, TritonOnePass
from attnbench.backends.triton.backward import launch as backward
from attnbench.backends.triton.backward.tiles import tiles_of
from attnbench.backends.triton.forward.hopper import launch as hopper
from attnbench.backends.triton.forward.tiles import tile_of
from attnbench.kernels.contract import Inputs

hopper._multiprocessors = lambda device: 132
folder, ptxas = sys.argv[1], str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas")
found = []
for recipe, size, size_v in json.load(sys.stdin):
    spec = AttentionSpec.make(batch=2, heads=16, seqlen_q=8192, head_dim=size, head_dim_v=size_v, direction="training",
                              mask=Mask(right=0))
    q, k, v, grad = (torch.empty(2, 8192, 16, each, dtype=torch.bfloat16, device="meta").transpose(1, 2)
                     for each in (size, size, size_v, size_v))
    both = recipe != "onepass"
    forward = TritonForward(recipe, tile_of(spec, (9, 0), per_key=False)) if both else TritonOnePass()
    with compiling() as made:
        operands = forward.prepare(Inputs(q, k, v, None), spec)
        if both:
            result = forward.run(operands)
            backward.launch(spec, operands.q, operands.k, operands.v, result.out, result.lse, grad,
                            lambda spec, size, device: tiles_of(spec, size, (9, 0), False), False, None)
    for each in made:
        if each.name in ("cast", "largest_magnitudes", "_lay_out", "_lay_out_gradient"):
            ptx = each.asm["ptx"]
            Path(f"{folder}/k.ptx").write_text(ptx)
            command = [ptxas, "-v", "--gpu-name=sm_90a", f"{folder}/k.ptx", "-o", f"{folder}/k.cubin"]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            registers, spilled = re.search("Used ([0-9]+) reg", said)[1], re.search("([0-9]+) bytes spill s", said)[1]
            threads = re.search("[.](?:reqntid|maxntid) ([0-9]+)", ptx)[1]
            found.append((recipe, size, each.name, int(registers), int(spilled), int(threads)))
print(json.dumps(found))
"""
STEPS = ("fp8", 64, 64), ("fp8", 96, 96), ("fp8", 128, 128), ("fp8-head", 128, 128), ("fp8-head", 192, 128)


@pytest.mark.exhaustive
def test_two_programs_of_a_pass_over_memory_fit_a_multiprocessor(tmp_path: Path) -> None:
    """One that stands alone waits for memory with nobody beside it: a fifth longer on an H200."""
    found = json_output_of(PASSES, str(tmp_path), folder=tmp_path, stdin=[*STEPS, ("onepass", 192, 128)])
    assert {name for _, _, name, *_ in found} == {"cast", "largest_magnitudes", "_lay_out", "_lay_out_gradient"}
    for *kernel, registers, spilled, threads in found:
        assert 65536 // (-(-registers // 8) * 8 * threads) >= 2, kernel
        assert spilled <= 64, kernel
