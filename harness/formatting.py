"""Formatting for reports: numbers with few digits, prose within the width, untrusted text made safe."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Literal

from attnbench.text.digits import three_digits as number
from attnbench.text.printable import printable

__all__ = ["WIDTH", "Style", "change", "error", "escape", "heading", "number", "prose", "size"]

Style = Literal["text", "markdown"]
WIDTH = 100
_TENFOLD = 9.0


def error(value: float) -> str:
    """A relative L2 with two digits."""
    return f"{value:.2g}" if math.isfinite(value) else "infinite"


def change(value: float) -> str:
    """A relative change in per cent, ``+0.031%`` for 0.00031; as a multiple from tenfold on."""
    return f"{value:+.3%}" if abs(value) < _TENFOLD else f"{number(1 + value)} times"


def size(count: int) -> str:
    """Bytes as MiB or GiB."""
    return f"{number(count / 2**20)} MiB" if count < 2**30 else f"{number(count / 2**30)} GiB"


def escape(text: str, style: Style) -> str:
    """The text without control characters and Markdown syntax: files and plug-ins write some of it."""
    safe = printable(text)
    if style == "markdown":
        for char in "\\`*_<>|[]":
            safe = safe.replace(char, f"\\{char}")
    return safe


def heading(text: str, style: Style) -> str:
    """A heading for text that is already safe to show."""
    if style == "markdown":
        return f"### {text}"
    lines = textwrap.wrap(text, WIDTH) or [""]
    return "\n".join([*lines, "=" * max(map(len, lines))])


def prose(lines: Sequence[str], style: Style, bullets: bool = False) -> str:
    """Sentences that are already safe to show, each on lines of its own."""
    if style == "markdown":
        return "\n".join(f"- {line}" if bullets or len(lines) > 1 else line for line in lines)
    first, later = ("- ", "  ") if bullets else ("", "")
    wrap = textwrap.TextWrapper(WIDTH, first, later, break_on_hyphens=False)
    return "\n".join(wrap.fill(line) for line in lines)
