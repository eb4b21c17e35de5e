"""Declared errors agree with the committed results of a GPU and with the conformance suite on this machine."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from functools import cache
from statistics import fmean
from types import MappingProxyType

import pytest
from places import RESULTS

from attnbench import AttentionSpec, Plan
from attnbench.kernels.capabilities import Device
from attnbench.kernels.registry import registry
from attnbench.tables.shipped import shipped_tables
from attnbench.tables.table import Table

GPU = Device("cuda", "NVIDIA H200", (9, 0))
MOST = 2.5  # times the largest error that was seen: other shapes, drivers and draws than those of the sweeps


@cache
def largest_errors() -> MappingProxyType[Plan, tuple[float, AttentionSpec]]:
    """The largest error of each plan on normal inputs in the shipped tables, with its spec."""
    found: dict[Plan, list[tuple[float, str, AttentionSpec]]] = defaultdict(list)
    for table in map(Table.load, shipped_tables()):
        for entry in table.entries.values():
            if entry.usable and "normal" in entry.errors:
                found[entry.plan].append((entry.errors["normal"], str(entry.spec), entry.spec))
    return MappingProxyType({plan: (max(each)[0], max(each)[2]) for plan, each in found.items()})


@pytest.mark.parametrize("plan", sorted(largest_errors(), key=str), ids=str)
def test_declared_errors_cover_the_committed_results_closely(plan):
    error, spec = largest_errors()[plan]
    declared = registry().declared_error(plan, spec, GPU)
    assert error <= declared <= MOST * error


@cache
def errors_by_length() -> MappingProxyType[str, dict[tuple[str, ...], dict[int, float]]]:
    """The committed errors of each plan and tensor by number of tokens, for families whose difficulty is constant."""
    found: dict[str, dict[tuple[str, ...], dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    with gzip.open(RESULTS / "nvidia-h200/growth/errors.jsonl.gz", "rt", encoding="utf-8") as lines:
        next(lines)  # the conditions
        for row in map(json.loads, lines):
            for name, errors in row["errors"].items():
                if row["family"] in ("normal", "biased-v"):
                    what = (row["mask"], str(row["heads"]), row["family"], name)
                    found[row["plan"]][what][row["tokens"]] = fmean(errors)
    return MappingProxyType(found)


@pytest.mark.parametrize("name", errors_by_length())
def test_declared_error_growth_covers_the_committed_results(name):
    plan = Plan.parse(name)
    spec = AttentionSpec.make(
        batch=1, heads=2, seqlen_q=8192, head_dim=128, direction="forward" if plan.backward is None else "training"
    )
    growth, declared = registry().error_growth(plan), registry().declared_error(plan, spec, GPU)

    def errors_beyond_growth(growth: float) -> list[tuple[str, ...]]:
        """Errors above the growth from the fewest tokens (at least from half of the declared error)."""
        found = []
        for what, errors in errors_by_length()[name].items():
            fewest = min(errors)
            before = max(errors[fewest], declared / 2)
            found += [what for tokens, error in errors.items()
                      if error > 1.25 * before * growth ** math.log2(tokens / fewest)]  # fmt: skip
        return found

    assert growth is not None
    assert not errors_beyond_growth(growth)
    assert growth < 1.5 or errors_beyond_growth(1.0), "it could declare less"
