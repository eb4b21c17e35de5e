"""Masks as FlexAttention takes them: blocks of queries and keys that are seen whole, in part, or not at all.

Blocks come from the first and last key that rows see, without the matrix of all (query, key) pairs that
``create_block_mask`` makes, and are kept: those of a packed batch as long as its cumulative lengths live.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from attnbench.graph_pools import current_stream, outside_pools, permanent, recording
from attnbench.problem.lengths import Lengths
from attnbench.problem.mask import Mask
from attnbench.problem.visible_keys import VisibleKeys

__all__ = ["BLOCK", "block_mask", "packed_blocks"]

BLOCK = 128  # queries and keys of a block of the mask, FlexAttention's own default
_MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_KEPT = 8  # masks of one batch: those of its layers


def block_mask(mask: Mask, seqlen_q: int, seqlen_kv: int, device: torch.device) -> BlockMask | None:
    """The mask of sequences of one length, None for no mask."""
    if mask.kind == "none":
        return None
    if recording():
        return _recorded_blocks(mask, seqlen_q, seqlen_kv, device)
    return _kept_blocks(mask, seqlen_q, seqlen_kv, device, current_stream(device))


@lru_cache(maxsize=16)
def _kept_blocks(mask: Mask, seqlen_q: int, seqlen_kv: int, device: torch.device, stream: int) -> BlockMask:
    """For this stream, which has made them before it reads them, and reads them before their memory is used again."""
    return outside_pools(partial(_blocks, mask, seqlen_q, seqlen_kv, device), device)


def _blocks(mask: Mask, seqlen_q: int, seqlen_kv: int, device: torch.device) -> BlockMask:
    offset = mask.offset(seqlen_q, seqlen_kv)
    low = offset - mask.left if mask.left is not None else -seqlen_q
    high = offset + mask.right if mask.right is not None else seqlen_kv
    # Every visible key j of query i has i + low <= j <= i + high.
    top = torch.arange(0, seqlen_q, BLOCK, device=device)[:, None]
    bottom = torch.clamp(top + BLOCK, max=seqlen_q) - 1
    left = torch.arange(0, seqlen_kv, BLOCK, device=device)[None, :]
    right = torch.clamp(left + BLOCK, max=seqlen_kv) - 1
    visible = (top + low <= right) & (bottom + high >= left)
    whole = (top + BLOCK <= seqlen_q) & (left + BLOCK <= seqlen_kv)
    full = whole & (bottom + low <= left) & (top + high >= right)
    band = _band(torch.full((), low, device=device), torch.full((), high, device=device))
    return _block_mask(visible, full, band, (seqlen_q, seqlen_kv))


_recorded_blocks = permanent(_blocks)


def packed_blocks(mask: Mask, lengths: Lengths, tokens_q: int, tokens_kv: int) -> BlockMask:
    """The mask within each sequence of a packed batch, which hides all others.  Reads nothing from the device."""
    starts_q, starts_kv = lengths.starts
    if recording() or starts_q.is_inference() or starts_kv.is_inference():  # no version tells of a change
        return _packed(mask, lengths, tokens_q, tokens_kv)
    same = starts_kv is starts_q
    key = (mask, tokens_q, tokens_kv, same, current_stream(starts_q.device))
    versions = starts_q._version, starts_kv._version
    known = _batches.setdefault(starts_q, {})
    found = known.get(key)
    if found is None or found.versions != versions or not (same or found.starts_kv() is starts_kv):
        if len(known) >= _KEPT:
            known.pop(next(iter(known)), None)
        blocks = outside_pools(partial(_packed, mask, lengths, tokens_q, tokens_kv), starts_q.device)
        found = known[key] = _KeptBatch(versions, TensorWeakRef(starts_kv), blocks)
    return found.blocks


class _KeptBatch(NamedTuple):
    """Blocks of starts at these versions; keys' starts are known by identity."""

    versions: tuple[int, int]
    starts_kv: TensorWeakRef
    blocks: BlockMask


_batches: MutableMapping[Tensor, dict[tuple[object, ...], _KeptBatch]] = WeakTensorKeyDictionary()


def _packed(mask: Mask, lengths: Lengths, tokens_q: int, tokens_kv: int) -> BlockMask:
    starts_q = lengths.starts[0]
    seen = VisibleKeys.of(mask, lengths, tokens_q, tokens_kv, starts_q.device)
    low, high = seen.first[0], seen.stop[0] - 1
    sees = low <= high
    low, high = torch.where(sees, low, tokens_kv), torch.where(sees, high, -1)  # the least and largest of no keys
    unfilled = -tokens_q % BLOCK
    rows_low = torch.nn.functional.pad(low, (0, unfilled), value=tokens_kv).view(-1, BLOCK)
    rows_high = torch.nn.functional.pad(high, (0, unfilled), value=-1).view(-1, BLOCK)
    left = torch.arange(0, tokens_kv, BLOCK, device=starts_q.device)[None, :]
    right = torch.clamp(left + BLOCK, max=tokens_kv) - 1
    visible = (rows_low.amin(1, keepdim=True) <= right) & (rows_high.amax(1, keepdim=True) >= left)
    full = (rows_low.amax(1, keepdim=True) <= left) & (rows_high.amin(1, keepdim=True) >= right)
    full &= left + BLOCK <= tokens_kv
    return _block_mask(visible, full, _interval(low, high), (tokens_q, tokens_kv))


def _block_mask(visible: Tensor, full: Tensor, mask_mod: _MaskMod, sizes: tuple[int, int]) -> BlockMask:
    """From which blocks (rows, columns) are visible, and which of them whole."""
    counts, indices = _ordered(visible & ~full)
    full_counts, full_indices = _ordered(full)
    return BlockMask.from_kv_blocks(
        counts, indices, full_counts, full_indices, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=sizes
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has (1, 1, rows) and which, the present ones first (1, 1, rows, columns)."""
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1).to(torch.int32)[None, None], order.to(torch.int32)[None, None].contiguous()


def _band(low: Tensor, high: Tensor) -> _MaskMod:
    # Bounds as tensors and not as numbers: another window is then the same program.
    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= query + low) & (key <= query + high)

    return mask_mod


def _interval(low: Tensor, high: Tensor) -> _MaskMod:
    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= low[query]) & (key <= high[query])

    return mask_mod
