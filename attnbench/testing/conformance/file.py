"""Reports of the conformance suite as files: what they say of the kernels that a table names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import MalformedFileError
from ...kernels.plan import backend_of
from ...tables.binding import release_of
from ...tables.files import read_text
from ...tables.table import Table
from ...text.printable import printable

__all__ = ["ReadReport", "read_report", "report_faults", "uncovered"]

_TITLE = re.compile(r"# Conformance of `([^`]{1,200})`")
_FACT = re.compile(r"\| (backend|device) \| (.{1,400}) \|")
_PLAN = re.compile(r"## `([^`]{1,200})`")
_CHECK = re.compile(r"\| (.{1,60}?) \| (passed|skipped|\*\*failed\*\*) \| .*\|")


@dataclass(frozen=True)
class ReadReport:
    """What a report says: of which device and version, and for each kernel or plan the names of the failed checks.

    ``checked`` has a kernel or plan only if at least one of its checks passed or failed.
    """

    path: Path
    device: str
    version: str
    checked: dict[str, tuple[str, ...]]

    @property
    def kernels(self) -> dict[str, tuple[str, ...]]:
        """The failed checks of every kernel in a checked plan."""
        found: dict[str, tuple[str, ...]] = {}
        for plan, failed in self.checked.items():
            for kernel in plan.split(">"):
                found[kernel] = found.get(kernel, ()) + failed
        return found


def read_report(path: Path) -> ReadReport:
    """Read what ``Report.to_markdown`` wrote.  Raises MalformedFileError on anything else, or OSError."""
    lines = read_text(path).splitlines()
    facts: dict[str, str] = {}
    outcomes: dict[str, list[tuple[str, str]]] = {}
    plan = None
    for line in lines:
        if found := _PLAN.fullmatch(line):
            plan = found[1]
        elif plan is None and (found := _FACT.fullmatch(line)):
            facts.setdefault(found[1], re.sub(r"\\(.)", r"\1", found[2]))
        elif plan is not None and (found := _CHECK.fullmatch(line)):
            outcomes.setdefault(plan, []).append((found[1], found[2].strip("*")))
    if not lines or not _TITLE.fullmatch(lines[0]) or facts.keys() != {"backend", "device"} or not outcomes:
        raise MalformedFileError(path, "expected a report of `attnbench check NAME -o FILE`")
    checked = {
        plan: tuple(name for name, outcome in found if outcome == "failed")
        for plan, found in outcomes.items()
        if any(outcome != "skipped" for _, outcome in found)
    }
    return ReadReport(path, printable(facts["device"]), printable(facts["backend"]).split(" ", 1)[0], checked)


def report_faults(table: Table, reports: Iterable[ReadReport]) -> Iterator[str]:
    """Why reports speak against the table: another device, another release of a backend, a failed check.

    Only what they say of the table's kernels counts.
    """
    named = {kernel for _, plan in table.entries for kernel in plan.kernels}
    here = table.environment
    for report in reports:
        found = {kernel: failed for kernel, failed in report.kernels.items() if kernel in named}
        if found and report.device != here.device_name:
            yield f"{report.path} is of {report.device}, the table of {printable(here.device_name)}"
        for backend in sorted({backend_of(kernel) for kernel in found}):
            version = here.backends.get(backend)
            if version is not None and release_of(version) != release_of(report.version):
                yield f"{report.path} is of {backend} {report.version}, the table of {printable(version)}"
        for kernel, failed in sorted(found.items()):
            if failed:
                yield f"{report.path}: {kernel} failed {', '.join(dict.fromkeys(failed))}"


def uncovered(table: Table, reports: Iterable[ReadReport]) -> list[str]:
    """The kernels of the table that no report has checked."""
    checked = {kernel for report in reports for kernel in report.kernels}
    return sorted({kernel for _, plan in table.entries for kernel in plan.kernels} - checked)
