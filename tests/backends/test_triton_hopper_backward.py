"""The backward's Hopper kernels without a GPU: emulated against FP64, compiled for sm_90, and what they serve.

The emulator runs the very functions that Gluon compiles; what it leaves out, layouts and the pipelines of matrix
products, is asked of the compiler here and of a GPU in tests/gpu.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from backwards import LONG, check, exactly_eight_bits, make, saved
from gluon_on_cpu import DeadlockError, emulated
from hopper_backward import KERNELS
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnbench import AttentionSpec, Mask
from attnbench.fp8 import Recipe
from attnbench.kernel import Saved, gradient_dtype

pytest.importorskip("triton", minversion="3.6")

import triton

from attnbench.backends.triton import backward_hopper_launch as hopper
from attnbench.backends.triton import forward_hopper_launch, interpreter
from attnbench.backends.triton.backward import TritonBackward
from attnbench.backends.triton.backward_layout import BLOCK, PEAK
from attnbench.backends.triton.backward_tiles import TILES, Ring, Tile, Tiles

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_MEMORY = 227 * 1024  # bytes that a program may have on Hopper
HEAD = Recipe("head")
ALLOWED = {False: 0.01, True: 0.06}  # by whether the sums are e4m3, as for the plain kernels
SAME = 0.005  # of the plain kernels' answers in e4m3, where a rounding may fall the other way
needs_interpreter = pytest.mark.skipif(not interpreter.interpreted(), reason="the passes before the kernels run here")


@pytest.fixture(scope="module", autouse=True)
def _on_cpu() -> Any:
    """Hopper is here, and its kernels are emulated; how many were launched is in ``LAUNCHED``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_hopper_launch, "_hopper", lambda device: True)
        for name in ("run_all", "run_keys", "run_queries"):
            patch.setattr(hopper, name, _emulated(getattr(hopper, name)))
        yield


LAUNCHED: list[str] = []
_MODES = random.Random(0)


def _emulated(launch: Any) -> Any:
    def run(*args: Any) -> None:
        LAUNCHED.append(launch.__name__)
        with emulated(lambda: _MODES.random() < 0.5, *KERNELS):
            launch(*args)

    return run


def kernel(
    keys: Ring | None = Ring(64, 4),  # noqa: B008
    queries: Ring | None = Ring(64, 4),  # noqa: B008
    narrow: bool = False,
    fused: bool = False,
) -> TritonBackward:
    tiles = Tiles(Tile(64, 64, 4, 2, keys), Tile(64, 64, 4, 2, queries), fused)
    return TritonBackward("triton:fp8", narrow=narrow, declared_error=0.1, tiles=tiles)


def check_on_hopper(given_: Saved, grad_out: Tensor, by: TritonBackward | None = None) -> None:
    by = by or kernel()
    assert by.tiles is not None
    LAUNCHED.clear()
    check(by, given_, grad_out, ALLOWED[by.narrow])
    rings = {"run_keys": by.tiles.keys.hopper, "run_queries": by.tiles.queries.hopper}
    assert (["run_all"] if by.tiles.fused else [name for name, ring in rings.items() if ring]) == LAUNCHED


def check_against_plain(given_: Saved, grad_out: Tensor, by: TritonBackward) -> None:
    """In e4m3, where what FP64 allows hides half a rounding."""
    plain = kernel(None, None, narrow=True).run(given_, grad_out)
    for x, wanted in zip(by.run(given_, grad_out), plain, strict=True):
        assert (x.float() - wanted.float()).norm() <= SAME * wanted.float().norm() + 1e-6


WAYS: dict[str, dict[str, bool]] = {"bf16 sums": {}, "e4m3 sums": {"narrow": True}, "fused": {"fused": True}}
any_way = pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    """Up to four blocks long, of every mask, grouping and head dimension that the kernels serve."""
    kv_heads, seqlen_q = draw(st.integers(1, 2)), draw(st.integers(1, 280))
    side = st.one_of(st.none(), st.just(0), st.integers(0, 300))
    return AttentionSpec.make(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        seqlen_kv=draw(st.one_of(st.just(seqlen_q), st.integers(1, 280))),
        head_dim=draw(st.sampled_from([64, 128, 40, 100])),
        head_dim_v=draw(st.sampled_from([64, 128, 33])),
        dtype=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        mask=draw(st.builds(Mask, side, side, st.sampled_from(["top-left", "bottom-right"]))),
        direction="training",
    )


@needs_interpreter
@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target])
@given(
    spec=specs(),
    recipe=st.builds(Recipe, st.sampled_from(["head", "tensor"]), rotation=st.sampled_from(["none", "hadamard"])),
    how=st.sampled_from(list(WAYS.values())),
    more=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_any_small_problem_agrees_with_fp64_on_its_operands(
    spec: AttentionSpec, recipe: Recipe, how: dict[str, bool], more: int, seed: int
) -> None:
    generator, dtype = torch.Generator().manual_seed(seed), gradient_dtype(spec)
    by_query, by_key = (spec.heads, spec.seqlen_q), (spec.kv_heads, spec.seqlen_kv)
    sizes = [
        (*by_query, spec.head_dim),
        (*by_key, spec.head_dim),
        (*by_key, spec.head_dim_v),
        (*by_query, spec.head_dim_v),
    ]
    q, k, v, grad_out = (torch.randn(spec.batch, *size, generator=generator).to(dtype) for size in sizes)
    given_ = saved(spec, q, k, v, (recipe,) * 3)
    least = (4, 4) if how.get("narrow") else (2, 3)
    rings = (Ring(64, stages + more) for stages in least)
    check_on_hopper(given_, exactly_eight_bits(grad_out), kernel(*rings, **how))


@needs_interpreter
@any_way
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv", "mask"), LONG, ids=str)
def test_blocks_are_skipped_and_masked_as_the_mask_says(
    seqlen_q: int, seqlen_kv: int, mask: Mask, how: dict[str, bool]
) -> None:
    spec, (q, k, v, grad_out) = make(seqlen_q, seqlen_kv, mask=mask, head_dim=64)
    given_ = saved(spec, q, k, v, (HEAD,) * 3)
    check_on_hopper(given_, grad_out, kernel(**how))
    if how.get("narrow"):
        check_against_plain(given_, grad_out, kernel(narrow=True))


@needs_interpreter
@pytest.mark.parametrize("fused", [False, True])
def test_keys_behind_the_last_count_for_nothing_where_all_scores_are_far_below_theirs(fused: bool) -> None:
    """Theirs are 0, and so far above the log-sum-exp that fp32 has no such P."""
    spec, (q, k, v, grad_out) = make(90, 70, head_dim=64)
    q, k = q / 8 + 4, k / 8 - 4
    given_ = saved(spec, q, k, v, (HEAD,) * 3)
    assert given_.lse is not None
    assert given_.lse.max() < -100
    check_on_hopper(given_, grad_out, kernel(fused=fused))


@needs_interpreter
@pytest.mark.parametrize("fused", [False, True])
def test_queries_without_a_key_get_zeros_and_spoil_nothing(fused: bool) -> None:
    spec, (q, k, v, grad_out) = make(330, 130, mask=Mask(right=0, alignment="bottom-right"), head_dim=64)
    given_ = saved(spec, q, k, v, (HEAD,) * 3)
    dq, dk, dv = kernel(fused=fused).run(given_, grad_out)
    assert not dq[:, :, :200].any()
    assert all(torch.isfinite(x).all() for x in (dq, dk, dv))


@needs_interpreter
@any_way
def test_each_head_of_a_group_has_a_scale_of_its_own(how: dict[str, bool]) -> None:
    spec, (q, k, v, grad_out) = make(200, 150, heads=3, head_dim=64)
    q = q * torch.tensor([1.0, 30.0, 0.01])[:, None, None].to(q.dtype)
    check_on_hopper(saved(spec, q, k, v, (HEAD,) * 3), grad_out, kernel(**how))


@needs_interpreter
def test_whoever_asks_torch_for_deterministic_algorithms_gets_the_same_bits_each_time() -> None:
    spec, (q, k, v, grad_out) = make(70, 90, head_dim=64)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    LAUNCHED.clear()
    try:
        check(kernel(fused=True), saved(spec, q, k, v, (HEAD,) * 3), grad_out, ALLOWED[False])
    finally:
        torch.use_deterministic_algorithms(before)
    assert LAUNCHED == ["run_keys", "run_queries"]


@needs_interpreter
def test_each_block_of_queries_has_a_descale_of_its_own_in_e4m3() -> None:
    """Powers of two, so that the gradient of the output stays exact."""
    spec, (q, k, v, grad_out) = make(420, 150, head_dim=64)
    larger = 2.0 ** (torch.arange(420) // 128 * 3)[:, None]
    given_, grad_out = saved(spec, q, k, v, (HEAD,) * 3), (grad_out * larger).to(q.dtype)
    check_on_hopper(given_, grad_out, kernel(narrow=True))
    check_against_plain(given_, grad_out, kernel(narrow=True))


@needs_interpreter
@pytest.mark.parametrize("rings", [(Ring(64, 4), None), (None, Ring(64, 4))], ids=["keys", "queries"])
def test_one_of_the_kernels_may_be_plain(rings: tuple[Ring | None, Ring | None]) -> None:
    """In e4m3 each reads transposed copies in its own order."""
    spec, (q, k, v, grad_out) = make(150, 200, head_dim=64)
    check_on_hopper(saved(spec, q, k, v, (HEAD,) * 3), grad_out, kernel(*rings, narrow=True))


@needs_interpreter
def test_longer_blocks_may_pass_by() -> None:
    spec, (q, k, v, grad_out) = make(300, 420, mask=Mask(left=200, right=0, alignment="bottom-right"), head_dim=64)
    check_on_hopper(saved(spec, q, k, v, (HEAD,) * 3), grad_out, kernel(Ring(128, 2), Ring(128, 3)))


@needs_interpreter
def test_partitions_that_wait_for_each_other_are_found() -> None:
    """Three blocks of keys are in use at a time, which two stages do not hold."""
    spec, (q, k, v, grad_out) = make(70, 400, head_dim=64)
    with pytest.raises(DeadlockError):
        kernel(queries=Ring(64, 2)).run(saved(spec, q, k, v, (HEAD,) * 3), grad_out)


@needs_interpreter
@pytest.mark.parametrize(
    ("more", "recipes", "narrow"),
    [
        ({}, (Recipe("token"), HEAD, HEAD), False),
        ({}, (HEAD, Recipe("token"), HEAD), False),
        ({}, (HEAD, HEAD, Recipe("block")), False),
        ({}, (Recipe("token"), HEAD, HEAD), True),
        ({"softcap": 3.0}, (HEAD,) * 3, False),
        ({"scale": -0.1}, (HEAD,) * 3, False),
        ({"head_dim": 32}, (HEAD,) * 3, False),
        ({"head_dim_v": 32}, (HEAD,) * 3, False),
    ],
    ids=[
        "q tokens",
        "k tokens",
        "v blocks",
        "e4m3 sums, q tokens",
        "softcap",
        "negative",
        "narrow head",
        "narrow values",
    ],
)
def test_what_they_do_not_serve_the_plain_kernels_do(
    more: dict[str, Any], recipes: tuple[Recipe, ...], narrow: bool
) -> None:
    spec, (q, k, v, grad_out) = make(70, 90, **{"head_dim": 64, **more})
    LAUNCHED.clear()
    check(kernel(narrow=narrow), saved(spec, q, k, v, recipes), grad_out, ALLOWED[narrow])
    assert not LAUNCHED


def test_every_committed_ring_is_one_that_the_kernels_take() -> None:
    for key, tiles in TILES.items():
        for tile, stages in ((tiles.keys, 2), (tiles.queries, 3)):
            if tile.hopper is not None:
                assert tile.hopper.stages >= stages
                assert tile.hopper.block * tile.hopper.stages >= (256 if key.narrow else 128)
                assert tile.hopper.block in (64, 128)


# Compiles kernels for sm_90, as json on stdin says, and prints what came of each.
COMPILE = """
import json, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from attnbench.backends.triton.backward_hopper_launch import _launches

def descriptor(kind, *block):
    bits = {"fp8e4nv": 8, "bf16": 16, "fp32": 32}[kind]
    swizzle = min(block[1] * bits // 8, 128) if len(block) > 1 else 0
    layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(block))
    return f"tensordesc<{kind}[{', '.join(map(str, block))}],{layout!r}>"

tools, found = sys.argv[1], []
for kind, d, block, narrow, maxnreg, constants in json.load(sys.stdin):
    kernel = _launches(kind, narrow)._kernel
    by_query, by_key = (64, block) if kind == "queries" else (block, 64)
    types = dict.fromkeys(("q", "do"), descriptor("fp8e4nv", by_query, d))
    types |= dict.fromkeys(("k", "v"), descriptor("fp8e4nv", by_key, d))
    types |= dict.fromkeys(("q_wide", "do_wide", "k_wide"), descriptor("bf16", block, d))
    types |= dict(k_wide=descriptor("bf16", 128, d // 2)) if kind == "all" else {}
    types |= dict.fromkeys(("q_across", "do_across", "k_across"), descriptor("fp8e4nv", d, block))
    types |= dict.fromkeys(("row_values", "descales", "k_descale", "v_descale", "dq_sums"), "*fp32")
    types |= dict(turn=descriptor("bf16", 64 if narrow else d, d))
    types |= dict.fromkeys(("dq_out", "dk_out", "dv_out"), "*bf16") | dict(rows=descriptor("fp32", block))
    types |= dict(scale="fp32", exponent="fp32")
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
               if signature[name].startswith("*") or name in ("size", "size_v")}
    source = GluonASTSource(kernel, signature, {(names.index(name),): x for name, x in constants.items()}, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, maxnreg=maxnreg))
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/k.ptx", "w") as file:
            file.write(made.asm["ptx"])
        command = [f"{tools}/ptxas", "-v", "--gpu-name=sm_90a", f"{folder}/k.ptx", "-o", f"{folder}/k.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [f"{tools}/cuobjdump", "-sass", f"{folder}/k.cubin"]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found.append(dict(said=said, code=code, shared=made.metadata.shared, ttgir=made.asm["ttgir"]))
print(json.dumps(found))
"""


def _kernel(kind: str, head_dim: int, ring: Ring, narrow: bool = False, **more: object) -> tuple[object, ...]:
    even, most = forward_hopper_launch.registers()
    constants: dict[str, object] = {"left": False, "right": False, "rotated": False, "registers": most}
    constants |= {} if kind == "all" else {"stages": ring.stages}
    constants |= {} if kind == "keys" else {"ragged": False}
    constants |= {} if kind == "queries" else {"group": 1}
    constants |= more | ({"shared": BLOCK, "peak": PEAK} if narrow else {})
    return kind, head_dim, ring.block, narrow, even, constants


def _loops(ttgir: str) -> list[list[str]]:
    """The lines of every loop that has no loop within, from the one that says what it carries on."""
    lines, found = ttgir.splitlines(), []
    for begin, line in enumerate(lines):
        if "scf.for" in line:
            indent = line[: len(line) - len(line.lstrip())]
            end = next(i for i in range(begin + 1, len(lines)) if lines[i].startswith(indent + "}"))
            if not any("scf.for" in each for each in lines[begin + 1 : end]):
                found.append(lines[begin:end])
    return found


def _check_rings(ttgir: str, numbers: int) -> None:
    """Every loop goes round its ring: Triton keeps a variable out of a loop that it takes for unchanged.

    It does so where the loop assigns the value that the variable came with, as in ``previous, slot = slot, other``
    after ``previous = slot``, and the loop then stays at the first slot.  ``numbers``: slot, phase and previous slot.
    """
    loops = _loops(ttgir)
    assert len(loops) == 3  # of two warpgroups and of the warp that loads
    for head, *body in loops:
        made = {match[1] for match in (re.match(r"\s*(%[\w#]+)(?::\d+)? =", line) for line in body) if match}
        barriers = [match[1] for match in map(re.compile(r"(?:arrive|wait)_barrier (%\w+)").search, body) if match]
        assert len(barriers) >= 1
        assert set(barriers) <= made, "a barrier of the first slot, in every turn"
        if any("warp_group_dot" in line for line in body):
            carried = head[head.index("->") :]
            assert len(re.findall(r"\bi32\b", carried[: carried.rindex(":")])) == numbers


def test_the_matrix_products_stay_asynchronous_and_nothing_spills(tmp_path: Path) -> None:
    if not all((TOOLS / name).exists() for name in ("ptxas", "cuobjdump")):
        pytest.skip("this Triton brings no ptxas")
    kernels = (
        _kernel("keys", 128, Ring(64, 4)),
        _kernel("keys", 128, Ring(64, 3), right=True, rotated=True, group=4),
        _kernel("keys", 64, Ring(64, 4), right=True, left=True),
        _kernel("queries", 128, Ring(64, 6), left=True, right=True, ragged=True, rotated=True),
        _kernel("queries", 64, Ring(64, 4)),
        _kernel("keys", 128, Ring(64, 5), True, rotated=True),
        _kernel("keys", 64, Ring(64, 4), True, right=True, left=True, group=4),
        _kernel("keys", 128, Ring(64, 4), True, right=True, rotated=True),
        _kernel("queries", 128, Ring(64, 6), True, rotated=True),
        _kernel("queries", 128, Ring(64, 4), True, right=True, rotated=True),
        _kernel("queries", 64, Ring(64, 4), True, left=True, right=True, ragged=True),
        _kernel("all", 128, Ring(64, 2)),
        _kernel("all", 128, Ring(64, 2), right=True, rotated=True, group=4),
        _kernel("all", 64, Ring(64, 2), left=True, right=True, ragged=True, rotated=True),
    )
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(TOOLS)], input=json.dumps(kernels), env=environment | {
            "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for found, (kind, head_dim, block, narrow, _, constants) in zip(json.loads(done.stdout), kernels, strict=True):
        assert isinstance(constants, dict)
        assert "C75" not in found["said"], found["said"]  # wgmma that ptxas waits for one by one
        # In e4m3, and where all is in one, a mask's bounds and what waits for the end may lie in memory at head
        # dimension 128.
        spilled = [int(x) for x in re.findall(r"(\d+) bytes spill stores", found["said"])]
        more = 240 if kind == "all" else 96 if narrow and constants["right"] else 0
        assert max(spilled) <= (more if head_dim == 128 else 0)
        assert int(found["shared"]) <= SHARED_MEMORY
        _check_rings(found["ttgir"], 2 if (kind, narrow) in (("keys", True), ("all", False)) else 3)
        # S of the first block, dP and S in the loop, 32 of the head dimension at a time; the sums, 16 or (in e4m3) 32
        # tokens and 64 columns at a time, in the loop, and the last block's dK or dQ behind it, unless dK waits for
        # nothing; where all is in one, dQ of 128 keys in the loop and behind it; the rotation.  For each of two
        # warpgroups.
        tokens = block // 32 * (head_dim // 64) if narrow else block // 16
        sums = 3 if kind != "queries" and not narrow else 2
        turns = head_dim // 16 if constants["rotated"] else 0
        assert len(re.findall("QGMMA", found["code"])) == 2 * (3 * head_dim // 32 + (sums * tokens if narrow else 0))
        both = 2 * 128 // 16 if kind == "all" else 0
        assert len(re.findall("HGMMA", found["code"])) == 2 * (turns + both + (0 if narrow else sums * tokens))
