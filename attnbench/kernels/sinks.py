"""Sinks: one more logit a head in the softmax's sum, added to what any kernel with a log-sum-exp returns.

Without its sink a row's sum of exponentials is exp(LSE).  With it the sum is exp(LSE) + exp(sink), so the LSE becomes
the logarithm of that, and the output shrinks by the ratio of the two, a sigmoid.  This is exact, whatever the kernel;
it costs one pass over the output.  A backward that is given this output and this LSE makes the gradients with the sink,
because they are made of exp(S - LSE) and of the sums of output times gradient.

Sinks are those of StreamingLLM (arXiv 2309.17453) as gpt-oss learns them (arXiv 2508.10925).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from .contract import Result

__all__ = ["check_sinks", "gradient_of_sinks", "with_sinks"]


def check_sinks(sinks: Tensor, heads: int, device: torch.device) -> None:
    """Raise InputError unless it is one number for each query head, floating point and on the device."""
    if sinks.shape != (heads,):
        raise InputError(f"sinks have one number for each of {heads} query heads, got shape {tuple(sinks.shape)}")
    if sinks.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise InputError(f"sinks must be bf16, fp16, fp32 or fp64, not {sinks.dtype}")
    if sinks.device != device:
        raise InputError(f"sinks must be on {device} as q is, not on {sinks.device}")


def with_sinks(result: Result, sinks: Tensor) -> Result:
    """The forward's result, out (B, H, Sq, Dv) and lse (B, H, Sq), with sinks (H,); the output is changed in place.

    A sink of minus infinity is none.  A row that sees no key stays 0, and its LSE is the sink.
    """
    out, lse, state = result
    assert lse is not None, "kernels without an LSE refuse a spec with sinks"
    each = sinks.detach().to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - each).masked_fill(each == -torch.inf, 1.0)
    return Result(out.mul_(share[..., None]), torch.logaddexp(lse, each.expand_as(lse)), state)


def gradient_of_sinks(sinks: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor) -> Tensor:
    """(H,) in the dtype of the sinks: minus the sum over rows of the sink's probability and output times gradient.

    ``out`` and ``lse`` have the sinks in them.
    """
    each = sinks.detach().to(lse.dtype)[:, None]
    probability = torch.exp(each - lse).masked_fill(each == -torch.inf, 0.0)
    # Products in bf16 are off by 2^-9 at random, which sums over all rows make small; fp16 may overflow.
    wide = grad_out.to(lse.dtype) if grad_out.dtype == torch.float16 else grad_out
    delta = (wide * out).sum(-1, dtype=lse.dtype)
    found: Tensor = (probability * delta).sum((0, 2)).neg().to(sinks.dtype)
    return found
