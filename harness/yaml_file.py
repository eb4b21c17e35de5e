"""Read a YAML file as nodes, which know their lines: limited in size, plain data only; every error names its line.

Whatever PyYAML raises for a hostile file (numbers that Python refuses to read, dates that do not exist, tags that do
not fit, endless nesting and repetition) becomes a MalformedFileError.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from attnbench.errors import MalformedFileError
from attnbench.files.untrusted import read_regular
from attnbench.text.printable import brief

__all__ = ["describe_node", "entries", "fault", "items", "read_yaml", "scalar"]

_LARGEST_FILE = 2**20
_LONGEST_SCALAR = 1000  # characters; no valid value is as long


def read_yaml(path: Path, what: str) -> yaml.Node | None:
    """The root of the one document of a file of ``what`` (``cases``); None if it is empty.

    Raises MalformedFileError with the line and what was expected there.
    """
    content = read_regular(path, _LARGEST_FILE, what)
    try:
        text = content.decode("utf-8-sig")
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise MalformedFileError(path, "expected text in UTF-8", content[: error.start].count(b"\n") + 1) from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise MalformedFileError(path, f"expected YAML: {error.reason}", line) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = f"expected YAML: {error.problem or error.context}"
        raise MalformedFileError(path, message, mark.line + 1 if mark else None) from error
    except RecursionError as error:
        raise MalformedFileError(path, f"expected {what}, not endless nesting") from error
    except ValueError as error:  # the version of a %YAML line, an escape beyond Unicode
        raise MalformedFileError(path, f"expected YAML: {error}") from error


def fault(path: Path, node: yaml.Node, expected: str) -> MalformedFileError:
    """An error that says what was expected at a node."""
    return MalformedFileError(path, expected, node.start_mark.line + 1)


def describe_node(node: yaml.Node) -> str:
    """A node for a message: its text if it is a scalar, else its kind."""
    if isinstance(node, yaml.ScalarNode):
        return brief(node.value)
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def items(node: yaml.Node) -> list[yaml.Node]:
    """The elements of a list; any other node is its own only element."""
    return list(node.value) if isinstance(node, yaml.SequenceNode) else [node]


def entries(path: Path, node: yaml.MappingNode, known: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """(name, its node, the value) of every entry of a mapping; ``known`` names the expected keys in errors.

    Raises MalformedFileError if a name is not text or occurs twice.
    """
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or not key.value:
            raise fault(path, key, f"expected {known}, not {describe_node(key)}")
        if key.value in seen:
            raise fault(path, key, f"expected {brief(key.value)} once, not a second time")
        seen.add(key.value)
        yield key.value, key, value


def scalar(path: Path, node: yaml.Node) -> Any:
    """The value of a node: text, a number, true or false, nothing, or a date.

    Raises MalformedFileError if it is not a scalar or its tag does not fit.
    """
    if not isinstance(node, yaml.ScalarNode):
        raise fault(path, node, f"expected one value, not {describe_node(node)}")
    if len(node.value) > _LONGEST_SCALAR:
        raise fault(path, node, f"expected at most {_LONGEST_SCALAR} characters, not {len(node.value)}")
    constructor = yaml.constructor.SafeConstructor()
    try:
        return constructor.construct_object(node)
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        raise fault(
            path, node, f"expected YAML of plain values, and {describe_node(node)} is no {brief(kind)}"
        ) from error
