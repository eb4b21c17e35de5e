"""``emulated``: the arithmetic of FP8 attention in plain torch, to study a recipe before it has a kernel.

A kernel's name is ``fp8``, then the options that differ from the default, in this order:

============  ======================================================================
``tensor``    scales per tensor, not per (batch, head); or
``block``     per 128 tokens of a head; or
``token``     per token of a head
``e5m2``      that format for Q, K, V, P, dO and dS, not e4m3
``hadamard``  Q and K rotated
``smooth``    the mean over K's tokens taken away
``accN``      products added in an accumulator of N mantissa bits (3 to 17), not in fp32
``accNpK``    the same, P·V promoted into fp32 every K keys (a multiple of 128)
============  ======================================================================

``emulated:fp8`` is FlashAttention-3's recipe; ``emulated:fp8-acc13`` adds Hopper's accumulator to it.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnbench.errors import InputError, UnknownBackendError
from attnbench.kernels.capabilities import Capabilities, Device
from attnbench.kernels.contract import Backend, BackwardKernel, ForwardKernel, Inputs, Kernel, Operands, Result, Saved
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.fp8 import BLOCK, Quantised, Recipe, quantise
from attnbench.problem.lengths_kind import BATCHES
from attnbench.problem.spec import GRANULARITIES, AttentionSpec

from .common.declared_errors import SHORT_ACCUMULATOR, STEADY
from .common.each_sequence import answer_each, derive_each, prepare_each
from .common.installed import torch_availability
from .emulated_arithmetic import Accumulator, attend, gradients

__all__ = ["BACKEND", "EmulatedBackward", "EmulatedForward", "emulate"]

_EVIDENCE = {"cpu": r"^emulated:fp8", "cuda": r"^emulated:fp8"}  # the profiler's label around each pass
# Relative L2 error of O and of the worst gradient.  Measured on normal inputs of 16 to 2048 tokens, D 64 to 256:
# 0.048 to 0.055 and 0.057 to 0.068 in e4m3, 0.094 to 0.108 and 0.123 to 0.134 in e5m2; few keys and small D need more.
_ERRORS = {"e4m3": (0.07, 0.12), "e5m2": (0.14, 0.22)}
# Operations that a pass may take.  Emulation is for studying recipes: beyond this it takes
# minutes on a CPU, and a sweep of real kernels on a GPU would wait for it most of its time.
_LARGEST = {"exact": 2.0**36, "narrow": 2.0**34}
_OPTIONS: dict[str, tuple[str, Any]] = {
    **{granularity: ("granularity", granularity) for granularity in GRANULARITIES},
    **{format: ("format", format) for format in _ERRORS},
    "hadamard": ("rotation", "hadamard"),
    "smooth": ("smoothing", True),
}
_ACCUMULATOR = re.compile(r"acc([0-9]{1,9})(?:p([0-9]{1,9}))?")
_NARROWEST, _WIDEST = 3, 17  # above 17 bits a step's 33 aligned terms no longer add up exactly in fp32


class _Triple(NamedTuple):
    q: Quantised
    k: Quantised
    v: Quantised


class _Emulated(Kernel):
    evidence = _EVIDENCE

    def __init__(self, recipe: Recipe, accumulator: Accumulator) -> None:
        self.recipe, self.accumulator = recipe, accumulator
        self.name = _name(recipe, accumulator)
        self.rows = _rows(recipe)
        forward, backward = _ERRORS[recipe.format]
        self.declared_error = backward if isinstance(self, BackwardKernel) else forward
        # The backward adds each tile up in fp32; a forward's narrow accumulator loses in proportion to its additions.
        long = accumulator.bits is not None and accumulator.promote is None and isinstance(self, ForwardKernel)
        self.error_growth = SHORT_ACCUMULATOR if long else STEADY

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        largest = _LARGEST["exact" if self.accumulator.bits is None else "narrow"]
        asked = spec.replace(direction="forward").flops
        return [f"emulates at most {largest:.2g} operations, this takes more"] if asked > largest else []


class EmulatedForward(_Emulated, ForwardKernel):
    """FP8 forward by one recipe and one accumulator; FP8 tensors with descales are used as they are."""

    def __init__(self, recipe: Recipe, accumulator: Accumulator) -> None:
        super().__init__(recipe, accumulator)
        self.mixes = self.name == "emulated:fp8"
        self.leaves = recipe.format if recipe.format == "e4m3" and not recipe.smoothing else None

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """Q, K and V quantised by the recipe, or by the caller.  Raises InputError if those do not match the recipe."""
        if inputs.lengths is not None:
            return prepare_each(self, inputs, spec)
        given = inputs.quantised()
        if given is None:
            return Operands(spec, *_quantised(*inputs.unquantised(), self.recipe))
        for name, x in zip("qkv", given, strict=True):
            if x.data.dtype != TO_TORCH[self.recipe.format]:
                raise InputError(f"{self.name} computes in {self.recipe.format}, {name} is {x.data.dtype}")
            if x.rotated or x.mean is not None:
                raise InputError(f"{self.name} takes descales alone, {name} is rotated or smoothed")
        return Operands(spec, *given)

    def run(self, operands: Operands) -> Result:
        """Out in the gradients' dtype, and the LSE of the dequantised operands."""
        if operands.lengths is not None:
            return answer_each(self, operands)
        q, k, v = operands.q, operands.k, operands.v
        if not (isinstance(q, Quantised) and isinstance(k, Quantised) and isinstance(v, Quantised)):
            raise InputError(f"{self.name} runs on what its own prepare made")
        with torch.profiler.record_function(self.name):
            return Result(*attend(q, k, v, operands.spec, self.recipe, self.accumulator))


class EmulatedBackward(_Emulated, BackwardKernel):
    """FP8 backward by one recipe and one accumulator, after any forward.

    FP8 operands of this recipe are used with the forward's LSE.  After any other forward its operands are quantised and
    the LSE is computed again: exp(S - LSE) sums to one over a row only for the S that made the LSE.
    """

    from_lse = True
    needs_lse = False

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK, dV in the gradients' dtype and in the basis of the unrotated Q and K."""
        if saved.operands.lengths is not None:
            return derive_each(self, saved, grad_out)
        spec, lse = saved.spec, saved.lse
        with torch.profiler.record_function(self.name):
            operands = self._own(saved.operands)
            if operands is None:
                operands, lse = _quantised(*saved.operands.tensors(), self.recipe), None
            if lse is None:
                lse = attend(*operands, spec, self.recipe, self.accumulator)[1]
            return gradients(*operands, saved.out, lse, grad_out, spec, self.recipe, self.accumulator)

    def _own(self, operands: Operands) -> _Triple | None:
        """The operands if they are FP8 by this recipe, else None."""
        q, k, v = operands.q, operands.k, operands.v
        if not (isinstance(q, Quantised) and isinstance(k, Quantised) and isinstance(v, Quantised)):
            return None
        rotated = self.recipe.rotation == "hadamard"
        ours = (
            all(x.data.dtype == TO_TORCH[self.recipe.format] for x in (q, k, v))
            and all(x.granularity == self.recipe.granularity for x in (q, k, v))
            and (q.rotated, k.rotated, v.rotated) == (rotated, rotated, False)
            and (q.mean is None, k.mean is None, v.mean is None) == (True, not self.recipe.smoothing, True)
        )
        return _Triple(q, k, v) if ours else None


def emulate(
    recipe: Recipe | None = None, accumulator: Accumulator | None = None
) -> tuple[EmulatedForward, EmulatedBackward]:
    """The forward and the backward kernel of a recipe and an accumulator.

    None is ``Recipe()``, FlashAttention-3's, and ``Accumulator()``, exact sums in fp32.  Raises InputError for an
    accumulator without a name.
    """
    recipe, accumulator = recipe or Recipe(), accumulator or Accumulator()
    bits, promote = accumulator.bits, accumulator.promote
    if bits is not None and not _NARROWEST <= bits <= _WIDEST:
        raise InputError(f"an accumulator has {_NARROWEST} to {_WIDEST} mantissa bits, or None for fp32, not {bits}")
    if promote is not None and (bits is None or promote <= 0 or promote % BLOCK):
        raise InputError(f"only a narrow accumulator is promoted, every multiple of {BLOCK} keys, not {promote}")
    return EmulatedForward(recipe, accumulator), EmulatedBackward(recipe, accumulator)


def _resolve(precision: str) -> tuple[ForwardKernel | BackwardKernel, ...]:
    """Both kernels of ``fp8`` with options.  Raises UnknownBackendError, with the right name for a wrong order."""
    asked = f"emulated:{precision}"
    known = f"a name is fp8, then any of: {', '.join(_OPTIONS)}, accN, accNpK"
    first, *options = precision.split("-")
    if first != "fp8":
        raise UnknownBackendError(f"no kernel is named {asked!r}; {known}")
    settings: dict[str, Any] = {}
    for option in options:
        if narrow := _ACCUMULATOR.fullmatch(option):
            bits, promote = narrow.groups()
            what, value = "accumulator", Accumulator(int(bits), int(promote) if promote else None)
        elif option in _OPTIONS:
            what, value = _OPTIONS[option]
        else:
            raise UnknownBackendError(f"{asked!r} has the unknown option {option!r}; {known}")
        if what in settings:
            raise UnknownBackendError(f"{asked!r} names its {what} twice; {known}")
        settings[what] = value
    accumulator = settings.pop("accumulator", None)
    try:
        kernels = emulate(Recipe(**settings), accumulator)
    except InputError as error:
        raise UnknownBackendError(f"no kernel is named {asked!r}: {error}") from None
    if kernels[0].name != asked:
        raise UnknownBackendError(f"{asked!r} is written {kernels[0].name!r}, so that a kernel has one name")
    return kernels


def _name(recipe: Recipe, accumulator: Accumulator) -> str:
    options = [
        recipe.granularity if recipe.granularity != "head" else "",
        recipe.format if recipe.format != "e4m3" else "",
        recipe.rotation if recipe.rotation != "none" else "",
        "smooth" if recipe.smoothing else "",
        f"acc{accumulator.bits}" if accumulator.bits is not None else "",
    ]
    promote = f"p{accumulator.promote}" if accumulator.promote is not None else ""
    return "emulated:" + "-".join(["fp8", *filter(None, options)]) + promote


def _rows(recipe: Recipe) -> dict[str, Capabilities]:
    """One row for every device.  FP8 input cannot be rotated or smoothed; smoothing shifts what softcap caps."""
    plain = recipe.rotation == "none" and not recipe.smoothing
    row = Capabilities(
        dtypes=("bf16", "fp16", "fp32", recipe.format) if plain else ("bf16", "fp16", "fp32"),
        softcap=not recipe.smoothing,
        descales=("tensor", "head", "block", "token") if plain else (),
        lengths=BATCHES,
        emulated=True,
    )
    return {"cpu": row, "cuda": row}


def _quantised(q: Tensor, k: Tensor, v: Tensor, recipe: Recipe) -> _Triple:
    return _Triple(quantise(q, recipe, rotate=True), quantise(k, recipe, rotate=True, smooth=True), quantise(v, recipe))


BACKEND = Backend(
    "emulated",
    "the arithmetic of FP8 kernels in plain torch, for studying recipes",
    torch_availability,
    tuple(
        kernel
        for recipe in (
            Recipe(),
            Recipe("tensor"),
            Recipe("block"),
            Recipe("token"),
            Recipe("token", rotation="hadamard"),
            Recipe(format="e5m2"),
        )
        for kernel in emulate(recipe)
    ),
    _resolve,
    yardstick=("cuda",),  # where there are FP8 kernels, and a plain computation takes longest of all
)
