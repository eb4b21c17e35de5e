"""Rules of the operators in ``operators`` under autograd, and under torch.func, which needs an autograd.Function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import InputError
from ..problem.tensor_kinds import refuse_tangents

__all__ = ["TENSORS", "derive", "map_backward", "map_forward", "save", "transformed", "underive"]

TENSORS = 8  # the number of leading tensor arguments of both operators


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep for the backward what it reads: q, k, v, out, the log-sum-exp and lengths."""
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:5])
    ctx.asked = inputs[TENSORS:]
    ctx.mark_non_differentiable(output[1])


def derive(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the forward operator's arguments, by the backward operator."""
    return _gradients(torch.ops.attnbench.attention_backward, ctx, grad_out)


def underive(ctx: Any, *_: Any) -> None:
    """Refuse a second derivative."""
    raise RuntimeError("attnbench::attention has no second derivative")


def transformed(*given: Any) -> tuple[Tensor, Tensor]:
    """The forward operator within transforms of torch.func."""
    out, lse = _Forward.apply(*given)  # type: ignore[no-untyped-call]
    return out, lse


def map_forward(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> Any:
    """vmap of the forward: a forward of a larger batch, for which a plan is chosen anew."""
    if given[5] is not None:
        raise InputError("attention of FP8 tensors has no vmap; give them a larger batch")
    _check_even(given[3:5])
    folded = _folded(info.batch_size, in_dims[:3], given[:3])
    found = torch.ops.attnbench.attention(*folded, *given[3:])
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in found), (0, 0)


def map_backward(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> Any:
    """vmap of the backward: a backward of a larger batch."""
    _check_even(given[6:TENSORS])
    folded = _folded(info.batch_size, in_dims[:6], given[:6])
    found = torch.ops.attnbench.attention_backward(*folded, *given[6:])
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in found), (0, 0, 0)


def _gradients(backward: Callable[..., tuple[Tensor, ...]], ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.asked[0]:
        raise InputError("attnbench::attention was called with training=False, so no gradients can follow")
    gradients = backward(grad_out, *ctx.saved_tensors, *ctx.asked)
    wanted = zip(gradients, ctx.needs_input_grad, strict=False)
    found = [gradient if needed else None for gradient, needed in wanted]
    return (*found, *[None] * (TENSORS - len(found) + len(ctx.asked)))


def _check_even(lengths: tuple[Tensor | None, ...]) -> None:
    if any(each is not None for each in lengths):
        raise InputError("attention of packed and padded batches has no vmap; make one batch of all sequences")


def _folded(size: int, dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Each tensor with the mapped axis folded into its batch; a tensor without that axis is repeated."""
    return [
        (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
        for x, dim in zip(tensors, dims, strict=True)
    ]


class _Forward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*given: Any) -> Any:
        return torch.ops.attnbench.attention(*given)

    setup_context = staticmethod(save)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_tangents()

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(_Backward.apply, ctx, grad_out)


class _Backward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*given: Any) -> Any:
        return torch.ops.attnbench.attention_backward(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    backward = staticmethod(underive)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_tangents()
