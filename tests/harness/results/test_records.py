"""A record holds numbers only where something ran, and survives the way to a file and back."""

import gzip
import json
import math
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from attnbench.errors import MalformedFileError
from attnbench.harness.results import records
from attnbench.harness.results.records import SCHEMA, STATUSES, Measurement, read_measurements
from attnbench.harness.results.store import recorded
from attnbench.kernels.plan import Plan
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.environment import Environment

HERE = Environment(
    device_type="cpu", device_name="a CPU", torch="2.9.0", python="3.12.1", platform="Linux", cpu="a CPU", threads=2,
    attnbench="0.1.0", backends={"fa3": "1.0"},
)  # fmt: skip
SPEC = AttentionSpec.make(batch=1, heads=2, seqlen_q=8, head_dim=16, mask=Mask(3, 0), scale=0.1, softcap=20)
WHEN = datetime(2026, 11, 20, tzinfo=timezone.utc)
FACTS = {"case": "a case", "spec": SPEC, "plan": Plan("fa3:fp8"), "started": WHEN, "environment": HERE}
NUMBERS = {
    "status": "ok",
    "time_ms": {"kernel": [1.0], "call": [2.0, 3.0]},
    "error": {"normal": {"out": 0.05, "lse": 0.0}},
    "bound": 0.12,
    "declared_error": 0.06,
    "truth": "all of it",
    "timer": "perf_counter",
    "drawn_on": "cpu",
}

DETAIL = {"sqnr_db": 20.0, "worst_head": 0.1, "worst_row": 0.2, "bias": 0.0, "nonfinite": 0}

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
    {"status": st.sampled_from(sorted({*STATUSES} - {"ok", "inaccurate"})), "reason": names}
)


@given(measured | passed_over, names)
def test_to_a_file_and_back(tmp_path_factory, numbers, case):
    row = Measurement(**{**FACTS, **numbers, "case": case})
    line = row.to_line()
    assert "\n" not in line
    assert json.loads(line, parse_constant=pytest.fail) == row.to_dict()
    assert next(iter(row.to_dict())) == "schema"
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text(f"{line}\n{line}\n")
    assert list(read_measurements(file)) == [row, row]


def test_an_infinite_error_is_written_as_text_and_read_as_infinite(tmp_path):
    row = Measurement(
        **FACTS, **{**NUMBERS, "error": {"normal": {"out": math.inf}}, "status": "inaccurate"}, reason="so"
    )
    assert row.to_dict()["error"] == {"normal": {"out": "Infinity"}}
    file = tmp_path / "rows.jsonl"
    file.write_text(row.to_line() + "\n")
    assert next(read_measurements(file)).error["normal"]["out"] == math.inf


def test_an_error_beyond_all_measure_is_infinite():
    row = Measurement(**FACTS, **{**NUMBERS, "error": {"normal": {"out": 1e300, "lse": 5}}, "leak": 1e308})
    assert row.error == {"normal": {"out": math.inf, "lse": 5.0}}
    assert row.leak == math.inf


@pytest.mark.parametrize("status", sorted({*STATUSES} - {"ok", "inaccurate"}))
@pytest.mark.parametrize("name", ["time_ms", "error", "bound", "truth", "memory_bytes", "floor"])
def test_no_number_on_what_was_not_measured(status, name):
    value = {**NUMBERS, "memory_bytes": 0, "floor": {"normal": {"out": 0.0}}}[name]
    Measurement(**FACTS, status=status, reason="so")
    with pytest.raises(ValidationError, match=name):
        Measurement(**FACTS, status=status, reason="so", **{name: value})


@pytest.mark.parametrize("name", ["time_ms", "error", "bound", "declared_error", "truth", "timer", "drawn_on"])
def test_every_number_on_what_was_measured(name):
    Measurement(**FACTS, **NUMBERS)
    with pytest.raises(ValidationError, match=name):
        Measurement(**FACTS, **{key: value for key, value in NUMBERS.items() if key != name})


@pytest.mark.parametrize(
    "wrong",
    [
        {"reason": "none needed"},
        {"status": "inaccurate"},
        {"status": "fine"},
        {"status": "refused", "reason": ""},
        {"colour": "red"},
        {"schema": "attnbench.measurement/0"},
        {"case": ""},
        {"case": "x" * 201},
        {"time_ms": {"kernel": [1.0]}},
        {"time_ms": {"call": []}},
        {"time_ms": {"call": [-1.0]}},
        {"time_ms": {"call": [math.nan]}},
        {"time_ms": {"call": [math.inf]}},
        {"time_ms": {"call": ["1.0"]}},
        {"time_ms": {"call": [1e-7]}},  # no clock here resolves it
        {"time_ms": {"call": [1e308]}},  # nor waits so long
        {"host_ms": [1e308]},
        {"first_ms": 1e308},
        {"bound": 1e308},
        {"memory_bytes": 2**80},
        {"detail": {"outlier": {"out": DETAIL}}},
        {"detail": {"normal": {"dq": DETAIL}}},
        {"time_ms": {"lunch": [1.0], "call": [1.0]}},
        {"error": {"normal": {"out": math.nan}}},
        {"error": {"normal": {"out": -0.1}}},
        {"error": {"normal": {"out": None}}},
        {"error": {"normal": {"out": "inf"}}},
        {"error": {"normal": {"lse": 0.1}}},
        {"ran": {"forward": ["x" * 161]}},
        {"ran": {"forward": ["x"] * 13}},
        {"memory_bytes": -1},
        {"started": datetime(2026, 11, 20)},
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValidationError):
        Measurement(**{**FACTS, **NUMBERS, **wrong})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda row: row.update(schema="other/1"), SCHEMA),
        (lambda row: row.pop("schema"), SCHEMA),
        (lambda row: row.pop("case"), "case"),
        (lambda row: row.update(plan="fa3"), "plan"),
        (lambda row: row.update(plan=5), "plan"),
        (lambda row: row["spec"].update(heads=0), "heads"),
        (lambda row: row["spec"].update(mask=3), "mask"),
        (lambda row: row["environment"].update(threads="two"), "threads"),
        (lambda row: row.update(environment=[]), "environment"),
        (lambda row: row.update(extra=1), "extra"),
    ],
)
def test_a_malformed_line_is_said_with_its_number(tmp_path, change, expected):
    good = Measurement(**FACTS, **NUMBERS)
    bad = good.to_dict()
    change(bad)
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{good.to_line()}\n{json.dumps(bad)}\n{good.to_line()}\n")
    with pytest.raises(MalformedFileError, match=expected) as caught:
        list(read_measurements(file))
    assert str(caught.value).startswith(f"{file}:2: expected ")


@pytest.mark.parametrize("line", ["", "{", "null", "[]", "5", "[" * 100_000, '{"schema": NaN}', "x" * (2**20 + 1)])
def test_a_line_that_is_no_record(tmp_path, line):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{line}\n")
    with pytest.raises(MalformedFileError) as caught:
        list(read_measurements(file))
    assert caught.value.line == 1
    with pytest.raises(MalformedFileError, match="No such file"):
        list(read_measurements(tmp_path / "none"))


def test_a_compressed_file_is_read_as_a_plain_one(tmp_path):
    row = Measurement(**FACTS, **NUMBERS)
    (tmp_path / "measurements.jsonl.gz").write_bytes(gzip.compress(f"{row.to_line()}\n{row.to_line()}\n".encode()))
    assert list(read_measurements(recorded(tmp_path))) == [row, row]
    (tmp_path / "measurements.jsonl").write_text(f"{row.to_line()}\n")
    assert list(read_measurements(recorded(tmp_path))) == [row]


def test_a_damaged_compressed_file_is_malformed(tmp_path):
    whole = gzip.compress(f"{Measurement(**FACTS, **NUMBERS).to_line()}\n".encode())
    file = tmp_path / "rows.jsonl.gz"
    for content in (whole[:-9], whole[: len(whole) // 2], b"no gzip", whole[:12] + b"\xff\xff\xff" + whole[15:]):
        file.write_bytes(content)
        with pytest.raises(MalformedFileError):
            list(read_measurements(file))


def test_more_than_a_file_may_hold_is_refused_whether_compressed_or_not(tmp_path, monkeypatch):
    line = f"{Measurement(**FACTS, **NUMBERS).to_line()}\n".encode()
    monkeypatch.setattr(records, "_FORM", records._FORM._replace(largest_file=5 * len(line)))
    for name, pack in (("rows.jsonl", bytes), ("rows.jsonl.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(line * 5))
        assert len(list(read_measurements(tmp_path / name))) == 5
        (tmp_path / name).write_bytes(pack(line * 6))
        with pytest.raises(MalformedFileError, match="at most"):
            list(read_measurements(tmp_path / name))
