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
    program: Annotated[str, typer.Argument(metavar="SCRIPT.py", help="What to run; with -m, a module's name.")],
    out: Annotated[Path, typer.Option(help="The .safetensors file to write.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The program's own arguments.")] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")] = False,
    max_bytes: Annotated[
        str, typer.Option(help="Of the tensors kept, here and in memory: bytes, or a number with KiB, MB, GiB ...")
    ] = "256MiB",
    most: Annotated[int, typer.Option(help="Most calls to keep; a sweep makes each of them a case.")] = 64,
) -> None:
    """Run a program and record the real Q, K, V and dO of its attention for `attnbench sweep`.

    Seen are torch's scaled_dot_product_attention, attnbench.attention and the eager attention
    of transformers' models, in this process.  Not seen are kernels that a program calls
    itself, and attention written out by hand.  torch is imported before the program starts, and
    what torch.compile would compile runs eagerly.  Of more calls than fit some of every shape
    and layer are kept, from the whole run.  The program's exit code is kept.
    """
    from ..harness.capture.recorder import capture as recording

    budget = _bytes(max_bytes)
    if not module and not os.path.isfile(program):
        raise MisuseError(f"there is no script {brief(program)}; -m runs a module")
    try:
        with recording(out, max_bytes=budget, most=most) as recorder:
            _run(program, arguments or [], module)
    except SystemExit:
        _say(recorder, out)
        raise
    _say(recorder, out)


def _run(program: str, arguments: list[str], module: bool) -> None:
    """Run it as python would.  Raises SystemExit with its code unless that is 0."""
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
        # An error of ours that the program lets through is still the program's, which fails with a traceback.
        place = error.__traceback__
        while place is not None and place.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
            place = place.tb_next
        sys.excepthook(type(error), error.with_traceback(place), place)
        raise SystemExit(1) from None


def _say(recorder: Recorder, out: Path) -> None:
    """What was kept and what was not, on standard error: standard output is the program's."""
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
        raise MisuseError(f"--max-bytes is a number of bytes such as 500MB or 2GiB, not {brief(text)}")
    number, unit = found.groups(default=" ")
    factor: int = (1024 if unit.endswith("i") else 1000) ** _POWERS.index(unit[0])
    return int(number) * factor
