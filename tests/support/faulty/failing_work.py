"""Work that goes wrong, for ``watched`` to survive: an item's name says how it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from supervised_work import Begun, Done


def work(items: list[str], say: Callable[[Any], None]) -> None:
    for item in items:
        if item.startswith("before"):
            raise ValueError("nothing is under way")
        say(Begun(item))
        if item.startswith("hangs"):
            time.sleep(600)
        if item.startswith("dies"):
            os._exit(9)
        if item.startswith("raises"):
            raise ValueError("so it goes\nand on")
        if item.startswith("slow"):
            for _ in range(8):  # together longer than the patience, which is for one silence
                time.sleep(0.25)
                say(Begun(item))
        say(Done(item, item.upper()))
