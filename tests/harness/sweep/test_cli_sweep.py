"""``attnbench sweep`` end to end on the installed backends."""

import json

import pytest
import torch
from command_line import expect
from planted import in_haste

from attnbench.choosing.selector import choose
from attnbench.harness.measure.timing import Timer
from attnbench.harness.results.records import Measurement, read_measurements
from attnbench.tables.table import Table

TINY = "- {batch: 1, heads: 1, seqlen_q: 128, head_dim: 128, direction: [forward, training]}\n"


def attnbench(*arguments, code=0):
    return expect("sweep", "--device", "cpu", *arguments, code=code)


@pytest.fixture(autouse=True)
def haste(monkeypatch):
    monkeypatch.setattr(Timer, "for_device", in_haste)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    file = tmp_path_factory.mktemp("cases") / "tiny.yaml"
    file.write_text(TINY)
    return file


def test_json_is_the_records_and_nothing_else_and_the_table_is_kept(tiny, tmp_path):
    names = "emulated:fp8,sdpa-flash:bf16,sdpa-cudnn:bf16"
    asked = "--preset", tiny, "--backends", names, "--format", "json", "--out", tmp_path / "out"
    done = attnbench(*asked)
    rows = [Measurement.model_validate_json(json.dumps(each)) for each in json.loads(done.stdout)]
    assert (tmp_path / "out" / "measurements.jsonl").read_text() == "".join(row.to_line() + "\n" for row in rows)
    status = {str(row.plan): row.status for row in rows if not row.spec.training}
    assert status["emulated:fp8"] == status["sdpa-flash:bf16"] == "ok"
    assert status["sdpa-cudnn:bf16"] in ("unavailable", "refused")
    for row in rows:
        if str(row.plan) == "emulated:fp8":
            assert 0.045 < row.error["normal"]["out"] < 0.06  # what every FP8 kernel measures at D = 128
            assert row.error["outlier"]["out"] > row.error["normal"]["out"]
    table = Table.load(tmp_path / "out" / "table.json")
    assert {(entry.spec, entry.plan, entry.status) for entry in table.entries.values()} == {
        (row.spec, row.plan, row.status) for row in rows
    }
    assert str(tmp_path / "out") in done.stderr
    assert f"[0 of {sum(row.measured for row in rows)} plans measured] " in done.stderr
    assert "sdpa-cudnn" not in done.stderr  # the report names what was refused, once

    misuse = attnbench("--preset", tiny, "--out", tmp_path / "out", code=2)
    assert "--resume" in misuse.stderr
    again = attnbench(*asked, "--resume", "--verbose")
    assert json.loads(again.stdout) == json.loads(done.stdout)
    assert again.stderr.count("there already") == len(rows)


def test_a_table_by_default_and_a_fresh_folder_that_is_named(tiny, own_cache, local_workers):
    done = attnbench("--preset", tiny, "--backends", "sdpa-flash:bf16,sdpa-cudnn:bf16")
    assert "Fastest within its bound: sdpa-flash:bf16" in done.stdout
    assert "Not measured" in done.stdout
    assert str(own_cache) in done.stderr
    assert len(list(own_cache.rglob("measurements.jsonl"))) == 1


def test_a_dry_run_reports_what_would_be_and_writes_nothing(tiny, own_cache):
    done = attnbench("--preset", tiny, "--dry-run", "--format", "json")
    tasks = {(task["case"], task["plan"]): task for task in json.loads(done.stdout)}
    assert {task["spec"]["direction"] for task in tasks.values()} == {"forward", "training"}
    refused = [task for task in tasks.values() if task["status"] != "ok"]
    assert refused
    assert all(task["reasons"] for task in refused)
    assert "measured" in attnbench("--preset", tiny, "--dry-run").stdout
    assert list(own_cache.rglob("*.jsonl")) == []


def test_nothing_measured_is_a_failure_with_its_rows_kept(tiny, tmp_path):
    done = attnbench("--preset", tiny, "--backends", "sdpa-cudnn", "--format", "json", "--out", tmp_path, code=1)
    assert {row["status"] for row in json.loads(done.stdout)} <= {"unavailable", "refused"}
    assert "nothing could be measured" in done.stderr


def test_packed_and_padded_cases_are_swept_reported_and_chosen_by(tmp_path, local_workers):
    file = tmp_path / "documents.yaml"
    file.write_text(
        "- heads: 2\n  head_dim: 64\n  mask: causal\n"
        "  lengths: {distribution: zipf, longest: 96, total: 200, layout: [packed, left-padded, dense, equal]}\n"
    )
    asked = "--preset", file, "--backends", "emulated:fp8-token,sdpa-flash:bf16", "--out", tmp_path / "out"
    done = attnbench(*asked)
    rows = list(read_measurements(tmp_path / "out" / "measurements.jsonl"))
    assert {row.lengths.layout for row in rows} == {"packed", "left-padded", "dense", "equal"}
    assert {row.status for row in rows} == {"ok"}
    assert "Beside it, in times its call:" in done.stdout
    packed = next(row.spec for row in rows if row.lengths.layout == "packed")
    choice = choose(packed, torch.device("cpu"), fp8=True, table=Table.load(tmp_path / "out" / "table.json"))
    assert (str(choice.plan.forward), choice.basis) == ("sdpa-flash:bf16", "measured")
    attnbench(*asked, "--resume")
