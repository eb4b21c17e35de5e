"""The emulated Hopper forward: compared with dense FP64 on its operands, for any asynchronous order."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from dense import dense_attention, relative_l2
from hopper_forward import forward_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Problem, tensors_of

from attnbench.backends.triton import TritonForward, TritonOnePass
from attnbench.backends.triton.forward.tiles import Tile, one_pass_tile
from attnbench.backends.triton.interpreter import interpreted
from attnbench.kernels.contract import Inputs, Operands, Result
from attnbench.problem.fp8 import Recipe, quantise
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec
from examples import every_pair, examples

pytest.importorskip("triton", minversion="3.6")
if not interpreted():
    pytest.skip("kernels are compiled here, which the tests in tests/gpu run", allow_module_level=True)


SMALL = Tile(128, 64, 4, 2, parts=2, interleaved=True, hopper=True, turns=True)
LONE = Tile(128, 128, 4, 3, interleaved=True, hopper=True, alone_from=0)
_LATE: list[bool] = [True]


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    with forward_on_cpu(lambda: _LATE[0]):
        yield
    _LATE[0] = True


def tensors(spec: AttentionSpec) -> list[torch.Tensor]:
    return tensors_of(Problem(spec, "bhsd", False, 0))[:3]


def assert_agrees(operands: Operands, result: Result, off: float = 0.04) -> None:
    """Asserts agreement up to the rounding of P, and an exact log-sum-exp, or one to 11 bits of the soft cap."""
    assert operands.native.tile.hopper
    out, lse = dense_attention(*operands.tensors(torch.float64), operands.spec)
    assert relative_l2(result.out, out) <= off
    seen = lse > -math.inf
    assert torch.equal(result.lse > -math.inf, seen)
    allowed = 2e-5 + operands.spec.softcap * 2**-11
    torch.testing.assert_close(result.lse[seen].double(), lse[seen], rtol=1e-5, atol=allowed)


MASKS = st.sampled_from(
    [Mask(), Mask(right=0), Mask(right=0, alignment="bottom-right"), Mask(left=90, right=3), Mask(left=70)]
)


@given(
    spec=st.builds(
        lambda mask, **fields: AttentionSpec.make(mask=mask, heads=4, **fields),
        mask=MASKS,
        batch=st.integers(1, 2),
        kv_heads=st.sampled_from([1, 2, 4]),
        seqlen_q=st.integers(1, 200),
        seqlen_kv=st.integers(1, 300),
        head_dim=st.sampled_from([40, 64, 128]),
        head_dim_v=st.sampled_from([24, 36, 64, 128]),
        dtype=st.sampled_from(["bf16", "fp16"]),
    ),
    kernel=st.sampled_from(
        [TritonOnePass(SMALL), TritonOnePass(LONE), TritonForward("fp8-head", SMALL), TritonForward("fp8", LONE)]
    ),
    late=st.booleans(),
)
@settings(max_examples=examples(4, 50), deadline=None)
def test_the_kernel_agrees_with_exact_attention_on_its_quantised_operands(
    spec: AttentionSpec, kernel: TritonForward, late: bool
) -> None:
    _LATE[0] = late
    operands = kernel.prepare(Inputs.of(tensors(spec)), spec)
    assert_agrees(operands, kernel.run(operands), 0.06)


@pytest.mark.parametrize(
    ("head_dim", "late", "mask"),
    [
        (64, True, Mask(right=0)),
        (128, False, Mask()),
        *(pytest.param(256, True, mask, marks=pytest.mark.exhaustive) for mask in (Mask(), Mask(right=0))),
    ],
    ids=str,
)
def test_committed_one_pass_tiles_agree_with_fp64(head_dim: int, late: bool, mask: Mask) -> None:
    _LATE[0] = late
    spec = AttentionSpec.make(batch=1, heads=1, seqlen_q=260, seqlen_kv=400, head_dim=head_dim, mask=mask)
    kernel = TritonOnePass()
    operands = kernel.prepare(Inputs.of(tensors(spec)), spec)
    assert operands.native.tile == one_pass_tile(spec)
    assert_agrees(operands, kernel.run(operands))


@pytest.mark.parametrize(
    ("kernel", "head_dim", "head_dim_v", "mask"),
    [
        (TritonForward("fp8-head", SMALL), 192, 128, Mask(right=0)),
        pytest.param(TritonOnePass(), 192, 80, Mask(), marks=pytest.mark.exhaustive),
        (TritonOnePass(), 80, 96, Mask(right=0)),
    ],
    ids=str,
)
def test_head_dimensions_that_are_not_powers_of_two_agree_with_fp64(
    kernel: TritonForward, head_dim: int, head_dim_v: int, mask: Mask
) -> None:
    """Whose keys lie beside another head's, so that what is behind a head is not zero."""
    spec = AttentionSpec.make(
        batch=1, heads=2, seqlen_q=40, seqlen_kv=150, head_dim=head_dim, head_dim_v=head_dim_v, mask=mask
    )
    beside = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(spec))
    operands = kernel.prepare(Inputs(*beside), spec)
    assert_agrees(operands, kernel.run(operands))


@pytest.mark.parametrize("head_dim", [72, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_queries_beside_another_heads_are_read_in_place_and_alone(head_dim: int) -> None:
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=70, seqlen_kv=90, head_dim=head_dim)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(spec))
    kernel, found = TritonOnePass(), []
    for other in (0.5, math.nan):
        q[:, 1] = other
        operands = kernel.prepare(Inputs(q, k, v), spec)
        assert operands.native.begins[0] == q.data_ptr()
        found.append(kernel.run(operands).out[:, 0])
    assert torch.equal(*found)
    out, _ = dense_attention(*operands.tensors(torch.float64), spec)
    assert relative_l2(found[0], out[:, 0]) <= 0.04


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize(("mask", "late"), [(Mask(), True), (Mask(right=0), False), (Mask(left=40, right=3), True)])
def test_capped_scores_agree_with_fp64(mask: Mask, late: bool, softcap: float) -> None:
    """Masked keys stay hidden: their scores must not become those of the cap."""
    _LATE[0] = late
    spec = AttentionSpec.make(
        batch=1, heads=2, kv_heads=1, seqlen_q=150, seqlen_kv=280, head_dim=64, mask=mask, softcap=softcap, scale=0.5
    )
    q, k, v = tensors(spec)
    for kernel in (TritonForward("fp8", SMALL), TritonForward("fp8-head", LONE)):
        operands = kernel.prepare(Inputs(q * 4, k, v), spec)
        assert_agrees(operands, kernel.run(operands))


def test_the_kernel_quantises_queries_like_the_token_recipe() -> None:
    """With one key the log-sum-exp is the score: a number of Q that is rounded otherwise changes it by 0.001 or so."""
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=140, seqlen_kv=1, head_dim=64)
    q, k, v = tensors(spec)
    q[0, 0, 3] = 0.0
    q[0, 0, 4] *= 1e-38
    q[0, 1, 5] *= 1e30
    kernel = TritonOnePass(SMALL)
    found = kernel.run(kernel.prepare(Inputs(q, k, v), spec)).lse
    assert found is not None
    rows, keys = quantise(q, Recipe("token")), quantise(k, Recipe("block"))
    scores = (rows.dequantised(torch.float64) @ keys.dequantised(torch.float64).mT)[..., 0] * spec.scale
    torch.testing.assert_close(found.double(), scores, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize(
    "sizes",
    [(1.0, 1e-6, 0.0, 1e6), (1e30, 1e-30, 1e30, 1.0)],
    ids=str,
)
def test_blocks_of_values_of_any_magnitude_have_their_own_scales(sizes: tuple[float, ...]) -> None:
    """Rows that see one block alone are right in its own size, down to 2^-70 of the largest value of the head."""
    spec = AttentionSpec.make(batch=1, heads=1, seqlen_q=256, head_dim=64, mask=Mask(left=20, right=0))
    q, k, v = tensors(spec)
    for i, size in enumerate(sizes):
        v[:, :, 64 * i : 64 * (i + 1)] *= size
    kernel = TritonOnePass(SMALL)
    operands = kernel.prepare(Inputs(q, k, v), spec)
    found = kernel.run(operands).out
    exact, _ = dense_attention(*operands.tensors(torch.float64), spec)
    assert bool(torch.isfinite(found).all())
    for i in range(4):
        rows = slice(64 * i + 21, 64 * (i + 1))  # that see this block alone
        off = (found[:, :, rows].double() - exact[:, :, rows]).norm()
        assert off <= 0.05 * exact[:, :, rows].norm() + 2.0**-70 * v.double().abs().max() * (
            max(sizes) > 1e20 * sizes[i]
        )


def test_scores_that_underflow_fp32_are_equal() -> None:
    """Each row's factor is 0 in FP32, and the mask's minus infinity times 0 would be no number."""
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=130, head_dim=64, mask=Mask(right=0))
    q, k, v = tensors(spec)
    kernel = TritonOnePass(SMALL)
    operands = kernel.prepare(Inputs(q * 1e-30, k * 1e-30, v), spec)
    assert_agrees(operands, kernel.run(operands))


@pytest.mark.parametrize(("which", "what"), every_pair([0, 1, 2], [math.nan, math.inf, -math.inf]))
def test_nonfinite_values_propagate_to_the_output(which: int, what: float) -> None:
    """In a row of Q for that row; in K and V for every row that sees the block."""
    spec = AttentionSpec.make(batch=1, heads=2, kv_heads=2, seqlen_q=80, seqlen_kv=80, head_dim=64)
    operands = tensors(spec)
    operands[which][0, 1, 70, 5] = what
    kernel = TritonOnePass(SMALL)
    out = kernel.run(kernel.prepare(Inputs.of(operands), spec)).out
    assert bool(torch.isfinite(out[0, 0]).all())
    hit = ~torch.isfinite(out[0, 1]).all(-1)
    if which == 0:
        assert hit.nonzero().flatten().tolist() == [70]
    else:
        assert bool(hit.all())
