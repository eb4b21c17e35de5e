"""Tables: they read back as written, round conservatively, and validate every file."""

import json
import math
import os
import re
from dataclasses import replace
from decimal import Decimal

import pytest
from fakes import an_environment
from hypothesis import example, given
from hypothesis import strategies as st
from problems import problems

from attnbench import AttentionSpec, Plan
from attnbench.errors import MalformedFileError, OutputError
from attnbench.tables.files import LARGEST
from attnbench.tables.table import Entry, Table

SPEC = AttentionSpec.make(batch=1, heads=4, seqlen_q=1024, head_dim=64)
families = st.text(st.characters(exclude_categories=("C", "Z")), max_size=20)
entries = st.builds(
    Entry,
    spec=problems().map(lambda problem: problem.spec),
    plan=st.sampled_from([Plan("a:bf16"), Plan("b:fp8", "a:bf16"), Plan("b:fp8")]),
    status=st.sampled_from(["ok", "inaccurate", "crashed", "refused"]),
    time_ms=st.none() | st.floats(1e-6, 1e9),
    spread_ms=st.none() | st.floats(0, 1e6),
    host_ms=st.none() | st.floats(1e-6, 1e9),
    device_ms=st.none() | st.floats(1e-6, 1e9),
    errors=st.dictionaries(families, st.just(0.0) | st.floats(1e-100, allow_nan=False), max_size=3),
    reason=st.none() | families,
    check=st.none() | st.sampled_from(["error", "stale"]),
)


def entry_of(plan: str = "a:bf16", time: float = 1.0, **more) -> Entry:
    return Entry(
        **{"spec": SPEC, "plan": Plan.parse(plan), "status": "ok", "time_ms": time, "errors": {"normal": 0.01}, **more}
    )


@given(st.lists(entries, max_size=6), st.none() | st.floats(1e-4, 10))
def test_a_table_reads_back_as_it_was_written(tmp_path_factory, found, launch_ms):
    path = tmp_path_factory.mktemp("table") / "deep" / "table.json"
    table = Table.from_entries(an_environment(), found, launch_ms)
    table.save(path)
    assert Table.load(path) == table
    assert [each.name for each in path.parent.iterdir()] == ["table.json"]
    assert Table.load(path).condensed().condensed() == table.condensed()


@given(st.lists(entries, max_size=4), st.lists(entries, max_size=4), st.randoms())
def test_the_file_is_the_same_for_any_order_of_entries(tmp_path_factory, apart, together, random):
    unique = {(each.spec, each.plan): each for each in [*apart, *(replace(each, spec=SPEC) for each in together)]}
    found = list(unique.values())
    folder = tmp_path_factory.mktemp("table")
    Table.from_entries(an_environment(), found).save(folder / "a")
    random.shuffle(found)
    Table.from_entries(an_environment(backends={"slow": "1.0", "fast": "1.0"}), found).save(folder / "b")
    assert (folder / "a").read_bytes() == (folder / "b").read_bytes()


@given(st.floats(0, allow_nan=False))
@example(0.12)
@example(0.12000000000000001)
@example(5e-324)
@example(1.7976931348623157e308)
def test_errors_are_rounded_up_by_a_small_amount(error):
    (rounded,) = entry_of(errors={"normal": error}).shortened().errors.values()
    assert rounded >= error
    if math.isfinite(rounded):
        assert len(Decimal(repr(rounded)).normalize().as_tuple().digits) <= 3
        assert Decimal(rounded) <= Decimal(error) * Decimal("1.0100001") or error < 1e-300
    assert entry_of(errors={"normal": rounded}).shortened().errors == {"normal": rounded}


def test_merging_takes_newer_entries_and_keeps_older_ones_without_a_newer():
    older = Table.from_entries(
        an_environment(backends={"a": "1", "b": "1", "c": "1"}, origins={"b": "x"}),
        [
            entry_of(errors={"normal": 0.05, "outlier": 0.3}), entry_of("b:fp8"), entry_of("d:bf16"),
            entry_of("e:bf16", spec=SPEC.replace(batch=2)), entry_of("f:bf16"),
        ],
    )  # fmt: skip
    failed = Entry(SPEC, Plan("f:bf16"), "crashed", reason="it broke")
    newer = Table.from_entries(
        an_environment(backends={"a": "1", "d": "1"}, driver="2"), [entry_of(time=2.0, errors={"normal": 0.04}), failed]
    )
    merged = older.merged(newer)
    assert merged.at(SPEC)[Plan("a:bf16")] == entry_of(time=2.0, errors={"normal": 0.04, "outlier": 0.3})
    assert merged.at(SPEC)[Plan("f:bf16")] == failed
    assert len(merged.entries) == 5
    assert merged.environment == an_environment(backends={"a": "1", "b": "1", "d": "1"}, origins={"b": "x"}, driver="2")
    assert set(merged.specs) == {SPEC, SPEC.replace(batch=2)}
    assert merged.at(SPEC.replace(batch=3)) == {}


@given(entries, st.floats(1e-5, 1e5))
def test_entries_converted_to_any_host_can_be_written(found, slower):
    moved = found.on_host(slower)
    for times in (moved.time_ms, moved.host_ms, moved.device_ms):
        assert times is None or 1e-6 <= times <= 1e9
    assert moved.device_ms == found.device_ms
    if None not in (found.time_ms, found.host_ms, found.device_ms):
        assert moved.time_ms == max(moved.host_ms, moved.device_ms)
        if found.spread_ms is not None:
            assert moved.spread_ms == pytest.approx(min(1e9, found.spread_ms * moved.time_ms / found.time_ms))


@pytest.mark.parametrize("launches", [(0.01, 0.02), (0.02, 0.01), (0.01, None), (None, 0.01)])
def test_merged_tables_use_the_host_speed_of_the_larger_table_that_has_one(launches):
    known = {"host_ms": 2.0, "device_ms": 1.0}
    older, newer = (
        Table.from_entries(
            an_environment(), [entry_of(plan, 2.0, **(known if launch else {})) for plan in plans], launch
        )
        for plans, launch in zip((["a:bf16", "b:bf16", "c:bf16"], ["c:bf16", "d:bf16"]), launches, strict=True)
    )
    merged = older.merged(newer)
    assert merged.launch_ms == (launches[0] or launches[1])
    times = {str(plan): entry.time_ms for plan, entry in merged.at(SPEC).items()}
    moved = max(1.0, 2.0 * launches[0] / launches[1]) if None not in launches else 2.0
    assert times == {"a:bf16": 2.0, "b:bf16": 2.0, "c:bf16": moved, "d:bf16": moved}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"time_ms": None, "status": "oom", "reason": "no room"}, "oom when it was measured: no room"),
        ({"errors": {}}, "when it was measured"),
        ({"status": "slower", "reason": "late"}, "lost a race .* late"),
        ({"status": "inaccurate", "check": "stale", "reason": "old"}, "the check 'stale' .* old"),
        ({"plan": "a:fp8", "errors": {"outlier": 0.0}}, "less than 8 bits allow"),
        ({"plan": "a:fp8", "errors": {"normal": 0.05}}, "never measured on inputs with outliers"),
        ({"plan": "a:fp8-token>b:bf16", "errors": {"normal": 9e-5, "outlier": 1e-9}}, "less than 8 bits"),
    ],
)
def test_an_unusable_entry_gives_its_reason(more, reason):
    entry = entry_of(**more)
    assert not entry.usable
    assert re.search(reason, entry.unusable)


@pytest.mark.parametrize(
    "more",
    [
        {"status": "inaccurate", "check": "error", "errors": {"normal": 0.5}},  # a budget may allow it
        {"plan": "a:fp8", "errors": {"captured:llama": 0.05}},
        {"plan": "a:fp8", "errors": {"outlier": 0.0005}},
        {"errors": {"normal": 1e-7}},
    ],
)
def test_an_entry_with_credible_errors_is_usable(more):
    assert entry_of(**more).usable


def text(plan: str = "a:bf16", *, whole=(), environment=(), spec=(), **change) -> str:
    """A file with one entry, valid but for these changes of its parts and of the entry."""
    facts = {"time_ms": 1.0, "spread_ms": 0.1, "errors": {"normal": 0.01}, **change}
    at = {"batch": 1, "heads": 4, "seqlen_q": 1024, "head_dim": 64, "dtype": "bf16", "direction": "forward"}
    data = {
        "schema": "attnbench.table/2",
        "environment": {**an_environment().to_dict(), **dict(environment)},
        "specs": [{"spec": {**at, **dict(spec)}, "plans": {plan: facts}}],
    }
    return json.dumps({**data, **dict(whole)})


TEXT = text()
SPECS = json.dumps(json.loads(TEXT)["specs"])[1:-1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "schema"),
        (text(whole={"schema": "attnbench.table/1"}), "attnbench.table/2"),
        (text(environment={"device_type": 3}), "environment.device_type: .*string"),
        (text(environment={"backends": {"\x1b[2J": 3}}), r"environment.backends. \[2J: .*string"),
        (text(whole={"launch_ms": 0}), "launch_ms: .*greater"),
        (text(whole={"launch_ms": 1e3}), "launch_ms: .*less"),
        (text(whole={"specs": [3]}), r"specs\.0: .*object"),
        (text(whole={"specs": [{}]}), r"specs\.0\.spec: Field required"),
        (TEXT.replace(SPECS, f"{SPECS}, {SPECS}"), "each spec once.* twice"),
        (text(time_ms=-1), r"specs\.0\.plans\.a:bf16\.time_ms: .*greater"),
        (text(time_ms="1"), "time_ms: .*number"),
        (text(errors={"normal": None}), "errors.normal: .*number"),
        (text(errors=7), "errors: .*object"),
        (text(errors=dict.fromkeys(map(str, range(65)), 0.1)), "at most 64"),
        (text(errors={"x" * 201: 0.1}), "200 characters"),
        (text(status="status: .*crashed"), "status: .*crashed"),
        (text(reason="x" * 2001), "at most 2000"),
        (text(check=[]), "check: .*string"),
        (text(more=1), "more: Extra"),
        (text("a"), "kernel name"),
        (text("a:" + "b" * 200), "200 characters"),
        (text(spec={"mask": []}), "must be a mapping, not list"),
        (text(spec={"mask": {"left": -1}}), "left"),
        (text(spec={"mask": {"\x1b[2J" + "x" * 2000: 1}}), "unexpected keyword"),
        ("", "table:1: expected JSON"),
        ("{\n\n  oops", "table:3: expected JSON"),
        ("[" * 9 + "]" * 9, "nested 8 deep at most"),
        ('{"a":' * 1_000_000, "nested 8 deep at most"),
        ('["\\\\", "\\"", "[[[[[[[[[[[[[", ' + "[" * 7 + "]" * 8, "schema"),
        ('["\\\\", ' + "[" * 9 + "]" * 10, "nested 8 deep at most"),
        ("[" + "{}," * 500_000 + "{}]", "at most 1048576 values"),
        ('["' + '\\"' * 3_000_000, "expected JSON"),
        (TEXT.replace("1024", "9" * 1000), "1000 digits"),
        (TEXT.replace("0.01", "NaN"), "NaN"),
        (TEXT.replace("1.0", "1e999"), "time_ms: .*less than"),
        (TEXT.replace('"batch": 1', '"batch": 1, "batch": 2'), "'batch' occurs twice"),
        (TEXT.replace("a:bf16", "a:\\u001b[2Jbf16"), "kernel name"),
        (TEXT.replace('"batch"', '"\\ud800\\u001b]0;x"'), "Invalid JSON: lone"),
        (TEXT.replace('"batch"', '"\\u001b]0;x"'), "a spec has no entry"),
        (TEXT.replace('"device_name"', '"\\u0007\\u202e"'), "environment"),
        (TEXT.replace('"normal"', '"nor\\u001bmal"'), "errors.nor mal.*pattern"),
    ],
)
def test_an_invalid_table_is_one_short_printable_error_that_names_the_file(tmp_path, content, words):
    (tmp_path / "table").write_text(content)
    with pytest.raises(MalformedFileError, match=words) as caught:
        Table.load(tmp_path / "table")
    assert str(tmp_path / "table") in str(caught.value)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


def test_control_characters_in_names_are_replaced(tmp_path):
    errors = {"normal": 0.5, "inf": "inf", "0": 0, "tiny": 5e-324}
    (tmp_path / "table").write_text(text(errors=errors, reason="a\nb\u202ec", check="\x07"))
    (entry,) = Table.load(tmp_path / "table").entries.values()
    assert entry.errors == {"normal": 0.5, "inf": math.inf, "0": 0.0, "tiny": 1e-100}
    assert (entry.reason, entry.check) == ("a b c", " ")


def test_invalid_utf8_and_endless_files_are_errors(tmp_path):
    path = tmp_path / "table"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MalformedFileError, match="UTF-8"):
        Table.load(path)
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(MalformedFileError, match=f"at most {LARGEST} bytes"):
        Table.load(path)


def test_a_file_changed_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "table"
    Table.from_entries(an_environment(), [entry_of()]).save(path)
    answers, real = [], os.fstat

    def fstat(handle):
        if answers:
            with path.open("a") as file:
                file.write("\n")
        answers.append(real(handle))
        return answers[-1]

    monkeypatch.setattr("attnbench.tables.files.os.fstat", fstat)
    with pytest.raises(MalformedFileError, match="stays as it is"):
        Table.load(path)


def test_a_table_that_could_not_be_read_again_is_not_written(tmp_path):
    path = tmp_path / "tables" / "table.json"
    Table.from_entries(an_environment(), [entry_of()]).save(path)
    before = path.read_bytes()
    many = [entry_of(spec=SPEC.replace(batch=batch), reason="x" * 2000) for batch in range(1, 4100)]
    with pytest.raises(OutputError, match="at most"):
        Table.from_entries(an_environment(), many).save(path)
    assert path.read_bytes() == before
