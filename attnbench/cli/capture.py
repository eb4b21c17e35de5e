"""``attnbench capture``: run a program of PyTorch and keep real inputs of its attention calls."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import MisuseError
from ..text.printable import brief

if TYPE_CHECKING:
    from ..harness.capture.recorder import Recorder

__all__ = ["capture"]

_SIZE = re.compile(r"([0-9]{1,15})([KMGT]i?)?B?")
_POWERS = " KMGT"


def capture(
    program: Annotated[
        str, typer.Argument(metavar="SCRIPT.py", help="The script to run; with -m, the name of a module.")
    ],
    out: Annotated[Path, typer.Option(help="The .safetensors file to write.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments passed to the program.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module, like python -m.")] = False,
    max_bytes: Annotated[
        str,
        typer.Option(
            help="Limit on the recorded tensors, in the file and in memory: bytes, or a number with KiB, MB, GiB ..."
        ),
    ] = "256MiB",
    most: Annotated[int, typer.Option(help="Largest number of calls to keep; each becomes a case of a sweep.")] = 64,
) -> None:
    """Run a program and record the real Q, K, V and dO of its attention calls for `attnbench sweep`.

    It records calls of torch's scaled_dot_product_attention, of attnbench.attention and of the eager attention in
    transformers' models, in this process.  It does not record kernels that the program calls directly, nor attention
    written out by hand.  torch is imported before the program starts, and code that torch.compile would compile runs
    eagerly.  If not all calls fit, a sample over the whole run is kept, with some calls of every shape and layer.  The
    exit code is the program's.
    """
    from ..harness.capture.recorder import capture as recording

    budget = _bytes(max_bytes)
    if not module and not os.path.isfile(program):
        raise MisuseError(f"no such script: {brief(program)}; use -m to run a module")
    try:
        with recording(out, max_bytes=budget, most=most) as recorder:
            _run(program, arguments or [], module)
    except SystemExit:
        _say(recorder, out)
        raise
    _say(recorder, out)


def _run(program: str, arguments: list[str], module: bool) -> None:
    """Run the program like python would.  Raises SystemExit with its exit code unless that is 0."""
    sys.argv = [program, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        sys.path[0] = str(Path.cwd() if module else Path(program).resolve().parent)
    try:
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    except Exception as error:
        # An attnbench error that the program does not catch is the program's failure: print its traceback.
        place = error.__traceback__
        while place is not None and place.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
            place = place.tb_next
        sys.excepthook(type(error), error.with_traceback(place), place)
        raise SystemExit(1) from None


def _say(recorder: Recorder, out: Path) -> None:
    """Print what was kept and what was not to standard error: standard output belongs to the program."""
    if recorder.recorded:
        size = f"{recorder.tensor_bytes / 2**20:.1f} MiB"
        print(
            f"attnbench: {recorder.recorded} of {recorder.seen} attention calls ({size}) are in {out}", file=sys.stderr
        )
    else:
        print(f"attnbench: nothing was recorded, {out} was not written", file=sys.stderr)
    for reason in recorder.left_out:
        print(f"attnbench: {reason}", file=sys.stderr)


def _bytes(text: str) -> int:
    if not (found := _SIZE.fullmatch(text.strip())):
        raise MisuseError(f"--max-bytes {brief(text)}: expected a number of bytes such as 500MB or 2GiB")
    number, unit = found.groups(default=" ")
    factor: int = (1024 if unit.endswith("i") else 1000) ** _POWERS.index(unit[0])
    return int(number) * factor
