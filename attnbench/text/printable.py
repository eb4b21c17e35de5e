"""Text and values from anywhere, as a message may show them: nothing that steers a terminal, nothing endless."""

from __future__ import annotations

import reprlib

__all__ = ["brief", "printable"]

_LONGEST = 200  # characters
_MOST_DIGITS = 18
_LOG10_OF_2 = 0.30103


def printable(text: str, instead: str = " ") -> str:
    """The text with ``instead`` for each character that would steer a terminal, break a line or has no UTF-8."""
    return text if text.isprintable() else "".join(char if char.isprintable() else instead for char in text)


def brief(value: object) -> str:
    """``repr``, cut short: what the value holds is bounded, and so are the digits of a whole number."""
    return printable(_Brief().repr(value))[:_LONGEST]


class _Brief(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        """Python itself refuses to write a number of more than 4,300 digits."""
        digits = int(x.bit_length() * _LOG10_OF_2)
        return repr(x) if digits < _MOST_DIGITS else f"a number of {digits:,} digits or more"
