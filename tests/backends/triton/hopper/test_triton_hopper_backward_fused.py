"""The fused Hopper kernel on a CPU: dO, K and dQ that it reads and writes in place, without copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import dense
import pytest
import torch
from backward_problems import check, interleaved_heads, make, misaligned, rounded_to_e4m3, saved, with_row_padding
from hopper_backward import on_cpu, sums_off
from torch import Tensor

from attnbench import AttentionSpec, Mask
from attnbench.kernels.contract import Saved
from attnbench.problem.fp8 import Recipe
from examples import every_pair

pytest.importorskip("triton", minversion="3.6")

from attnbench.backends.triton.backward.contract import TritonBackward
from attnbench.backends.triton.backward.operands import Prepared
from attnbench.backends.triton.backward.tiles import Ring, Tile, Tiles
from attnbench.backends.triton.interpreter import interpreted
from attnbench.backends.triton.launching import Launch

pytestmark = pytest.mark.skipif(not interpreted(), reason="the passes before the kernel run here")
HEAD, ROTATED = Recipe("head"), Recipe("head", rotation="hadamard")
ALLOWED = 0.01  # as for the plain kernels with sums in bf16
_TILE = Tile(64, 64, 4, 2, Ring(64, 2))
KERNEL = TritonBackward("triton:fp8", narrow=False, declared_error=0.1, tiles=Tiles(_TILE, _TILE, fused=True))
# P is scaled up by dO's descale; or each turn reads that as a factor, and dO where it lies; or Q's descale as well.
_WAYS = {}, {"head_dim": 128, "mask": Mask(right=0)}, {"head_dim": 128, "mask": Mask(left=40, right=0)}
WAYS = pytest.mark.parametrize("way", _WAYS, ids=["scaled up", "by factors", "by Q's descales"])
_MODES = random.Random(0)
Ran = list[tuple[str, Prepared]]


@pytest.fixture
def kernels_run() -> Iterator[Ran]:
    """The Hopper kernels that ran, with their inputs."""
    found: Ran = []
    with on_cpu(lambda: _MODES.random() < 0.5, lambda *args: found.append(args)):
        yield found


@pytest.fixture
def launched_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were launched."""
    found, start = [], Launch.__call__

    def starting(launch: Launch, *args: Any) -> None:
        found.append(launch.kernel.__name__)
        start(launch, *args)

    monkeypatch.setattr(Launch, "__call__", starting)
    return found


def problem(seqlen_q: int = 256, recipe: Recipe = HEAD, **more: Any) -> tuple[Saved, Tensor]:
    """The tensors saved by a forward, and an output gradient whose magnitude changes every 128 queries."""
    spec, (q, k, v, grad) = make(seqlen_q, 150, **{"head_dim": 64, **more})
    grad = grad * 2.0 ** -(torch.arange(seqlen_q) // 128 * 3)[:, None]
    return saved(spec, q, k, v, (recipe, recipe, HEAD)), grad.to(torch.bfloat16)


def check_fused(given: Saved, grad: Tensor, ran: Ran) -> Prepared:
    """Asserts correct gradients and an unchanged dO; returns the inputs of the fused kernel."""
    kept = grad.clone()
    ran.clear()
    check(KERNEL, given, grad, ALLOWED + sums_off(given.spec))
    assert torch.equal(grad, kept)
    ((name, prepared),) = ran
    assert name == "run_all"
    return prepared


@pytest.mark.parametrize(
    ("change", "more"),
    [
        (interleaved_heads, {}),
        (with_row_padding, {}),
        (misaligned, {}),
        (torch.Tensor.float, {"dtype": "fp32"}),
        (torch.Tensor.contiguous, {"seqlen_q": 150}),
        (torch.Tensor.contiguous, {"head_dim_v": 40}),
    ],
    ids=["heads beside", "longer rows", "not aligned", "fp32", "ragged", "padded"],
)
def test_gradients_of_other_layouts_and_dtypes_are_read_correctly(
    change: Callable[[Tensor], Tensor], more: dict[str, Any], kernels_run: Ran
) -> None:
    given, grad = problem(**{"seqlen_q": 128, "mask": Mask(right=0), **more})
    check_fused(given, change(grad), kernels_run)


def test_a_gradient_read_in_place_gives_the_same_bits_as_a_copy(kernels_run: Ran) -> None:
    """Calls alike but for where dO lies follow each other, so that none may get the other's launch."""
    given, grad = problem(head_dim=128, mask=Mask(right=0))
    places = [grad, misaligned(grad), interleaved_heads(grad), grad]
    found = [KERNEL.run(given, each) for each in places]
    read = [prepared.gradient.laid.further(False, interleaved=False) for _, prepared in kernels_run]
    in_place = [x.data_ptr() == each.data_ptr() for x, each in zip(read, places, strict=True)]
    assert in_place == [True, False, False, True]
    for each in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(each, found[0], strict=True))


@pytest.mark.parametrize(
    ("more", "in_place"),
    [
        ({"head_dim": 128, "mask": Mask(left=40, right=3), "batch": 2}, True),
        ({"head_dim_v": 33}, True),
        ({"recipe": ROTATED}, True),
        ({"seqlen_q": 192}, False),
        ({"head_dim": 40}, False),
        ({"dtype": "fp16"}, False),
    ],
    ids=["another head dimension", "padded V", "rotated", "ragged", "padded", "fp16"],
)
def test_a_finishing_pass_runs_only_where_the_sums_are_not_yet_dq(
    more: dict[str, Any], in_place: bool, kernels_run: Ran, launched_kernels: list[str]
) -> None:
    given, grad = problem(**{"seqlen_q": 128, **more})
    check_fused(given, grad, kernels_run)
    assert launched_kernels[3:] == ([] if in_place else ["finish_query_gradients"])


@WAYS
@pytest.mark.parametrize("recipe", [HEAD, ROTATED], ids=["as it is", "rotated"])
def test_each_key_head_has_its_own_scales(recipe: Recipe, way: dict[str, Any], kernels_run: Ran) -> None:
    """dS bears those of K and V, and dK is freed from them again; query heads of a key head have their own, too."""
    spec, (q, k, v, grad) = make(70, 90, batch=2, heads=4, kv_heads=2, **{"head_dim": 64, **way})
    q = q * torch.tensor([1.0, 0.1, 0.3, 2.0]).view(1, 4, 1, 1)
    k = k * torch.tensor([1.0, 0.03, 5.0, 0.2]).view(2, 2, 1, 1)
    v = v * torch.tensor([0.01, 30.0, 1.0, 1e4]).view(2, 2, 1, 1)
    given = saved(spec, q.bfloat16(), k.bfloat16(), v.bfloat16(), (recipe, recipe, HEAD))
    check_fused(given, grad, kernels_run)
    found = KERNEL.run(given, grad)
    for batch, head in ((0, 0), (0, 1), (1, 0), (1, 1)):  # the largest must not hide the others
        q_heads, kv_heads = slice(2 * head, 2 * head + 2), slice(head, head + 1)
        exact = [x[batch : batch + 1] for x in given.operands.tensors(torch.float64)]
        one = spec.replace(batch=1, heads=2, kv_heads=1)
        parts = exact[0][:, q_heads], exact[1][:, kv_heads], exact[2][:, kv_heads], grad[batch : batch + 1, q_heads]
        truth = dense.dense_gradients(*parts, one)
        for x, wanted, heads in zip(found, truth, (q_heads, kv_heads, kv_heads), strict=True):
            assert dense.relative_l2(x[batch : batch + 1, heads], wanted) < 0.03


@WAYS
@pytest.mark.parametrize(("dtype", "exponent"), every_pair(["bf16", "fp32"], [-90, 60, 110]))
def test_the_magnitude_of_the_gradient_does_not_affect_accuracy(
    exponent: int, dtype: str, way: dict[str, Any], kernels_run: Ran
) -> None:
    given, grad = problem(dtype=dtype, **way)
    plain = KERNEL.run(given, grad)
    for x, y in zip(KERNEL.run(given, grad * 2.0**exponent), plain, strict=True):
        assert dense.relative_l2(x, y.double() * 2.0**exponent) < 0.002


@pytest.mark.parametrize(("operand", "exponent"), [("k", -60), ("k", 20), ("v", 60)])
def test_the_magnitude_of_keys_and_values_does_not_affect_accuracy(
    operand: str, exponent: int, kernels_run: Ran
) -> None:
    """What K is larger by, Q is smaller by, so that P is the same."""
    spec, (q, k, v, grad) = make(64, 90, head_dim=64)
    plain = KERNEL.run(saved(spec, q, k, v, (HEAD,) * 3), grad)
    larger, sizes = 2.0**exponent, {"k": (1, -1), "v": (1, 1)}[operand]
    changed = (q / larger, k * larger, v) if operand == "k" else (q, k, v * larger)
    found = KERNEL.run(saved(spec, *changed, (HEAD,) * 3), grad)
    for x, y, size in zip(found, plain, (*sizes, 0), strict=True):
        assert dense.relative_l2(x, y.double() * larger**size) < 0.002


@WAYS
def test_the_largest_numbers_of_fp32_do_not_become_infinite_in_bf16(way: dict[str, Any], kernels_run: Ran) -> None:
    given, grad = problem(dtype="fp32", **way)
    grad = rounded_to_e4m3(grad.float()) * 2.0**-10
    grad[0, 0, 5] = torch.finfo(torch.float32).max
    spec: AttentionSpec = given.spec
    truth = dense.dense_gradients(*given.operands.tensors(torch.float64), grad, spec)
    for x, wanted in zip(KERNEL.run(given, grad), truth, strict=True):
        assert torch.isfinite(x).all()
        assert dense.relative_l2(x, wanted) < 0.02


@WAYS
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_scale_of_zero_leaves_queries_and_keys_without_a_gradient(
    kv_heads: int, way: dict[str, Any], kernels_run: Ran
) -> None:
    given, grad = problem(scale=0.0, kv_heads=kv_heads, **way)
    truth = dense.dense_gradients(*given.operands.tensors(torch.float64), grad, given.spec)
    dq, dk, dv = KERNEL.run(given, grad)
    assert not dq.any()
    assert not dk.any()
    assert dense.relative_l2(dv, truth[2]) < 0.02
