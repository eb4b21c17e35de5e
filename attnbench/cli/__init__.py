"""The ``attnbench`` command.  Importing it imports no torch: every command loads what it needs when it runs."""

from __future__ import annotations

import errno
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import AttnbenchError, AttnbenchWarning
from ..text.printable import printable
from .backends import backends
from .capture import capture
from .check import check
from .compare import compare
from .doctor import doctor
from .explain import explain
from .gate import gate
from .merge import merge
from .report import report
from .streams import flush_streams, is_lost_output, prepare_streams
from .sweep import sweep
from .tables.submit import submit
from .tables.table import app as table
from .train import train

__all__ = ["app", "main"]

_LONGEST_LINE = 5000  # characters of an error: the longest path and what is wrong with it
# Plain help and plain errors: they read the same on a terminal, in a pipe and in a log.
app = typer.Typer(
    name="attnbench",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (sweep, train, backends, explain, check, compare, gate, doctor, merge, report, submit):
    app.command()(command)
# All arguments after the program's name belong to the program.
app.command(context_settings={"allow_interspersed_args": False})(capture)
app.add_typer(table, name="table")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attnbench {__version__}")
        raise typer.Exit


@app.callback()
def _attnbench(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Measure every FP8 attention on this machine, then run the fastest one that is accurate enough."""


def main() -> None:
    """Run the command line; exit 0 on success, 1 on failure, 2 on misuse, 130 when interrupted.

    An AttnbenchError or AttnbenchWarning is one message on standard error; any other exception keeps its traceback.
    """
    warnings.formatwarning = partial(_formatted, warnings.formatwarning)
    prepare_streams()
    code, lost = None, None
    try:
        code = _run()
    except OSError as error:
        if not is_lost_output(error):
            raise
        lost = error
    lost = flush_streams() or lost
    if lost is not None:
        if lost.errno != errno.EPIPE:  # a reader that closes its pipe early is no error to report
            print(f"attnbench: cannot print: {lost.strerror}", file=sys.stderr)
        code = code or 1
    sys.exit(code)


def _run() -> int | str | None:
    try:
        app(prog_name="attnbench")
    except SystemExit as end:  # how typer ends a command, misuse of its options included
        return end.code
    except AttnbenchError as error:
        print(_message(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _formatted(
    others: Callable[..., str], message: Warning | str, category: type[Warning], *place: Any, **line: Any
) -> str:
    if issubclass(category, AttnbenchWarning):
        return f"{_message(message)}\n"
    return others(message, category, *place, **line)


def _message(message: Exception | str) -> str:
    """A message for standard error, freed of control characters: it may quote files, paths and plug-ins."""
    return "\n".join(printable(line)[:_LONGEST_LINE] for line in f"attnbench: {message}".split("\n"))
