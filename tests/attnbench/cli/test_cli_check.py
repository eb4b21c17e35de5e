"""``attnbench check`` as a person meets it: what it prints, what it leaves, and how it exits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attnbench.cli import main
from attnbench.kernels.registry import Registry, registry
from attnbench.testing import conformance
from attnbench.testing.faults import BACKEND as PLANTED

GOOD, BAD = "reference:fp64", "planted:fp8-zeros"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command in this process, where kernels with planted faults are installed: (exit code, out, err)."""
    monkeypatch.setattr(conformance, "installed", lambda: Registry([*registry().backends.values(), PLANTED]))
    monkeypatch.setattr(conformance, "CHECKS", tuple(each for each in conformance.CHECKS if each.name in NEEDED))

    def run(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["attnbench", "check", *map(str, arguments), "--device", "cpu"])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capsys.readouterr()

    return run


NEEDED = ("returned", "inputs", "out")  # enough to tell a good kernel from a bad one; the rest costs seconds


def test_a_good_kernel_exits_0_and_its_report_is_written(check, tmp_path: Path) -> None:
    code, out, _ = check(GOOD, "--output", tmp_path / "report.md")
    assert code == 0, out
    assert " 0 failed" in out
    written = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert written.startswith(f"# Conformance of `{GOOD}`")
    assert " 0 failed" in written


def test_a_bad_kernel_exits_1_and_says_which_check_failed(check, tmp_path: Path) -> None:
    code, out, err = check(BAD, "-o", tmp_path / "report.md", "--seed", 3)
    assert code == 1
    assert "FAILED   out" in out
    assert not err
    written = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| out | **failed** |" in written
    assert "seed=3" in written


def test_an_unknown_backend_is_misuse(check) -> None:
    code, _, err = check("nobody")
    assert code == 2
    assert err.startswith("attnbench: ")
    assert "nobody" in err


def test_a_place_that_takes_no_report_is_said_before_anything_is_checked(check, tmp_path: Path) -> None:
    code, out, err = check(GOOD, "--output", tmp_path / "missing" / "report.md")
    assert code == 1
    assert "report.md cannot be written" in err
    assert not out
