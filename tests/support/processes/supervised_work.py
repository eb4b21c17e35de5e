"""Runs items one by one in a child process, so that an item that hangs or dies does not affect the others.

The child reports each item that it starts and its result.  The parent kills a child that is silent for too long, counts
the item that was started last as lost, and starts another child for the remaining items.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

__all__ = ["ItemDone", "ItemLost", "ItemStarted", "run_one_by_one"]

START = 90.0  # seconds until the first message of a process: imports, the GPU's context, the first inputs
_DYING = 10.0
Item = TypeVar("Item", bound=Hashable)


class ItemStarted(NamedTuple):
    """The item was started: failures from here on belong to it."""

    item: Any


class ItemDone(NamedTuple):
    """The item's result."""

    item: Any
    found: Any


class ItemLost(NamedTuple):
    """The item's process hung or died, for this reason."""

    reason: str


class _WorkEnded(NamedTuple):
    problem: str | None


def run_one_by_one(
    work: Callable[[list[Item], Callable[[Any], None]], None],
    items: Sequence[Item],
    *,
    patience: float,
    limit: float = float("inf"),
    give_up: Callable[[list[Item], Item], bool] = lambda lost, item: False,
    on_message: Callable[[Any], None] = lambda message: None,
) -> dict[Item, Any]:
    """Results by item: ``ItemLost`` where its process hung or died; items that ``work`` skipped are absent.

    ``work(items, send)`` runs in the child: a function of a module, which sends ``ItemStarted`` and ``ItemDone``.
    ``on_message`` gets each of its messages, and an ``ItemDone`` for each lost item.  A child is killed after
    ``patience`` seconds of silence, and the last one ``limit`` seconds from now.  ``give_up(lost, item)`` says whether
    to skip an item after those that were lost.
    Raises RuntimeError where a child fails before it starts an item.
    """
    ends = time.monotonic() + limit
    found: dict[Item, Any] = {}
    lost: list[Item] = []

    def mark_lost(item: Item, reason: str) -> None:
        found[item] = ItemLost(reason)
        on_message(ItemDone(item, found[item]))

    while remaining := [item for item in items if item not in found]:
        started: list[Item] = []

        def handle(message: Any, started: list[Item] = started) -> None:
            if isinstance(message, ItemStarted):
                started.append(message.item)
            elif isinstance(message, ItemDone):
                found[message.item] = message.found
            on_message(message)

        problem = _run_in_process(work, remaining, handle, patience, ends)
        if problem is None:
            break
        last = started[-1] if started and started[-1] not in found else None
        if last is not None:
            lost.append(last)
            mark_lost(last, problem)
        if time.monotonic() >= ends:
            break
        if last is None:
            raise RuntimeError(f"a process ended with no item under way: {problem}")
        for item in remaining:
            if item not in found and give_up(lost, item):
                mark_lost(item, "not tried after those that were lost")
    return found


def _run_in_process(
    work: Any, items: list[Any], handle: Callable[[Any], None], patience: float, ends: float
) -> str | None:
    """What went wrong in one process, or None."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_process_main, args=(work, items, theirs), daemon=True)
    process.start()
    theirs.close()
    wait = START
    try:
        while True:
            if not mine.poll(max(0.0, min(wait, ends - time.monotonic()))):
                return "no time was remaining" if time.monotonic() >= ends else f"silent for {wait:.0f} s, and killed"
            message = mine.recv()
            if isinstance(message, _WorkEnded):
                return message.problem
            handle(message)
            wait = patience
    except EOFError:
        process.join(_DYING)
        return f"its process died, exit code {process.exitcode}"
    finally:
        mine.close()
        process.join(_DYING if process.exitcode is not None else 0.0)
        if process.is_alive():
            process.kill()
            process.join(_DYING)


def _process_main(work: Any, items: list[Any], pipe: Connection) -> None:
    problem = None
    try:
        work(items, pipe.send)
    except Exception as error:
        problem = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
    with suppress(OSError):  # the parent has closed the pipe
        pipe.send(_WorkEnded(problem))
