"""Every figure of the README's tables is a committed measurement's."""

import re
import statistics
from pathlib import Path

from attnbench.harness.records import Measurement, read_measurements

ROOT = Path(__file__).parents[1]
HEAD = re.compile(r"\| (b\d.*?) \| kernel \| call \| error \|")
ROW = re.compile(r"\| `(.+?)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) / ([\d.]+) \|")


def shown() -> list[tuple[str, str, list[str]]]:
    """(case, plan, [kernel, call, error on normal, error on outlier]) as the README writes them."""
    case, rows = "", []
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        if head := HEAD.fullmatch(line):
            case = head[1]
        elif row := ROW.fullmatch(line):
            rows.append((case, row[1], list(row.groups()[1:])))
    return rows


def worst(row: Measurement, family: str) -> float:
    return max(error for name, error in row.error[family].items() if name != "lse")


def test_figures_come_from_committed_results() -> None:
    measured = read_measurements(ROOT / "results/nvidia-h200/quick/measurements.jsonl")
    rows = {(row.case, str(row.plan)): row for row in measured}
    assert len(shown()) >= 6
    for case, plan, figures in shown():
        row = rows[case, plan]
        truths = [statistics.median(row.time_ms[cost]) for cost in ("kernel", "call")]
        truths += [worst(row, family) for family in ("normal", "outlier")]
        for figure, truth in zip(figures, truths, strict=True):
            digits = len(figure.partition(".")[2])
            assert float(figure) == round(truth, digits), (case, plan, figure, truth)
