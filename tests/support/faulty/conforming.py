"""A forward and a backward that conform to the contract on a CPU; tests run them and derive faulty ones."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from attnbench import AttentionSpec
from attnbench.backends.reference import BACKEND as REFERENCE
from attnbench.kernels.capabilities import Capabilities
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Operands, Result, Saved
from attnbench.problem.fp8 import Quantised
from attnbench.problem.lengths import Lengths
from attnbench.problem.lengths_kind import BATCHES

ROW = Capabilities(dtypes=("bf16", "fp32", "e4m3"), head_dims=(8, 64, 8), descales=("head",), lengths=BATCHES)
ROWS = {"cpu": ROW}
EXACT = next(kernel for kernel in REFERENCE.kernels if isinstance(kernel, ForwardKernel))
EXACT_BACKWARD = next(kernel for kernel in REFERENCE.kernels if isinstance(kernel, BackwardKernel))


class Forward(ForwardKernel):
    """Exact attention in FP64; faulty kernels override one method."""

    name = "mine:fp64"
    declared_error = 0.004  # of bf16 outputs and of the tests' small problems
    rows: Mapping[str, Capabilities] = ROWS

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        given = inputs.quantised()
        if inputs.lengths is not None:
            return EXACT.prepare(self.batched(inputs, inputs.lengths), spec)
        if given is None:
            return self.prepare_tensors(*inputs.unquantised(), spec)
        return self.prepare_quantised(*given, spec)

    def batched(self, inputs: Inputs, lengths: Lengths) -> Inputs:
        return inputs

    def prepare_tensors(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Operands:
        return EXACT.prepare(Inputs(q, k, v), spec)

    def prepare_quantised(self, q: Quantised, k: Quantised, v: Quantised, spec: AttentionSpec) -> Operands:
        return EXACT.prepare(Inputs(q, k, v), spec)

    def run(self, operands: Operands) -> Result:
        out, lse, _ = EXACT.run(operands)
        return Result(out, lse.float())


class Backward(BackwardKernel):
    """Exact gradients; faulty kernels override ``run``."""

    name = "mine:fp64"
    declared_error = 0.004
    rows: Mapping[str, Capabilities] = ROWS
    from_lse = True

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return EXACT_BACKWARD.run(saved, grad_out)
