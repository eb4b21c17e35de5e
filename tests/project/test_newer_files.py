"""A file that a newer attnbench wrote is refused as that, with what to do about it, whatever its format."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from compared import row
from fakes import an_environment
from safetensors.torch import save_file
from small_training import run_of

from attnbench import AttentionSpec, Plan, __version__
from attnbench.errors import MalformedFileError, NewerFileError, OutputError
from attnbench.files.untrusted import is_newer
from attnbench.freezing.file import Frozen
from attnbench.harness.capture.file import read_captured
from attnbench.harness.results.records import read_measurements
from attnbench.harness.training.rows import read_runs
from attnbench.harness.training.run import checkpoint
from attnbench.harness.training.run.parallel import Ranks
from attnbench.tables.table import Entry, Table
from attnbench.tables.user_table import update_user_table, user_table_path

ALONE = Ranks(torch.device("cpu"), 0, 1)
SPEC = AttentionSpec.make(batch=1, heads=1, seqlen_q=8, head_dim=8)
TABLE = Table.from_entries(an_environment(), [Entry(SPEC, Plan("slow:bf16"), "ok", 1.0, 0.1, {"normal": 0.01})])


def _lines(line: str, path: Path, change) -> None:
    path.write_text(json.dumps(change(json.loads(line))) + "\n")


def _captured(path: Path, change) -> None:
    save_file({}, path, {"attnbench.captured": json.dumps(change({"schema": "attnbench.captured/1"}))})


def _checkpoint(path: Path, change) -> None:
    path.mkdir()
    save_file({}, path / "rank-0.safetensors", change({"schema": "attnbench.checkpoint/1"}))


def _saved(content: Table | Frozen, path: Path, change) -> None:
    content.save(path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


FORMATS = {  # a file that is changed before it is written, and its reader
    "measurement": (partial(_lines, row().to_line()), lambda path: list(read_measurements(path))),
    "training": (partial(_lines, run_of([1.0]).to_line()), lambda path: list(read_runs(path))),
    "table": (partial(_saved, TABLE), Table.load),
    "frozen": (partial(_saved, Frozen()), Frozen.load),
    "captured": (_captured, read_captured),
    "checkpoint": (_checkpoint, lambda path: checkpoint.load(path, {}, {}, ALONE)),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_newer_schema_is_reported_as_one(tmp_path: Path, kind: str) -> None:
    write, read = FORMATS[kind]
    write(tmp_path / "newer", lambda data: {**data, "schema": f"attnbench.{kind}/12", "more": "facts"})
    with pytest.raises(NewerFileError, match=f'found "attnbench.{kind}/12": a newer attnbench wrote') as caught:
        read(tmp_path / "newer")
    assert f"which {__version__} cannot read; upgrade attnbench" in str(caught.value)
    assert f"attnbench.{kind}/12" not in str(caught.value).partition(", found")[0]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("attnbench.{kind}/0", "an older attnbench wrote this file; make it again"),
        ("attnbench.other/1", "another kind of file"),
        ("attnbench.{kind}/" + "9" * 5000, "found 'attnbench"),
        ("\x1b[2J", "found '\\x1b[2J'"),
    ],
)
def test_any_other_schema_is_malformed(tmp_path: Path, kind: str, schema: str, message: str) -> None:
    write, read = FORMATS[kind]
    write(tmp_path / "file", lambda data: {**data, "schema": schema.format(kind=kind)})
    with pytest.raises(MalformedFileError, match=f'expected "schema": "attnbench.{kind}/[12]", found') as caught:
        read(tmp_path / "file")
    assert message in str(caught.value)
    assert not isinstance(caught.value, NewerFileError)
    assert str(caught.value).isprintable()
    assert len(caught.value.expected) < 300


@pytest.mark.parametrize("kind", ["measurement", "training"])
def test_what_a_newer_attnbench_added_to_a_row_is_reported_as_its(tmp_path: Path, kind: str) -> None:
    write, read = FORMATS[kind]

    def grown(data: dict, version: str = "9.1.0") -> dict:
        return {**data, "more": 1, "environment": {**data["environment"], "attnbench": version}}

    write(tmp_path / "newer", grown)
    with pytest.raises(MalformedFileError, match=r"attnbench '9\.1\.0' wrote this, which is newer than .*: upgrade"):
        read(tmp_path / "newer")
    write(tmp_path / "ours", lambda data: grown(data, __version__))
    with pytest.raises(MalformedFileError, match=r"more: Extra inputs are not permitted$"):
        read(tmp_path / "ours")


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        ("99.0", True), ("0.999.1", True), (__version__, False), ("0.0.9", False), ("", False), (None, False),
        (3, False), ("new", False), ("9" * 5000, False), ("٩.0", False),
    ],
)  # fmt: skip
def test_versions(version: object, newer: bool) -> None:
    assert is_newer(version) is newer


def test_a_newer_table_of_the_users_is_not_replaced() -> None:
    path = user_table_path(TABLE.environment)
    path.parent.mkdir(parents=True, exist_ok=True)
    _saved(TABLE, path, lambda data: {**data, "schema": "attnbench.table/12"})
    before = path.read_bytes()
    with pytest.raises(OutputError, match=r"your table stays as it is: .*newer"):
        update_user_table(TABLE)
    assert path.read_bytes() == before
