"""The forward kernels of ``triton``: how each prepares Q, K and V for the attention kernel that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnbench.errors import InputError
from attnbench.kernels.capabilities import Capabilities, Device
from attnbench.kernels.contract import ForwardKernel, Inputs, Operands, Result
from attnbench.kernels.devices import describe
from attnbench.problem.fp8 import BLOCK, Quantised, Recipe
from attnbench.problem.lengths import Lengths
from attnbench.problem.lengths_kind import BATCHES
from attnbench.problem.spec import GRANULARITIES, AttentionSpec

from ...common.declared_errors import STEADY
from ..interpreter import alone, misplaced
from ..quantise.deferred import Deferred
from ..quantise.stored import Form, Stored
from .tiles import HEAD_DIMS, WIDE_SCORES, Tile, head_class, one_pass_tile, tile_of

if TYPE_CHECKING:
    from ..quantise.launch import Quantisation
    from .launch import Native, Operand
    from .plan import Plan

__all__ = ["RECIPES", "TritonForward", "TritonOnePass", "TritonWideScores", "check_plain"]

_LARGEST_GRID = 2**31 - 1
# Relative L2 on normal inputs; 0.051 to 0.054 was computed for 2048 keys, D 64 to 256, and few keys need more.
_ERROR = 0.07
RECIPES = {
    "fp8": Recipe("head", rotation="hadamard"),
    "fp8-head": Recipe("head"),
    **{f"fp8-{each}": Recipe(each) for each in GRANULARITIES if each != "head"},
    **{f"fp8-{each}-hadamard": Recipe(each, rotation="hadamard") for each in GRANULARITIES if each != "head"},
}
_Outline = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # a tensor's shape, strides and dtype
_MIXING = ("fp8", "fp8-token")  # with other backends' backwards: the most accurate, and the one without leaks


class TritonForward(ForwardKernel):
    """Q, K and V quantised by one recipe, or by the caller; ``tile`` replaces the committed one."""

    preference = 9
    declared_error = _ERROR
    error_growth = STEADY  # every block's product starts at zero and is added in FP32
    leaves: str | None = "e4m3"

    def __init__(self, precision: str, tile: Tile | None = None) -> None:
        self.name = f"triton:{precision}"
        self.recipe = RECIPES[precision]
        self.tile = tile
        self.mixes = precision in _MIXING
        row = {
            "dtypes": ("bf16", "fp16", "fp32", "e4m3"),
            "head_dims": (1, HEAD_DIMS[-1], 1),
            "descales": GRANULARITIES,
            "lengths": BATCHES,
        }
        self.rows = {
            "cuda": Capabilities(capability=(9, 0), capability_below=(10, 0), **row),  # type: ignore[arg-type]
            "cpu": Capabilities(**row, emulated=True),  # type: ignore[arg-type]
        }
        self.evidence = {"cuda": r"^triton_fp8_attention_forward", "cpu": rf"^{self.name}$"}

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """A CPU without the interpreter, a GPU with it, and more programs than a grid has."""
        reasons = misplaced(device)
        tile = self.tile or tile_of(spec, device.capability, per_key=self._per_key(spec))
        programs = spec.batch * spec.heads * -(-spec.seqlen_q // tile.block_m)
        if programs > _LARGEST_GRID:
            reasons.append(f"starts at most {_LARGEST_GRID} programs, and this takes {programs}")
        return reasons

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """Q and K in rows and V transposed, in one launch, or two for scales of a head or a tensor.

        For training V comes in rows as well, for the backward.  V's keys are in the order of the tile.  Of tensors that
        the caller quantised only V is copied.
        """
        if spec.descale is not None and (given := inputs.quantised()) is not None:
            return self._laid_out(*given, spec)
        q, k, v = inputs.unquantised()
        lengths, device = inputs.lengths, q.device
        own = None if lengths is None else _own(lengths, q)
        plan = _planned(self, spec, device, own, q.dtype, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())
        if device.type == "cpu":
            with alone(device):
                made = plan.quantised((q, k, v), lengths)
        else:
            made = plan.quantised((q, k, v), lengths)

        def operands() -> tuple[Quantised, Quantised, Quantised]:
            recipe = self.recipe
            return made[0].operand(recipe), made[1].operand(recipe), self._of_values(v, made[2], spec, lengths)

        if plan.layout is not None:
            forms = plan.quantising.forms if spec.training else ()
            return Quantising(spec, operands, plan.native(device, None, made, lengths), lengths, made.kept.block, forms)
        (forward, _), (q_, k_, v_) = _modules(), operands()
        of = forward.Operand
        sides = of(q_.data, q_.descale), of(k_.data, k_.descale), of(made[2].transposed, v_.descale)
        return Operands(spec, q_, k_, v_, forward.laid_out(spec, self._tile(spec, device), *sides, lengths), lengths)

    def _plan(
        self, spec: AttentionSpec, device: torch.device, own: tuple[int, bool] | None, *outlines: _Outline
    ) -> Plan:
        """How Q, K and V, that lie so, are quantised and read; ``own`` as in ``_own``."""
        forward, plans = _modules()
        here = forward.hopper.runs_on(device)
        made: Plan = plans.plan(self.recipe, spec, self._tile(spec, device), device, here, own, *outlines)
        return made

    def _target(
        self, spec: AttentionSpec, q: Tensor, lengths: Lengths | None
    ) -> tuple[Tile, torch.device, bool, tuple[int, bool] | None]:
        """The tile, the device, whether the Hopper kernels run there, and what of lengths a plan depends on."""
        forward, _ = _modules()
        device = q.device
        own = None if lengths is None else _own(lengths, q)
        return self._tile(spec, device), device, forward.hopper.runs_on(device), own

    def _of_values(
        self, v: Tensor, made: Quantisation, spec: AttentionSpec, lengths: Lengths | None, block: int = BLOCK
    ) -> Quantised:
        """V as an operand; of sequences in slots rows that were not asked for are quantised when they are read."""
        if lengths is None or spec.training:
            return made.operand(self.recipe, block=block)
        x = v.detach()

        def rows() -> Tensor:
            from ..quantise.launch import Request, quantised_together, unequal

            request = Request(x, unequal=unequal(lengths, "kv", block))
            with alone(x.device):
                again = quantised_together([request], self.recipe, block=block)[0].rows
            assert again is not None, "they were asked for"
            return again

        return Deferred.of(rows, lambda: made.descale, self.recipe.granularity)

    def _laid_out(self, q: Quantised, k: Quantised, v: Quantised, spec: AttentionSpec) -> Operands:
        """The tensors as they are, and V transposed.  Raises InputError as ``check_plain`` does."""
        forward, _ = _modules()
        check_plain(self.name, q, k, v)
        tile, values = self._tile(spec, q.data.device), forward.transposed(v.data)
        if tile.interleaved:
            values = forward.interleaved(values)
        return _operands(spec, tile, q, k, v, forward.Operand(values, v.descale))

    def run(self, operands: Operands) -> Result:
        """The kernel on the current stream."""
        forward, _ = _modules()
        native: Native = operands.native
        attend: Callable[[Native], Result] = forward.attend
        if native.device.type != "cpu":
            return attend(native)
        with torch.profiler.record_function(self.name), alone(native.device):
            return attend(native)

    def _tile(self, spec: AttentionSpec, device: torch.device) -> Tile:
        return self.tile or _committed(spec, device, self._per_key(spec))

    def _per_key(self, spec: AttentionSpec) -> bool:
        return (spec.descale or self.recipe.granularity) in ("block", "token")


class TritonWideScores(TritonForward):
    """Q and K in 16 bits, V by FlashAttention-3's recipe: scores are exact and cost twice as much.

    Only other backends' backwards follow it; ours reads Q and K in e4m3.
    """

    preference = 10
    declared_error = 0.05  # 0.036 to 0.037 was computed for 2048 keys
    mixes = False
    leaves = None

    def __init__(self, tile: Tile | None = None) -> None:
        super().__init__("fp8-head", tile)
        self.name, self.mixes = "triton:fp8-pv", False
        self.rows = {device: replace(row, dtypes=("bf16", "fp16"), descales=()) for device, row in self.rows.items()}
        self.evidence = {**self.evidence, "cpu": rf"^{self.name}$"}

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """V transposed in e4m3, and in rows as well for training."""
        q, k, v = inputs.unquantised()
        (forward, plans), lengths = _modules(), inputs.lengths
        tile, device, _, own = self._target(spec, q, lengths)
        plan: Plan = plans.values_plan(self.recipe, spec, tile, device, own, _outline(v))
        with alone(device):
            made = plan.quantised((v,), lengths)[0]
        v_, shared = self._of_values(v, made, spec, lengths), lengths is not None
        assert made.transposed is not None, "it was asked for"
        # A scale a sequence has each token's place.
        ones = [torch.ones(1, 1, x.shape[2] if shared else 1, 1, device=q.device) for x in (q, k)]
        q, k = q.detach(), k.detach()
        of = forward.Operand
        native = forward.laid_out(
            spec, tile, of(q, ones[0], shared), of(k, ones[1], shared), of(made.transposed, v_.descale, shared), lengths
        )
        return Operands(spec, q, k, v_, native, lengths)

    def _tile(self, spec: AttentionSpec, device: torch.device) -> Tile:
        return self.tile or WIDE_SCORES[head_class(spec)]


class TritonOnePass(TritonForward):
    """Q as it is, cast by row in the attention kernel, and K and V in one pass, by blocks of keys.

    This reads and writes two tensors once, where scales of a head read three tensors twice.  On a CPU, and for a
    backward, the same numbers come from Q quantised by token.
    """

    preference = 11

    def __init__(self, tile: Tile | None = None) -> None:
        super().__init__("fp8-block", tile)
        self.name, self.mixes = "triton:fp8-onepass", False
        rows = {device: replace(row, dtypes=("bf16", "fp16"), descales=()) for device, row in self.rows.items()}
        # Up to 64 the kernel that casts takes 1.2 to 1.4 times as long on an H200 as the plain one.
        self.rows = {**rows, "cuda": replace(rows["cuda"], head_dims=(65, HEAD_DIMS[-1], 1), softcap=False)}
        self.evidence = {**self.evidence, "cpu": rf"^{self.name}$"}

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """On a GPU also what the kernel that casts does not serve: the plain one is for a CPU."""
        reasons = super().further_refusals(spec, device)
        if device.type == "cuda" and spec.scale < 0:
            reasons.append("casts Q in a kernel that takes no negative scale")
        if device.type == "cuda" and not _gluon_is_known():
            reasons.append("casts Q in a kernel that wants Triton 3.6 or later")
        return reasons

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """K in rows and V transposed, in one launch; for training V in rows as well."""
        q, k, v = inputs.unquantised()
        (forward, plans), lengths = _modules(), inputs.lengths
        tile, device, *where = self._target(spec, q, lengths)
        plan: Plan = plans.casting_plan(self.recipe, spec, tile, device, *where, *map(_outline, (q, k, v)))
        with alone(device):
            quantised = plan.quantised((k, v), lengths)
        of_k, of_v = quantised
        q, of = q.detach(), forward.Operand
        k_, v_ = of_k.operand(self.recipe, block=tile.block_n), self._of_values(v, of_v, spec, lengths, tile.block_n)
        q_ = _by_token(q)
        if plan.reads(q):
            native = plan.native(device, q, quantised, lengths)
        elif forward.casts(spec, tile, device):
            native = forward.laid_out_by_block(
                spec, tile, q, of(of_k.data, of_k.descale), of(of_v.transposed, of_v.descale), lengths
            )
        else:
            sides = of(q_.data, q_.descale), of(k_.data, k_.descale), of(of_v.transposed, v_.descale)
            native = forward.laid_out(spec, tile, *sides, lengths)
        return Operands(spec, q_, k_, v_, native, lengths)

    def _tile(self, spec: AttentionSpec, device: torch.device) -> Tile:
        return self.tile or one_pass_tile(spec)


class Quantising(Operands):
    """Operands of tensors that were quantised, each of which is made when it is first read: most kernels read none."""

    def __init__(
        self, spec: AttentionSpec, make: Callable[[], tuple[Quantised, Quantised, Quantised]], native: Native,
        lengths: Lengths | None, block: Tensor, forms: tuple[Form | None, ...],
    ) -> None:  # fmt: skip
        """``forms``: how Q, K and V lie in the block for a backward."""
        self.spec, self.native, self.lengths, self._make = spec, native, lengths, make
        self._block, self._forms = block, forms

    def apart(self) -> tuple[list[Tensor | None], Callable[[Iterator[Tensor | None]], Operands]]:
        """The block alone, where they lie in one."""
        q, k, v = self._forms or (None, None, None)
        if self.lengths is not None or q is None or k is None or v is None:
            return super().apart()
        return [self._block], partial(_in_block, self.spec, (q, k, v))

    @cached_property
    def _made(self) -> tuple[Quantised, Quantised, Quantised]:
        return self._make()

    @cached_property
    def q(self) -> Quantised:  # type: ignore[override]
        """(B, H, Sq, D)."""
        return self._made[0]

    @cached_property
    def k(self) -> Quantised:  # type: ignore[override]
        """(B, Hkv, Skv, D)."""
        return self._made[1]

    @cached_property
    def v(self) -> Quantised:  # type: ignore[override]
        """(B, Hkv, Skv, Dv)."""
        return self._made[2]


def _in_block(spec: AttentionSpec, forms: tuple[Form, Form, Form], tensors: Iterator[Tensor | None]) -> Operands:
    block, (q, k, v) = next(tensors), forms
    assert block is not None, "it was kept"
    return Operands(spec, Stored.of(block, q), Stored.of(block, k), Stored.of(block, v))


def check_plain(name: str, q: Quantised, k: Quantised, v: Quantised) -> None:
    """Raise InputError unless Q, K and V are e4m3, none smoothed, and Q and K rotated together or not at all."""
    for label, x in {"q": q, "k": k, "v": v}.items():
        dtype = x.data.dtype
        if dtype != torch.float8_e4m3fn:
            raise InputError(f"{name} computes in e4m3, {label} is {dtype}")
        if x.mean is not None:
            raise InputError(f"{name} knows no smoothing, and {label} had its mean taken away")
    if q.rotated != k.rotated or v.rotated:
        raise InputError(f"{name} takes Q and K rotated together, and V as it is")


def _gluon_is_known() -> bool:
    """Whether the installed Triton is recent enough for the Hopper kernels; True if there is none, which is said
    elsewhere.
    """
    try:
        from .hopper.launch import recent
    except ImportError:
        return True
    return recent()


def _by_token(q: Tensor) -> Quantised:
    """Q as the attention kernel casts it."""

    @cache
    def made() -> Quantised:
        from ..quantise.launch import quantised

        with alone(q.device):
            return quantised(q, Recipe("token")).operand(Recipe("token"))

    return Deferred.of(lambda: made().data, lambda: made().descale, "token")


def _operands(spec: AttentionSpec, tile: Tile, q: Quantised, k: Quantised, v: Quantised, values: Operand) -> Operands:
    forward, _ = _modules()
    native = forward.laid_out(
        spec, tile, forward.Operand(q.data, q.descale), forward.Operand(k.data, k.descale), values
    )
    return Operands(spec, q, k, v, native)


@cache
def _modules() -> tuple[ModuleType, ModuleType]:
    """``launch`` and ``plan``, imported when a kernel runs, once, because importing again takes time."""
    from . import launch, plan

    return launch, plan


def _outline(x: Tensor) -> _Outline:
    return x.shape, x.stride(), x.dtype


def _own(lengths: Lengths, q: Tensor) -> tuple[int, bool]:
    """How many sequences have lengths of their own, and whether they are rows with padding."""
    forward, _ = _modules()
    return forward.sequences_of(lengths, q.shape[0]), lengths.batch != "packed"


@lru_cache(maxsize=1024)
def _planned(
    kernel: TritonForward, spec: AttentionSpec, device: torch.device, own: tuple[int, bool] | None, dtype: torch.dtype,
    q: tuple[int, ...], q_strides: tuple[int, ...], k: tuple[int, ...], k_strides: tuple[int, ...],
    v: tuple[int, ...], v_strides: tuple[int, ...],
) -> Plan:  # fmt: skip
    """The kernel's plan for tensors of these shapes and strides, in one look-up a call."""
    return kernel._plan(spec, device, own, (q, q_strides, dtype), (k, k_strides, dtype), (v, v_strides, dtype))


@lru_cache(maxsize=1024)
def _committed(spec: AttentionSpec, device: torch.device, per_key: bool) -> Tile:
    return tile_of(spec, describe(device).capability, per_key=per_key)
