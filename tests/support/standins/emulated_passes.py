"""Recipes, seeded inputs and both passes for the tests of the emulated FP8 kernels."""

from __future__ import annotations

from problems import Problem, tensors_of
from torch import Tensor

from attnbench.backends.emulated import emulate
from attnbench.backends.emulated_arithmetic import Accumulator
from attnbench.kernels.contract import Inputs, Operands, Saved
from attnbench.problem.fp8 import Recipe
from attnbench.problem.spec import AttentionSpec

RECIPES = [
    Recipe(granularity, format, rotation, smoothing)
    for granularity in ("tensor", "head", "block", "token")
    for format in ("e4m3", "e5m2")
    for rotation in ("none", "hadamard")
    for smoothing in (False, True)
]


def tensors(spec: AttentionSpec, seed: int = 0, strided: bool = False) -> list[Tensor]:
    """q, k, v and the output's gradient, standard normal; strided as of (B, S, H, D)."""
    return tensors_of(Problem(spec, "bshd" if strided else "bhsd", False, seed))


def run_both_passes(
    recipe: Recipe,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    accumulator: Accumulator | None = None,
) -> tuple[Operands, Tensor, Tensor, tuple[Tensor, ...]]:
    """The operands, out, lse and gradients of the kernels of a recipe."""
    forward, backward = emulate(recipe, accumulator)
    operands = forward.prepare(Inputs(q, k, v), spec)
    out, lse, state = forward.run(operands)
    return operands, out, lse, backward.run(Saved(operands, out, lse, state), grad_out)
