"""Folders of tables: invalid files are named in one warning, and the others are used in a fixed order."""

import os
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import an_environment
from patience import PATIENCE

from attnbench import AttentionSpec, Plan
from attnbench.errors import AttnbenchWarning
from attnbench.state import forget
from attnbench.tables import folders
from attnbench.tables.environment import Environment
from attnbench.tables.folders import folder_tables
from attnbench.tables.table import Entry, Table
from attnbench.tables.user_table import known_tables, update_user_table

SPEC = AttentionSpec.make(batch=1, heads=4, seqlen_q=1024, head_dim=64)
FAST, SLOW = Plan("fast:bf16"), Plan("slow:bf16")
H200 = an_environment(device_type="cuda", device_name="NVIDIA H200", capability="9.0")
H100 = replace(H200, device_name="NVIDIA H100 80GB HBM3")
GPU = torch.device("cuda", 0)


def table(*times: float, environment: Environment = H100, spec: AttentionSpec = SPEC) -> Table:
    plans = zip((FAST, SLOW), times, strict=False)
    return Table.from_entries(environment, [Entry(spec, plan, "ok", t, errors={"normal": 0.01}) for plan, t in plans])


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """The folder of shipped tables, filled by the test, in a process that detects an H100."""
    monkeypatch.setattr(Environment, "detect", classmethod(lambda *_: H100))
    monkeypatch.setattr("attnbench.tables.shipped._FOLDER", tmp_path / "shipped")
    forget()
    yield tmp_path / "shipped"
    forget()


@pytest.fixture
def folder(shipped, monkeypatch, tmp_path):
    place = tmp_path / "folder"
    place.mkdir()
    monkeypatch.setenv("ATTNBENCH_TABLES", str(place))
    return place


def times(spec: AttentionSpec = SPEC) -> dict[str, float]:
    return {str(plan): entry.time_ms for plan, entry in known_tables(GPU).at(spec).items()}


def tables_without_warnings() -> tuple[tuple[Path, Table], ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return folder_tables()


def warning_of_folders(*, of: int = 1) -> str:
    """The single warning of reading the folders; asserts that reading them again gives none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(folder_tables()) == of
        assert len(folder_tables()) == of
    assert [each.category for each in caught] == [AttnbenchWarning]
    message = str(caught[0].message)
    assert message.isprintable()
    return message


# --- which are used, and in which order ---


def test_folder_tables_rank_after_the_users_and_before_the_shipped(folder, shipped):
    one, two, three = (SPEC.replace(batch=batch) for batch in (1, 2, 3))
    both = [table(1.0, 2.0, spec=spec).entries for spec in (one, two)]
    Table(H100, {**both[0], **both[1]}).save(folder / "mine.json")
    of_all = [table(5.0, 6.0, spec=spec).entries for spec in (one, two, three)]
    Table(H100, {key: entry for each in of_all for key, entry in each.items()}).save(
        shipped / "nvidia-h100-80gb-hbm3.json"
    )
    update_user_table(table(9.0, spec=one))
    assert times(one) == {"fast:bf16": 9.0}  # the user's alone, though others know more plans
    assert times(two) == {"fast:bf16": 1.0, "slow:bf16": 2.0}
    assert times(three) == {"fast:bf16": 5.0, "slow:bf16": 6.0}
    assert [each.scaled_from for each in known_tables(GPU).tables] == [None, None, None]


def test_another_gpus_table_is_scaled_if_possible_and_ignored_otherwise(folder):
    table(1.0, environment=replace(H200, device_name="NVIDIA B200", capability="10.0")).save(folder / "a.json")
    table(2.0, environment=an_environment()).save(folder / "b.json")
    assert known_tables(GPU).tables == ()
    table(3.0, environment=H200).save(folder / "c.json")
    forget()
    (found,) = known_tables(GPU).tables
    assert (found.scaled_from, found.environment.device_name) == ("NVIDIA H200", H100.device_name)
    assert 3.0 < times()["fast:bf16"] < 3.0 * 4.8 / 3.35
    assert known_tables(GPU).note is None


def test_all_tables_are_converted_to_the_first_known_host_speed(folder, shipped):
    def save(path, launch_ms, **more):
        entries = [replace(each, host_ms=9.0, device_ms=1.0) for each in table(9.0, **more).entries.values()]
        Table.from_entries(more.get("environment", H100), entries, launch_ms).save(path)

    save(folder / "a.json", None, spec=SPEC.replace(batch=2))
    save(folder / "b.json", 0.01)
    save(shipped / "nvidia-h200.json", 0.03, environment=H200)
    tables = known_tables(GPU).tables
    assert [each.launch_ms for each in tables] == [None, 0.01, 0.01]
    assert [entry.time_ms for each in tables for entry in each.entries.values()] == [9.0, 9.0, pytest.approx(3.0)]


def test_tables_of_this_gpu_rank_before_scaled_ones(folder, shipped):
    table(1.0, 1.0, environment=H200).save(folder / "a.json")
    table(2.0).save(folder / "b.json")
    table(3.0, 3.0, environment=H200).save(shipped / "nvidia-h200.json")
    assert times() == {"fast:bf16": 2.0}
    own, other = known_tables(GPU).tables  # which is whole, but has no spec of its own GPU twice
    assert own.scaled_from is None
    assert (other.scaled_from, set(other.specs)) == ("NVIDIA H200", {SPEC})


# --- what is no table ---


def fifo(path: Path) -> None:
    os.mkfifo(path)


def too_fast(path: Path) -> None:
    table(1e-6, environment=H200).save(path)


def unknown_plan(path: Path) -> None:
    table(1.0).save(path)
    path.write_text(path.read_text().replace("fast:bf16", "../../etc/passwd"))


HOSTILE = {
    "braces and a name that would steer a terminal": lambda path: path.write_text("[\x1b[2J"),
    "newer": lambda path: path.write_text('{"schema": "attnbench.table/99"}'),
    "fifo": fifo,
    "dangling": lambda path: path.symlink_to("nowhere"),
    "too fast": too_fast,
    "unknown plan": unknown_plan,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_invalid_table_is_named_in_one_warning_and_others_are_used(kind, folder):
    table(1.0).save(folder / "good.json")
    HOSTILE[kind](folder / "bad.json")
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(warning_of_folders()), daemon=True)
    reader.start()
    reader.join(PATIENCE)
    assert not reader.is_alive(), "it is waited for"
    assert "bad.json: " in found[0]
    assert "good.json" not in found[0]
    assert times() == {"fast:bf16": 1.0}


def test_hidden_nested_and_non_json_files_are_ignored(folder):
    table(1.0).save(folder / "good.json")
    for name in (".draft.json", "x.lock", "README.md", "json"):
        (folder / name).write_text("{")
    (folder / "deeper").mkdir()
    (folder / "deeper" / "x.json").write_text("{")
    assert len(tables_without_warnings()) == 1


@pytest.mark.parametrize("place", ["nowhere", "a-file", "zero\0byte"])
def test_an_unreadable_folder_is_skipped_and_others_are_used(place, folder, monkeypatch, tmp_path):
    table(1.0).save(folder / "good.json")
    (tmp_path / "a-file").write_text("x")
    value = f"{tmp_path / place}{os.pathsep}{folder}"
    monkeypatch.setattr(os, "environ", {**os.environ, "ATTNBENCH_TABLES": value})  # the real one takes no zero byte
    assert "cannot be read" in warning_of_folders()
    assert times() == {"fast:bf16": 1.0}


# --- how much is read ---


def test_the_file_limit_applies_to_all_folders_together(folder, monkeypatch, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for number in range(4):
        table(1.0).save(folder / f"{number}.json")
        table(1.0).save(other / f"{number}.json")
    monkeypatch.setenv("ATTNBENCH_TABLES", f"{folder}{os.pathsep}{other}")
    monkeypatch.setattr(folders, "_MOST_FILES", 6)
    assert f"in {other} are not used: 2.json and those after it: there are more than 6 files" in warning_of_folders(
        of=6
    )
    monkeypatch.setattr(folders, "_MOST_FILES", 4)
    forget()
    assert f"in {other} are not used: 0.json and those after it" in warning_of_folders(of=4)


def test_the_number_of_bytes_read_is_limited(folder, monkeypatch):
    for number in range(4):
        table(1.0).save(folder / f"{number}.json")
    monkeypatch.setattr(folders, "_MOST_BYTES", 2 * (folder / "0.json").stat().st_size)
    assert "2.json and those after it: all files have more than" in warning_of_folders(of=2)
