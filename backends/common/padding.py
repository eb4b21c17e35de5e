"""Head dimensions that a kernel was not built for: zeros behind the last one, cut off again afterwards.

Zeros add nothing to q·k, and a zero column of V is a zero column of the output, so padding changes no number
as long as the scale is the spec's own and not the one that a library derives from the padded size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["padded", "rounded_up"]


def rounded_up(size: int, step: int) -> int:
    """The smallest multiple of ``step`` that is no smaller than ``size``."""
    return -(-size // step) * step


def padded(x: Tensor, size: int) -> Tensor:
    """x (..., D) as it is where D is ``size``, else a copy (..., size) with zeros behind; float8 keeps its bits.

    Raises ValueError where x is larger than ``size`` already: cutting would change the answer.
    """
    missing = size - x.shape[-1]
    if missing < 0:
        raise ValueError(f"a head dimension of {x.shape[-1]} does not fit into {size}")
    if missing == 0:
        return x
    if x.element_size() == 1:  # no padding is defined on float8; zero is the byte 0 in every format
        return F.pad(x.view(torch.uint8), (0, missing)).view(x.dtype)
    return F.pad(x, (0, missing))
