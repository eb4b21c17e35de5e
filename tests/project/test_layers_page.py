"""The page on the layers of today's models, beside the rows that it is made of."""

from __future__ import annotations

import re
from collections import defaultdict

import figures
from places import ROOT

from attnbench.harness.results.records import Measurement


def test_steps_are_those_of_the_rows() -> None:
    """Of each training the fastest accurate FP8 plan and the fastest other one, and the ratio of the two."""
    calls: dict[str, dict[bool, list[float]]] = defaultdict(lambda: {True: [], False: []})
    row: Measurement
    for row in figures.rows("bars"):
        if row.spec.training and row.status == "ok":
            calls[str(row.spec)][row.plan.fp8].append(row.median_ms())
    fastest = [(min(both[True]), min(both[False])) for both in calls.values()]
    page = (ROOT / "results/nvidia-h200/layers.md").read_text(encoding="utf-8")
    shown = re.findall(r"([\d.]+) for ([\d.]+), \*\*([\d.]+)\*\*", page.partition("MLA's forward")[0])
    expected = [(f"{ours:.2f}", f"{others:.2f}", f"{others / ours:.2f}") for ours, others in fastest]
    assert sorted(shown) == sorted(expected)
