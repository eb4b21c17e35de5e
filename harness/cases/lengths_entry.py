"""The entry ``lengths`` of a file of cases: sequences with lengths of their own, drawn or read.

A mapping, or a list of mappings; a list as a value stands for each of its elements::

    lengths:
      distribution: lognormal
      mean: [4096, 16384]
      longest: 32768
      total: 65536
      layout: [packed, padded, dense, equal]
      seed: 1

``total`` tokens of sequences are drawn, the last one cut.  ``distribution`` is constant, uniform, lognormal (it needs
``mean``), zipf, or file, which needs ``file``: a path relative to the YAML file, with one length a line.  ``longest``
is by default ``total``, or the file's longest.  ``layout`` is packed by default (attnbench.harness.sequence_lengths).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from attnbench.errors import MalformedFileError
from attnbench.files.json_text import validation_fault

from ..sequence_lengths import DISTRIBUTIONS, LAYOUTS, Draw, SequenceLengths
from ..yaml_file import describe_node, entries, fault, items, scalar
from .drawn_lengths import draw_lengths, draw_of_file

__all__ = ["read_lengths"]

_KEYS = ("distribution", "total", "longest", "mean", "seed", "file", "layout")
_WORDS = {"distribution": DISTRIBUTIONS, "layout": LAYOUTS}


def read_lengths(path: Path, node: yaml.Node) -> Iterator[SequenceLengths]:
    """The lengths of every combination of an entry.  Raises MalformedFileError with the line and what was expected."""
    if not isinstance(node, yaml.MappingNode):
        raise fault(path, node, f"expected a mapping of {', '.join(_KEYS)} for lengths, not {describe_node(node)}")
    options: dict[str, list[Any]] = {}
    for name, key, value in entries(path, node, f"one of {', '.join(_KEYS)}"):
        if name not in _KEYS:
            raise fault(path, key, f"expected one of {', '.join(_KEYS)} in lengths, not {describe_node(key)}")
        options[name] = [_value(path, name, each) for each in items(value)]
        if not options[name]:
            raise fault(path, value, f"expected at least one value for {name}")
    if missing := [name for name in ("distribution", "total") if name not in options]:
        raise fault(path, node, f"expected {' and '.join(missing)} in lengths")
    for chosen in itertools.product(*options.values()):
        yield _from_distribution(path, node, dict(zip(options, chosen, strict=True)))


def _from_distribution(path: Path, node: yaml.Node, facts: dict[str, Any]) -> SequenceLengths:
    layout, total, longest = facts.pop("layout", "packed"), facts.pop("total"), facts.pop("longest", None)
    of_file: list[int] = []
    try:
        if facts["distribution"] == "file" and "file" in facts:
            if beside := sorted(facts.keys() - {"distribution", "file"}):
                raise fault(path, node, f"expected no {beside[0]} beside the distribution file")
            draw, of_file = draw_of_file(path.parent / facts["file"], total, longest)
        else:
            draw = Draw(**facts, total=total, longest=total if longest is None else longest)
        return SequenceLengths(layout=layout, q=draw_lengths(draw, of_file), drawn=draw)
    except ValidationError as error:
        raise fault(path, node, f"expected possible lengths: {validation_fault(error, 'they')}") from error
    except MalformedFileError as error:
        if error.path == path:
            raise
        raise fault(path, node, f"expected a file of lengths: {error}") from error


def _value(path: Path, name: str, node: yaml.Node) -> Any:
    value: Any = scalar(path, node)
    if name in _WORDS:
        if value not in _WORDS[name]:
            raise fault(path, node, f"expected {', '.join(_WORDS[name])} for {name}, not {describe_node(node)}")
        return value
    kinds = (str,) if name == "file" else (int, float) if name == "mean" else (int,)
    if not isinstance(value, kinds) or isinstance(value, bool) or (isinstance(value, str) and "\0" in value):
        expected = "a path" if name == "file" else "a number" if name == "mean" else "a whole number"
        raise fault(path, node, f"expected {expected} for {name}, not {describe_node(node)}")
    return float(value) if name == "mean" else value
