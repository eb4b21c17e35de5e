"""Measure one case after the other on one device until a deadline, which ends whatever is running.

Plans that are timed together must all be compiled first, and get rows only when all are judged.  So a case is measured
in stages, the likeliest plans first: late plans delay no others, and a deadline costs one stage, not the case.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice
from queue import Empty, SimpleQueue

from attnbench.kernels.plan import Plan

from ..cases.case import Case
from ..measure.setup import DeviceSetup
from ..results.records import Measurement
from ..sweep.device_sweep import DeviceSweep, PhaseStarted, StoppedError
from ..sweep.run import Event, Finished, Started
from ..sweep.worker_pool import usable_cores

__all__ = ["Work", "measured_within"]

Work = tuple[Case, Sequence[Plan]]
_Event = PhaseStarted | Measurement | BaseException | None
_Happened = SimpleQueue[_Event]
_AGAIN_SECONDS = 0.2  # a worker that is just starting cannot be killed yet
_FIRST = 4  # plans: the current choice with and without FP8, the choice without measurements, and one other
# The share of the remaining time that the next stage may take at the last one's pace: later plans may compile longer.
_SHARE = 0.5
# A stage has at most this many times the plans of the last one, which may have had nothing to compile.
_GROWTH = 2


def measured_within(setup: DeviceSetup, work: Sequence[Work], deadline: float) -> Generator[Event, None, None]:
    """Yield events until all is measured or ``time.monotonic()`` has reached the deadline.

    The plans of a case are measured in order, a few at a time beside the fastest so far, whose new row replaces the old
    one: plans are compared by times from the same minutes.  A case that is cut off has rows of its first plans.  No
    process is left when the iterator ends or is closed; a failure in the thread is raised here.
    """
    happened: _Happened = SimpleQueue()
    sweep = DeviceSweep(setup)
    thread = threading.Thread(target=_work, args=(sweep, work, deadline, happened), name="attnbench-autotune")
    thread.start()
    total = sum(len(plans) for _, plans in work)
    done: set[tuple[str, Plan]] = set()
    try:
        while (event := _next(happened, sweep, deadline)) is not None:
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, PhaseStarted):
                yield Started(len(done), total, event)
            else:
                done.add(event.key)
                yield Finished(len(done), total, event, resumed=False)
    finally:
        while thread.is_alive():
            sweep.stop()
            thread.join(_AGAIN_SECONDS)


def _next(
    happened: _Happened, sweep: DeviceSweep, deadline: float
) -> PhaseStarted | Measurement | BaseException | None:
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            sweep.stop()
        try:
            return happened.get(timeout=left if left > 0 else _AGAIN_SECONDS)
        except Empty:
            continue


def _work(sweep: DeviceSweep, work: Sequence[Work], deadline: float, happened: _Happened) -> None:
    """Runs in its own thread: an interrupt reaches the main thread, which then waits until no worker is left."""
    try:
        with sweep:
            firsts: dict[str, Plan] = {}  # by the forward: its other plans run in the same process
            for plan in (plan for _, plans in work for plan in plans):
                firsts.setdefault(plan.forward, plan)
            # More processes than cores would slow the first ones down; the rest start with their first request.
            sweep.start(islice(firsts.values(), usable_cores()))
            for event in _stages(sweep, work, deadline):
                happened.put(event)
    except StoppedError:
        pass
    except BaseException as error:  # carried to the thread that waits for rows
        happened.put(error)
    happened.put(None)


def _stages(sweep: DeviceSweep, work: Sequence[Work], deadline: float) -> Iterator[PhaseStarted | Measurement]:
    pace = math.inf  # seconds per plan of the last stage, including starting and compiling
    most = _FIRST
    for case, plans in work:
        rows: dict[Plan, Measurement] = {}
        waiting = list(plans)
        while waiting and (left := deadline - time.monotonic()) > 0:
            count = max(1 if rows else _FIRST, min(most, int(_SHARE * left / pace)))
            most = _GROWTH * count
            leading, found = _leading(rows.values()), dict[Plan, Measurement]()
            stage = [*leading, *waiting[:count]]
            del waiting[:count]
            start = time.monotonic()
            for event in sweep.measure(case, stage):
                if isinstance(event, Measurement):
                    found[event.plan] = event
                else:
                    yield event
            # The leading plans first: the other rows are compared with theirs.
            yield from sorted(found.values(), key=lambda row: row.plan not in leading)
            rows |= found
            pace = max(1e-6, time.monotonic() - start) / len(stage)


def _leading(rows: Iterable[Measurement]) -> list[Plan]:
    """The fastest accurate plan so far, and the fastest without FP8."""
    accurate = sorted((row for row in rows if row.status == "ok"), key=Measurement.median_ms)
    exact = [row for row in accurate if not row.plan.fp8]
    return list(dict.fromkeys(row.plan for each in (accurate, exact) for row in each[:1]))
