"""The lengths of the sequences of one call: the tensors that kernels read, checked, and each sequence on its own.

What is known of a tensor of lengths on a GPU (its largest difference, that it is in order) is read once and kept as
long as the tensor lives and is not changed in place; then a call reads nothing from the device.  Memory that is changed
behind torch's back (by a kernel of one's own, a replayed CUDA graph) is noticed with ATTNBENCH_CHECK=1 alone: pass
``max_seqlen_q`` and ``max_seqlen_kv`` there.  On a CPU every call reads and checks them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import InputError
from ..text.printable import brief
from .lengths_kind import Batch
from .spec import AttentionSpec

__all__ = ["CHECK", "Lengths", "Sequence", "packed", "padded"]

CHECK = "ATTNBENCH_CHECK"  # 1: values on a GPU are checked too, which waits for it


class Sequence(NamedTuple):
    """Where one sequence with a query and a key lies in q, k, v (B, H, S, D), and its spec."""

    row: int
    queries: slice
    keys: slice
    spec: AttentionSpec

    def q(self, x: Tensor) -> Tensor:
        """Its part of x (B, H, Sq, ...), with a batch of one."""
        return x[self.row : self.row + 1, :, self.queries]

    def kv(self, x: Tensor) -> Tensor:
        """Its part of x (B, Hkv, Skv, ...), with a batch of one."""
        return x[self.row : self.row + 1, :, self.keys]


@dataclass(frozen=True, eq=False)
class Lengths:
    """``q`` and ``kv`` are cumulative lengths (N + 1,) of a packed batch, or lengths (B,) of a padded one, in int32.

    A padded batch whose rows are all full on one side has None there.  ``longest_q`` and ``longest_kv`` bound the
    lengths of the sequences.  q, k, v and out of a packed batch are (1, H, T, D) views, the LSE is (1, H, T).
    """

    batch: Batch
    q: Tensor | None
    kv: Tensor | None
    longest_q: int
    longest_kv: int

    @property
    def square(self) -> bool:
        """Whether every sequence is known to have as many keys as queries."""
        return self.q is self.kv and self.longest_q == self.longest_kv

    @property
    def starts(self) -> tuple[Tensor, Tensor]:
        """Where queries and keys of each sequence of a packed batch start, and where the last ends, (N + 1,) each."""
        if self.q is None or self.kv is None or self.batch != "packed":
            raise InputError(f"a {self.batch} batch has no cumulative lengths")
        return self.q, self.kv

    def sequences(self, spec: AttentionSpec, q: Tensor, k: Tensor) -> Iterator[Sequence]:
        """The sequences that have a query and a key.  Waits for the device and reads the lengths."""
        sides = zip(self._ranges(self.q, q.shape), self._ranges(self.kv, k.shape), strict=True)
        for index, (queries, keys) in enumerate(sides):
            count, seen = queries.stop - queries.start, keys.stop - keys.start
            if count > 0 and seen > 0:
                own = spec.replace(batch=1, seqlen_q=count, seqlen_kv=seen, lengths=None)
                yield Sequence(0 if self.batch == "packed" else index, queries, keys, own)

    def _ranges(self, lengths: Tensor | None, shape: torch.Size) -> list[slice]:
        rows, size = shape[0], shape[2]
        if lengths is None:
            return [slice(0, size)] * rows
        numbers = lengths.tolist()
        if self.batch == "packed":
            return [slice(*pair) for pair in itertools.pairwise(numbers)]
        if self.batch == "left-padded":
            return [slice(size - number, size) for number in numbers]
        return [slice(0, number) for number in numbers]


class _Known(NamedTuple):
    version: int
    total: int
    longest: int


_known: MutableMapping[Tensor, _Known] = WeakTensorKeyDictionary()  # cumulative lengths, read and found in order


def packed(q: Tensor, k: Tensor, starts_q: Tensor, starts_kv: Tensor, max_q: int | None, max_kv: int | None) -> Lengths:
    """The lengths of a packed batch: q (1, H, Tq, D) and k (1, Hkv, Tkv, D), cumulative lengths (N + 1,) in int32.

    Raises InputError for another type, shape or device, a largest length that is no positive number, and, on a CPU or
    with ATTNBENCH_CHECK=1, for values that do not ascend from 0 to the number of tokens or exceed that length.
    """
    for name, starts in {"cu_seqlens_q": starts_q, "cu_seqlens_kv": starts_kv}.items():
        _check_integers(name, starts, q.device, "(N + 1,)")
        if starts.shape[0] < 2:
            raise InputError(f"{name} must have an entry for each sequence and one more, got {starts.shape[0]}")
    if starts_q.shape != starts_kv.shape:
        raise InputError(
            f"cu_seqlens_q and cu_seqlens_kv must name as many sequences, got {starts_q.shape[0] - 1} "
            f"and {starts_kv.shape[0] - 1}"
        )
    longest_q = _longest("q", starts_q, q.shape[2], max_q)
    same = starts_kv is starts_q and max_kv in (None, max_q)
    longest_kv = longest_q if same else _longest("kv", starts_kv, k.shape[2], max_kv)
    if starts_kv is starts_q and k.shape[2] != q.shape[2]:
        raise InputError(f"cu_seqlens_kv is cu_seqlens_q, but k has {k.shape[2]} tokens and q {q.shape[2]}")
    return Lengths("packed", starts_q, starts_kv, longest_q, longest_kv)


def padded(q: Tensor, k: Tensor, q_lengths: Tensor | None, kv_lengths: Tensor | None, side: str) -> Lengths:
    """The lengths of a padded batch: q (B, H, Sq, D), k (B, Hkv, Skv, D), lengths (B,) in int32, None where all are
    full.

    Raises InputError for another type, shape, device or side, and, on a CPU or with ATTNBENCH_CHECK=1, for lengths
    below 0 or beyond the rows.
    """
    if side not in ("left", "right"):
        raise InputError(f'padding_side must be "left" or "right", not {brief(side)}')
    for name, lengths, x in (("q_lengths", q_lengths, q), ("kv_lengths", kv_lengths, k)):
        if lengths is None:
            continue
        _check_integers(name, lengths, q.device, f"({q.shape[0]},)")
        if lengths.shape[0] != q.shape[0]:
            raise InputError(f"{name} must have the shape ({q.shape[0]},), one length a row, got {lengths.shape[0]}")
        if _readable(lengths) and bool(((lengths < 0) | (lengths > x.shape[2])).any()):
            raise InputError(f"{name} must lie between 0 and {x.shape[2]}, got {brief(lengths.tolist())}")
    return Lengths("padded" if side == "right" else "left-padded", q_lengths, kv_lengths, q.shape[2], k.shape[2])


def _check_integers(name: str, lengths: object, device: torch.device, shape: str) -> None:
    if not isinstance(lengths, Tensor):
        raise InputError(f"{name} must be a torch.Tensor, not {type(lengths).__name__}")
    if lengths.dtype != torch.int32:
        raise InputError(f"{name} must be int32, not {lengths.dtype}; pass {name}.to(torch.int32)")
    if lengths.device != device:
        raise InputError(f"{name} is on {lengths.device}, q on {device}; make it there once, not at every call")
    if lengths.ndim != 1:
        raise InputError(f"{name} must have the shape {shape}, got {tuple(lengths.shape)}")
    if not lengths.is_contiguous():
        raise InputError(f"{name} must be contiguous; pass {name}.contiguous()")


def _readable(lengths: Tensor) -> bool:
    """Whether its values are to be checked: no device is waited for on a CPU."""
    return not lengths.is_cuda or os.environ.get(CHECK) == "1"


def _longest(side: str, starts: Tensor, total: int, given: int | None) -> int:
    """The bound on the lengths of one side's sequences."""
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise InputError(f"max_seqlen_{side} must be a whole number, at least 1, not {brief(given)}")
        if not _readable(starts):
            return min(given, total)
    found = _read(f"cu_seqlens_{side}", starts, total)
    if given is None:
        return found
    if given < found:
        raise InputError(f"max_seqlen_{side} is {given}, but the longest sequence has {found} tokens")
    return min(given, total)


def _read(name: str, starts: Tensor, total: int) -> int:
    """The longest sequence, at least 1: known already, or read from the device once."""
    version = -1 if starts.is_inference() else starts._version
    known = None if _readable(starts) else _known.get(starts)  # what is to be checked is read at every call
    if known is not None and known.version == version != -1 and known.total == total:
        return known.longest
    if starts.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InputError(f"a CUDA graph is being recorded, so {name} cannot be read; pass max_seqlen_{name[11:]}")
    values = starts.detach().cpu()
    lengths = values.diff()
    if int(values[0]) != 0 or int(values[-1]) != total or bool((lengths < 0).any()):
        raise InputError(f"{name} must ascend from 0 to {total}, the number of tokens, got {brief(values.tolist())}")
    longest = max(1, int(lengths.max()))
    _known[starts] = _Known(version, total, longest)
    return longest
