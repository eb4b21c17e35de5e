"""What a kernel is handed: tensors, or FP8 data with descales."""

import pytest
import torch

from attnbench.kernels.contract import Inputs
from attnbench.problem.fp8 import Recipe, quantise


def test_inputs_are_tensors_or_quantised_and_say_which():
    q, k, v = torch.randn(3, 1, 2, 8, 16).unbind()
    tensors = Inputs(q, k, v)
    assert tensors.unquantised() == (q, k, v)
    assert tensors.quantised() is None
    given = tuple(quantise(x, Recipe()) for x in (q, k, v))
    quantised = Inputs.of(given)
    assert quantised.quantised() == given
    assert quantised.device == q.device
    assert not quantised.q.is_cuda
    with pytest.raises(TypeError, match="declares no descales"):
        quantised.unquantised()
