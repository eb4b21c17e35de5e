"""FP32 products in FP32, whatever shorter type the program allows for them: an error is declared for one arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

__all__ = ["full_fp32", "shortened"]

_NOTHING = nullcontext()
# What ``fp32_precision`` of torch.backends.cuda.matmul and torch.backends.mkldnn.matmul are properties of: these take
# 0.6 µs more to read.
_read, _write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter


def full_fp32(x: Tensor) -> AbstractContextManager[None]:
    """Within the block, matrix products of FP32 tensors use neither TF32 nor bf16 on the device of ``x``.

    ``torch.get_float32_matmul_precision`` raises once a program has set a backend's own ``fp32_precision``, so that is
    read and set here.
    """
    if x.is_cuda:  # where "none" leaves the decision to environment variables
        return _lengthened("cuda")
    return _lengthened("mkldnn") if shortened() else _NOTHING


def shortened() -> bool:
    """Whether a CPU may compute FP32 products in a shorter type; "none", the default, shortens nothing there."""
    return _read("mkldnn", "matmul") not in ("none", "ieee")  # setting it takes 4 µs


@contextmanager
def _lengthened(backend: str) -> Iterator[None]:
    before = _read(backend, "matmul")
    _write(backend, "matmul", "ieee")
    try:
        yield
    finally:
        _write(backend, "matmul", before)
