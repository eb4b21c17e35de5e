"""Finds the attnbench commands in the shell scripts of a page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import typer.main

from attnbench.cli import app

OPERATORS = set("&|;<>()")


def commands(script: str) -> Iterator[list[str]]:
    """The words behind ``attnbench`` in each command of a shell script that calls it, directly or by a launcher."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        while "attnbench" in words:
            words = words[words.index("attnbench") + 1 :]
            end = next((place for place, word in enumerate(words) if set(word) <= OPERATORS), len(words))
            yield words[:end]


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words call, and the rest of them."""
    command: Any = typer.main.get_command(app)
    while words and not words[0].startswith("-") and hasattr(command, "commands"):
        assert words[0] in command.commands, f"attnbench has no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    return command, words
