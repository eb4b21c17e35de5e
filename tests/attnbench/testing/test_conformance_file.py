"""Reports of the conformance suite, read from files and checked against a table's kernels."""

from dataclasses import replace
from pathlib import Path

import pytest
from places import ROOT
from submission_rows import H200, valid_rows

from attnbench.errors import MalformedFileError
from attnbench.harness.results.condense import join_sweeps
from attnbench.tables.table import Table
from attnbench.testing.conformance.file import read_report, report_faults, uncovered
from attnbench.testing.conformance.report import Finding, Outcome, Report

TABLE = join_sweeps({"a folder": valid_rows()})
COMMITTED = sorted((ROOT / "results").glob("*/conformance/*.md"))


def findings(plan: str, **outcomes: Outcome) -> list[Finding]:
    return [Finding(plan, check, outcome, "1 spec | `b1`; *so* it is") for check, outcome in outcomes.items()]


def report(folder: Path, *found: Finding, device: str = "NVIDIA H200", version: str = "0.4.2.post2") -> Path:
    backend = found[0].plan.partition(":")[0]
    path = folder / f"{backend}.md"
    made = Report(backend, device, f"{version} from a place", 0, H200, found)
    path.write_text(made.to_markdown(), encoding="utf-8")
    return path


def faults(*paths: Path) -> list[str]:
    return list(report_faults(TABLE, map(read_report, paths)))


def test_a_passed_report_has_no_objection_and_covers_what_it_ran(tmp_path: Path) -> None:
    path = report(tmp_path, *findings("fa3:bf16", out="passed", sink="skipped"), version="0.4.9")  # a patch
    assert faults(path) == []
    assert r"| 1 spec \| \`b1\`; \*so\* it is |" in path.read_text(encoding="utf-8")
    assert uncovered(TABLE, [read_report(path)]) == ["sdpa-flash:bf16", "triton:fp8"]
    skipped = report(tmp_path, *findings("fa3:fp16", out="passed"), *findings("fa3:bf16", out="skipped"))
    assert "fa3:bf16" in uncovered(TABLE, [read_report(skipped)])  # of which all checks were


def test_every_failed_check_of_a_kernel_in_the_table_is_an_objection(tmp_path: Path) -> None:
    pair = findings("fa3:bf16>fa3:bf16", dq="failed", dk="passed")
    other = findings("fa3:fp16", out="failed")
    (fault,) = faults(report(tmp_path, *findings("fa3:bf16", out="failed", LSE="failed"), *pair, *other))
    assert "fa3:bf16 failed out, LSE, dq" in fault


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"device": "NVIDIA H100 80GB HBM3"}, "is of NVIDIA H100 80GB HBM3, the table of NVIDIA H200"),
        ({"version": "0.5.0"}, "is of fa3 0.5.0, the table of 0.4.2.post2"),
    ],
)
def test_a_report_from_another_device_or_version_does_not_cover_the_table(
    facts: dict[str, str], message: str, tmp_path: Path
) -> None:
    (fault,) = faults(report(tmp_path, *findings("fa3:bf16", out="passed"), **facts))
    assert message in fault
    assert faults(report(tmp_path, *findings("te:bf16", out="failed"), **facts)) == []  # the table has none of it


def test_committed_reports_are_read_and_none_has_a_failure() -> None:
    reports = [read_report(path) for path in COMMITTED]
    assert len(reports) > 20
    assert all(each.kernels and not any(each.kernels.values()) for each in reports)
    shipped = Table.load(ROOT / "attnbench" / "tables" / "nvidia-h200.json")
    own = [each for each in reports if each.path.parts[-3] == "nvidia-h200"]
    assert list(report_faults(shipped, own)) == []
    assert list(report_faults(replace(shipped, environment=replace(shipped.environment, device_name="A GPU")), own))


@pytest.mark.parametrize("content", ["", "# A page\n", "# Conformance of `fa3`\n", "whole, twice", "not text"])
def test_an_invalid_report_is_an_error_that_names_the_file(content: str, tmp_path: Path) -> None:
    path = report(tmp_path, *findings("fa3:bf16", out="passed"))
    whole = path.read_text(encoding="utf-8")
    path.write_bytes(
        {"whole, twice": whole[1:].encode(), "not text": b"\xff" + whole.encode()}.get(content, content.encode())
    )
    with pytest.raises(MalformedFileError, match=path.name):
        read_report(path)
