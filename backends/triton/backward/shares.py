"""How many programs share a block of keys: where key heads are few, each has part of a key head's query heads."""

from __future__ import annotations

from torch import Tensor

from attnbench.problem.spec import AttentionSpec

from .place import AT_ONCE

__all__ = ["shares_of", "summed"]

# Times as many programs as a GPU runs at once.  Under a causal mask the first keys' programs take twice as long as the
# mean, and more of them are needed so that none is waited for.
_ENOUGH, _ENOUGH_CAUSAL = 2, 4
_LEAST = 4096  # queries of a share, over all its heads: with fewer the sum over shares costs more than they save


def shares_of(spec: AttentionSpec, programs: int) -> int:
    """The least number of shares, a divisor of the group, with which ``programs`` of a whole group become enough."""
    enough = AT_ONCE.value * (_ENOUGH if spec.mask.right is None else _ENOUGH_CAUSAL)
    possible = [
        each
        for each in range(1, spec.group + 1)
        if spec.group % each == 0 and spec.group // each * spec.seqlen_q >= _LEAST
    ]
    return next((each for each in possible if programs * each >= enough), max(possible, default=1))


def summed(x: Tensor, kv_heads: int) -> Tensor:
    """A gradient (B, Hkv, Skv, D) from those of each share (B, Hkv · shares, Skv, D), in their dtype."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)
