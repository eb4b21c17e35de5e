"""Tables on the command line: built from a sweep's rows, shown, chosen by, and seen by the doctor."""

import json
import re
from pathlib import Path

import pytest
import torch
from command_line import attnbench, named
from merged import part, row

from attnbench import AttentionSpec, Plan
from attnbench.kernels.registry import registry
from attnbench.tables.environment import Environment


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """What a sweep of one tiny case has left here."""
    here = Environment.detect(torch.device("cpu"), registry())
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=32, head_dim=16, dtype="fp32")
    facts = {"spec": spec, "environment": here, "error": {"normal": {"out": 1e-6, "lse": 0.0}}}
    plans = [Plan(f"{backend}:fp32") for backend in ("reference", "sdpa-math")]
    return part(tmp_path / "out", [row(0, plan, **facts) for plan in plans])


def test_table_build_feeds_auto_and_show_prints_it(results: Path, own_cache: Path) -> None:
    built = attnbench("table", "build", results)
    assert built.returncode == 0, built.stderr
    assert list(own_cache.rglob("*.json"))
    shown = attnbench("table", "show", "--device", "cpu")
    assert shown.returncode == 0, shown.stderr
    assert "reference:fp32" in shown.stdout
    assert re.search(r"normal \d", shown.stdout)
    choice = attnbench(
        "explain", "--heads", 2, "--seqlen", 32, "--head-dim", 16, "--dtype", "fp32", "--device", "cpu",
        "--format", "json",
    )  # fmt: skip
    assert json.loads(choice.stdout)["basis"] == "measured"


def test_table_build_from_the_file_equals_that_from_the_folder(results: Path, tmp_path: Path) -> None:
    for name, source in {"a": results, "b": results / "measurements.jsonl"}.items():
        assert attnbench("table", "build", source, "-o", tmp_path / name).returncode == 0
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    assert attnbench("table", "show", tmp_path / "a").stdout == attnbench("table", "show", tmp_path / "b").stdout


def test_a_table_that_cannot_be_written_exits_1(results: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    named(attnbench("table", "build", results, "-o", tmp_path / "file" / "table.json"), 1, "cannot be written")


@pytest.mark.parametrize(
    ("content", "said"), [(None, "nothing was measured"), ("{", "cannot be used"), ("whole", "entries measured on")]
)
def test_doctor_says_what_tables_there_are(results: Path, own_cache: Path, content: str | None, said: str) -> None:
    if content is not None:
        attnbench("table", "build", str(results))
        (table,) = own_cache.rglob("*.json")
        if content != "whole":
            table.write_text(content)
    report = json.loads(attnbench("doctor", "--format", "json").stdout)
    (found,) = [row for row in report["findings"] if row["name"] == "table"]
    assert said in found["detail"]
    assert found["status"] == ("ok" if content == "whole" else "missing")
