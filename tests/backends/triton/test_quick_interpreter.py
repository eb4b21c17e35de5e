"""The faster interpreter of these tests gives the same bits and errors as Triton's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from packed import Documents, answers
from quick_interpreter import WRITTEN_FOR, quicker_parts

from attnbench import Mask

pytest.importorskip("triton")
import triton

if not triton.__version__.startswith(WRITTEN_FOR):
    pytest.skip(f"Triton {triton.__version__} is interpreted as it comes", allow_module_level=True)

from attnbench.backends.triton.interpreter import interpreted

if not interpreted():
    pytest.skip("kernels are compiled here, which the tests in tests/gpu run", allow_module_level=True)


from attnbench.backends.triton import TritonForward
from attnbench.backends.triton.backward.contract import KERNELS
from attnbench.backends.triton.forward.tiles import Tile


@pytest.fixture
def tritons_interpreter() -> Iterator[pytest.MonkeyPatch]:
    """Restores Triton's own interpreter until the yielded patch is undone."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, _ in quicker_parts():
            quicker = getattr(owner, name)  # without a ``__wrapped__`` the tests of this folder would run in Triton's
            before = replace(quicker, sanitize_overflow=True) if name == "options" else quicker.__wrapped__
            patch.setattr(owner, name, before)
        yield patch


def test_a_packed_batch_has_the_same_bits(tritons_interpreter: pytest.MonkeyPatch) -> None:
    """Whose kernels load and store with masks, call functions, loop, reduce, multiply matrices and round to FP8."""
    batch = Documents(((20, 5), (0, 3)), Mask(right=0), heads=(1, 1))
    forward = TritonForward("fp8-token-hadamard", Tile(16, 32, 4, 2, interleaved=True))
    expected = answers(batch, forward, KERNELS[0])
    tritons_interpreter.undo()
    for found, wanted in zip(answers(batch, forward, KERNELS[0]), expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
