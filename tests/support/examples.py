"""How many examples a property is tried on: few in every run, many in the exhaustive one."""

import os

__all__ = ["examples"]


def examples(few: int, many: int) -> int:
    """``many`` where HYPOTHESIS_PROFILE is ``exhaustive``, else ``few``."""
    return many if os.environ.get("HYPOTHESIS_PROFILE") == "exhaustive" else few
