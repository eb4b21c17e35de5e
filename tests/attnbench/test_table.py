"""Tables: read back what was written, one step at a time, and never believe a file."""

import contextlib
import json
import multiprocessing
import os
import warnings

import pytest
import torch
from fakes import an_environment
from hypothesis import given
from hypothesis import strategies as st
from problems import problems

from attnbench import AttentionSpec, Plan, explain
from attnbench.environment import Environment
from attnbench.errors import AttnbenchWarning, MalformedFileError, OutputError
from attnbench.registry import registry
from attnbench.table import Entry, Table
from attnbench.user_table import forget, update_user_table, user_table, user_table_path

SPEC = AttentionSpec.make(batch=1, heads=4, seqlen_q=1024, head_dim=64)
entries = st.builds(
    Entry,
    spec=problems().map(lambda problem: problem.spec),
    plan=st.sampled_from([Plan("a:bf16"), Plan("b:fp8", "a:bf16")]),
    status=st.sampled_from(["ok", "inaccurate"]),
    time_ms=st.floats(0, 1e6),
    spread_ms=st.floats(0, 1e6),
    errors=st.dictionaries(st.text(max_size=20), st.floats(0, allow_nan=False), min_size=1, max_size=3),
    reason=st.none() | st.text(max_size=50),
)


def one(plan: str = "a:bf16", time: float = 1.0, **more) -> Entry:
    return Entry(
        **{"spec": SPEC, "plan": Plan.parse(plan), "status": "ok", "time_ms": time, "errors": {"normal": 0.01}, **more}
    )


@given(st.lists(entries, max_size=6))
def test_a_table_reads_back_as_it_was_written(tmp_path_factory, found):
    path = tmp_path_factory.mktemp("table") / "deep" / "table.json"
    table = Table.from_entries(an_environment(), found)
    table.save(path)
    assert Table.load(path) == table
    assert [each.name for each in path.parent.iterdir()] == ["table.json"]


def test_the_file_is_the_same_whatever_the_order(tmp_path):
    for name, order in {"a": (0, 1), "b": (1, 0)}.items():
        made = [one(), one("b:fp8", 2.0)]
        Table.from_entries(an_environment(), [made[i] for i in order]).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sum("plan" in line for line in (tmp_path / "a").read_text().splitlines()) == 2


def good() -> dict:
    return {"schema": "attnbench.table/1", "environment": an_environment().to_dict(), "entries": [one().to_dict()]}


def broken(**change) -> dict:
    data = good()
    data["entries"][0].update(change)
    return data


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"table:1: expected JSON"),
        ("{\n\n  oops", r"table:3: expected JSON"),
        ("[]", "schema"),
        ("[" * 100000, "JSON"),
        (json.dumps({**good(), "schema": "attnbench.table/9"}), "attnbench.table/1"),
        (json.dumps({**good(), "environment": {"device_type": 3}}), "environment"),
        (json.dumps({**good(), "entries": [3]}), r"entries\[0\]"),
        (json.dumps({**good(), "entries": 3}), "entries"),
        (json.dumps(broken(time_ms=-1)), r"entries\[0\].*time"),
        (json.dumps(broken(time_ms=float("nan"))), r"entries\[0\].*time"),
        (json.dumps(broken(time_ms=True)), r"entries\[0\].*time"),
        (json.dumps(broken(errors={"normal": -0.1})), r"entries\[0\].*error"),
        (json.dumps(broken(errors=7)), r"entries\[0\]"),
        (json.dumps(broken(plan="a")), r"entries\[0\]"),
        (json.dumps(broken(plan=7)), r"entries\[0\]"),
        (json.dumps(broken(spec={"batch": 1})), r"entries\[0\].*spec"),
        (json.dumps(broken(spec=[])), r"entries\[0\]"),
        (json.dumps(broken(reason="x" * 5000)), r"entries\[0\]"),
        (json.dumps(broken(more=1)), r"entries\[0\].*fields"),
    ],
)
def test_what_is_no_table_is_one_named_error(tmp_path, text, words):
    path = tmp_path / "table"
    path.write_text(text)
    with pytest.raises(MalformedFileError, match=words):
        Table.load(path)


def test_bytes_that_are_no_text_and_files_without_end(tmp_path):
    path = tmp_path / "table"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MalformedFileError, match="UTF-8"):
        Table.load(path)
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(MalformedFileError, match="bytes"):
        Table.load(path)


@given(st.integers(0, 3000), st.binary(max_size=30))
def test_damage_anywhere_is_a_named_error_or_a_table(tmp_path_factory, place, junk):
    path = tmp_path_factory.mktemp("table") / "table"
    Table.from_entries(an_environment(), [one(), one("b:fp8")]).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + junk + whole[place + len(junk) + 1 :])
    with contextlib.suppress(MalformedFileError):
        assert len(Table.load(path).entries) <= 2


def test_a_table_that_cannot_be_written_leaves_the_old_one(tmp_path):
    with pytest.raises(OutputError):
        Table.from_entries(an_environment(), [one()]).save("/proc/nowhere/table.json")
    folder = tmp_path / "a file"
    folder.write_text("")
    with pytest.raises(OutputError):
        Table.from_entries(an_environment(), [one()]).save(folder / "table.json")


def here() -> Environment:
    return Environment.detect(torch.device("cpu"), registry())


def test_the_user_table_grows_and_forgets_other_environments():
    path = update_user_table(Table.from_entries(here(), [one(), one("b:fp8", 5.0)]))
    assert path == user_table_path(here())
    update_user_table(Table.from_entries(here(), [one(time=2.0)]))
    assert {str(each.plan): each.time_ms for each in Table.load(path).entries.values()} == {"a:bf16": 2.0, "b:fp8": 5.0}
    table, note = user_table(torch.device("cpu"))
    assert note is None
    assert len(table.entries) == 2
    other = Environment.from_dict({**here().to_dict(), "torch": "1.0"})
    update_user_table(Table.from_entries(other, [one("c:bf16")]))
    assert {str(each.plan) for each in Table.load(path).entries.values()} == {"c:bf16"}
    with pytest.warns(AttnbenchWarning, match=r"is not used.*torch was 1\.0"):
        assert user_table(torch.device("cpu"))[0] is None


def test_a_soft_difference_is_used_and_said():
    update_user_table(Table.from_entries(Environment.from_dict({**here().to_dict(), "python": "3.9.1"}), [one()]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table, note = user_table(torch.device("cpu"))
    assert len(table.entries) == 1
    assert "python was 3.9.1" in note
    q = torch.randn(1, 2, 8, 16)
    assert "python was 3.9.1" in explain(q, q, q).hint


def test_a_damaged_user_table_is_a_miss_with_a_warning():
    path = update_user_table(Table.from_entries(here(), [one()]))
    path.write_text("{")
    forget()
    with pytest.warns(AttnbenchWarning, match="expected JSON"):
        assert user_table(torch.device("cpu"))[0] is None
    update_user_table(Table.from_entries(here(), [one()]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert user_table(torch.device("cpu"))[0] is not None


def _write(number: int) -> None:
    update_user_table(
        Table.from_entries(an_environment(), [one(f"writer{number}:bf16", time=float(i)) for i in range(3)])
    )


def test_writers_at_the_same_time_lose_nothing():
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(_write, range(16))
    table = Table.load(user_table_path(an_environment()))
    assert {plan.forward for _, plan in table.entries} == {f"writer{number}:bf16" for number in range(16)}
    assert not [name for name in os.listdir(user_table_path(an_environment()).parent) if name.startswith(".")]
