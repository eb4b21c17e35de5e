"""``attnbench check``: its output, its report and its exit codes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from command_line import expect, fails_in_one_line

from attnbench.kernels.registry import Registry, registry
from attnbench.testing.conformance import suite
from attnbench.testing.faults import BACKEND as PLANTED

GOOD, BAD = "reference:fp64", "planted:fp8-zeros"
NEEDED = ("returned", "inputs", "out")  # enough to tell a good kernel from a bad one; the rest costs seconds
check = partial(expect, "check", "--device", "cpu")


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs kernels with injected faults."""
    monkeypatch.setattr(suite, "installed", lambda: Registry([*registry().backends.values(), PLANTED]))
    monkeypatch.setattr(suite, "CHECKS", tuple(each for each in suite.CHECKS if each.name in NEEDED))


def test_a_correct_kernel_exits_0_and_its_report_is_written(tmp_path: Path) -> None:
    assert " 0 failed" in check(GOOD, "--output", tmp_path / "report.md").stdout
    written = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert written.startswith(f"# Conformance of `{GOOD}`")
    assert " 0 failed" in written


def test_a_bad_kernel_exits_1_and_reports_which_check_failed(tmp_path: Path) -> None:
    run = check(BAD, "-o", tmp_path / "report.md", "--seed", 3, code=1)
    assert "FAILED   out" in run.stdout
    assert not run.stderr
    written = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| out | **failed** |" in written
    assert "seed=3" in written
    assert f"| torch | {torch.__version__.partition('+')[0]} |" in written
    assert "<br>smallest spec: `b" in written


def test_an_unknown_backend_is_misuse() -> None:
    fails_in_one_line(check("nobody", code=2), 2, "nobody", "there are", "sdpa-flash")


def test_an_unwritable_report_path_is_reported_before_any_check(tmp_path: Path) -> None:
    run = check(GOOD, "--output", tmp_path / "missing" / "report.md", code=1)
    fails_in_one_line(run, 1, "report.md cannot be written")
    assert not run.stdout
