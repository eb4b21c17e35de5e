"""A record holds numbers only where something ran, survives the way to a file and back, and a torn line is named."""

import gzip
import json
import math
import shlex
import warnings
from datetime import datetime
from pathlib import Path

import pytest
from command_line import attnbench
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from row_facts import measurement
from sweep_parts import HERE, NUMBERS, PLANS, ROWS, WHEN, part, row

from attnbench.errors import AttnbenchWarning, MalformedFileError
from attnbench.harness.measure.accuracy import Detail
from attnbench.harness.results import records
from attnbench.harness.results.records import STATUSES, read_measurements
from attnbench.harness.results.store import MEASUREMENTS, measurements_file
from attnbench.harness.sequence_lengths import Draw, SequenceLengths
from attnbench.kernels.plan import Plan
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

SPEC = AttentionSpec.make(batch=1, heads=2, seqlen_q=8, head_dim=16, mask=Mask(3, 0), scale=0.1, softcap=20)
FACTS = {"case": "a case", "spec": SPEC, "plan": Plan("fa3:fp8"), "started": WHEN, "environment": HERE}
DETAIL = Detail(sqnr_db=20.0, worst_head=0.1, worst_row=0.2, bias=0.0, nonfinite=0)

names = st.text(min_size=1, max_size=40)
errors = st.floats(min_value=0) | st.just(math.inf)
times = st.lists(st.floats(min_value=1e-6, max_value=1e9), min_size=1, max_size=5)
measured = st.fixed_dictionaries(
    {
        "time_ms": st.fixed_dictionaries({"call": times}, optional={"kernel": times, "backward": times}),
        "error": st.dictionaries(names, st.fixed_dictionaries({"out": errors}, optional={"lse": errors}), min_size=1),
        "floor": st.dictionaries(names, st.fixed_dictionaries({"dq": errors})),
        "bound": st.floats(min_value=1e-9, max_value=9),
        "declared_error": st.floats(min_value=1e-9, max_value=9),
        "truth": names,
        "timer": names,
        "drawn_on": st.sampled_from(["cpu", "cuda"]),
        "memory_bytes": st.none() | st.integers(0, 2**40),
        "ran": st.dictionaries(st.sampled_from(["forward", "backward"]), st.lists(names, max_size=3)),
        "status": st.just("ok"),
    }
)
passed_over = st.fixed_dictionaries(
    {"status": st.sampled_from(sorted({*STATUSES} - {"ok", "inaccurate", "slower"})), "reason": names}
)


@given(measured | passed_over, names)
def test_to_a_file_and_back(tmp_path_factory, numbers, case):
    row = measurement(**{**FACTS, **numbers, "case": case})
    line = row.to_line()
    assert "\n" not in line
    assert json.loads(line, parse_constant=pytest.fail) == row.to_dict()
    assert next(iter(row.to_dict())) == "schema"
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text(f"{line}\n{line}\n")
    assert list(read_measurements(file)) == [row, row]


def test_an_error_beyond_all_measure_is_infinite():
    row = measurement(**FACTS, **{**NUMBERS, "error": {"normal": {"out": 1e300, "lse": 5}}, "leak": 1e308})
    assert row.error == {"normal": {"out": math.inf, "lse": 5.0}}
    assert row.to_dict()["correctness"]["error"]["normal"]["out"] == "Infinity"
    assert row.correctness.leak == math.inf


@pytest.mark.parametrize("status", sorted({*STATUSES} - {"ok", "inaccurate", "slower"}))
@pytest.mark.parametrize("part", ["correctness", "performance"])
def test_no_number_on_what_was_not_measured(status, part):
    row = measurement(**FACTS, status=status, reason="so")
    assert (row.error, row.time_ms) == ({}, {})
    numbers = getattr(measurement(**FACTS, **NUMBERS), part)
    with pytest.raises(ValidationError, match=f"{status} must not carry {part}"):
        measurement(**FACTS, status=status, reason="so", **{f"{part}_": numbers})


@pytest.mark.parametrize(
    "wrong",
    [
        {"reason": "none needed"},
        {"status": "inaccurate"},
        {"status": "refused", "reason": ""},
        {"case": ""},
        {"case": "x" * 201},
        {"time_ms": {"kernel": [1.0]}},
        {"time_ms": {"call": []}},
        {"time_ms": {"call": [-1.0]}},
        {"time_ms": {"call": [1e-7]}},  # no clock here resolves it
        {"time_ms": {"call": [1e308]}},  # nor waits so long
        {"host_ms": [1e308]},
        {"bound": 1e308},
        {"memory_bytes": 2**80},
        {"launch_ms": [1e7]},
        {"host_scale": [0.0]},
        {"peak_share": 1.01},
        {"visits": {"call": [1]}},  # of two samples
        {"visits": {"call": [1, 2]}},
        {"detail": {"outlier": {"out": DETAIL}}},
        {"detail": {"normal": {"dq": DETAIL}}},
        {"time_ms": {"lunch": [1.0], "call": [1.0]}},
        {"error": {"normal": {"out": -0.1}}},
        {"error": {"normal": {"out": "inf"}}},
        {"error": {"normal": {"lse": 0.1}}},
        {"ran": {"forward": ["x" * 161]}},
        {"ran": {"forward": ["x"] * 13}},
        {"started": datetime(2026, 11, 20)},
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValidationError):
        measurement(**{**FACTS, **NUMBERS, **wrong})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda row: row.pop("case"), "case"),
        (lambda row: row["spec"].update(heads=0), "heads"),
    ],
)
def test_a_malformed_line_is_reported_with_its_number(tmp_path, change, expected):
    good = measurement(**FACTS, **NUMBERS)
    bad = good.to_dict()
    change(bad)
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{good.to_line()}\n{json.dumps(bad)}\n{good.to_line()}\n")
    with pytest.raises(MalformedFileError, match=expected) as caught:
        list(read_measurements(file))
    assert str(caught.value).startswith(f"{file}:2: expected ")


def test_a_compressed_file_is_read_as_a_plain_one(tmp_path):
    row = measurement(**FACTS, **NUMBERS)
    (tmp_path / "measurements.jsonl.gz").write_bytes(gzip.compress(f"{row.to_line()}\n{row.to_line()}\n".encode()))
    assert list(read_measurements(measurements_file(tmp_path))) == [row, row]
    (tmp_path / "measurements.jsonl").write_text(f"{row.to_line()}\n")
    assert list(read_measurements(measurements_file(tmp_path))) == [row]


def test_a_damaged_compressed_file_is_malformed(tmp_path):
    whole = gzip.compress(f"{measurement(**FACTS, **NUMBERS).to_line()}\n".encode())
    file = tmp_path / "rows.jsonl.gz"
    for content in (whole[:-9], whole[: len(whole) // 2], b"no gzip", whole[:12] + b"\xff\xff\xff" + whole[15:]):
        file.write_bytes(content)
        with pytest.raises(MalformedFileError):
            list(read_measurements(file))


def test_more_than_a_file_may_hold_is_refused_whether_compressed_or_not(tmp_path, monkeypatch):
    line = f"{measurement(**FACTS, **NUMBERS).to_line()}\n".encode()
    monkeypatch.setattr(records, "_FORM", records._FORM._replace(largest_file=5 * len(line)))
    for name, pack in (("rows.jsonl", bytes), ("rows.jsonl.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(line * 5))
        assert len(list(read_measurements(tmp_path / name))) == 5
        (tmp_path / name).write_bytes(pack(line * 6))
        with pytest.raises(MalformedFileError, match="at most"):
            list(read_measurements(tmp_path / name))


def flat(row):
    """The row as the first schema wrote it: all numbers beside each other, and null or empty ones of what failed."""
    row = row.to_dict()
    parts = {name: row.pop(name) for name in ("correctness", "performance")}
    empty = {
        "time_ms": {}, "error": {}, "floor": {}, "bound": None, "truth": None, "detail": {}, "visits": {}, "leak": None,
        "host_ms": None, "replayed": [], "gpu": None, "deterministic": None, "memory_bytes": None,
    }  # fmt: skip
    numbers = {name: value for part in parts.values() if part for name, value in part.items()}
    return {**row, "schema": "attnbench.measurement/1", **empty, **numbers}


@given(st.lists(measured | passed_over, min_size=1, max_size=4), st.randoms())
def test_rows_of_the_first_schema_are_read_and_stand_beside_newer_ones(tmp_path_factory, numbers, chance):
    rows = [measurement(**{**FACTS, **each}) for each in numbers]
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("".join(json.dumps(flat(row) if chance.random() < 0.7 else row.to_dict()) + "\n" for row in rows))
    assert list(read_measurements(file)) == rows


def test_a_row_holds_the_lengths_of_a_packed_case_and_none_of_another(tmp_path):
    drawn = Draw(distribution="zipf", total=24, longest=9)
    own = SequenceLengths(layout="packed", q=(9, 1, 9, 5), drawn=drawn)
    row = measurement(**FACTS, **NUMBERS)
    assert "lengths" not in json.loads(row.to_line())
    assert not {"host_scale", "launch_ms"} & json.loads(row.to_line())["performance"].keys()
    packed = AttentionSpec.make(heads=2, head_dim=16, mask=Mask(right=0), **own.sizes())
    found = row.model_copy(update={"spec": packed, "lengths": own})
    path = tmp_path / "measurements.jsonl"
    path.write_text(f"{found.to_line()}\n{row.to_line()}\n")
    assert list(read_measurements(path)) == [found, row]
    assert found.flops == (45 + 1 + 45 + 15) * 2 * 4 * 16
    for wrong in (found.model_copy(update={"lengths": None}), row.model_copy(update={"lengths": own})):
        path.write_text(f"{wrong.to_line()}\n")
        with pytest.raises(MalformedFileError, match="lengths"):
            list(read_measurements(path))


WHOLE = [row(number, plan) for number in range(2) for plan in PLANS[:2]]


@pytest.fixture
def torn(tmp_path):
    """A folder whose name a shell must be able to distinguish from options and words."""
    folder = part(tmp_path / "a sweep", WHOLE, finished=False)
    with (folder / MEASUREMENTS).open("a") as file:
        file.write(row(2).to_line()[:500])
    return folder


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("report", "TORN", "-o", "OUT.html"), 0),
        (("compare", "TORN", "TORN"), 4),
        (("table", "build", "TORN", "-o", "OUT.json"), 0),
        (("table", "check", "TORN"), None),
        (("merge", "--partial", "OUT", "TORN"), 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_every_command_that_reads_a_sweep_names_it(torn, tmp_path, command, code):
    given = [each.replace("TORN", str(torn)).replace("OUT", str(tmp_path / "out")) for each in command]
    before = (torn / MEASUREMENTS).read_bytes()
    with warnings.catch_warnings(record=True) as caught:  # which pytest would keep
        warnings.simplefilter("always")
        run = attnbench(*given)
    shown = "\n".join([run.stdout, run.stderr, *(str(each.message) for each in caught)])
    assert f"{torn / MEASUREMENTS}:{len(WHOLE) + 1}: the last line is incomplete, 500 bytes" in shown
    assert f"`attnbench sweep --resume --out {shlex.quote(str(torn))}`, with the same options" in shown
    assert "Traceback" not in run.stderr
    assert code is None or run.returncode == code, run.stderr
    assert (torn / MEASUREMENTS).read_bytes() == before


@pytest.mark.parametrize("kept", [1, 2, 12, 60, -1])
def test_wherever_the_line_was_cut(torn, kept):
    (torn / MEASUREMENTS).write_text(f"{WHOLE[0].to_line()}\n{WHOLE[1].to_line()[:kept]}")
    with pytest.warns(AttnbenchWarning, match=f"{MEASUREMENTS}:2: the last line is incomplete"):
        assert list(read_measurements(torn / MEASUREMENTS)) == WHOLE[:1]


@pytest.mark.parametrize("last", ["x", "{}", '{"schema": 5', '{"schema":"attnbench.measurement/3","case', "\x00" * 20])
def test_what_a_sweep_does_not_write_is_malformed_as_ever(torn, last):
    (torn / MEASUREMENTS).write_text(f"{WHOLE[0].to_line()}\n{last}")
    with pytest.raises(MalformedFileError, match=f"{MEASUREMENTS}:2: expected"):
        list(read_measurements(torn / MEASUREMENTS))


def test_a_whole_row_without_its_line_end_is_a_row_and_half_a_line_in_the_middle_is_none(torn):
    (torn / MEASUREMENTS).write_text("\n".join(each.to_line() for each in WHOLE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(read_measurements(torn / MEASUREMENTS)) == WHOLE
    (torn / MEASUREMENTS).write_text(f"{WHOLE[0].to_line()[:500]}\n{WHOLE[1].to_line()}\n")
    with pytest.raises(MalformedFileError, match=f"{MEASUREMENTS}:1: expected a measurement"):
        list(read_measurements(torn / MEASUREMENTS))


def test_a_part_is_completed_by_the_command_of_all_parts_and_a_copy_by_its_sweep(tmp_path, monkeypatch):
    folder = part(tmp_path / "run" / "part-0001-of-0002", ROWS[:1], finished=False)
    text = (folder / MEASUREMENTS).read_text()
    (folder / MEASUREMENTS).write_text(text + text[:100])
    monkeypatch.chdir(folder)
    for path in (folder / MEASUREMENTS, Path(MEASUREMENTS)):
        with pytest.warns(AttnbenchWarning, match=f"--resume --out {tmp_path / 'run'}`, with the same launcher"):
            list(read_measurements(path))
    (tmp_path / "copy.jsonl").write_text(text + text[:100])
    with pytest.warns(AttnbenchWarning, match=r"copy\.jsonl:2: .* the sweep that wrote it, run again"):
        list(read_measurements(tmp_path / "copy.jsonl"))
