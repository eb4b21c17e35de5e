"""Kernels with one fault each for the conformance suite, and the check that must report it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from conforming import EXACT, Backward, Forward
from torch import Tensor

from attnbench import AttentionSpec, Mask
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Operands, Result, Saved, Whole
from attnbench.problem.fp8 import Quantised
from attnbench.problem.lengths import Lengths
from attnbench.problem.lengths_kind import Batch


class ChangesSpec(Forward):
    """Computes another spec than the given one."""

    def __init__(self, change: Callable[[AttentionSpec], AttentionSpec]) -> None:
        self.change = change

    def run(self, operands: Operands) -> Result:
        return super().run(replace(operands, spec=self.change(operands.spec)))


class ChangesLengths(Forward):
    """Changes the lengths of one kind of batch."""

    def __init__(self, batch: Batch, change: Callable[[Inputs, Lengths], Inputs]) -> None:
        self.batch, self.change = batch, change

    def batched(self, inputs: Inputs, lengths: Lengths) -> Inputs:
        return self.change(inputs, lengths) if lengths.batch == self.batch else inputs


def join_first_sequences(inputs: Inputs, lengths: Lengths) -> Inputs:
    """Joins the first two sequences."""
    joined = [torch.cat([x[:1], x[2:]]) for x in lengths.starts]
    return inputs._replace(lengths=replace(lengths, q=joined[0], kv=joined[1]))


def share_scale(inputs: Inputs, lengths: Lengths) -> Inputs:
    """Quantises V in e4m3 with one scale for all sequences."""
    v = inputs.unquantised()[2]
    scale = v.abs().amax().float() / 448
    return inputs._replace(v=((v / scale).to(torch.float8_e4m3fn).to(v.dtype) * scale).to(v.dtype))


def use_full_lengths(inputs: Inputs, lengths: Lengths) -> Inputs:
    assert lengths.kv is not None
    return inputs._replace(lengths=replace(lengths, kv=torch.full_like(lengths.kv, lengths.longest_kv)))


def treat_as_right_padded(inputs: Inputs, lengths: Lengths) -> Inputs:
    return inputs._replace(lengths=replace(lengths, batch="padded"))


class ChangesResult(Forward):
    """Exact attention with a changed result."""

    def __init__(self, change: Callable[[Operands, Result], Result]) -> None:
        self.change = change

    def run(self, operands: Operands) -> Result:
        return self.change(operands, super().run(operands))


class AlternatingRefusal(Forward):
    asked = 0

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        self.asked += 1
        return ["refuses every second time"] if self.asked % 2 else []


class LongRefusal(Forward):
    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        return ["has no such tile. Try another one."] if spec.head_dim == 40 else []


class MissingRefusal(Forward):
    """Lacks a refusal of softcap."""

    def run(self, operands: Operands) -> Result:
        if operands.spec.softcap:
            raise RuntimeError("no kernel image\nand a traceback")
        return super().run(operands)


class MutatesInputs(Forward):
    """Changes K in place."""

    def prepare_tensors(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Operands:
        k.mul_(-1)
        return super().prepare_tensors(q, k, v, spec)


class CachesByAddress(Forward):
    def __init__(self) -> None:
        self.seen: dict[Any, Operands] = {}

    def prepare_tensors(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Operands:
        key = (q.data_ptr(), q.stride(), spec)
        if key not in self.seen:
            self.seen = {key: Operands(spec, q.clone(), k.clone(), v.clone())}
        return self.seen[key]


class ReusesOutput(Forward):
    """Returns the same output buffer for every call with a shape."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def run(self, operands: Operands) -> Result:
        result = super().run(operands)
        if self.buffer is None or self.buffer.shape != result.out.shape or self.buffer.dtype != result.out.dtype:
            self.buffer = torch.empty_like(result.out)
        return result._replace(out=self.buffer.copy_(result.out))


class ChangesAfterCalls(Forward):
    """Changes its result from the fourth call with a spec; only one check calls that often."""

    seen = 0
    last: AttentionSpec | None = None

    def run(self, operands: Operands) -> Result:
        result = super().run(operands)
        return result._replace(out=result.out * 1.5) if self._repeated(operands) else result

    def _repeated(self, operands: Operands) -> bool:
        self.seen = self.seen + 1 if operands.spec == self.last else 0
        self.last = operands.spec
        return self.seen >= 3


class ClearsOperands(Forward):
    """Clears V in its operands after reading it."""

    def prepare_tensors(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Operands:
        return super().prepare_tensors(q, k, v.clone(), spec)

    def run(self, operands: Operands) -> Result:
        result = super().run(operands)
        operands.tensors()[2].zero_()
        return result


class UsesGlobalRandomState(Forward):
    """Draws a number from torch's global generator."""

    def run(self, operands: Operands) -> Result:
        torch.rand(1)
        return super().run(operands)


class MutatesDescale(Forward):
    """Changes V's descale in place."""

    def prepare_quantised(self, q: Quantised, k: Quantised, v: Quantised, spec: AttentionSpec) -> Operands:
        operands = super().prepare_quantised(q, k, replace(v, descale=v.descale.clone()), spec)
        v.descale.mul_(1.001)
        return operands


class IgnoresFp8Strides(Forward):
    """Reads FP8 memory as if it were contiguous."""

    def prepare_quantised(self, q: Quantised, k: Quantised, v: Quantised, spec: AttentionSpec) -> Operands:
        read = [replace(x, data=x.data.as_strided(x.data.shape, torch.empty(x.data.shape).stride())) for x in (q, k, v)]
        return super().prepare_quantised(*read, spec)


class SharesOperands(Forward):
    """Passes its operands from prepare to run through an attribute, which threads share."""

    operands: Operands | None = None

    def prepare_tensors(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Operands:
        self.operands = super().prepare_tensors(q, k, v, spec)
        time.sleep(0.002)
        return self.operands

    def run(self, operands: Operands) -> Result:
        held, self.operands = self.operands, None
        return super().run(operands if held is None else held)


class LeaksOperands(Forward):
    def __init__(self) -> None:
        self.kept: list[Operands] = []

    def run(self, operands: Operands) -> Result:
        self.kept.append(operands)
        return super().run(operands)


class IgnoresStrides(Forward):
    """Reads memory as if it were contiguous."""

    def prepare_tensors(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Operands:
        def read(x: Tensor) -> Tensor:
            return x if x.stride(-1) == 1 else x.as_strided(x.shape, torch.empty(x.shape).stride())

        return super().prepare_tensors(read(q), read(k), read(v), spec)


class IgnoresDescale(Forward):
    def prepare_quantised(self, q: Quantised, k: Quantised, v: Quantised, spec: AttentionSpec) -> Operands:
        return super().prepare_quantised(q, replace(k, descale=torch.ones_like(k.descale)), v, spec)


def swap_group_order(operands: Operands, result: Result) -> Result:
    """Query head h uses key head h % kv_heads."""
    spec = operands.spec
    if spec.group == 1:
        return result
    order = torch.arange(spec.heads).view(spec.kv_heads, spec.group).mT.flatten()
    q, k, v = operands.tensors()
    out, lse, _ = EXACT.run(Operands(spec, q[:, order], k, v))
    back = torch.argsort(order)
    return Result(out[:, back], lse[:, back].float())


def widen_window(spec: AttentionSpec) -> AttentionSpec:
    mask = spec.mask
    if mask.left is None:
        return spec
    return spec.replace(mask=Mask(mask.left + 1, mask.right, mask.alignment))


def align_top_left(spec: AttentionSpec) -> AttentionSpec:
    return spec.replace(mask=Mask(spec.mask.left, spec.mask.right)) if not spec.has_empty_rows else spec


def zero_lse_of_empty_rows(_: Operands, result: Result) -> Result:
    assert result.lse is not None
    return result._replace(lse=torch.where(result.lse == -torch.inf, 0.0, result.lse))


def double_grouped_masks(operands: Operands, result: Result) -> Result:
    spec = operands.spec
    both = spec.group > 1 and spec.mask.kind != "none"
    return result._replace(out=result.out * 2) if both else result


def double_where(feature: Callable[[AttentionSpec], bool]) -> Callable[[Operands, Result], Result]:
    """Doubles out for specs with the feature."""
    return lambda operands, result: result._replace(out=result.out * 2) if feature(operands.spec) else result


def lose_bits_with_length(operands: Operands, result: Result) -> Result:
    """Models an accumulator of so few bits that each addition of 32 keys loses a part of the sum."""
    return result._replace(out=result.out * (1 - operands.spec.seqlen_kv / 32 * 2.0**-11))


class WholeWithoutScale(Forward):
    """Correct in prepare and run, and without the scale in whole."""

    def whole(self, spec: AttentionSpec, device_type: str) -> Whole | None:
        forward, unscaled = Forward(), spec.replace(scale=spec.head_dim**-0.5)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
            return forward.run(forward.prepare(Inputs(q, k, v), unscaled))[:2]

        return attend if spec.descale is None else None


# The kernel, the check that must report it, and a part of its message.
FORWARDS: dict[str, tuple[Callable[[], ForwardKernel], str, str]] = {
    "changing refusals": (AlternatingRefusal, "refusals", "asked again"),
    "long refusal": (LongRefusal, "refusals", "more than one sentence"),
    "missing refusal": (MissingRefusal, "runs", "no kernel image"),
    "wrong dtype": (lambda: ChangesResult(lambda _, r: r._replace(out=r.out.double())), "returned", "float64"),
    "wrong layout": (lambda: ChangesResult(lambda _, r: r._replace(out=r.out.transpose(1, 2))), "returned", "shape"),
    "half-precision LSE": (lambda: ChangesResult(lambda _, r: r._replace(lse=r.lse.half())), "returned", "float16"),
    "no LSE": (lambda: ChangesResult(lambda _, r: r._replace(lse=None)), "returned", "lse is None"),
    "in place": (MutatesInputs, "inputs", "k changed"),
    "random state": (UsesGlobalRandomState, "torch's state", "random state"),
    "zeros": (lambda: ChangesResult(lambda _, r: r._replace(out=r.out * 0)), "out", "out is off by 1"),
    "declared error": (
        lambda: ChangesResult(lambda _, r: r._replace(out=r.out * 1.006)),
        "declared error",
        "0.006, 0.004 declared",
    ),
    "base 2": (lambda: ChangesResult(lambda _, r: r._replace(lse=r.lse / 0.6931472)), "LSE", "base 2"),
    "empty rows": (lambda: ChangesResult(zero_lse_of_empty_rows), "empty rows", "lse"),
    "later calls": (ChangesAfterCalls, "repeated calls", "call"),
    "operands cleared": (ClearsOperands, "repeated calls", "second run on the same operands"),
    "cached by address": (CachesByAddress, "new values", "negated"),
    "output reused": (ReusesOutput, "results kept", "out of the first call"),
    "lengths": (lambda: ChangesResult(double_where(lambda s: s.seqlen_q != s.seqlen_kv)), "lengths", "out"),
    "causal": (
        lambda: ChangesSpec(lambda s: s.replace(mask=Mask()) if s.mask.kind == "causal" else s),
        "causal",
        "out",
    ),
    "alignment": (lambda: ChangesSpec(align_top_left), "alignment", "that of the mask causal"),
    "window": (lambda: ChangesSpec(widen_window), "window", "that of the mask"),
    "grouping": (lambda: ChangesResult(swap_group_order), "grouping", "h %"),
    "softcap": (lambda: ChangesSpec(lambda s: s.replace(softcap=0.0)), "softcap", "is off by"),
    "scale": (lambda: ChangesSpec(lambda s: s.replace(scale=s.head_dim**-0.5)), "scale", "is off by"),
    "head_dim_v": (lambda: ChangesResult(double_where(lambda s: s.head_dim != s.head_dim_v)), "head_dim_v", "out"),
    "descales": (IgnoresDescale, "descales", "k_descale = 1"),
    "descales in place": (MutatesDescale, "descales", "v or its descale changed"),
    "FP8 strides": (IgnoresFp8Strides, "descales", "with FP8 views"),
    "strides": (IgnoresStrides, "strides", "with every second column"),
    "threads": (SharesOperands, "threads", "two threads"),
    "short accumulator": (lambda: ChangesResult(lose_bits_with_length), "growth", "out of 2048 tokens is off by 0.03"),
    "memory": (LeaksOperands, "memory", "alive"),
    "sequences joined": (lambda: ChangesLengths("packed", join_first_sequences), "packed batch", "the sequence of"),
    "a scale for all sequences": (lambda: ChangesLengths("packed", share_scale), "packed batch", "is off by"),
    "padding read": (lambda: ChangesLengths("padded", use_full_lengths), "padded batch", "is off by"),
    "the other side padded": (
        lambda: ChangesLengths("left-padded", treat_as_right_padded),
        "left-padded batch",
        "is off by",
    ),
    "the whole without a scale": (WholeWithoutScale, "whole", "by whole"),
    "combinations": (lambda: ChangesResult(double_grouped_masks), "combinations", "out"),
}


class ScalesGradient(Backward):
    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = super().run(saved, grad_out)
        return dq * 1.05, dk, dv


class ShortAccumulator(Backward):
    """Sums dV in so few bits that each addition of 32 queries loses a part of it."""

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = super().run(saved, grad_out)
        return dq, dk, dv * (1 - saved.spec.seqlen_q / 32 * 2.0**-11)


class ClearsSavedOut(Backward):
    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gradients = super().run(saved, grad_out)
        saved.out.zero_()
        return gradients


class DropsState(Backward):
    """Uses a state that only the first backward has."""

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gradients = super().run(saved, grad_out)
        if saved.state is not None and saved.state.pop("again", None) is None:
            gradients = (torch.zeros_like(gradients[0]), *gradients[1:])
        return gradients


class RecomputesLse(Backward):
    """Recomputes the LSE and output, although it declares that it reads the saved ones."""

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = saved.operands
        out, lse, _ = EXACT.run(EXACT.prepare(Inputs(own.q, own.k, own.v, own.lengths), own.spec))
        return super().run(Saved(own, out, lse), grad_out)


class Stateful(Forward):
    def run(self, operands: Operands) -> Result:
        return super().run(operands)._replace(state={"again": True})


BACKWARDS: dict[str, tuple[Callable[[], tuple[ForwardKernel, BackwardKernel]], str, str]] = {
    "gradient times 1.05": (lambda: (Forward(), ScalesGradient()), "gradients", "dq is off by 0.0"),
    "saved out is changed": (lambda: (Forward(), ClearsSavedOut()), "inputs", "out changed"),
    "an LSE of its own": (lambda: (Forward(), RecomputesLse()), "sinks", "dq is off by"),
    "works once": (lambda: (Stateful(), DropsState()), "autograd", "second backward"),
}
