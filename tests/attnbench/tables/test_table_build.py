"""``attnbench table build``: several sweeps become one table, and the shipped one comes from the committed rows."""

import re
import shlex
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import sweep_parts
import torch
from command_line import attnbench, expect, fails
from fakes import an_environment
from places import ROOT

from attnbench import AttentionSpec
from attnbench.errors import MisuseError
from attnbench.harness.results.condense import join_sweeps
from attnbench.harness.results.records import Measurement
from attnbench.kernels.registry import registry
from attnbench.state import forget
from attnbench.tables.environment import Environment
from attnbench.tables.shipped import file_name
from attnbench.tables.table import Table
from attnbench.tables.user_table import known_tables, user_table_path

SHIPPED = sorted((ROOT / "attnbench" / "tables").glob("*.json"))
COMMANDS = re.findall(
    r"^attnbench (table build|submit) (.+) -o (attnbench/tables/\S+)$",
    (ROOT / "docs" / "tables.md").read_text(),
    re.MULTILINE,
)
SPEC = AttentionSpec.make(batch=1, heads=4, seqlen_q=1024, head_dim=64)
HERE = an_environment(power_cap_w=700, origins={"fast": "a wheel"})


def row(plan: str = "fast:bf16", hours: float = 0, call: float = 1.0, **more) -> Measurement:
    facts = {"spec": SPEC, "started": sweep_parts.WHEN + timedelta(hours=hours), "environment": HERE, **more}
    return sweep_parts.row(0, plan, **(facts if "status" in more else {**facts, "time_ms": {"call": [call]}}))


def times(table: Table) -> dict[str, float | None]:
    return {str(plan): entry.time_ms for (_, plan), entry in table.entries.items()}


def test_the_newest_row_of_several_sweeps_is_used_in_any_order():
    old = [row(call=1.0), row("slow:bf16", hours=5, call=5.0)]
    new = [row(hours=1, call=2.0), row("slow:bf16", hours=1, call=6.0)]
    for sweeps in ({"old": old, "new": new}, {"new": new, "old": old}):
        assert times(join_sweeps(sweeps)) == {"fast:bf16": 2.0, "slow:bf16": 5.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_name": "NVIDIA H100"}, "device_name was A CPU, is NVIDIA H100"),
        ({"torch": "2.9.1"}, "torch was 2.9.0, is 2.9.1"),
        ({"backends": {"fast": "1.1"}}, "the backend fast was 1.0, is 1.1"),
        ({"origins": {"fast": "a build"}}, "the backend fast came from a wheel, comes from a build"),
        ({"power_cap_w": 500}, "power_cap_w was 700, is 500"),
    ],
)
def test_incompatible_sweeps_are_refused_with_the_reason(changes, message):
    with pytest.raises(MisuseError, match=f"one and two: .*must not be mixed.*{message}"):
        join_sweeps({"one": [row()], "two": [row(environment=replace(HERE, **changes))]})
    with pytest.raises(MisuseError, match=r"^one: .*must not be mixed"):
        join_sweeps({"one": [row(), row(environment=replace(HERE, **changes))]})


def test_power_caps_and_origins_must_match_only_if_both_are_known():
    unknown = row(hours=1, call=2.0, environment=replace(HERE, power_cap_w=None, origins={}))
    assert times(join_sweeps({"one": [row()], "two": [unknown]})) == {"fast:bf16": 2.0}


# --- the command ---


def test_the_command_accepts_folders_and_files_and_names_its_output(tmp_path):
    one = sweep_parts.part(tmp_path / "one", [row()])
    two = sweep_parts.part(tmp_path / "two", [row("slow:bf16"), row("gone:bf16", status="refused")])
    run = expect("table", "build", one, two / "measurements.jsonl", "-o", tmp_path / "table.json")
    assert times(Table.load(tmp_path / "table.json")) == {"fast:bf16": 1.0, "slow:bf16": 1.0}
    assert "2 entries from" in run.stdout
    other = sweep_parts.part(tmp_path / "three", [row(environment=replace(HERE, torch="9.9"))])
    fails(attnbench("table", "build", one, other, "-o", tmp_path / "no.json"), 2, "must not be mixed")
    assert not (tmp_path / "no.json").exists()


# --- the shipped tables ---


def test_the_shipped_tables_come_from_the_committed_rows(tmp_path):
    """With the commands in docs/tables.md, byte for byte."""
    assert sorted(Path(file).name for _, _, file in COMMANDS) == [path.name for path in SHIPPED]
    for command, results, file in COMMANDS:
        rebuilt = tmp_path / Path(file).name
        expect(*command.split(), *(ROOT / each for each in shlex.split(results)), "-o", rebuilt)
        assert rebuilt.read_bytes() == (ROOT / file).read_bytes()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_table_is_small_has_known_plans_and_is_named_after_its_device(path):
    table = Table.load(path)
    assert path.stat().st_size < 2**20
    assert path.name == file_name(table.environment)
    assert table.condensed() == table
    for _, plan in table.entries:
        registry().forward(plan.forward)  # raises where there is no such kernel
        assert plan.backward is None or registry().backward(plan.backward)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_table_is_used_on_its_gpu_and_scaled_or_ignored_elsewhere(path, monkeypatch):
    table = Table.load(path)
    device = torch.device("cuda", 0)

    def on(environment: Environment):
        monkeypatch.setattr(Environment, "detect", classmethod(lambda *_: environment))
        forget()
        return known_tables(device)

    names = [Table.load(each).environment.device_name for each in SHIPPED]
    known = on(table.environment)
    assert known.tables[0].entries == table.entries
    assert [each.scaled_from for each in known.tables] == [
        None, *(name for name in names if name != table.environment.device_name)
    ]  # fmt: skip
    assert "driver was" in on(replace(table.environment, driver="1.0")).note
    for other in ("NVIDIA H20", "NVIDIA B200"):
        elsewhere = replace(table.environment, device_name=other)
        scaled = [] if other == "NVIDIA B200" else names
        assert [each.scaled_from for each in on(elsewhere).tables] == scaled
        mine = user_table_path(elsewhere)
        table.save(mine)
        with pytest.warns(UserWarning, match=f"is not used.*device_name was .*, is {other}"):
            assert [each.scaled_from for each in on(elsewhere).tables] == scaled
    forget()
