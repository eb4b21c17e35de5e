"""Batches of transformers whose sequences have lengths of their own, as the packed tensors that ``attention`` takes.

Rows are padded, or hold several sequences end to end.  Where each sequence lies is found once, when the mask is made,
and layers only gather by it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.weak import WeakTensorKeyDictionary

from attnbench.errors import InputError
from attnbench.problem.mask import Mask

from .calls import Calls

__all__ = ["Sequences", "named_lengths"]


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a batch of rows: ``queries`` (Tq,) and ``keys`` (Tkv,) are the places of their tokens.

    A place counts the tokens of the rows, (B, Sq) or (B, Skv), end to end; None stands for all of them.  ``starts_q``
    and ``starts_kv`` (N + 1,), int32, say where each sequence begins in those.  ``longest_q`` and ``longest_kv`` bound
    the lengths; None leaves them to be read from the device, once for each such tensor.
    """

    queries: Tensor | None
    keys: Tensor | None
    starts_q: Tensor
    starts_kv: Tensor
    longest_q: int | None
    longest_kv: int | None

    @classmethod
    def of_padded(cls, real: Tensor, seqlen_q: int, every_query: bool, device: torch.device | str) -> Sequences:
        """One sequence a row, of its tokens without padding: ``real`` (B, Skv), on the CPU, is true at those.

        The queries are the last Sq tokens of each row, or, with ``every_query``, Sq other tokens that are all used.
        """
        keys, starts_kv, longest_kv = _places(real)
        queries, starts_q, longest_q = keys, starts_kv, longest_kv
        if every_query:
            starts = torch.arange(0, (len(real) + 1) * seqlen_q, seqlen_q, dtype=torch.int32)
            queries, starts_q, longest_q = None, starts, seqlen_q
        elif seqlen_q != real.shape[1]:
            queries, starts_q, longest_q = _places(real[:, real.shape[1] - seqlen_q :])
        return cls(queries, keys, starts_q, starts_kv, longest_q, longest_kv).to(device)

    @classmethod
    def of_shown(cls, real: Tensor, asks: Tensor | None, seqlen_q: int, device: torch.device | str) -> Sequences:
        """One sequence a row, of the keys at which ``real`` (B, Skv) is true, on the CPU, and the queries at which
        ``asks`` (B, Sq) is, None for all of them.
        """
        if asks is None:
            return cls.of_padded(real, seqlen_q, True, device)
        keys, starts_kv, longest_kv = _places(real)
        queries, starts_q, longest_q = _places(asks)
        return cls(queries, keys, starts_q, starts_kv, longest_q, longest_kv).to(device)

    @classmethod
    def of_packed(cls, anew: Tensor, device: torch.device | str) -> Sequences:
        """Sequences end to end: ``anew`` (B, S - 1), on the CPU, is true where a sequence begins after column 0."""
        first = torch.nn.functional.pad(anew, (1, 0), value=True).flatten()
        starts = torch.cat([first.nonzero().flatten(), torch.tensor([len(first)])]).to(torch.int32)
        longest = int(starts.diff().max())
        return cls(None, None, starts, starts, longest, longest).to(device)

    def to(self, device: torch.device | str) -> Sequences:
        """The same places and starts on another device."""
        moved = {id(x): x.to(device, non_blocking=True) for x in vars(self).values() if isinstance(x, Tensor)}
        return replace(self, **{name: moved.get(id(x), x) for name, x in vars(self).items()})

    def attend(self, calls: Calls, q: Tensor, k: Tensor, v: Tensor, mask: Mask, **named: Any) -> Tensor | None:
        """q (B, H, Sq, D), k and v (B, Hkv, Skv, D) to (B, Sq, H, Dv), 0 at queries of no sequence.

        The mask is aligned within each sequence.  None if attention refuses and the call is handed on.  Compiled code
        breaks its graph where the lengths have no bound yet.
        """
        if is_compiling() and (self.longest_q is None or self.longest_kv is None):
            out: Tensor | None = self._outside(calls, q, k, v, mask, **named)
            return out
        batch, heads, seqlen_q, _ = q.shape
        tokens = batch * seqlen_q
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        if self.queries is not None:
            q = q.index_select(0, self.queries)
        if self.keys is not None:
            k, v = k.index_select(0, self.keys), v.index_select(0, self.keys)
        if not (len(q) and len(k)):
            return q.new_zeros(batch, seqlen_q, heads, v.shape[-1])
        out = calls.attend(
            q, k, v, mask, layout="thd", cu_seqlens_q=self.starts_q, cu_seqlens_kv=self.starts_kv,
            max_seqlen_q=self.longest_q, max_seqlen_kv=self.longest_kv, **named,
        )  # fmt: skip
        if out is None:
            return None
        if self.queries is not None:
            out = out.new_zeros(tokens, *out.shape[1:]).index_copy_(0, self.queries, out)
        return out.view(batch, seqlen_q, *out.shape[1:]).contiguous()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _outside(self, *call: Any, **named: Any) -> Tensor | None:
        return self.attend(*call, **named)

    def visible_keys(self, batch: int, seqlen_q: int, seqlen_kv: int) -> Tensor:
        """Which keys are of the query's own sequence, (B, 1, Sq, Skv); padding as a query sees its row's tokens."""
        device = self.starts_q.device
        if self.keys is None:
            sides = ((self.starts_q, seqlen_q), (self.starts_kv, seqlen_kv))
            own_q, own_kv = (_numbers(starts, batch * size).view(batch, size) for starts, size in sides)
        else:
            own_q = torch.arange(batch, device=device)[:, None].expand(batch, seqlen_q)
            own_kv = torch.full((batch * seqlen_kv,), -1, device=device)
            own_kv = own_kv.index_copy_(0, self.keys, self.keys // seqlen_kv).view(batch, seqlen_kv)
        return own_q[:, None, :, None] == own_kv[:, None, None, :]


def named_lengths(layer: str, starts_q: Any, starts_kv: Any, longest_q: Any, longest_kv: Any) -> Sequences | None:
    """The sequences that ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k`` name, if they do.

    Keys without lengths of their own have those of the queries.  Raises InputError if queries have none, or for what
    is no tensor.
    """
    if starts_q is None and starts_kv is None:
        return None  # a largest length alone says nothing
    starts_kv = starts_q if starts_kv is None else starts_kv
    for name, starts in (("cu_seq_lens_q", starts_q), ("cu_seq_lens_k", starts_kv)):
        if not isinstance(starts, Tensor):
            raise InputError(f"{layer} wants {name} as a tensor (N + 1,), got {type(starts).__name__}")
    # Tensors, as transformers makes them of positions, would be read in each layer.
    known = [longest if isinstance(longest, int) else None for longest in (longest_q, longest_kv)]
    return Sequences(None, None, _int32(starts_q), _int32(starts_kv), known[0], known[1])


def _places(real: Tensor) -> tuple[Tensor | None, Tensor, int]:
    """The places of true entries (B, S), where each row begins in them, and the most in a row, at least 1."""
    lengths = real.sum(1)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return real.flatten().nonzero().flatten(), starts, max(1, int(lengths.max()))


def _numbers(starts: Tensor, count: int) -> Tensor:
    """The number of the sequence that each of ``count`` tokens is of."""
    tokens = torch.arange(count, dtype=torch.int32, device=starts.device)
    return torch.bucketize(tokens, starts[1:].contiguous(), right=True)


class _Converted(NamedTuple):
    version: int
    starts: Tensor


_converted: MutableMapping[Tensor, _Converted] = WeakTensorKeyDictionary()  # int64 starts in int32


def _int32(starts: Tensor) -> Tensor:
    """The starts in int32: the same tensor for all layers, so that its lengths are read once."""
    if starts.dtype != torch.int64:
        return starts  # ``attention`` refuses other types
    if is_compiling():
        return starts.to(torch.int32)
    version = -1 if starts.is_inference() else starts._version
    found = _converted.get(starts)
    if found is None or found.version != version or version == -1:
        found = _converted[starts] = _Converted(version, starts.to(torch.int32))
    return found.starts
