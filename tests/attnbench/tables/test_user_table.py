"""The tables that choices use: the user's own with several writers, those of folders, and the shipped ones."""

import json
import multiprocessing
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
from attnbench.kernels.registry import registry
from attnbench.state import forget
from attnbench.tables import folders
from attnbench.tables.environment import Environment
from attnbench.tables.folders import folder_tables
from attnbench.tables.table import Entry, Table
from attnbench.tables.user_table import Known, known_tables, update_user_table, user_table_path

CPU = torch.device("cpu")
SPEC = AttentionSpec.make(batch=1, heads=4, seqlen_q=1024, head_dim=64)
PROCESSES, ROUNDS = 4, 3


@pytest.fixture(autouse=True)
def forget_tables():
    forget()
    yield
    forget()


def detected_environment() -> Environment:
    return Environment.detect(CPU, registry())


def entry_of(plan: str = "sdpa-math:bf16", time_ms: float = 1.0, spec: AttentionSpec = SPEC, **more) -> Entry:
    return Entry(spec, Plan.parse(plan), **{"status": "ok", "time_ms": time_ms, "errors": {"normal": 0.01}, **more})


def table(*entries: Entry, environment: Environment | None = None) -> Table:
    return Table.from_entries(environment or detected_environment(), entries)


def changed_environment(**changes) -> Environment:
    """The detected environment with changed fields."""
    return Environment.from_dict({**detected_environment().to_dict(), **changes})


# --- many writers ---


def _writer(number: int, start) -> None:
    start.wait()
    for turn in range(ROUNDS):
        specs = [SPEC.replace(batch=batch) for batch in range(1, turn + 2)]
        entries = [entry_of(f"writer{number}:bf16", 1.0 + turn, spec) for spec in specs]
        update_user_table(table(*entries, environment=an_environment(backends={f"writer{number}": "1.0"})))


def test_four_processes_write_one_table_and_every_read_is_complete():
    context = multiprocessing.get_context("fork")
    start, path, reads = context.Event(), user_table_path(an_environment()), []
    writers = [context.Process(target=_writer, args=(number, start)) for number in range(PROCESSES)]
    for writer in writers:
        writer.start()
    start.set()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            reads.append(len(Table.load(path).entries))  # raises on half a table
    assert [writer.exitcode for writer in writers] == [0] * PROCESSES
    assert reads == sorted(reads)  # a writer that overlooked another's entries would shrink it
    written = Table.load(path)
    assert {(plan.forward, spec.batch, entry.time_ms) for (spec, plan), entry in written.entries.items()} == {
        (f"writer{number}:bf16", batch, float(ROUNDS)) for number in range(PROCESSES) for batch in range(1, ROUNDS + 1)
    }
    assert len(written.environment.backends) == PROCESSES
    assert sorted(os.listdir(path.parent)) == ["a-cpu.json", "a-cpu.lock"]


# --- what stays of it, and what may be used ---


def test_the_table_accumulates_entries_and_drops_those_of_other_versions():
    path = update_user_table(table(entry_of(), entry_of("reference:bf16", 5.0)))

    def kept() -> dict[str, float]:
        return {str(each.plan): each.time_ms for each in Table.load(path).entries.values()}

    assert path == user_table_path(detected_environment())
    update_user_table(table(entry_of(time_ms=2.0)))
    assert kept() == {"sdpa-math:bf16": 2.0, "reference:bf16": 5.0}
    newer = changed_environment(backends={**detected_environment().backends, "reference": "99.1"})
    update_user_table(table(entry_of(time_ms=3.0), environment=newer))
    assert kept() == {"sdpa-math:bf16": 3.0}
    other = changed_environment(threads=detected_environment().threads + 1)
    update_user_table(table(entry_of("reference:bf16"), environment=other))
    assert kept() == {"reference:bf16": 1.0}


def test_times_converted_from_another_host_are_rounded():
    def measured(launch_ms: float, *plans: str) -> Table:
        entries = [entry_of(plan, host_ms=1.0, device_ms=0.1) for plan in plans]
        return Table.from_entries(detected_environment(), entries, launch_ms)

    update_user_table(measured(0.01, "sdpa-math:bf16", "sdpa-efficient:bf16"))
    path = update_user_table(measured(0.03, "sdpa-flash:bf16"))
    (moved,) = (entry for (_, plan), entry in Table.load(path).entries.items() if plan.forward == "sdpa-flash:bf16")
    assert (moved.time_ms, moved.host_ms) == (0.3333, 0.333)


def test_a_damaged_table_is_a_miss_with_one_warning_and_is_replaced():
    path = update_user_table(table(entry_of()))
    path.write_text("{")
    forget()
    with pytest.warns(AttnbenchWarning, match="your table cannot be used: .*expected JSON") as caught:
        assert known_tables(CPU) == known_tables(CPU) == Known()
    assert len(caught) == 1
    path.unlink()
    path.symlink_to(path)
    forget()
    with pytest.warns(AttnbenchWarning, match="your table cannot be used: .*symbolic links"):
        known_tables(CPU)
    path.unlink()
    update_user_table(table(entry_of()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(known_tables(CPU).at(SPEC)) == 1


# --- those of folders and the shipped ones ---

H200 = an_environment(device_type="cuda", device_name="NVIDIA H200", capability="9.0")
H100 = replace(H200, device_name="NVIDIA H100 80GB HBM3")
GPU = torch.device("cuda", 0)


def gpu_table(*times: float, environment: Environment = H100, spec: AttentionSpec = SPEC) -> Table:
    """Of fast:bf16 and slow:bf16."""
    plans = zip(("fast:bf16", "slow:bf16"), times, strict=False)
    return table(*(entry_of(plan, time, spec) for plan, time in plans), environment=environment)


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """The folder of shipped tables, filled by the test, in a process that detects an H100."""
    monkeypatch.setattr(Environment, "detect", classmethod(lambda *_: H100))
    monkeypatch.setattr("attnbench.tables.shipped._FOLDER", tmp_path / "shipped")
    return tmp_path / "shipped"


@pytest.fixture
def folder(shipped, monkeypatch, tmp_path):
    place = tmp_path / "folder"
    place.mkdir()
    monkeypatch.setenv("ATTNBENCH_TABLES", str(place))
    return place


def times(spec: AttentionSpec = SPEC) -> dict[str, float]:
    return {str(plan): entry.time_ms for plan, entry in known_tables(GPU).at(spec).items()}


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


def test_folder_tables_rank_after_the_users_and_before_the_shipped(folder, shipped):
    one, two, three = (SPEC.replace(batch=batch) for batch in (1, 2, 3))
    both = [gpu_table(1.0, 2.0, spec=spec).entries for spec in (one, two)]
    Table(H100, {**both[0], **both[1]}).save(folder / "mine.json")
    of_all = [gpu_table(5.0, 6.0, spec=spec).entries for spec in (one, two, three)]
    Table(H100, {key: entry for each in of_all for key, entry in each.items()}).save(
        shipped / "nvidia-h100-80gb-hbm3.json"
    )
    update_user_table(gpu_table(9.0, spec=one))
    assert times(one) == {"fast:bf16": 9.0}  # the user's alone, though others know more plans
    assert times(two) == {"fast:bf16": 1.0, "slow:bf16": 2.0}
    assert times(three) == {"fast:bf16": 5.0, "slow:bf16": 6.0}
    assert [each.scaled_from for each in known_tables(GPU).tables] == [None, None, None]


def test_another_gpus_table_is_scaled_if_possible_and_ignored_otherwise(folder):
    gpu_table(1.0, environment=replace(H200, device_name="NVIDIA B200", capability="10.0")).save(folder / "a.json")
    gpu_table(2.0, environment=an_environment()).save(folder / "b.json")
    assert known_tables(GPU).tables == ()
    gpu_table(3.0, environment=H200).save(folder / "c.json")
    forget()
    (found,) = known_tables(GPU).tables
    assert (found.scaled_from, found.environment.device_name) == ("NVIDIA H200", H100.device_name)
    assert 3.0 < times()["fast:bf16"] < 3.0 * 4.8 / 3.35
    assert known_tables(GPU).note is None


def test_all_tables_are_converted_to_the_first_known_host_speed(folder, shipped):
    def save(path, launch_ms, **more):
        entries = [replace(each, host_ms=9.0, device_ms=1.0) for each in gpu_table(9.0, **more).entries.values()]
        Table.from_entries(more.get("environment", H100), entries, launch_ms).save(path)

    save(folder / "a.json", None, spec=SPEC.replace(batch=2))
    save(folder / "b.json", 0.01)
    save(shipped / "nvidia-h200.json", 0.03, environment=H200)
    tables = known_tables(GPU).tables
    assert [each.launch_ms for each in tables] == [None, 0.01, 0.01]
    assert [entry.time_ms for each in tables for entry in each.entries.values()] == [9.0, 9.0, pytest.approx(3.0)]


def test_tables_of_this_gpu_rank_before_scaled_ones(folder, shipped):
    gpu_table(1.0, 1.0, environment=H200).save(folder / "a.json")
    gpu_table(2.0).save(folder / "b.json")
    gpu_table(3.0, 3.0, environment=H200).save(shipped / "nvidia-h200.json")
    assert times() == {"fast:bf16": 2.0}
    own, other = known_tables(GPU).tables  # which is whole, but has no spec of its own GPU twice
    assert own.scaled_from is None
    assert (other.scaled_from, set(other.specs)) == ("NVIDIA H200", {SPEC})


def unknown_plan(path: Path) -> None:
    gpu_table(1.0).save(path)
    path.write_text(path.read_text().replace("fast:bf16", "../../etc/passwd"))


HOSTILE = {
    "braces and a name that would steer a terminal": lambda path: path.write_text("[\x1b[2J"),
    "newer": lambda path: path.write_text('{"schema": "attnbench.table/99"}'),
    "fifo": os.mkfifo,
    "dangling": lambda path: path.symlink_to("nowhere"),
    "too fast": lambda path: gpu_table(1e-6, environment=H200).save(path),
    "unknown plan": unknown_plan,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_invalid_table_is_named_in_one_warning_and_others_are_used(kind, folder):
    gpu_table(1.0).save(folder / "good.json")
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
    gpu_table(1.0).save(folder / "good.json")
    for name in (".draft.json", "x.lock", "README.md", "json"):
        (folder / name).write_text("{")
    (folder / "deeper").mkdir()
    (folder / "deeper" / "x.json").write_text("{")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(folder_tables()) == 1


@pytest.mark.parametrize("place", ["nowhere", "a-file", "zero\0byte"])
def test_an_unreadable_folder_is_skipped_and_others_are_used(place, folder, monkeypatch, tmp_path):
    gpu_table(1.0).save(folder / "good.json")
    (tmp_path / "a-file").write_text("x")
    value = f"{tmp_path / place}{os.pathsep}{folder}"
    monkeypatch.setattr(os, "environ", {**os.environ, "ATTNBENCH_TABLES": value})  # the real one takes no zero byte
    assert "cannot be read" in warning_of_folders()
    assert times() == {"fast:bf16": 1.0}


def test_the_numbers_of_files_and_bytes_are_limits_of_all_folders_together(folder, monkeypatch, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for number in range(4):
        gpu_table(1.0).save(folder / f"{number}.json")
        gpu_table(1.0).save(other / f"{number}.json")
    monkeypatch.setenv("ATTNBENCH_TABLES", f"{folder}{os.pathsep}{other}")
    size = (folder / "0.json").stat().st_size
    for limit, most, of, first in (
        ("_MOST_FILES", 6, 6, "2.json and those after it: there are more than 6 files"),
        ("_MOST_FILES", 4, 4, "0.json and those after it: there are more than 4 files"),
        ("_MOST_BYTES", 6 * size, 6, "2.json and those after it: all files have more than"),
    ):
        forget()
        with monkeypatch.context() as patch:
            patch.setattr(folders, limit, most)
            assert f"in {other} are not used: {first}" in warning_of_folders(of=of)


def test_a_damaged_shipped_table_is_skipped_with_a_warning(shipped):
    shipped.mkdir()
    (shipped / "nvidia-h100-80gb-hbm3.json").write_text("{")
    update_user_table(gpu_table(1.0))
    with pytest.warns(AttnbenchWarning, match="the table that attnbench ships cannot be used"):
        known = known_tables(GPU)
    assert len(known.tables) == 1


def test_no_shipped_table_is_read_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr("attnbench.tables.shipped._FOLDER", tmp_path)
    (tmp_path / user_table_path(detected_environment()).name).write_text(json.dumps("no table"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert known_tables(CPU) == Known()
