"""Another process that computes on the same device, as when two jobs share a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Timer

import torch

from ..errors import AttnbenchError

__all__ = ["NeighbourError", "neighbour"]

_AT_WORK = "at work"
_STARTING_SECONDS = 120.0  # a cold disk may take as long to import torch
_ENDING_SECONDS = 10.0
_LONGEST = 200
# It ends when its standard input does, that is when the process that started it ends; and it imports what that
# one would, nothing from the folder where it happens to be.
_PROGRAM = f"""
import json, os, sys, threading

sys.path[:] = json.loads(sys.argv[2])

def outlived():
    sys.stdin.buffer.read()
    os._exit(0)

import torch

torch.set_num_threads(1)
device = torch.device(sys.argv[1])
x = torch.randn(1024, 1024, device=device)
threading.Thread(target=outlived, daemon=True).start()
began = False
while True:
    for _ in range(50):
        x @ x
    float(x[0, 0])
    if not began:
        print({_AT_WORK!r}, flush=True)
        began = True
"""


class NeighbourError(AttnbenchError):
    """No other process could compute on the device: it is exclusive, or its memory is full."""


@contextmanager
def neighbour(device: torch.device) -> Iterator[None]:
    """While open, another process multiplies matrices on the device.  Raises NeighbourError if it does not."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:  # a pipe that fills up would stop it
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(device), json.dumps(sys.path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, errors="replace",
        )  # fmt: skip
        assert process.stdout is not None
        late = Timer(_STARTING_SECONDS, process.kill)
        late.start()
        try:
            began = process.stdout.readline().strip() == _AT_WORK
            late.cancel()
            if not began:
                process.wait()
                log.seek(0)
                last = (log.read().strip().splitlines() or [f"it said nothing for {_STARTING_SECONDS:.0f} s"])[-1]
                raise NeighbourError(f"another process cannot work on {device}: {last[:_LONGEST]}")
            yield
        finally:
            late.cancel()
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # a driver that hangs keeps it, and is not what was asked about
                process.communicate(timeout=_ENDING_SECONDS)
