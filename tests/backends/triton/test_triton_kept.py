"""Caches of the ``triton`` backend for equal calls: they are reused and never give another call's result."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from backward_problems import interleaved_heads, make, misaligned, saved, with_row_padding
from torch import Tensor

from attnbench import AttentionSpec, Mask
from attnbench.errors import InputError
from attnbench.kernels.contract import Inputs, Saved
from attnbench.problem.fp8 import Quantised, Recipe

pytest.importorskip("triton")

from attnbench.backends.triton import TritonForward
from attnbench.backends.triton.backward import launch as backward_launch
from attnbench.backends.triton.backward import plan as backward_plan
from attnbench.backends.triton.backward.contract import TritonBackward
from attnbench.backends.triton.backward.hopper import launch as backward_hopper_launch
from attnbench.backends.triton.backward.tiles import Ring, Tile, Tiles
from attnbench.backends.triton.forward import contract as forward_contract
from attnbench.backends.triton.forward import launch as forward
from attnbench.backends.triton.forward import plan as forward_plan
from attnbench.backends.triton.forward.hopper import launch as forward_hopper_launch
from attnbench.backends.triton.forward.tiles import Tile as ForwardTile
from attnbench.backends.triton.interpreter import interpreted
from attnbench.backends.triton.launching import Launch

pytestmark = pytest.mark.skipif(not interpreted(), reason="kernels run here, under the interpreter")
MODULES = (backward_hopper_launch, backward_launch, backward_plan, forward, forward_contract, forward_plan)
TILE = Tile(64, 64, 4, 2)
FORWARD_TILE = ForwardTile(16, 32, 4, 2)
HEAD = Recipe("head")


def forget() -> None:
    """Clears the caches, as in a new process."""
    for module in MODULES:
        for each in vars(module).values():
            if hasattr(each, "cache_clear"):
                each.cache_clear()


class RecordedLaunch(NamedTuple):
    """A launch and its arguments."""

    launch: Launch
    first: tuple[Any, ...]
    addresses: int

    def __str__(self) -> str:
        """All that a launch may not have from another call."""
        kernel, *rest = (getattr(self.launch, name) for name in ("kernel", "grid", "constants", "options"))
        return f"{kernel.__name__} {rest} {program_of(self.first)} {self.addresses % 16}"


@pytest.fixture
def recorded_launches(monkeypatch: pytest.MonkeyPatch) -> list[RecordedLaunch]:
    """Records every launch without running it."""
    found: list[RecordedLaunch] = []
    monkeypatch.setattr(Launch, "__call__", lambda *args: found.append(RecordedLaunch(*args)))
    return found


def program_of(argument: Any) -> Any:
    """The properties of an argument that a compiled kernel or a launch depends on."""
    if isinstance(argument, Tensor):
        return argument.dtype
    if isinstance(argument, tuple):
        return tuple(map(program_of, argument))
    if hasattr(argument, "block_shape"):
        shapes = tuple(tuple(x) for x in (argument.shape, argument.strides, argument.block_shape))
        return type(argument), argument.base.dtype, shapes
    return argument


Change = Callable[[Quantised], Quantised]
MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "moved": misaligned,
    "beside": interleaved_heads,
    "wider": with_row_padding,
}
DATA: dict[str, Change] = {
    name: lambda x, to=to: replace(x, data=to(x.data.view(torch.uint8)).view(x.data.dtype))
    for name, to in MEMORY.items()
}
DESCALES: dict[str, Change] = {
    "moved": lambda x: replace(x, descale=misaligned(x.descale)),
    "apart": lambda x: replace(x, descale=torch.stack([x.descale, -x.descale], -1)[..., 0]),
    "fp64": lambda x: replace(x, descale=x.descale.double()),
    "every token's": lambda x: replace(x, descale=x.descale.expand(-1, -1, x.data.shape[2], -1).contiguous()),
    "one for all": lambda x: replace(x, descale=x.descale[:1, :1]),
}


def layout_variants() -> list[tuple[str, Saved, Tensor]]:
    """One problem in many layouts; scales shared between heads make other problems."""
    spec, (q, k, v, grad) = make(70, 90, batch=2, heads=4, kv_heads=2, head_dim=64, mask=Mask(right=0))
    plain = saved(spec, q, k, v, (HEAD,) * 3)
    operands, out, lse = plain.operands, plain.out, plain.lse
    assert lse is not None
    found = [("plain", plain, grad)]
    for operand in "qkv":
        for name, change in {**DATA, **{f"descale {each}": to for each, to in DESCALES.items()}}.items():
            changed = replace(operands, **{operand: change(getattr(operands, operand))})
            found.append((f"{operand} {name}", Saved(changed, out, lse), grad))
    for name, to in MEMORY.items():
        found.append((f"out {name}", Saved(operands, to(out), lse), grad))
        found.append((f"grad {name}", plain, to(grad)))
    found.append(("lse beside", Saved(operands, out, interleaved_heads(lse[..., None])[..., 0]), grad))
    found.append(("fp32 out", Saved(operands, out.float(), lse), grad))
    found.append(("fp32 grad", plain, grad.float()))
    found.append(("constant grad", plain, torch.ones(1, dtype=grad.dtype).expand(grad.shape)))
    for dtype in ("fp16", "fp32"):
        other = saved(spec.replace(dtype=dtype), q, k, v, (HEAD,) * 3)
        found.append((dtype, Saved(other.operands, out, lse), grad))
    tokens = saved(spec, q, k, v, (Recipe("token"),) * 3)
    found.append(("tokens", tokens, grad))
    return found


def check(run: Callable[[Saved, Tensor], object], started: list[RecordedLaunch]) -> None:
    """Asserts that each variant starts the same launch as in a new process, and that no launch serves two layouts."""
    cases, wanted = layout_variants(), []
    for _, given, grad in cases:
        forget()
        started.clear()
        run(given, grad)
        wanted.append([str(each) for each in started])
    assert len({tuple(each) for each in wanted}) > 10, "the variants are as good as one"
    forget()
    kinds: dict[int, set[Any]] = {}
    launches = []  # which keep their identity as long as they live
    for (name, given, grad), each in zip(cases, wanted, strict=True):
        started.clear()
        run(given, grad)
        assert [str(each) for each in started] == each, name
        launches += started
    for launch, first, _ in launches:
        kinds.setdefault(id(launch), set()).add(program_of(first))
    assert all(len(each) == 1 for each in kinds.values())


@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
@pytest.mark.parametrize("hopper", [False, True])
def test_a_cached_backward_launch_is_not_used_for_another_memory_layout(
    narrow: bool, hopper: bool, recorded_launches: list[RecordedLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    if hopper:
        pytest.importorskip("triton", minversion="3.6")
        monkeypatch.setattr(forward_hopper_launch, "runs_on", lambda device: True)
    tile = Tile(64, 64, 4, 2, Ring(64, 4))
    kernel = TritonBackward("triton:fp8", narrow=narrow, declared_error=0.1, tiles=Tiles(tile, tile, not narrow))
    check(kernel.run, recorded_launches)


def test_a_cached_forward_launch_is_not_used_for_another_memory_layout(recorded_launches: list[RecordedLaunch]) -> None:
    kernel = TritonForward("fp8-head", FORWARD_TILE)

    def run(given: Saved, _: Tensor) -> None:
        operands = given.operands
        kernel.run(kernel.prepare(Inputs(operands.q, operands.k, operands.v), _e4m3_spec(given.spec)))

    check(run, recorded_launches)


@pytest.mark.parametrize("operand", "qkv")
def test_rows_that_tma_cannot_read_are_copied(operand: str) -> None:
    kernel = TritonBackward("triton:fp8", narrow=False, declared_error=0.1, tiles=Tiles(TILE, TILE))
    spec, (q, k, v, grad) = make(128, 128, head_dim=64)
    plain = saved(spec, q, k, v, (HEAD,) * 3)
    operands = replace(plain.operands, **{operand: DATA["moved"](getattr(plain.operands, operand))})
    found = kernel.run(replace(plain, operands=operands), grad)
    assert all(torch.equal(x, y) for x, y in zip(found, kernel.run(plain, grad), strict=True))


def test_equal_calls_reuse_their_launches(recorded_launches: list[RecordedLaunch]) -> None:
    """A new launch costs several times what one that is known does."""
    kernel = TritonBackward("triton:fp8", narrow=False, declared_error=0.1, tiles=Tiles(TILE, TILE))
    forward_ = TritonForward("fp8", FORWARD_TILE)
    spec, (q, k, v, grad) = make(70, 90, head_dim=64)
    found = []
    for _ in range(2):
        recorded_launches.clear()
        operands = forward_.prepare(Inputs(q.clone(), k.clone(), v.clone()), spec)
        result = forward_.run(operands)
        kernel.run(Saved(operands, result.out, result.lse), grad.clone())
        found.append([each.launch for each in recorded_launches])
    assert len(found[0]) > 4
    assert [id(x) for x in found[0]] == [id(x) for x in found[1]]


def test_threads_with_different_problems_get_their_own_results() -> None:
    """The interpreter, which serves one thread at a time, is no reason to serve one caller."""
    kernel = TritonBackward("triton:fp8", narrow=False, declared_error=0.1, tiles=Tiles(TILE, TILE))
    spec, tensors = make(70, 90)
    problems = []
    for seed in range(4):
        torch.manual_seed(seed)
        q, k, v, grad = (torch.randn_like(x) for x in tensors)
        problems.append((saved(spec, q, k, v, (HEAD,) * 3), grad))
    wanted = [kernel.run(*each) for each in problems]
    forget()
    with ThreadPoolExecutor(4) as pool:
        for found, answer in zip(pool.map(lambda each: kernel.run(*each), problems), wanted, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(found, answer, strict=True))


@pytest.mark.parametrize("operand", "qkv")
def test_descales_of_an_invalid_shape_are_an_error_in_both_passes(operand: str) -> None:
    spec, (q, k, v, grad) = make(70, 90, heads=4, kv_heads=2, head_dim=64)
    plain = saved(spec, q, k, v, (HEAD,) * 3)
    for shape in ((1, 3, 1, 1), (1, 1, 7, 1), (2, 1, 1, 1), (1, 1, 1, 64)):
        wrong = replace(getattr(plain.operands, operand), descale=torch.ones(shape))
        operands = replace(plain.operands, **{operand: wrong})
        with pytest.raises(InputError, match="descales"):
            TritonBackward("triton:fp8", narrow=False, declared_error=0.1).run(
                Saved(operands, plain.out, plain.lse), grad
            )
        with pytest.raises(InputError, match="descales"):
            TritonForward("fp8", FORWARD_TILE).prepare(Inputs(operands.q, operands.k, operands.v), _e4m3_spec(spec))


def test_tensors_restored_to_another_device_are_an_error() -> None:
    spec, (q, k, v, grad) = make(16, 16, head_dim=16)
    plain = saved(spec, q, k, v, (HEAD,) * 3)
    away = [replace(plain, out=plain.out.to("meta"))]
    for name in "qkv":
        operand = getattr(plain.operands, name)
        moved_ = replace(plain.operands, **{name: replace(operand, data=operand.data.to("meta"))})
        away.append(replace(plain, operands=moved_))
    for each in away:
        with pytest.raises(InputError, match="came back on meta"):
            TritonBackward("triton:fp8", narrow=False, declared_error=0.1).run(each, grad)


def _e4m3_spec(spec: AttentionSpec) -> AttentionSpec:
    return spec.replace(direction="forward", dtype="e4m3", descale="head")
