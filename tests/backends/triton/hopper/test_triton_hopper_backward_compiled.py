"""The compiled code of the backward's Hopper kernels: asynchronous products, no spills, advancing rings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.6")

from compiled_for_hopper import assembly_of

from attnbench.backends.triton.backward.layout import BLOCK, PEAK
from attnbench.backends.triton.backward.tiles import Ring
from attnbench.backends.triton.forward.hopper import launch as forward_hopper_launch

# The kernels that json on stdin describes, and how many registers each may have.
SOURCES = """
from attnbench.backends.triton.backward.hopper.launch import _launches

def sources(kernels):
    for kind, d, block, narrow, maxnreg, constants in kernels:
        kernel = _launches(kind, narrow)._kernel
        whole, d = d, 64 if kind in ("pieces", "values") else d
        by_query, by_key = (64, block) if kind == "queries" else (block, 64)
        types = dict.fromkeys(("q", "do"), descriptor("fp8e4nv", by_query, d))
        types |= dict.fromkeys(("k", "v"), descriptor("fp8e4nv", by_key, d))
        types |= dict.fromkeys(("q_wide", "do_wide", "k_wide"), descriptor("bf16", block, d))
        types |= dict(dq_sums=descriptor("bf16", 64, d * block // 128))
        if kind == "pieces":  # of 96 columns 64 and 32, of 192 of Q and K alone 128 and 64
            both = constants["values_in_pieces"]
            values, (first, more) = constants["with_values"], (64, 32) if whole == 96 else (128, 64)
            types |= dict.fromkeys(("q", "k"), descriptor("fp8e4nv", 64, first))
            types |= dict.fromkeys(("more_q", "more_k"), descriptor("fp8e4nv", 64, more))
            types |= dict.fromkeys(("do", "v"), descriptor("fp8e4nv", 64, first))
            types |= dict.fromkeys(("more_do", "more_v"), descriptor("fp8e4nv", 64, more if both else first))
            types |= dict(q_wide=descriptor("bf16", 64, first), more_q_wide=descriptor("bf16", 64, more))
            types |= dict(do_wide=descriptor("bf16", 64, first))
            types |= dict(more_do_wide=descriptor("bf16", 64, more if both else first))
            parts = (first, more) if values else (first // 2, more // 2)
            types |= dict(zip(("dq_sums", "more_dq_sums"), (descriptor("bf16", 64, each) for each in parts)))
        if kind == "values":
            types |= dict.fromkeys(("q", "k"), descriptor("fp8e4nv", 64, 128))
            types |= dict.fromkeys(("more_q", "more_k"), descriptor("fp8e4nv", 64, 64))
            types |= dict(do_wide=descriptor("bf16", 64, 128), more_do_wide=descriptor("bf16", 64, 64))
        types |= dict.fromkeys(("q_across", "do_across", "k_across"), descriptor("fp8e4nv", d, block))
        types |= dict.fromkeys(("row_values", "descales", "factors", "k_descale", "v_descale"), "*fp32")
        types |= dict(turn=descriptor("bf16", 64 if narrow else d, d))
        types |= dict.fromkeys(("dq_out", "dk_out", "dv_out"), "*bf16") | dict(rows=descriptor("fp32", block))
        types |= dict(scale="fp32", exponent="fp32")
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
                   if signature[name].startswith("*")}
        source = GluonASTSource(kernel, signature, {(names.index(name),): x for name, x in constants.items()}, aligned)
        yield source, maxnreg
"""


def _kernel(kind: str, head_dim: int, ring: Ring, narrow: bool = False, **more: object) -> tuple[object, ...]:
    even, most = forward_hopper_launch.registers()
    constants: dict[str, object] = {"size": head_dim, "left": False, "right": False, "registers": most}
    if kind == "values":
        constants = {"left": False, "right": False, "registers": most, "stages": ring.stages, "size_v": 128}
        constants |= {"group": 1, "shares": 1, "ragged": False, "tiles": None, "aligned": False}
        constants |= {"values_in_pieces": False}
        return kind, head_dim, ring.block, narrow, even, constants | more
    if kind == "pieces":
        constants |= {"with_values": head_dim == 96, "values_in_pieces": head_dim == 96}
    else:
        constants |= {"rotated": False}
    constants |= {"shares": 1} if kind in ("all", "pieces") else {"stages": ring.stages}
    constants |= {} if kind == "keys" else {"ragged": False}
    constants |= {} if kind == "queries" else {"group": 1, "size_v": 128 if head_dim == 192 else head_dim}
    if kind in ("all", "pieces"):  # as ``Layout`` decides
        constants |= {"tiles": None, "aligned": False}
        constants |= {"scaled_up": not more.get("left") and (head_dim in (64, 192) or not more.get("right"))}
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
    after ``previous = slot``, and the loop then stays at the first slot.  ``numbers``: slot, phase and previous slot;
    or the row of a block, that of the one before and that of the query head.
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


def _mixes(code: str) -> list[bool]:
    """Of each warpgroup whether exponentials stand among the products that begin a turn, dP and dK of 128 columns."""
    names = {"QGMMA.64x64x32": "S", "HGMMA.64x128x16": "K", "MUFU.EX2": "e"}
    found = re.findall(rf"\s({'|'.join(map(re.escape, names))})", code)
    turns = re.findall(r"SSSS((?:Ke*){3}K)e", "".join(names[each] for each in found))
    return ["e" in turn for turn in turns]


# One with its sums in e4m3 and the fused one, which has most in it, at the head dimension that compiles sooner.
KERNELS = (
    _kernel("queries", 64, Ring(64, 4), True, left=True, right=True, ragged=True),
    _kernel("all", 64, Ring(128, 2), left=True, right=True, ragged=True, rotated=True),
)
OTHERS = (
    _kernel("keys", 64, Ring(64, 4), right=True, left=True),
    _kernel("queries", 64, Ring(64, 4)),
    _kernel("keys", 64, Ring(64, 4), True, right=True, left=True, group=4),
    _kernel("keys", 128, Ring(64, 3), right=True, rotated=True, group=4),
    _kernel("queries", 128, Ring(64, 4), True, right=True, rotated=True),
    _kernel("all", 128, Ring(64, 2), right=True, rotated=True, group=2, shares=2),
    _kernel("keys", 128, Ring(64, 4)),
    _kernel("queries", 128, Ring(64, 6), left=True, right=True, ragged=True, rotated=True),
    _kernel("keys", 128, Ring(64, 5), True, rotated=True),
    _kernel("keys", 128, Ring(64, 4), True, right=True, rotated=True),
    _kernel("queries", 128, Ring(64, 6), True, rotated=True),
    _kernel("all", 128, Ring(64, 2)),
    _kernel("all", 128, Ring(64, 2), rotated=True),
    _kernel("all", 128, Ring(64, 2), left=True, right=True, ragged=True, group=4),
)
_FULLER: dict[str, object] = {"left": True, "ragged": True, "group": 4, "shares": 2}
_V_192: dict[str, object] = {"values_in_pieces": True, "size_v": 192}
PIECES = (
    _kernel("pieces", 96, Ring(64, 2), right=True),
    _kernel("pieces", 96, Ring(64, 2), right=True, **_FULLER),
    _kernel("pieces", 192, Ring(64, 2), right=True),
    _kernel("pieces", 192, Ring(64, 2), right=True, **_FULLER),
    _kernel("pieces", 192, Ring(64, 2), right=True, **_V_192),
    _kernel("pieces", 192, Ring(64, 2), right=True, **_V_192, **_FULLER),
)
VALUES = (
    _kernel("values", 192, Ring(64, 5), right=True),
    _kernel("values", 192, Ring(64, 5), right=True, **_FULLER),
    _kernel("values", 192, Ring(64, 4), right=True, **_V_192, **_FULLER),
)


@pytest.mark.parametrize(
    "kernels", [KERNELS, pytest.param(OTHERS, marks=pytest.mark.exhaustive)], ids=["fused and narrow", "others"]
)
def test_the_matrix_products_stay_asynchronous_and_nothing_spills(
    kernels: tuple[tuple[object, ...], ...], tmp_path: Path
) -> None:
    made = assembly_of(SOURCES, kernels, tmp_path)
    for found, (kind, head_dim, block, narrow, _, constants) in zip(made, kernels, strict=True):
        assert isinstance(constants, dict)
        # In e4m3 and under a window, a mask's bounds and what waits for the end may lie in memory with D = 128.  With a
        # causal mask alone nothing may: one register in memory made the fused backward 4 % slower on an H200.
        spilled = [int(x) for x in re.findall(r"(\d+) bytes spill stores", found["stderr"])]
        more = (24 if constants["left"] else 0) if kind == "all" else (96 if constants["right"] else 8) if narrow else 0
        assert max(spilled) <= (more if head_dim == 128 else 0)
        grouped = constants.get("group", 1) > constants.get("shares", 1)  # query heads, one after the other
        _check_rings(found["ttgir"], 2 if kind == "keys" and narrow else 2 + grouped if kind == "all" else 3)
        # S of the first block, dP and S in the loop, 32 of the head dimension at a time; the sums, 16 or (in e4m3) 32
        # tokens and 64 columns at a time, in the loop, and the last block's dK or dQ behind it, unless dK waits for
        # nothing; where all is in one, dQ of 128 keys in the loop and behind it; the rotation, which is undone in K too
        # where all is in one, there by parts of the columns.  For each of two warpgroups.
        tokens = block // 32 * (head_dim // 64) if narrow else block // 16
        sums = 3 if kind != "queries" and not narrow else 2
        turns = head_dim // 16 * (1 + 128 // block if kind == "all" else 1) if constants["rotated"] else 0
        assert len(re.findall("QGMMA", found["code"])) == 2 * (3 * head_dim // 32 + (sums * tokens if narrow else 0))
        both = 2 * 128 // 16 if kind == "all" else 0
        assert len(re.findall("HGMMA", found["code"])) == 2 * (turns + both + (0 if narrow else sums * tokens))
        if kind == "all":  # dQ is added block by block, in the loop and behind it, and dS is laid down by stmatrix
            assert len(re.findall(r"UTMAREDG\.2D\.ADD", found["code"])) == 2 * 2
            assert "STSM" in found["code"]
        if kind == "all" and head_dim == 128 and not constants["right"]:  # the fastest of all orders, as measured
            assert sorted(_mixes(found["code"])) == [False, True]


@pytest.mark.exhaustive
def test_heads_in_two_pieces_stay_asynchronous_and_keep_their_sums_in_registers(tmp_path: Path) -> None:
    """What may lie in memory are a mask's bounds, places and what waits for the end: no sum has so few numbers."""
    for found, kernel in zip(assembly_of(SOURCES, PIECES, tmp_path), PIECES, strict=True):
        spilled = [int(x) for x in re.findall(r"(\d+) bytes spill stores", found["stderr"])]
        both = kernel[-1]["values_in_pieces"]
        assert max(spilled) <= (0 if kernel[1] == 96 else 212 if both else 148)
        _check_rings(found["ttgir"], 2 + (kernel[-1]["group"] > 1))
        # S of the first block and in the loop and dP, 32 columns at a time; dK of 64 queries and dQ of 128 keys, in the
        # loop and behind it, and dV in the loop; all sums in two pieces, except that of 96 columns' dQ each warpgroup
        # has one.
        scores, sums, adds = (3 + 3 + 3, 2 * (2 * 4 + 8) + 2 * 4, 2)
        if kernel[1] == 192:
            scores, sums, adds = 6 + 6 + (6 if both else 4), 2 * 2 * (4 + 8), 4
        assert len(re.findall("QGMMA", found["code"])) == 2 * scores
        assert len(re.findall("HGMMA", found["code"])) == 2 * sums
        assert len(re.findall(r"UTMAREDG\.2D\.ADD", found["code"])) == 2 * adds
        assert "STSM" in found["code"]


@pytest.mark.exhaustive
def test_the_kernel_of_dv_stays_asynchronous_and_spills_nothing(tmp_path: Path) -> None:
    for found, kernel in zip(assembly_of(SOURCES, VALUES, tmp_path), VALUES, strict=True):
        spilled = [int(x) for x in re.findall(r"(\d+) bytes spill stores", found["stderr"])]
        assert max(spilled) == 0
        _check_rings(found["ttgir"], 4)  # with the block's first query
        # S of the first block and in the loop, 32 of 192 columns at a time; dV of 64 queries, in it and behind it, in
        # one piece or two.
        assert len(re.findall("QGMMA", found["code"])) == 2 * 2 * 6
        assert len(re.findall("HGMMA", found["code"])) == 2 * 2 * 4 * (2 if kernel[-1]["values_in_pieces"] else 1)
