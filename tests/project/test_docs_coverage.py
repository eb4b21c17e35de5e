"""The coverage table of docs/tables.md says what lies in the folders, and the page's numbers are the code's."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from figures_coverage import HEADERS, coverage_rows
from places import ROOT
from submitted import H200, honest

from attnbench.harness.results.condense import join_sweeps
from attnbench.harness.results.submission import LEAST_SHAPES
from attnbench.tables.environment import Environment

PAGE = (ROOT / "docs" / "tables.md").read_text(encoding="utf-8")
OTHER = replace(H200, uuid_hash="ba9876543210")


def cells(place: Path) -> dict[str, str]:
    (row,) = coverage_rows(place / "tables", place / "results")
    return dict(zip(HEADERS, row, strict=True))


def save(path: Path, environment: Environment = H200, factor: float = 1.0) -> None:
    join_sweeps({"rows": honest(environment, factor)}).condensed().save(path)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders with a table of one GPU, the only one that ships, and nothing beside it."""
    save(tmp_path / "tables" / "nvidia-h200.json")
    monkeypatch.setattr("attnbench.tables.shipped._FOLDER", tmp_path / "tables")
    return tmp_path


def test_a_table_alone_says_what_it_has_and_that_nothing_else_is_known(place: Path) -> None:
    found = cells(place)
    assert (found["GPU"], found["shapes"], found["plans"]) == ("NVIDIA H200", "12 forward, 0 training", "36")
    assert found["measured with"].startswith("driver 580.159.04, CUDA 13.0, cuDNN 9.19.0, torch 2.11.0, `fa3` 0.4.2")
    assert "sdpa" not in found["measured with"]  # part of torch
    assert [found[name] for name in ("conformance", "fresh regret", "confirmed by")] == [
        "no report", "not measured", "nobody yet",
    ]  # fmt: skip


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


def test_fresh_rows_beside_a_table_give_its_regret(place: Path) -> None:
    """Between two measured lengths every plan is predicted, and the fastest is the one that was fastest there."""
    fresh = place / "results" / "nvidia-h200" / "fresh" / "1"
    fresh.mkdir(parents=True)
    lines = []
    for row in honest()[12:15]:
        spec = row.spec.replace(seqlen_q=row.spec.seqlen_q + 8, seqlen_kv=row.spec.seqlen_kv + 8)
        lines.append(row.model_copy(update={"spec": spec}).to_line())
    (fresh / "measurements.jsonl").write_text("\n".join(lines) + "\n")
    assert cells(place)["fresh regret"] == "1 shapes; 16 bits 1: 0.0 %, 0.0 %, 0 %; FP8 1: 0.0 %, 0.0 %, 0 %"
    flash, fa3, fp8 = lines
    swapped = [flash.replace("sdpa-flash:bf16", "fa3:bf16"), fa3.replace("fa3:bf16", "sdpa-flash:bf16"), fp8]
    (fresh / "measurements.jsonl").write_text("\n".join(swapped) + "\n")
    assert re.search(r"16 bits 1: (100\.\d %, ){2}100 %; FP8 1: 0\.0 %", cells(place)["fresh regret"])


def test_every_gpu_with_a_committed_table_has_a_row_in_the_page() -> None:
    rows = re.findall(r"^\| (NVIDIA [^|]+) \|(.*)\|$", PAGE, re.MULTILINE)
    for path in (ROOT / "attnbench" / "tables").glob("*.json"):
        device = json.loads(path.read_text())["environment"]["device_name"]
        assert any(name == device and "no table yet" not in rest for name, rest in rows), device


def test_the_page_names_the_least_number_of_shapes() -> None:
    assert f"| {LEAST_SHAPES} shapes with two plans each |" in PAGE
