"""The rows of the coverage table in docs/tables.md, from the committed tables and what lies beside them in results/.

For the table ``attnbench/tables/GPU.json`` these are ``results/GPU/conformance`` (reports of ``attnbench check``),
``results/GPU/fresh`` (rows of ``attnbench table check --fresh``) and ``results/GPU/submitted`` (others' tables).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attnbench.choosing.fresh_regret import FreshSummary, fresh_scores, summary_of
from attnbench.harness.results.condense import join_sweeps
from attnbench.harness.results.records import read_measurements
from attnbench.harness.results.submission import agreement
from attnbench.kernels.plan import backend_of
from attnbench.kernels.registry import registry
from attnbench.tables.table import Table
from attnbench.tables.user_table import tables_for
from attnbench.testing.conformance.file import ReadReport, read_report

HEADERS = ("GPU", "measured with", "shapes", "plans", "conformance", "fresh regret", "confirmed by")


def coverage_rows(tables: Path, results: Path) -> list[list[str]]:
    """A row for each GPU that has a table or conformance reports, in the order of ``HEADERS``."""
    names = {path.stem for path in tables.glob("*.json")} | {path.parent.name for path in results.glob("*/conformance")}
    return [_row(tables / f"{name}.json", results / name) for name in sorted(names)]


def _row(path: Path, results: Path) -> list[str]:
    reports = [read_report(each) for each in sorted((results / "conformance").glob("*.md"))]
    if not path.exists():
        return [reports[0].device, "no table yet", "0", "0", _checked(reports), "not measured", "nobody yet"]
    table = Table.load(path)
    timed = [entry for entry in table.entries.values() if entry.time_ms is not None]
    forward, training = (
        len({entry.spec for entry in timed if entry.spec.direction == direction})
        for direction in ("forward", "training")
    )
    return [
        table.environment.device_name,
        _versions(table),
        f"{forward} forward, {training} training",
        str(len(timed)),
        _checked(reports),
        _fresh(table, results / "fresh"),
        _confirmed(table, results / "submitted"),
    ]


def _versions(table: Table) -> str:
    here = table.environment
    used = sorted({backend_of(kernel) for _, plan in table.entries for kernel in plan.kernels})
    # What is part of torch has torch's version.
    own = [name for name in used if here.backends[name].partition("+")[0] != here.torch]
    facts = {"driver": here.driver, "CUDA": here.cuda, "cuDNN": here.cudnn, "torch": here.torch}
    facts |= {f"`{name}`": here.backends[name] for name in own}
    return ", ".join(f"{name} {version}" for name, version in facts.items() if version)


def _checked(reports: Sequence[ReadReport]) -> str:
    kernels = {kernel for report in reports for kernel in report.kernels}
    failed = {kernel for report in reports for kernel, checks in report.kernels.items() if checks}
    text = f"{len(kernels)} kernels" if kernels else "no report"
    return f"{text}, of which {len(failed)} fail" if failed else text


def _fresh(table: Table, folder: Path) -> str:
    files = sorted(folder.rglob("measurements.jsonl*"))
    if not files:
        return "not measured"
    truth = join_sweeps({str(file): list(read_measurements(file)) for file in files})
    scored = summary_of(fresh_scores(truth, tables_for(table.environment), registry()))
    return f"{len(list(truth.specs))} shapes; " + "; ".join(map(_regret, scored))


def _regret(summary: FreshSummary) -> str:
    asked = "FP8" if summary.asked.fp8 else "16 bits"
    beyond = f", {summary.violations} beyond its budget" if summary.violations else ""
    of = f" of {summary.choices + summary.unsteady}" if summary.unsteady else ""
    return (
        f"{asked} {summary.choices}{of}: {100 * summary.geometric_mean:.1f} %, {100 * summary.percentile_90:.1f} %, "
        f"{100 * summary.worst:.0f} %{beyond}"
    )


def _confirmed(table: Table, folder: Path) -> str:
    """By tables of other GPUs of the model whose times are these."""
    others = [Table.load(path) for path in sorted(folder.glob("*.json"))]
    own = table.environment
    found = {
        other.environment.uuid_hash
        for other in others
        if other.environment.device_name == own.device_name
        and other.environment.uuid_hash != own.uuid_hash
        and agreement(table, other).confirms
    }
    return f"{len(found)} other{'s' if len(found) > 1 else ''}" if found else "nobody yet"
