"""The lengths of the sequences of a case: how they lie in its tensors, and the draw that repeats them."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from attnbench.errors import InputError
from attnbench.problem.lengths import Lengths, packed, padded
from attnbench.problem.lengths_kind import Batch, LengthsKind, bucket, packed_sizes
from attnbench.problem.spec import AttentionSpec

__all__ = [
    "DISTRIBUTIONS",
    "LARGEST_TOTAL",
    "LAYOUTS",
    "BatchLayout",
    "Distribution",
    "Draw",
    "SequenceLengths",
    "check_lengths",
]

Distribution = Literal["constant", "uniform", "lognormal", "zipf", "file"]
BatchLayout = Literal["packed", "padded", "left-padded", "dense", "equal"]
DISTRIBUTIONS: tuple[Distribution, ...] = get_args(Distribution)
LAYOUTS: tuple[BatchLayout, ...] = get_args(BatchLayout)
LARGEST_TOTAL = 2**22  # tokens of a case: 17 GB of bf16 for each of 16 heads' q, k and v
_MOST_SEQUENCES = 2**16  # which fit into a line of a row

_Count = Annotated[int, Field(ge=0, le=LARGEST_TOTAL)]
_Positive = Annotated[int, Field(ge=1, le=LARGEST_TOTAL)]
_Each = Annotated[tuple[_Count, ...], Field(min_length=1, max_length=_MOST_SEQUENCES)]


class Draw(BaseModel):
    """A draw of lengths; the same again gives the same lengths (attnbench.harness.cases.drawn_lengths).

    ``file`` is the start of the SHA-256 of the file of a distribution ``file``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    distribution: Distribution
    total: _Positive
    longest: _Positive
    mean: Annotated[float, Field(ge=1, le=LARGEST_TOTAL)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    file: Annotated[str, Field(min_length=1, max_length=64)] | None = None

    @model_validator(mode="after")
    def _possible(self) -> Draw:
        if self.longest > self.total:
            raise ValueError(f"longest is {self.longest}, beyond the total of {self.total}")
        if (self.mean is not None) != (self.distribution == "lognormal"):
            raise ValueError("mean goes with the distribution lognormal, which needs it")
        if (self.file is not None) != (self.distribution == "file"):
            raise ValueError("file goes with the distribution file, which needs it")
        return self

    def __str__(self) -> str:
        mean = "" if self.mean is None else f" mean{self.mean:g}"
        file = "" if self.file is None else f" {self.file}"
        seed = f" seed{self.seed}" if self.distribution in ("uniform", "lognormal", "zipf") else ""
        return f"{self.distribution}{mean}{file} longest{self.longest} total{self.total}{seed}"


class SequenceLengths(BaseModel):
    """The lengths of a case's sequences: ``q``, and ``kv`` where keys are not as many as queries.

    ``packed``: end to end, without padding.  ``padded``, ``left-padded``: in rows, each with its length.  Two layouts
    are rectangular tensors that show what the others save: ``dense`` rows as long as the longest sequence, padding
    computed like tokens, and ``equal``: as many sequences and about as many tokens, all of one length.

    ``drawn`` is the draw that repeats the lengths; None for those of a program.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    layout: BatchLayout
    q: _Each
    kv: _Each | None = None
    drawn: Draw | None = None

    @model_validator(mode="after")
    def _possible(self) -> SequenceLengths:
        if len(self.keys) != len(self.q):
            raise ValueError(f"{len(self.q)} sequences of queries and {len(self.keys)} of keys")
        if not any(map(min, self.q, self.keys)):
            raise ValueError("no sequence has a query and a key")
        if max(sum(self.q), sum(self.keys)) > LARGEST_TOTAL:
            raise ValueError(f"more than {LARGEST_TOTAL} tokens")
        return self

    @property
    def keys(self) -> tuple[int, ...]:
        """The keys of each sequence."""
        return self.q if self.kv is None else self.kv

    @property
    def unequal(self) -> bool:
        """Whether kernels are given lengths; False for rectangular tensors."""
        return self.layout not in ("dense", "equal")

    def sizes(self, rows: tuple[int, int] | None = None) -> dict[str, Any]:
        """The sizes of the spec, for ``AttentionSpec.make``.

        Padded rows hold ``rows`` queries and keys, by default as many as the longest sequence.
        """
        longest, totals = (max(self.q), max(self.keys)), (sum(self.q), sum(self.keys))
        if self.layout == "packed":
            bounds = _some(longest[0]), _some(longest[1])
            return packed_sizes(len(self.q), bounds[0], bounds[1], totals[0], totals[1], self.kv is None)
        if self.layout == "equal":
            queries, keys = (_some(round(total / len(self.q))) for total in totals)
            return {"batch": len(self.q), "seqlen_q": queries, "seqlen_kv": keys}
        queries, keys = rows or (_some(longest[0]), _some(longest[1]))
        sizes = {"batch": len(self.q), "seqlen_q": queries, "seqlen_kv": keys}
        if self.layout == "dense":
            return sizes
        return {**sizes, "lengths": LengthsKind(batch=self.layout, square=self.kv is None and queries == keys)}

    @classmethod
    def read(cls, lengths: Lengths, spec: AttentionSpec) -> SequenceLengths:
        """The lengths of a call of the spec, read from its device.

        Raises ValidationError if there are too many, or no sequence has a query and a key.
        """
        assert spec.lengths is not None, "a call with lengths has a spec with them"
        q, kv = (
            _read(side, spec.lengths.batch, spec.batch, size)
            for side, size in ((lengths.q, spec.seqlen_q), (lengths.kv, spec.seqlen_kv))
        )
        return cls(layout=spec.lengths.batch, q=q, kv=None if spec.lengths.square else kv)

    def tensors(self, spec: AttentionSpec, q: Tensor, k: Tensor) -> Lengths | None:
        """The lengths as kernels take them, for q (B, H, Sq, D) and k (B, Hkv, Skv, D); None for rectangular ones."""
        if not self.unequal:
            return None
        own = _on(self.q, q.device, self.layout)
        other = own if self.kv is None else _on(self.kv, q.device, self.layout)
        if self.layout != "packed":
            return padded(q, k, own, other, "left" if self.layout == "left-padded" else "right")
        return packed(q, k, own, other, _bound(self.q, spec.seqlen_q), _bound(self.keys, spec.seqlen_kv))

    def shapes(self, spec: AttentionSpec) -> tuple[tuple[int, int], tuple[int, int]]:
        """(batch, tokens) of the tensors of queries and of those of keys."""
        if self.layout == "packed":
            return (1, sum(self.q)), (1, sum(self.keys))
        return (spec.batch, spec.seqlen_q), (spec.batch, spec.seqlen_kv)

    def flops(self, spec: AttentionSpec) -> float:
        """``AttentionSpec.flops`` over the pairs that each sequence sees; those of the spec for rectangular tensors."""
        return _flops(self, spec) if self.unequal else spec.flops

    def __str__(self) -> str:
        drawn = "as called" if self.drawn is None else str(self.drawn)
        return drawn if self.unequal else f"{self.layout} of {drawn}"


def check_lengths(spec: AttentionSpec, lengths: SequenceLengths | None) -> None:
    """Raise InputError unless a packed or padded spec has its lengths, and a rectangular one none but as alternative.

    Rows of padded sequences, and the bound of packed ones, may be longer than the longest.
    """
    if lengths is None:
        if spec.lengths is not None:
            raise InputError(f"a {spec.lengths.batch} batch needs the lengths of its sequences")
        return
    rows = (spec.seqlen_q, spec.seqlen_kv) if lengths.layout in ("padded", "left-padded") else None
    if rows is not None and (max(lengths.q) > rows[0] or max(lengths.keys) > rows[1]):
        raise InputError(f"a sequence is longer than its row of {rows[0]} queries and {rows[1]} keys")
    wanted = {"lengths": None, **lengths.sizes(rows)}
    if lengths.layout == "packed":  # a program may bound its lengths by more than the longest
        wanted |= {name: max(wanted[name], getattr(spec, name)) for name in ("seqlen_q", "seqlen_kv")}
    if differ := [name for name, size in wanted.items() if getattr(spec, name) != size]:
        mismatches = ", ".join(f"{name} {wanted[name]}, not {getattr(spec, name)}" for name in differ)
        raise InputError(f"the lengths of the sequences make {mismatches}")


def _some(length: int) -> int:
    """A spec has no size of 0."""
    return max(1, length)


def _bound(lengths: tuple[int, ...], bucketed: int) -> int:
    """The bound of a packed call: its longest, or what the spec says where a program bounds its lengths by more."""
    longest = max(lengths)
    return _some(longest) if bucket(longest) == bucketed else bucketed


def _read(lengths: Tensor | None, batch: Batch, sequences: int, size: int) -> tuple[int, ...]:
    if lengths is None:
        return (size,) * sequences
    return tuple((lengths.diff() if batch == "packed" else lengths).tolist())


def _on(lengths: tuple[int, ...], device: torch.device, layout: BatchLayout) -> Tensor:
    if layout != "packed":
        return torch.tensor(lengths, dtype=torch.int32, device=device)
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32).to(device)


@lru_cache(maxsize=4096)
def _flops(lengths: SequenceLengths, spec: AttentionSpec) -> float:
    each = Counter(zip(lengths.q, lengths.keys, strict=True))
    return sum(
        count * spec.replace(batch=1, seqlen_q=queries, seqlen_kv=keys, lengths=None).flops
        for (queries, keys), count in each.items()
        if queries and keys
    )
