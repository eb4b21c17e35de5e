"""The user's own table: several writers, killed writers, full disks, and which entries are usable here."""

import json
import multiprocessing
import os
import warnings

import pytest
import torch
from fakes import an_environment

from attnbench import AttentionSpec, Plan
from attnbench.errors import AttnbenchWarning
from attnbench.kernels.registry import registry
from attnbench.state import forget
from attnbench.tables.environment import Environment
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
        update_user_table(
            table(
                *(
                    entry_of(f"writer{number}:bf16", 1.0 + turn, SPEC.replace(batch=batch))
                    for batch in range(1, turn + 2)
                ),
                environment=an_environment(backends={f"writer{number}": "1.0"}),
            )
        )


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
    assert path == user_table_path(detected_environment())
    update_user_table(table(entry_of(time_ms=2.0)))
    assert {str(each.plan): each.time_ms for each in Table.load(path).entries.values()} == {
        "sdpa-math:bf16": 2.0, "reference:bf16": 5.0,
    }  # fmt: skip
    newer = changed_environment(backends={**detected_environment().backends, "reference": "99.1"})
    update_user_table(table(entry_of(time_ms=3.0), environment=newer))
    assert {str(each.plan): each.time_ms for each in Table.load(path).entries.values()} == {"sdpa-math:bf16": 3.0}
    update_user_table(
        table(entry_of("reference:bf16"), environment=changed_environment(threads=detected_environment().threads + 1))
    )
    assert {str(each.plan) for each in Table.load(path).entries.values()} == {"reference:bf16"}


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


# --- the user's before the shipped one ---

H200 = an_environment(device_type="cuda", device_name="NVIDIA H200", capability="9.0")
GPU = torch.device("cuda", 0)


@pytest.fixture
def on_an_h200(monkeypatch, tmp_path):
    """The path of a shipped table for the H200 that this process detects."""
    monkeypatch.setattr(Environment, "detect", classmethod(lambda *_: H200))
    monkeypatch.setattr("attnbench.tables.shipped._FOLDER", tmp_path)
    return tmp_path / "nvidia-h200.json"


def test_a_damaged_shipped_table_is_skipped_with_a_warning(on_an_h200):
    on_an_h200.write_text("{")
    update_user_table(table(entry_of("fast:bf16"), environment=H200))
    with pytest.warns(AttnbenchWarning, match="the table that attnbench ships cannot be used"):
        known = known_tables(GPU)
    assert len(known.tables) == 1


def test_no_shipped_table_is_read_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr("attnbench.tables.shipped._FOLDER", tmp_path)
    (tmp_path / user_table_path(detected_environment()).name).write_text(json.dumps("no table"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert known_tables(CPU) == Known()
