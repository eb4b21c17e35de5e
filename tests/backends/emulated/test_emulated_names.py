"""Names, lists and refusals of the emulated kernels."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from emulated_passes import RECIPES

from attnbench.backends.emulated import BACKEND, emulate
from attnbench.backends.emulated_arithmetic import Accumulator
from attnbench.errors import InputError, UnknownBackendError
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import Inputs, Operands
from attnbench.kernels.registry import Registry
from attnbench.problem.fp8 import Quantised, Recipe
from attnbench.problem.spec import AttentionSpec

CPU = Device("cpu", "CPU")


def test_every_recipe_round_trips_through_its_name():
    registry = Registry([BACKEND])
    names = set()
    widths = [Accumulator(), Accumulator(13), Accumulator(10, 512)]
    for recipe, accumulator in itertools.product(RECIPES, widths):
        forward, backward = emulate(recipe, accumulator)
        again = registry.forward(forward.name), registry.backward(backward.name)
        assert [(x.recipe, x.accumulator, x.name) for x in again] == [(recipe, accumulator, forward.name)] * 2
        names.add(forward.name)
    assert len(names) == len(RECIPES) * len(widths)
    assert emulate(Recipe("token", "e5m2", "hadamard", True), Accumulator(13, 512))[0].name == (
        "emulated:fp8-token-e5m2-hadamard-smooth-acc13p512"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp8-hadamard-token", "'emulated:fp8-token-hadamard'"),
        ("fp8-head", "'emulated:fp8'"),
        ("fp8-e4m3", "'emulated:fp8'"),
        ("fp8-acc013", "'emulated:fp8-acc13'"),
        ("fp8-tensor-block", "granularity twice"),
        ("fp8-acc13-acc14", "accumulator twice"),
        ("fp8-tokens", "unknown option 'tokens'.*hadamard"),
        ("fp8-acc13p100", "multiple of 128"),
        ("fp8-acc13p0", "multiple of 128"),
        ("fp8-acc2", "3 to 17"),
        ("fp8-acc18", "3 to 17"),
        ("fp8-", "unknown option ''"),
        ("bf16", "no kernel is named 'emulated:bf16'"),
    ],
)
def test_an_invalid_name_is_an_error_that_lists_valid_ones(name, message):
    with pytest.raises(UnknownBackendError, match=message):
        Registry([BACKEND]).forward(f"emulated:{name}")


def test_inputs_quantised_by_another_recipe_are_refused():
    spec = AttentionSpec.make(batch=1, heads=1, seqlen_q=4, head_dim=8, dtype="e4m3", descale="head")
    q = Quantised(torch.ones(1, 1, 4, 8).to(torch.float8_e4m3fn), torch.ones(1, 1, 1, 1), "head")
    assert "e5m2" in " ".join(emulate(Recipe(format="e5m2"))[0].refusals(spec, CPU))
    for recipe in (Recipe(rotation="hadamard"), Recipe(smoothing=True)):
        assert all(kernel.refusals(spec, CPU) for kernel in emulate(recipe))
    with pytest.raises(InputError, match="computes in e5m2"):
        emulate(Recipe(format="e5m2"))[0].prepare(Inputs(q, q, q), spec)
    for odd in (replace(q, rotated=True), replace(q, mean=torch.zeros(1, 1, 1, 8))):
        with pytest.raises(InputError, match="k is rotated or smoothed"):
            emulate()[0].prepare(Inputs(q, odd, q), spec)
    with pytest.raises(InputError, match="its own prepare"):
        emulate()[0].run(Operands(spec, *[torch.ones(1, 1, 4, 8)] * 3))
    capped = AttentionSpec.make(batch=1, heads=1, seqlen_q=4, head_dim=8, softcap=5.0)
    assert emulate(Recipe(smoothing=True))[0].refusals(capped, CPU)
    assert not emulate()[0].refusals(capped, CPU)
