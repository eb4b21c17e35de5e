"""The coverage table of docs/tables.md says what lies in the folders, and the page's numbers are the code's."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from figures_coverage import HEADERS, coverage_rows
from places import ROOT
from submission_rows import H200, valid_rows

from attnbench.harness.results.condense import join_sweeps
from attnbench.tables.environment import Environment

PAGE = (ROOT / "docs" / "tables.md").read_text(encoding="utf-8")
OTHER = replace(H200, uuid_hash="ba9876543210")


def cells(place: Path) -> dict[str, str]:
    (row,) = coverage_rows(place / "tables", place / "results")
    return dict(zip(HEADERS, row, strict=True))


def save(path: Path, environment: Environment = H200, factor: float = 1.0) -> None:
    join_sweeps({"rows": valid_rows(environment, factor)}).condensed().save(path)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders with a table of one GPU, the only one that ships, and nothing beside it."""
    save(tmp_path / "tables" / "nvidia-h200.json")
    monkeypatch.setattr("attnbench.tables.shipped._FOLDER", tmp_path / "tables")
    return tmp_path


def test_others_confirm_a_table_by_other_gpus_with_the_same_times(place: Path) -> None:
    others = place / "results" / "nvidia-h200" / "submitted"
    for name, environment, factor in (
        ("the same GPU again", H200, 1.0),
        ("other times", OTHER, 1.5),
        ("another model", replace(OTHER, device_name="NVIDIA H20"), 1.0),
    ):
        save(others / f"{name}.json", environment, factor)
    assert cells(place)["confirmed by"] == "nobody yet"
    save(others / "one.json", OTHER, 1.03)
    save(others / "one, again.json", OTHER, 0.98)
    assert cells(place)["confirmed by"] == "1 other"
    save(others / "two.json", replace(H200, uuid_hash="cc9876543210"))
    assert cells(place)["confirmed by"] == "2 others"


def test_every_gpu_with_a_committed_table_has_a_row_in_the_page() -> None:
    rows = re.findall(r"^\| (NVIDIA [^|]+) \|(.*)\|$", PAGE, re.MULTILINE)
    for path in (ROOT / "attnbench" / "tables").glob("*.json"):
        device = json.loads(path.read_text())["environment"]["device_name"]
        assert any(name == device and "no table yet" not in rest for name, rest in rows), device
