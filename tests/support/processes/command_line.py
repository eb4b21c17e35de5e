"""Runs the command line in this process or in a new one, and asserts what its errors look like."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

import pytest
from patience import PATIENCE

from attnbench.cli import main
from attnbench.state import forget

SHAPE = ("--heads", "4", "--seqlen", "64", "--head-dim", "32")


class Run(NamedTuple):
    """The exit code and output of a command."""

    returncode: int | str | None
    stdout: str
    stderr: str


def attnbench(*arguments: object) -> Run:
    """Runs the command like the console script, but in this process, which has already imported torch."""
    forget()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        patch.setattr(sys, "argv", ["attnbench", *map(str, arguments)])
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)  # main replaces it
        with pytest.raises(SystemExit) as end:
            main()
    return Run(end.value.code, out.getvalue(), err.getvalue())


def expect(*arguments: object, code: int = 0) -> Run:
    """Runs the command in this process and asserts its exit code."""
    run = attnbench(*arguments)
    assert (run.returncode or 0) == code, run.stdout + run.stderr
    return run


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command in a new process, for behaviour that needs one."""
    command = [sys.executable, "-m", "attnbench", *arguments]
    return subprocess.run(
        command, **{"capture_output": True, "text": True, "timeout": PATIENCE, "check": False, **options}
    )


def fails(run: Run | subprocess.CompletedProcess[str], code: int, *messages: str) -> None:
    """Asserts this exit code and these messages on standard error, without a traceback."""
    assert run.returncode == code, run.stderr
    assert "Traceback" not in run.stderr
    for each in messages:
        assert each in run.stderr


def fails_in_one_line(run: Run | subprocess.CompletedProcess[str], code: int, *messages: str) -> None:
    """The same for attnbench's own errors: one line that begins with the program's name."""
    fails(run, code, *messages)
    assert run.stderr.startswith("attnbench: ")
    assert run.stderr.count("\n") == 1, run.stderr
