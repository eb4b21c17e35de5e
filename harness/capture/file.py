"""A file of captured tensors: real Q, K, V (and dO) of attention calls, in safetensors.

The tensors of call i are ``i.q`` (B, H, Sq, D), ``i.k`` (B, Hkv, Skv, D), ``i.v`` (B, Hkv, Skv, Dv) and, for training
calls, ``i.grad_out`` (B, H, Sq, Dv).  The header's metadata has one entry, ``attnbench.captured``: the index as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attnbench.errors import InputError, MalformedFileError
from attnbench.files.json_text import validation_fault
from attnbench.files.untrusted import check_schema, open_regular
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.record_fields import SpecField
from attnbench.text.printable import printable

from ..sequence_lengths import SequenceLengths, check_lengths

__all__ = [
    "LONGEST_CALL",
    "MOST_CALLS",
    "PREFIX",
    "SUFFIX",
    "CapturedCall",
    "CapturedFamily",
    "CapturedFile",
    "CapturedIndex",
    "captured_family",
    "input_bytes",
    "read_captured",
    "tensor_shapes",
    "write_captured",
]

SUFFIX = ".safetensors"
SCHEMA = "attnbench.captured/1"
LONGEST_CALL = 100  # characters of a call's name
MOST_CALLS = 4096
PREFIX = "captured:"
_METADATA = "attnbench.captured"
_LARGEST_HEADER = 2**24
_LONGEST_FILE_NAME = 60  # of which a family's name shows no more
_HASH_CHARACTERS = 8
_STORED = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}


_Count = Annotated[int, Field(ge=0)]


class CapturedCall(BaseModel):
    """One attention call: the module that made it, its number among the program's calls, and its spec.

    If only a part is kept, the first batch entries and the key heads ``kv_heads`` with their query heads, ``spec`` is
    the spec of that part and ``whole`` that of the call.  ``lengths`` are those of the sequences of a packed or padded
    part.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(min_length=1, max_length=LONGEST_CALL)]
    number: _Count
    spec: SpecField
    whole: SpecField | None = None
    kv_heads: Annotated[list[_Count], Field(max_length=2**16)] | None = None
    lengths: SequenceLengths | None = None

    @model_validator(mode="after")
    def _possible(self) -> CapturedCall:
        if not self.name.isprintable():
            raise ValueError("a call's name is printable")
        if self.spec.dtype not in _STORED.values():
            raise ValueError(f"captured tensors are {', '.join(_STORED.values())}")
        if (self.whole is None) != (self.kv_heads is None):
            raise ValueError("whole and kv_heads belong together")
        try:
            check_lengths(self.spec, self.lengths)
        except InputError as error:
            raise ValueError(str(error)) from None
        return self


class CapturedIndex(BaseModel):
    """The index of a file of captured tensors: the calls kept, how many were seen, and why others were not recorded."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)

    schema_: Annotated[Literal["attnbench.captured/1"], Field(alias="schema")] = "attnbench.captured/1"
    torch: Annotated[str, Field(max_length=100)]
    seen: _Count
    unrecorded: Annotated[dict[Annotated[str, Field(max_length=500)], _Count], Field(max_length=1000)]
    calls: Annotated[list[CapturedCall], Field(min_length=1, max_length=MOST_CALLS)]

    @property
    def absent(self) -> dict[str, dict[int, set[str]]]:
        """What is not written: a call without lengths is as it was before there were any."""
        return {"calls": {number: {"lengths"} for number, call in enumerate(self.calls) if call.lengths is None}}


@dataclass(frozen=True)
class CapturedFile:
    """A file of captured tensors with a valid header; ``digest`` is the SHA-256 of its content."""

    path: Path
    digest: str
    calls: tuple[CapturedCall, ...]

    def family(self, call: int) -> CapturedFamily:
        """The input family of call number ``call``."""
        stem = printable(self.path.name, "?")
        name = f"{PREFIX}{stem[-_LONGEST_FILE_NAME:]}@{self.digest[:_HASH_CHARACTERS]}#{call}"
        return CapturedFamily(name, self.path, self.digest, call)

    def tensors(self, call: int) -> dict[str, Tensor]:
        """q, k, v and perhaps grad_out of a call as stored, on the CPU.  Raises MalformedFileError if unreadable."""
        with _opened(self.path) as file:
            return {name: file.get_tensor(f"{call}.{name}") for name in tensor_shapes(self.calls[call].spec)}


class CapturedFamily(str):
    """An input family's name, ``captured:acts.safetensors@1a2b3c4d#3``, with the path of its tensors.

    The text is what records hold: the file's name, the start of its content's SHA-256 and the call, at most 100
    characters and no path.  Pickling keeps path and call.
    """

    def __new__(cls, name: str, path: Path, digest: str, call: int) -> CapturedFamily:
        """The family called ``name``."""
        family = super().__new__(cls, name)
        family.path, family.digest, family.call = path, digest, call
        return family

    path: Path
    digest: str
    call: int

    def __reduce__(self) -> tuple[type[CapturedFamily], tuple[str, Path, str, int]]:
        return CapturedFamily, (str(self), self.path, self.digest, self.call)

    def tensors(self, spec: AttentionSpec, lengths: SequenceLengths | None = None) -> dict[str, Tensor]:
        """q, k, v and in training grad_out of the spec and its lengths, converted to its dtype, on the CPU.

        A training call also serves forward specs.  Raises InputError if the call has another spec or other lengths, the
        file has changed, or values are not finite in the spec's dtype; MalformedFileError if the file cannot be read.
        """
        file = read_captured(self.path)
        if file.digest != self.digest:
            raise InputError(f"{self.path} is no longer the file that {self} was made from")
        if reason := _mismatch(file.calls[self.call], spec, lengths):
            raise InputError(f"{self} is another question: {reason}")
        tensors = file.tensors(self.call)
        if not spec.training:
            tensors.pop("grad_out", None)
        return {name: self._finite(name, stored, spec.dtype) for name, stored in tensors.items()}

    def _finite(self, name: str, stored: Tensor, dtype: str) -> Tensor:
        if not bool(torch.isfinite(stored).all()):
            raise InputError(f"{name} of {self} holds values that are not finite; nothing can be measured on it")
        values = stored.to(TO_TORCH[dtype])
        if not bool(torch.isfinite(values).all()):
            raise InputError(f"{name} of {self} holds values too large for {dtype}; sweep it in another dtype")
        return values


def captured_family(
    text: str, spec: AttentionSpec, folder: Path, lengths: SequenceLengths | None = None
) -> CapturedFamily:
    """The family ``captured:FILE`` for a spec: the first call of the file with that spec; FILE#3 is call 3 alone.

    A relative FILE is relative to ``folder``.  Sizes, mask, scale and softcap must agree; values are converted to the
    spec's dtype.  Raises InputError if no call has the spec, MalformedFileError if FILE is not a capture.
    """
    name, _, number = text.removeprefix(PREFIX).rpartition("#")
    if not name or not number.isdecimal() or len(number) > len(str(MOST_CALLS)):
        name, number = text.removeprefix(PREFIX), ""
    if not name or "\0" in name:
        raise InputError(f"captured:FILE names a file, not {name[:50]!r}")
    file = read_captured(folder / name)
    if number and int(number) >= len(file.calls):
        raise InputError(f"{name} holds calls 0 to {len(file.calls) - 1}, not {number}")
    wanted = [int(number)] if number else range(len(file.calls))
    reasons = {call: _mismatch(file.calls[call], spec, lengths) for call in wanted}
    for call, reason in reasons.items():
        if reason is None:
            return file.family(call)
    call, reason = min(reasons.items(), key=lambda item: len(item[1] or ""))
    raise InputError(f"{name} holds no call that asks {spec}; the nearest, #{call}, differs: {reason}")


def _mismatch(call: CapturedCall, spec: AttentionSpec, lengths: SequenceLengths | None) -> str | None:
    """Why the tensors of a captured call cannot serve a spec, or None."""
    captured = call.spec
    names = (each.name for each in fields(AttentionSpec))
    asked = [name for name in names if name not in ("dtype", "direction", "return_lse", "descale")]
    if differ := [name for name in asked if getattr(captured, name) != getattr(spec, name)]:
        return ", ".join(f"{name} is {getattr(captured, name)}, not {getattr(spec, name)}" for name in differ)
    if _each(call.lengths) != _each(lengths):
        return "its sequences have other lengths"
    if spec.training and not captured.training:
        return "training needs the output's gradient, and none was captured (no backward ran)"
    return None


def _each(lengths: SequenceLengths | None) -> tuple[object, ...]:
    """The lengths themselves, wherever they come from; nothing for rectangular tensors."""
    return (lengths.q, lengths.kv) if lengths is not None and lengths.unequal else ()


def tensor_shapes(spec: AttentionSpec, lengths: SequenceLengths | None = None) -> dict[str, tuple[int, ...]]:
    """The shapes of q, k, v and in training grad_out; of a packed batch (1, H, T, D)."""
    sides = ((spec.batch, spec.seqlen_q), (spec.batch, spec.seqlen_kv)) if lengths is None else lengths.shapes(spec)
    (batch, queries), (_, keys) = sides
    shapes: dict[str, tuple[int, ...]] = {
        "q": (batch, spec.heads, queries, spec.head_dim),
        "k": (batch, spec.kv_heads, keys, spec.head_dim),
        "v": (batch, spec.kv_heads, keys, spec.head_dim_v),
    }
    return shapes | {"grad_out": (batch, spec.heads, queries, spec.head_dim_v)} if spec.training else shapes


def input_bytes(spec: AttentionSpec) -> int:
    """The bytes of q, k, v and, in training, of the output's gradient."""
    queries, keys = spec.tokens
    of_queries = spec.head_dim + (spec.head_dim_v if spec.training else 0)
    elements = spec.heads * queries * of_queries + spec.kv_heads * keys * (spec.head_dim + spec.head_dim_v)
    return elements * TO_TORCH[spec.dtype].itemsize


def write_captured(path: Path, index: CapturedIndex, tensors: list[Mapping[str, Tensor]]) -> None:
    """Write the calls of an index and their tensors, contiguous and on the CPU.  Raises OSError."""
    named = {f"{call}.{name}": values for call, each in enumerate(tensors) for name, values in each.items()}
    try:
        save_file(named, path, {_METADATA: index.model_dump_json(by_alias=True, exclude=index.absent)})
    except SafetensorError as error:  # how a full disk arrives
        raise OSError(None, str(error)) from error


def read_captured(path: Path) -> CapturedFile:
    """A file of captured tensors whose header matches its content; read again only after a change.

    Raises MalformedFileError with what was expected.
    """
    try:
        with open_regular(path) as file:
            facts = os.fstat(file.fileno())
    except OSError as error:
        raise MalformedFileError(path, f"cannot be read: {error.strerror}") from error
    return _read(path.absolute(), facts.st_size, facts.st_mtime_ns)


@lru_cache(maxsize=16)
def _read(path: Path, size: int, changed: int) -> CapturedFile:
    digest = hashlib.sha256()
    try:
        with open_regular(path) as content:
            (header,) = struct.unpack("<Q", content.read(8).ljust(8, b"\xff"))
            # Checked before the library reads the header: safetensors itself accepts headers of 100 MB.
            if header > min(_LARGEST_HEADER, size - 8):
                raise MalformedFileError(path, f"expected safetensors with a header of at most {_LARGEST_HEADER} bytes")
            content.seek(0)
            while chunk := content.read(2**20):
                digest.update(chunk)
    except OSError as error:
        raise MalformedFileError(path, f"cannot be read: {error.strerror}") from error
    with _opened(path) as file:
        index = _index(path, file.metadata() or {})
        stored = {}
        names = file.keys()
        for name in names:
            part = file.get_slice(name)
            stored[name] = (_STORED.get(part.get_dtype(), part.get_dtype()), tuple(part.get_shape()))
    expected = {
        f"{number}.{name}": (call.spec.dtype, shape)
        for number, call in enumerate(index.calls)
        for name, shape in tensor_shapes(call.spec, call.lengths).items()
    }
    for name in sorted(expected.keys() | stored.keys()):
        if stored.get(name) != expected.get(name):
            raise MalformedFileError(
                path, f"expected {_tensor_text(expected, name)}, found {_tensor_text(stored, name)}"
            )
    return CapturedFile(path, digest.hexdigest(), tuple(index.calls))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:  # safetensors has no types
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise MalformedFileError(path, f"expected a safetensors file: {error}") from error


def _tensor_text(tensors: Mapping[str, tuple[str, tuple[int, ...]]], name: str) -> str:
    return f"{name[:50]!r} of {tensors[name][0]} {tensors[name][1]}" if name in tensors else f"no tensor {name[:50]!r}"


def _index(path: Path, metadata: Mapping[str, str]) -> CapturedIndex:
    text = metadata.get(_METADATA, "")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedFileError(path, f"expected JSON under {_METADATA!r} in its metadata") from error
    check_schema(path, content.get("schema") if isinstance(content, dict) else None, SCHEMA)
    try:
        return CapturedIndex.model_validate_json(text)
    except ValidationError as error:
        problem = validation_fault(error, "the index")
        raise MalformedFileError(path, f"expected captured calls, but {problem}") from error
