"""Recognise the mask that a tensor describes, exactly, a few rows at a time."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .mask import Alignment, Mask

__all__ = ["HIDDEN", "mask_of_tensor"]

# fp16's least number.  Models hide keys with -inf, the least number of some type or -1e9: the
# exponential of each is 0 in fp32, whatever scores below this size it is added to.
HIDDEN = -65504.0
_CHUNK = 2**22  # elements of a mask looked at together


def mask_of_tensor(tensor: Tensor, seqlen_q: int, seqlen_kv: int) -> Mask | None:
    """The mask that ``tensor`` (..., Sq or 1, Skv or 1) describes; None if it is not none, causal or a window.

    Boolean tensors are true where a key is seen; others are added to the scores: 0 where it is seen, -65504 or less
    where not.  Also None if batch entries or heads differ, or some query sees no key, on which kernels disagree.
    """
    if seqlen_q < 1 or seqlen_kv < 1:
        return None
    spans: Tensor | None = None
    for piece in _pieces(tensor):
        found = _spans(piece.expand(seqlen_q, seqlen_kv))
        if found is None or (spans is not None and not torch.equal(found, spans)):
            return None
        spans = found
    if spans is None:
        return None
    starts, stops = spans.tolist()
    for mask in _candidates(starts, stops, seqlen_q, seqlen_kv):
        if all(mask.span(row, seqlen_q, seqlen_kv) == span for row, span in enumerate(zip(starts, stops, strict=True))):
            return mask
    return None


def _pieces(tensor: Tensor) -> list[Tensor]:
    """The different (Sq, Skv) masks of a tensor; what was expanded is one."""
    while tensor.ndim < 2:
        tensor = tensor.unsqueeze(0)
    for axis in range(tensor.ndim - 2):
        if tensor.stride(axis) == 0 and tensor.shape[axis]:
            tensor = tensor.narrow(axis, 0, 1)
    return [tensor[place] for place in itertools.product(*map(range, tensor.shape[:-2]))]


def _spans(piece: Tensor) -> Tensor | None:
    """The first key that each row sees and one past the last, (2, Sq) on the CPU; None where those are no spans."""
    rows, keys = piece.shape
    step = max(1, _CHUNK // keys)
    found = []
    for first in range(0, rows, step):
        part = piece[first : first + step]
        seen = part if part.dtype == torch.bool else part == 0
        if part.dtype != torch.bool and not bool((seen | (part <= HIDDEN)).all()):
            return None
        start = seen.byte().argmax(dim=-1)
        stop = keys - seen.flip(-1).byte().argmax(dim=-1)
        count = seen.sum(dim=-1)
        if not bool(((stop - start == count) & (count > 0)).all()):
            return None
        found.append(torch.stack([start, stop]).cpu())
    return torch.cat(found, dim=1)


def _candidates(starts: list[int], stops: list[int], seqlen_q: int, seqlen_kv: int) -> list[Mask]:
    """The masks that could have these spans, causal ones first."""
    left = next((row - start for row, start in enumerate(starts) if start > 0), None)
    right = next((stop - 1 - row for row, stop in enumerate(stops) if stop < seqlen_kv), None)
    alignments: tuple[Alignment, ...] = ("top-left", "bottom-right")
    found = []
    for alignment in alignments:
        offset = Mask(alignment=alignment).offset(seqlen_q, seqlen_kv)
        sides = (None if left is None else left + offset, None if right is None else right - offset)
        if all(side is None or side >= 0 for side in sides):
            found.append(Mask(*sides, alignment))
    return sorted(found, key=lambda mask: mask.right != 0)
