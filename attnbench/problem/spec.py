"""The attention problem: frozen, hashable, JSON-able.  No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from numbers import Real
from typing import Any, Literal, get_args

from ..errors import InputError
from ..text.printable import brief
from .lengths_kind import LengthsKind
from .mask import Mask

__all__ = ["DTYPES", "FORWARDS_IN_TRAINING", "FP8_DTYPES", "GRANULARITIES", "AttentionSpec", "Direction", "Granularity"]

Direction = Literal["forward", "training"]
Granularity = Literal["tensor", "head", "block", "token"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)
FP8_DTYPES = ("e4m3", "e5m2")
DTYPES = ("fp64", "fp32", "bf16", "fp16", *FP8_DTYPES)
FORWARDS_IN_TRAINING = 3.5  # operations of both passes in those of a forward, as FlashAttention's papers count them
_SIZES = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_kv", "head_dim", "head_dim_v")
_LARGEST_SIZE = 2**31 - 1  # the largest length that every library here can index; a typo beyond it allocates nothing


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Shapes, type, mask and direction of one attention call.

    q is (batch, heads, seqlen_q, head_dim), k (batch, kv_heads, seqlen_kv, head_dim) and v (batch, kv_heads, seqlen_kv,
    head_dim_v); query head h reads key head ``h // (heads // kv_heads)``.  ``scale`` multiplies q·k; ``softcap`` c
    turns a scaled score s into ``c * tanh(s / c)``, 0 means none.  ``dtype`` is that of the tensors, ``descale`` the
    granularity of FP8 tensors' scales, else None.  The mask is made canonical, so equal questions are equal specs.

    With ``lengths`` sequences have lengths of their own, and the mask is aligned within each.  ``batch`` counts the
    sequences, and ``seqlen_q`` and ``seqlen_kv`` bound their lengths: of a packed batch rounded up (``bucket``), of a
    padded one those of its rows.  ``sinks``: each query head has one more logit, which takes part in the softmax's sum
    and carries no value.  ``partial``: the keys are some of those that the queries see, and what several such calls
    return is merged by their log-sum-exps.

    Raises InputError where the numbers describe no attention.
    """

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    scale: float
    mask: Mask = field(default_factory=Mask)
    softcap: float = 0.0
    direction: Direction = "forward"
    return_lse: bool = False
    descale: Granularity | None = None
    lengths: LengthsKind | None = None
    sinks: bool = False
    partial: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= _LARGEST_SIZE:
                raise InputError(f"{name} must be a whole number from 1 to {_LARGEST_SIZE}, got {brief(size)}")
        if self.heads % self.kv_heads:
            raise InputError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype must be one of {', '.join(DTYPES)}, not {brief(self.dtype)}")
        if self.direction not in get_args(Direction):
            raise InputError(f"direction must be forward or training, not {brief(self.direction)}")
        if not isinstance(self.return_lse, bool):
            raise InputError(f"return_lse must be True or False, not {brief(self.return_lse)}")
        for name in ("sinks", "partial"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be True or False, not {brief(getattr(self, name))}")
        if self.sinks and (self.descale is not None or (self.lengths is not None and self.lengths.batch != "packed")):
            raise InputError("sinks go with tensors that are not quantised, of one length or packed, not padded")
        if self.descale not in (None, *GRANULARITIES):
            raise InputError(f"descale must be one of {', '.join(GRANULARITIES)}, not {brief(self.descale)}")
        if (self.descale is not None) != (self.dtype in FP8_DTYPES):
            raise InputError("FP8 tensors need descales, and tensors of other types take none")
        if self.descale is not None and self.training:
            raise InputError("no gradients flow into FP8 tensors; pass detached ones, or the tensors before quantising")
        object.__setattr__(self, "scale", _finite("scale", self.scale))
        object.__setattr__(self, "softcap", _finite("softcap", self.softcap))
        if self.softcap < 0:
            raise InputError(f"softcap must not be negative, got {self.softcap}; 0 or None means none")
        if self.lengths is not None and self.descale is not None:
            raise InputError("FP8 tensors with descales have one length for all; pass the tensors before quantising")
        if self.lengths is not None and self.lengths.square and self.seqlen_q != self.seqlen_kv:
            raise InputError("where every sequence has as many keys as queries, seqlen_q and seqlen_kv must be equal")
        shortened = self.mask.canonical if self._aligned else self.mask.canonical_within
        object.__setattr__(self, "mask", shortened(self.seqlen_q, self.seqlen_kv))

    def __hash__(self) -> int:
        """That of the fields, computed once: several look-ups of every call have the spec in their keys."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: strings have another hash in another process."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def make(
        cls,
        *,
        batch: int,
        heads: int,
        seqlen_q: int,
        head_dim: int,
        kv_heads: int | None = None,
        seqlen_kv: int | None = None,
        head_dim_v: int | None = None,
        dtype: str = "bf16",
        scale: float | None = None,
        **others: Any,
    ) -> AttentionSpec:
        """A spec with the usual defaults: as many key heads as heads, square, ``scale = head_dim ** -0.5``."""
        if scale is None and isinstance(head_dim, int) and 0 < head_dim <= _LARGEST_SIZE:
            scale = head_dim**-0.5
        return cls(
            batch=batch,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_q if seqlen_kv is None else seqlen_kv,
            head_dim=head_dim,
            head_dim_v=head_dim if head_dim_v is None else head_dim_v,
            dtype=dtype,
            scale=scale if scale is not None else 1.0,
            **others,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionSpec:
        """The spec that ``to_dict`` wrote, or ``short_fields``, whose gaps ``make`` fills.

        Raises InputError on a missing, unknown or impossible entry.
        """
        if not isinstance(data, Mapping):
            raise InputError(f"a spec is an object, not {type(data).__name__}")
        known = {each.name for each in fields(cls)}
        if unknown := sorted(set(data) - known, key=str):
            raise InputError(f"a spec has no entry {brief(unknown[0])}")
        mask, lengths = data.get("mask", {}), data.get("lengths")
        if not (lengths is None or isinstance(lengths, LengthsKind)):
            lengths = LengthsKind.from_dict(lengths)
        try:
            return cls.make(**{**data, "mask": mask if isinstance(mask, Mask) else Mask(**mask), "lengths": lengths})
        except TypeError as error:
            raise InputError(f"not a spec: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Every field, in plain JSON types; without ``lengths``, ``sinks`` and ``partial`` where there are none."""
        found = asdict(self)
        del found["lengths"]
        for name in ("sinks", "partial"):
            if not found[name]:
                del found[name]
        return found if self.lengths is None else {**found, "lengths": self.lengths.to_dict()}

    def replace(self, **changes: Any) -> AttentionSpec:
        """The same spec with some fields changed."""
        return replace(self, **changes)

    @property
    def group(self) -> int:
        """How many query heads share one key head."""
        return self.heads // self.kv_heads

    @property
    def tokens(self) -> tuple[int, int]:
        """The queries and keys of the whole batch; of a packed one rounded up, as its lengths have them."""
        queries, keys = self.batch * self.seqlen_q, self.batch * self.seqlen_kv
        if self.lengths is None:
            return queries, keys
        return self.lengths.total_q or queries, self.lengths.total_kv or keys

    @property
    def training(self) -> bool:
        """Whether gradients are asked for."""
        return self.direction == "training"

    @cached_property  # every call asks for it
    def has_empty_rows(self) -> bool:
        """Whether some query may see no key: by the mask, or by the lengths."""
        return not self._aligned or self.mask.has_empty_rows(self.seqlen_q, self.seqlen_kv)

    @property
    def _aligned(self) -> bool:
        """Whether the lengths of every sequence's two sides differ by as much as those of the spec."""
        return self.lengths is None or self.lengths.square

    @property
    def flops(self) -> float:
        """Floating-point operations of exact attention over the visible (query, key) pairs.

        Forward: two products, 2·(D + Dv) a pair.  Training is ``FORWARDS_IN_TRAINING`` of them.  ``typical_lengths``
        stand for all; padded rows count as full.
        """
        queries, keys = self.typical_lengths
        total = None if self.lengths is None else self.lengths.total_q
        count = float(self.batch) if total is None else total / queries
        return self._operations(count * self.mask.area(round(queries), round(keys)))

    @property
    def typical_lengths(self) -> tuple[float, float]:
        """Queries and keys of the sequences that hold most of the work, ``LengthsKind.typical`` of either.

        Of lengths a spec knows the number, the total and the longest, and of padded rows the longest alone.
        """
        if self.lengths is None:
            return self.seqlen_q, self.seqlen_kv
        typical, kind = self.lengths.typical, self.lengths
        queries = typical(self.seqlen_q, self.batch, kind.total_q)
        return queries, typical(self.seqlen_kv, self.batch, kind.total_kv)

    @property
    def least_flops(self) -> float:
        """The fewest operations that a call of the spec may have: ``flops`` where all sequences have one length.

        A packed batch has the fewest if its sequences are equally long and its counts the least of their buckets.
        Padded rows may be empty, and queries of some sequences may meet the keys of no other.
        """
        if self.lengths is None:
            return self.flops
        if self.lengths.total_q is None or not self.lengths.square:
            return 0.0
        tokens = int(self.lengths.total_q / math.sqrt(2))
        count, equal = (self.batch, tokens // self.batch) if tokens >= self.batch else (tokens, 1)
        return self._operations(float(count * self.mask.area(equal, equal)))

    def _operations(self, pairs: float) -> float:
        forward = 2.0 * pairs * self.heads * (self.head_dim + self.head_dim_v)
        return forward * FORWARDS_IN_TRAINING if self.training else forward

    def __str__(self) -> str:
        """A short name, the same for equal specs and different for different ones."""
        parts = [f"b{self.batch}", f"h{self.heads}"]
        if self.kv_heads != self.heads:
            parts.append(f"kv{self.kv_heads}")
        parts.append(f"s{self.seqlen_q}" if self.seqlen_q == self.seqlen_kv else f"q{self.seqlen_q}-k{self.seqlen_kv}")
        parts.append(
            f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}-dv{self.head_dim_v}"
        )
        parts.append(self.dtype if self.descale is None else f"{self.dtype}-{self.descale}")
        if self.mask.kind != "none":
            parts.append(str(self.mask))
        if self.softcap:
            parts.append(f"cap{self.softcap!r}")
        if self.scale != self.head_dim**-0.5:
            parts.append(f"scale{self.scale!r}")
        if self.return_lse:
            parts.append("lse")
        if self.lengths is not None:
            parts.append(str(self.lengths))
        parts += [name for name in ("sinks", "partial") if getattr(self, name)]
        return " ".join([*parts, self.direction])


def _finite(name: str, value: object) -> float:
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number beyond all floats
        number = math.inf
    if not math.isfinite(number):
        raise InputError(f"{name} must be a finite number, got {brief(value)}")
    return number
