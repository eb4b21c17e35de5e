"""Cases from a file: YAML, or the calls of captured tensors.

A YAML file is a list of entries; each entry is a mapping; a list as a value stands for each of its elements, and the
entry for all combinations::

    - batch: 2
      heads: 16
      kv_heads: [16, 4]
      seqlen_q: [1024, 4096]
      head_dim: 128
      mask: [none, causal, {left: 512, right: 0, alignment: bottom-right}]
      direction: [forward, training]
      families: [normal, outlier]

batch, heads, seqlen_q and head_dim are required, or ``lengths`` instead of batch and seqlen_q
(attnbench.harness.cases.lengths_entry).  kv_heads, seqlen_kv, head_dim_v, scale and softcap default as in
AttentionSpec.make.  ``mask`` is none, causal, causal/bottom-right, or a mapping of left, right and alignment.
``families`` is the only list that is not multiplied out; ``captured:acts.safetensors`` in it is the first captured call
with the spec of the case, ``captured:acts.safetensors#3`` is call 3; paths are relative to the YAML file.  ``name`` is
put before the spec's own name if an entry stands for several cases.  The sweep sets the tensors' dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from attnbench.errors import InputError, MalformedFileError
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

from ..capture.file import PREFIX, captured_family, read_captured
from ..sequence_lengths import SequenceLengths
from ..yaml_file import describe_node, entries, fault, items, read_yaml, scalar
from .case import LONGEST_NAME, Case, case_name, tensor_dtype
from .inputs import DEFAULT_FAMILIES
from .lengths_entry import read_lengths

__all__ = ["read_captured_cases", "read_cases"]

_MOST_CASES = 10_000
_REQUIRED = ("batch", "heads", "seqlen_q", "head_dim")
_OF_LENGTHS = ("batch", "seqlen_q", "seqlen_kv")  # what lengths say
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys((*_REQUIRED, "kv_heads", "seqlen_kv", "head_dim_v"), (int,)),
    "lengths": (),  # mappings
    **dict.fromkeys(("scale", "softcap"), (int, float)),
    **dict.fromkeys(("direction", "name", "families"), (str,)),
    "mask": (str, type(None)),  # or a mapping; YAML reads a bare `none` as text and `null` as None
}
_TYPE_NAMES = {int: "a whole number", float: "a number", str: "text"}
_SIDES = "left, right and alignment"
_MASKS = {
    "none": Mask(),
    "causal": Mask(right=0),
    "causal/top-left": Mask(right=0),
    "causal/bottom-right": Mask(right=0, alignment="bottom-right"),
}


def read_cases(path: Path, dtype: str) -> list[Case]:
    """The cases of a YAML file for a sweep of ``dtype`` (fp8, bf16, fp16, fp32).

    Raises MalformedFileError with the line and what was expected there.
    """
    return _Reader(path, tensor_dtype(dtype)).cases()


def read_captured_cases(path: Path, dtype: str) -> list[Case]:
    """A case for every call of a file of captured tensors, for a sweep of ``dtype``.

    Times are taken on the captured tensors, errors on normal inputs as well: an error that two families share is the
    kernel's (attnbench.harness.measure.verdict).  Tensors are converted to the sweep's dtype, and the case's name then
    has the original one.  Raises MalformedFileError with what was expected.
    """
    tensors = tensor_dtype(dtype)
    file = read_captured(path)
    cases = []
    for number, call in enumerate(file.calls):
        spec = call.spec.replace(dtype=tensors)
        origin = "" if call.spec.dtype == tensors else f" from {call.spec.dtype}"
        identity = f" #{number} {spec}{origin}"
        name = call.name[: LONGEST_NAME - len(identity)] + identity
        cases.append(Case(name, spec, (file.family(number), "normal"), call.lengths))
    return cases


class _Reader:
    """Reads YAML nodes rather than values, because only a node knows its line."""

    def __init__(self, path: Path, tensors: str) -> None:
        self._path, self._tensors = path, tensors

    def cases(self) -> list[Case]:
        root = read_yaml(self._path, "cases")
        if root is None:
            raise MalformedFileError(self._path, "expected a list of cases, the file is empty", 1)
        if not isinstance(root, yaml.SequenceNode) or not root.value:
            raise self._fault(root, "expected a list of cases, each entry starting with `- `")
        found: dict[str, Case] = {}
        for entry in root.value:
            for case in self._entry(entry):
                if case.name in found:
                    raise self._fault(entry, f"expected each case once, {case.name!r} stands here again")
                if len(found) == _MOST_CASES:
                    raise self._fault(entry, f"expected at most {_MOST_CASES} cases in all")
                found[case.name] = case
        return list(found.values())

    def _fault(self, node: yaml.Node, expected: str) -> MalformedFileError:
        return fault(self._path, node, expected)

    def _entry(self, entry: yaml.Node) -> Iterator[Case]:
        if not isinstance(entry, yaml.MappingNode):
            raise self._fault(entry, "expected a mapping of batch, heads, seqlen_q, head_dim and so on")
        options: dict[str, list[Any]] = {}
        for name, key, value in entries(self._path, entry, f"one of {', '.join(_KINDS)}"):
            if name not in _KINDS:
                hint = " (the tensors' type is the sweep's --dtype)" if name == "dtype" else ""
                raise self._fault(key, f"expected one of {', '.join(_KINDS)}, not {describe_node(key)}{hint}")
            if not (nodes := items(value)):
                raise self._fault(value, f"expected at least one value for {name}")
            if name == "lengths":
                options[name] = [each for node in nodes for each in read_lengths(self._path, node)]
            else:
                options[name] = [self._value(name, node) for node in nodes]
        unequal = "lengths" in options
        if unequal and (given := [name for name in _OF_LENGTHS if name in options]):
            raise self._fault(entry, f"expected lengths or {', '.join(given)} in this entry, not both")
        required = [name for name in _REQUIRED if not (unequal and name in _OF_LENGTHS)]
        if missing := [name for name in required if name not in options]:
            raise self._fault(entry, f"expected {', '.join(missing)} in this entry")
        families = tuple(options.pop("families", DEFAULT_FAMILIES))
        several = any(len(values) > 1 for values in options.values())
        for chosen in itertools.product(*options.values()):
            facts = dict(zip(options, chosen, strict=True))
            prefix, lengths = facts.pop("name", None), facts.pop("lengths", None)
            try:
                spec = AttentionSpec.make(**facts, **(lengths.sizes() if lengths else {}), dtype=self._tensors)
                own = case_name(spec, lengths)
                name = own if prefix is None else f"{prefix} {own}" if several else prefix
                yield Case(name, spec, tuple(self._family(family, spec, lengths) for family in families), lengths)
            except InputError as error:
                raise self._fault(entry, f"expected a possible case: {error}") from error

    def _family(self, name: str, spec: AttentionSpec, lengths: SequenceLengths | None) -> str:
        return captured_family(name, spec, self._path.parent, lengths) if name.startswith(PREFIX) else name

    def _value(self, name: str, node: yaml.Node) -> Any:
        kinds = _KINDS[name]
        if name == "mask" and isinstance(node, yaml.MappingNode):
            return self._window(node)
        value: Any = scalar(self._path, node) if isinstance(node, yaml.ScalarNode) else node
        if not isinstance(value, kinds) or isinstance(value, bool):
            expected = " or ".join(_TYPE_NAMES[kind] for kind in kinds if kind in _TYPE_NAMES)
            raise self._fault(node, f"expected {expected} for {name}, not {describe_node(node)}")
        return self._mask(value, node) if name == "mask" else value

    def _window(self, node: yaml.MappingNode) -> Mask:
        sides: dict[str, Any] = {}
        for name, key, value in entries(self._path, node, _SIDES):
            if name not in ("left", "right", "alignment"):
                raise self._fault(key, f"expected {_SIDES} in a mask, not {describe_node(key)}")
            sides[name] = scalar(self._path, value)
        try:
            return Mask(**sides)
        except InputError as error:
            raise self._fault(node, f"expected a possible mask: {error}") from error

    def _mask(self, name: Any, node: yaml.Node) -> Mask:
        if name is None:
            return Mask()
        if name not in _MASKS:
            raise self._fault(node, f"expected {', '.join(_MASKS)} or a mapping for mask, not {describe_node(node)}")
        return _MASKS[name]
