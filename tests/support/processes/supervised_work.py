"""Work on a GPU item by item in a process of its own, so that an item that hangs or dies takes no more than that along.

The one who works says which item it begins and what came of it.  Whoever watches kills a process that is silent for
too long, blames the item that was begun last, and starts another process for those that are left.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

__all__ = ["Begun", "Done", "Lost", "one_by_one"]

START = 90.0  # seconds until a process says something: imports, the GPU's context, the first inputs
_DYING = 10.0
Item = TypeVar("Item", bound=Hashable)


class Begun(NamedTuple):
    """Whatever goes wrong from here on is this item's."""

    item: Any


class Done(NamedTuple):
    """The item needs no other process."""

    item: Any
    found: Any


class Lost(NamedTuple):
    """What an item's process came to."""

    reason: str


class _Ended(NamedTuple):
    problem: str | None


def one_by_one(
    work: Callable[[list[Item], Callable[[Any], None]], None],
    items: Sequence[Item],
    *,
    patience: float,
    limit: float = float("inf"),
    hopeless: Callable[[list[Item], Item], bool] = lambda lost, item: False,
    heard: Callable[[Any], None] = lambda said: None,
) -> dict[Item, Any]:
    """What was found for each item, ``Lost`` where its process was; missing are those that ``work`` left out.

    ``work(items, say)`` runs in the process: a function of a module, which says ``Begun`` and ``Done``; ``heard`` is
    told all that it says, and of those that are lost that they are done.  A process is killed after ``patience``
    seconds of silence, and the last one ``limit`` seconds from now.  ``hopeless(lost, item)`` says whether an item is
    given up after those that were lost.
    Raises RuntimeError where a process ends badly with no item under way.
    """
    ends = time.monotonic() + limit
    found: dict[Item, Any] = {}
    lost: list[Item] = []

    def lose(item: Item, reason: str) -> None:
        found[item] = Lost(reason)
        heard(Done(item, found[item]))

    while left := [item for item in items if item not in found]:
        begun: list[Item] = []

        def listen(said: Any, begun: list[Item] = begun) -> None:
            if isinstance(said, Begun):
                begun.append(said.item)
            elif isinstance(said, Done):
                found[said.item] = said.found
            heard(said)

        problem = _watched(work, left, listen, patience, ends)
        if problem is None:
            break
        last = begun[-1] if begun and begun[-1] not in found else None
        if last is not None:
            lost.append(last)
            lose(last, problem)
        if time.monotonic() >= ends:
            break
        if last is None:
            raise RuntimeError(f"a process ended with no item under way: {problem}")
        for item in left:
            if item not in found and hopeless(lost, item):
                lose(item, "not tried after those that were lost")
    return found


def _watched(work: Any, items: list[Any], listen: Callable[[Any], None], patience: float, ends: float) -> str | None:
    """What went wrong in one process, or None."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_live, args=(work, items, theirs), daemon=True)
    process.start()
    theirs.close()
    wait = START
    try:
        while True:
            if not mine.poll(max(0.0, min(wait, ends - time.monotonic()))):
                return "no time was left" if time.monotonic() >= ends else f"silent for {wait:.0f} s, and killed"
            said = mine.recv()
            if isinstance(said, _Ended):
                return said.problem
            listen(said)
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


def _live(work: Any, items: list[Any], pipe: Connection) -> None:
    problem = None
    try:
        work(items, pipe.send)
    except Exception as error:
        problem = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
    with suppress(OSError):  # nobody listens any more
        pipe.send(_Ended(problem))
