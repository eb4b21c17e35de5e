"""Paths of the checkout that contains these tests."""

import os
from pathlib import Path

__all__ = ["RESULTS", "ROOT", "SUPPORT", "TESTS"]

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
RESULTS = ROOT / "results"
# For the PYTHONPATH of a child process: this folder and each below it, as pytest's ``pythonpath`` has them.
SUPPORT = os.pathsep.join(
    [str(TESTS / "support"), *sorted(str(each) for each in (TESTS / "support").glob("[!_]*/") if each.is_dir())]
)
