"""Which queries see which keys at each step of a ring, and how a sequence is laid over its ranks.

Rank r of N holds two pieces of a sequence cut into 2 N: r and 2 N - 1 - r, the head and the tail, so that under a
causal mask every rank has as much to do.  torch's ``context_parallel``, torchtitan and Megatron lay sequences so.  At
step i a rank has the keys of rank r - i.  Its own keys it sees by the causal mask.  Of an earlier rank's it sees the
head alone, with all queries; of a later rank's all, with the queries of its tail.  So no step but the first has a mask,
and each has half of the pairs of a square.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..problem.mask import Mask
from ..problem.spec import AttentionSpec

__all__ = ["Part", "part_at", "parts_of", "places"]


class Part(NamedTuple):
    """What a rank computes at a step: with ``half_q`` the queries of its tail, with ``half_kv`` the keys of a head."""

    name: str
    half_q: bool = False
    half_kv: bool = False
    causal: bool = False

    def spec(self, whole: AttentionSpec) -> AttentionSpec:
        """What a step asks of a kernel; ``whole`` has the lengths of one rank."""
        return whole.replace(
            seqlen_q=whole.seqlen_q // 2 if self.half_q else whole.seqlen_q,
            seqlen_kv=whole.seqlen_kv // 2 if self.half_kv else whole.seqlen_kv,
            mask=whole.mask if self.causal else Mask(),
            return_lse=False,
            partial=True,
        )


_ALL = Part("all keys")
_OWN = Part("own keys", causal=True)
_EARLIER = Part("an earlier rank's keys", half_kv=True)
_LATER = Part("a later rank's keys", half_q=True)


def parts_of(causal: bool, size: int) -> tuple[Part, ...]:
    """The parts that some rank of so many computes."""
    if not causal:
        return (_ALL,)
    return (_OWN, _EARLIER, _LATER) if size > 1 else (_OWN,)


def part_at(step: int, rank: int, causal: bool) -> Part:
    """What this rank computes at a step, with the keys of rank ``rank - step``."""
    if not causal:
        return _ALL
    return _OWN if step == 0 else _EARLIER if step <= rank else _LATER


def places(length: int, size: int, rank: int, device: torch.device | str) -> Tensor:
    """The places (length / size,) in the sequence of the tokens that this rank holds, ascending.

    Raises InputError if the length is no multiple of two pieces a rank.
    """
    if length % (2 * size):
        raise InputError(f"a sequence over {size} ranks has a multiple of {2 * size} tokens, not {length}")
    piece = length // (2 * size)
    within = torch.arange(piece, device=device)
    return torch.cat([within + rank * piece, within + (2 * size - 1 - rank) * piece])
