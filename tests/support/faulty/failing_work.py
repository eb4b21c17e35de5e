"""Work that fails, for ``supervised_work``: an item's name says how it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from supervised_work import ItemDone, ItemStarted


def run_items(items: list[str], say: Callable[[Any], None]) -> None:
    for item in items:
        if item.startswith("before"):
            raise ValueError("no item was started")
        say(ItemStarted(item))
        if item.startswith("hangs"):
            time.sleep(600)
        if item.startswith("dies"):
            os._exit(9)
        if item.startswith("raises"):
            raise ValueError("the first line\nthe second line")
        if item.startswith("slow"):
            for _ in range(8):  # longer in total than the patience, which limits one silence
                time.sleep(0.25)
                say(ItemStarted(item))
        say(ItemDone(item, item.upper()))
