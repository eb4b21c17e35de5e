"""Measuring within a time: one case after the other on one device, until a deadline ends whatever is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from queue import Empty, SimpleQueue

from attnbench.plan import Plan

from .cases import Case
from .laboratory import Laboratory
from .line import Doing, Line, StoppedError
from .records import Measurement
from .sweep import Event, Finished, Started

__all__ = ["Work", "measured_within"]

Work = tuple[Case, Sequence[Plan]]
_Happened = SimpleQueue[Doing | Measurement | BaseException | None]
_AGAIN_SECONDS = 0.2  # a worker that is just being started is not there yet to be killed


def measured_within(laboratory: Laboratory, work: Sequence[Work], deadline: float) -> Generator[Event, None, None]:
    """What happens, as it happens, until all is measured or ``time.monotonic()`` has reached the deadline.

    A case that is cut off has fewer rows than plans.  No process is left when the iterator
    ends or is closed; whatever goes wrong is raised here.
    """
    happened: _Happened = SimpleQueue()
    line = Line(laboratory)
    thread = threading.Thread(target=_work, args=(line, work, deadline, happened), name="attnbench-autotune")
    thread.start()
    total, index = sum(len(plans) for _, plans in work), 0
    try:
        while (event := _next(happened, line, deadline)) is not None:
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Doing):
                yield Started(index, total, event)
            else:
                index += 1
                yield Finished(index, total, event, resumed=False)
    finally:
        while thread.is_alive():
            line.stop()
            thread.join(_AGAIN_SECONDS)


def _next(happened: _Happened, line: Line, deadline: float) -> Doing | Measurement | BaseException | None:
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            line.stop()
        try:
            return happened.get(timeout=left if left > 0 else _AGAIN_SECONDS)
        except Empty:
            continue


def _work(line: Line, work: Sequence[Work], deadline: float, happened: _Happened) -> None:
    """In a thread of its own: an interrupt reaches the main one, which then waits until no worker is left."""
    try:
        with line:
            line.start(dict.fromkeys(plan for _, plans in work for plan in plans))
            for case, plans in work:
                if time.monotonic() >= deadline:
                    break
                for event in line.measure(case, plans):
                    happened.put(event)
    except StoppedError:
        pass
    except BaseException as error:  # carried to the thread that waits for rows
        happened.put(error)
    happened.put(None)
