"""What a choice may depend on where sequences have lengths of their own: frozen, hashable, JSON-able, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ..errors import InputError
from ..text.printable import brief

__all__ = ["BATCHES", "Batch", "LengthsKind", "bucket", "packed_sizes"]

Batch = Literal["packed", "padded", "left-padded"]
BATCHES: tuple[Batch, ...] = get_args(Batch)


@dataclass(frozen=True, kw_only=True)
class LengthsKind:
    """How the sequences of a call lie in its tensors, and how many tokens they have together.

    ``batch``: ``packed`` end to end, or ``padded`` at the end or (``left-padded``) at the start of rows of one length.
    ``square`` says that every sequence has as many keys as queries.  ``total_q`` and ``total_kv`` count the tokens of a
    packed batch; the lengths of padded rows are known on the device alone, so these are None there.

    Raises InputError where that describes no batch.
    """

    batch: Batch
    square: bool = False
    total_q: int | None = None
    total_kv: int | None = None

    def __post_init__(self) -> None:
        if self.batch not in BATCHES:
            raise InputError(f"batch must be one of {', '.join(BATCHES)}, not {brief(self.batch)}")
        if not isinstance(self.square, bool):
            raise InputError(f"square must be True or False, not {brief(self.square)}")
        for name in ("total_q", "total_kv"):
            total = getattr(self, name)
            if self.batch != "packed":
                if total is not None:
                    raise InputError(f"{name} counts the tokens of a packed batch, and this one is {self.batch}")
            elif isinstance(total, bool) or not isinstance(total, int) or total < 1:
                raise InputError(f"{name} must be the number of tokens, at least 1, not {brief(total)}")
        if self.square and self.total_q != self.total_kv:
            raise InputError("where every sequence has as many keys as queries, total_q and total_kv must be equal")

    @classmethod
    def from_dict(cls, data: object) -> LengthsKind:
        """What ``to_dict`` wrote.  Raises InputError on a missing, unknown or impossible entry."""
        if not isinstance(data, Mapping):
            raise InputError(f"lengths must be an object, not {type(data).__name__}")
        if unknown := sorted(set(data) - {each.name for each in fields(cls)}, key=str):
            raise InputError(f"lengths have no entry {brief(unknown[0])}")
        try:
            return cls(**data)
        except TypeError as error:
            raise InputError(f"not a description of lengths: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The fields that are not at their default, in plain JSON types."""
        usual = {"square": False, "total_q": None, "total_kv": None}
        return {name: value for name, value in vars(self).items() if name not in usual or value != usual[name]}

    def typical(self, longest: int, sequences: int, total: int | None) -> float:
        """The length of the sequences that hold most of the work: the harmonic mean of the mean and the longest.

        A token's sequence has the mean length E[n²] / E[n].  For the lengths of a Beta(1, b) distribution up to the
        longest (uniform at b = 1, nearly exponential for a large b, constant at b = 0) that is this harmonic mean.
        """
        mean = longest if total is None else min(longest, total / sequences)
        return 2 * mean * longest / (mean + longest)

    def __str__(self) -> str:
        """A short name, the same for equal kinds and different for different ones."""
        if self.total_q is None:
            return f"{self.batch}-square" if self.square else self.batch
        return f"packed{self.total_q}" if self.square else f"packed{self.total_q}-k{self.total_kv}"


def bucket(count: int) -> int:
    """The least ⌈2^(i / 2)⌉ that is not below ``count`` (1, 2, 3, 4, 6, 8, 12, 16, 23, 32, ...), at least 1.

    Counts of a training that differ at each step fall into two buckets a doubling, so that few choices are asked for.
    """
    doublings = max(0, count - 1).bit_length()  # 2 ** doublings is the least power of two that is not below
    between = math.isqrt(2 ** (2 * doublings - 1)) + 1 if doublings > 1 else 1
    return between if count <= between else 2**doublings


def packed_sizes(
    sequences: int, longest_q: int, longest_kv: int, total_q: int, total_kv: int, square: bool
) -> dict[str, Any]:
    """The sizes of a spec of a packed batch, all counts in buckets: batch, seqlen_q, seqlen_kv and lengths."""
    kind = LengthsKind(batch="packed", square=square, total_q=bucket(total_q), total_kv=bucket(total_kv))
    sizes = {"batch": sequences, "seqlen_q": longest_q, "seqlen_kv": longest_kv}
    return {**{name: bucket(count) for name, count in sizes.items()}, "lengths": kind}
