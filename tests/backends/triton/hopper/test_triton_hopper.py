"""The Hopper kernel of ``triton`` without a GPU: the specs that it serves and its compiled code.

What it computes is tested in test_triton_hopper_forward.py, emulated, and in tests/gpu.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiled_for_hopper import assembly_of
from dense import dense_attention, relative_l2

from attnbench.kernels.capabilities import Device
from attnbench.problem.lengths_kind import LengthsKind
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

pytest.importorskip("triton", minversion="3.6")

import triton

from attnbench.backends.triton.forward import launch as triton_forward
from attnbench.backends.triton.forward.extent import Extent
from attnbench.backends.triton.forward.hopper import launch as hopper
from attnbench.backends.triton.forward.launch import Operand, interleaved, laid_out, transposed
from attnbench.backends.triton.forward.tiles import ONE_PASS, TILES, Tile, TileKey, chunks_of, one_pass_tile, tile_of
from attnbench.backends.triton.interpreter import interpreted

SPEC = AttentionSpec.make(batch=1, heads=2, seqlen_q=70, head_dim=64, mask=Mask(right=0))
TILE = Tile(128, 128, 4, 3, interleaved=True, hopper=True)
CPU, GPU = torch.device("cpu"), torch.device("cuda")

# The kernels that json on stdin describes, and how many registers each may have.
SOURCES = """
from attnbench.backends.triton.forward.hopper.kernel import triton_fp8_attention_forward_hopper as kernel

def sources(kernels):
    for width, height, block_n, bits, maxnreg, constants in kernels:
        types = dict(q=descriptor("fp8e4nv" if bits == 8 else "bf16", 64, width),
                     k=descriptor("fp8e4nv", block_n, width), v=descriptor("fp8e4nv", height, block_n),
                     out="*bf16", lse="*fp32", q_factors="*fp32", k_factors="*fp32", v_factors="*fp32", scale="fp32",
                     softcap="fp32")
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        known = ("out", "lse") if constants["eights"] else ("out", "lse", "head_dim_v")
        aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in known}
        source = GluonASTSource(kernel, signature, {(names.index(name),): x for name, x in constants.items()}, aligned)
        yield source, maxnreg
"""


def test_each_program_has_one_tile_from_the_declared_number_of_keys() -> None:
    """Three tiles of 128 queries for each of 2 x 2 heads."""
    tiles = 2 * Extent(2, 257, 1000, None).tiles(128)
    found = [hopper.programs_of(TILE._replace(alone_from=keys), tiles, 1000, 5) for keys in (None, 1001, 1000, 0)]
    assert found == [5, 5, 12, 12]
    assert hopper.programs_of(TILE, tiles, 1000, 132) == 12
    assert hopper.programs_of(TILE._replace(alone_from=0), tiles, None, 5) == 5  # of a table


def test_every_hopper_tile_is_valid_for_the_kernel() -> None:
    tiles = [tile for tile in (*TILES.values(), *ONE_PASS.values()) if tile.hopper]
    assert tiles
    assert all(tile.block_m == hopper.BLOCK_M and tile.interleaved and tile.tma for tile in tiles)


@pytest.mark.parametrize(
    ("seqlen", "mask", "block"),
    [(257, Mask(), 128), (512, Mask(), 256), (1100, Mask(), 128), (512, Mask(right=0), 128), (4096, Mask(right=0), 256),
     (8192, Mask(1023, 0), 128), (8192, Mask(4095, 0), 256)],
)  # fmt: skip
def test_blocks_of_keys_are_shorter_where_longer_ones_would_compute_many_in_vain(
    seqlen: int, mask: Mask, block: int
) -> None:
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=seqlen, head_dim=128, mask=mask)
    assert one_pass_tile(spec).block_n == tile_of(spec, (9, 0), per_key=False).block_n == block
    alike = replace(spec, lengths=LengthsKind(batch="packed", total_q=seqlen, total_kv=seqlen))
    assert one_pass_tile(alike).block_n == block


@pytest.mark.parametrize(
    ("sequences", "longest", "total", "mask", "block"),
    [(213, 640, 32768, Mask(), 128), (123, 2048, 65536, Mask(), 256), (123, 2048, 65536, Mask(right=0), 128),
     (61, 4096, 65536, Mask(right=0), 256), (27, 8192, 50000, Mask(1023, 0), 128),
     (15, 16384, 65536, Mask(4095, 0), 256)],
)  # fmt: skip
def test_blocks_of_keys_are_shorter_in_packed_batches_of_short_sequences(
    sequences: int, longest: int, total: int, mask: Mask, block: int
) -> None:
    """As was faster on an H200 with lengths of a lognormal distribution."""
    lengths = LengthsKind(batch="packed", square=True, total_q=total, total_kv=total)
    spec = AttentionSpec.make(batch=sequences, heads=2, seqlen_q=longest, head_dim=128, mask=mask, lengths=lengths)
    assert one_pass_tile(spec).block_n == tile_of(spec, (9, 0), per_key=False).block_n == block


def test_only_supported_specs_are_served() -> None:
    assert hopper.serves(SPEC, per_token=False)
    assert not hopper.serves(SPEC, per_token=True)
    assert hopper.serves(replace(SPEC, softcap=5.0), per_token=False)
    assert not hopper.serves(replace(SPEC, scale=-0.1), per_token=False)


@pytest.mark.parametrize(
    ("capability", "version", "runs"),
    [((9, 0), "3.6.0", True), ((9, 0), "3.10.1", True), ((9, 0), "3.5.1", False), ((8, 9), "3.6.0", False),
     ((10, 0), "3.6.0", False), ((9, 0), "main", False)],
)  # fmt: skip
def test_the_kernel_needs_hopper_and_a_supported_triton(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: str, runs: bool
) -> None:
    monkeypatch.setattr(hopper, "describe", lambda device: Device(device.type, "a GPU", capability))
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(hopper, "recent", hopper.recent.__wrapped__)
    assert hopper.runs_on(GPU) is runs
    assert not hopper.runs_on(CPU)


@pytest.mark.skipif(not interpreted(), reason="kernels are compiled here, which the tests in tests/gpu run")
def test_the_plain_kernel_serves_what_the_hopper_kernel_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(1, 2, 70, 64, generator=generator).to(torch.float8_e4m3fn) for _ in range(3)]
    one = torch.ones(1, 1, 1, 1)
    q, k, v = (Operand(x, one) for x in data)
    native = laid_out(SPEC, TILE, q, k, Operand(interleaved(transposed(v.data)), one))
    assert not native.tile.hopper
    assert native.tile.interleaved
    exact, _ = dense_attention(*(x.double() for x in data), SPEC)
    assert relative_l2(triton_forward.attend(native).out, exact) < 0.05


Kernel = tuple[int, int, int, int, int, dict[str, object]]


def _kernel(head_dim: int, tile: Tile, bits: int = 8, head_dim_v: int | None = None, **more: object) -> Kernel:
    """``bits``: of Q."""
    even, most = hopper.registers()
    size_v = head_dim if head_dim_v is None else head_dim_v
    chunks, chunks_v = chunks_of(head_dim), chunks_of(size_v)
    constants = {
        "stages": tile.stages, "chunks": chunks.number, "chunks_v": chunks_v.number,
        "part": hopper.part_of(tile, size_v), "turns": tile.turns,
        "head_dim": head_dim, "left": False, "right": False, "full_width": size_v == chunks_v.size, "eights": False,
        "registers": most, "aligned": False, "tiles": None,
        "softcapped": False,
    }  # fmt: skip
    return chunks.width, chunks_v.width, tile.block_n, bits, even, constants | more


WIDE = TILES[TileKey((9, 0), 128, "none", False)]
KERNELS = (_kernel(128, ONE_PASS[128, False], 16, left=True, right=True),)
OTHERS = (
    _kernel(128, WIDE, left=True, right=True),
    _kernel(64, TILE, head_dim_v=56, right=True, eights=True),
    _kernel(128, WIDE),
    _kernel(128, ONE_PASS[128, True], 16),
    _kernel(192, TILES[TileKey((9, 0), 192, "causal", False)], head_dim_v=128, right=True),
    _kernel(192, ONE_PASS[192, False], 16, head_dim_v=128, right=True),
    _kernel(96, WIDE, right=True),
    _kernel(128, WIDE, right=True, softcapped=True),
)
OF_256 = tuple(
    kernel
    for causal, mask in ((False, "none"), (True, "causal"))
    for kernel in (
        _kernel(256, TILES[TileKey((9, 0), 256, mask, False)], right=causal),
        _kernel(256, ONE_PASS[256, not causal], 16, right=causal),
        *([_kernel(256, TILES[TileKey((9, 0), 256, mask, False)], left=True, right=True, softcapped=True)] * causal),
    )
)


@pytest.mark.parametrize(
    "kernels",
    [KERNELS, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (OTHERS, OF_256))],
    ids=["masked", "others", "heads of 256"],
)
def test_the_matrix_products_stay_asynchronous_and_nothing_spills(kernels: tuple[Kernel, ...], tmp_path: Path) -> None:
    for found, kernel in zip(assembly_of(SOURCES, kernels, tmp_path), kernels, strict=True):
        width, height, block_n, bits, _, constants = kernel
        if kernels is OF_256:  # which has fewer registers than it wants
            continue
        spilled = [int(x) for x in re.findall(r"(\d+) bytes spill", found["stderr"])]
        assert max(spilled) <= (8 if constants["chunks"] > 1 else 0)  # between tiles
        # Q·Kᵀ of the first block and of the next, P·V of a block and of the last, 32 numbers of the sum at a time:
        # 32 of the head dimension in Q·Kᵀ, 32 keys in P·V.
        head_dim, parts = width * constants["chunks"], height * constants["chunks_v"] // constants["part"]
        products = 2 * 2 * (head_dim + parts * block_n) // 32
        assert len(re.findall(r"QGMMA", found["code"])) == products
        # Q's own bytes are taken apart once a tile: one instruction for two columns.
        apart = 0 if bits == 8 else head_dim // 2
        assert len(re.findall(r"PRMT", found["code"])) <= apart + 8, "bytes of P change their places"
