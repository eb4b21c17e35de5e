"""YAML that means harm: each file is cases or thresholds, or an error of one short line that names its line."""

import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.errors import MalformedFileError
from attnbench.harness.cases.case import Case
from attnbench.harness.cases.file import read_cases
from attnbench.harness.compare.terms import Threshold, read_thresholds
from examples import examples

ENTRY = "- batch: 1\n  heads: 2\n  seqlen_q: 8\n  head_dim: 16\n"
DIGITS = "9" * 10_000
# What PyYAML's constructors raise something of their own for, and what they read as no one meant it.
HOSTILE = [
    DIGITS, "9" * 400, "0x" + "f" * 900, "!!int x", "!!int ''", "!!float x", "!!bool x", "!!timestamp x", "!!binary é",
    "2020-01-01", "2020-13-45", "2020-01-01 25:00:00", "!!set {a}", "!!null 3", "!!python/object:os.system x", ".inf",
    "1e400", "[[1]]", "{a: b}", "{left: 1, left: 2}", "{<<: {left: 3}}", "{left: 2020-01-01}", "{left: [1]}", "{1: 2}",
    "{[1]: 2}", "{left: " + DIGITS + "}", "*nowhere", "&c [*c]", "&d {left: *d}", '"\\u202e"', '"\\ud800"', "yes",
    "captured:/dev/zero", "captured:#" + "9" * 30, '"captured:\\0"', "\x85", "%TAG", "---", "? x", "<<", "!<x> y",
]  # fmt: skip
NAMES = ["batch", "scale", "mask", "direction", "name", "families"]


def read(path: Path, text: str, reader: str = "cases") -> list[Case] | tuple[Threshold, ...] | str:
    """What came of the text: what was read, or the message of the error, which is held to be fit to show."""
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        return read_cases(path, "fp8") if reader == "cases" else read_thresholds(path)
    except MalformedFileError as error:
        refused = error
    assert str(refused).isprintable()
    assert len(refused.expected) <= 500
    return refused.expected


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file.yaml"


@pytest.mark.parametrize("value", HOSTILE)
def test_no_value_gets_past_the_reader(file: Path, value: str) -> None:
    for name in NAMES:
        kept = "".join(line + "\n" for line in ENTRY.splitlines() if f" {name}:" not in line)
        kept = kept if kept.startswith("- ") else "- " + kept.lstrip()
        for text in (f"{kept}  {name}: {value}\n", f"{kept}  {name}: [{value}]\n"):
            read(file, text)
    read(file, f'"*": {value}\n', "thresholds")
    read(file, f"{value}: 3%\n", "thresholds")
    read(file, f'"*": {{time: {value}}}\n', "thresholds")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (f"{ENTRY}  kv_heads: {DIGITS}\n", 5, "at most 1000 characters, not 10000"),
        (f"{ENTRY}  kv_heads: {'9' * 900}\n", 1, "kv_heads must be a whole number.* a number of 900 digits or more"),
        (f"{ENTRY}  mask: 2020-13-45\n", 5, "'2020-13-45' is no 'timestamp'"),
        (f"{ENTRY}  mask: {{left: 1, left: 2}}\n", 5, "expected 'left' once"),
        (f"{ENTRY}  mask: {{<<: {{left: 1}}}}\n", 5, "not '<<'"),
        (f"{ENTRY}  mask: [[causal]]\n", 5, "expected text for mask, not a list"),
        (f"{ENTRY}  ? [1]\n  : 2\n", 5, "not a list"),
        (f"%YAML {DIGITS}.1\n---\n{ENTRY}", None, "YAML"),
    ],
)
def test_what_is_wrong_is_reported_with_its_line(file: Path, text: str, line: int | None, message: str) -> None:
    file.write_text(text)
    with pytest.raises(MalformedFileError, match=message) as caught:
        read_cases(file, "fp8")
    assert caught.value.line == line


def test_aliases_of_aliases_cost_nothing(file: Path) -> None:
    tenfold = "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(30))
    assert "not a mapping" not in str(read(file, f"x: &a0 [x]\n{tenfold}", "thresholds"))
    laughs = "".join(f"- &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(30))
    assert "expected a mapping" in str(read(file, f"- &a0 [x]\n{laughs}"))
    assert "not a list" in str(read(file, f"{ENTRY}  mask: [{{left: &a0 [x, x]}}, {{left: [*a0, *a0]}}]\n"))


def test_a_mark_at_the_start_and_lines_of_windows_are_read(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + ENTRY.replace("\n", "\r\n").encode())
    assert len(read_cases(file, "fp8")) == 1


words = st.sampled_from(
    [*HOSTILE, *NAMES, "1", "2", "causal", "none", "[", "]", "{", "}", ": ", "- ", ", ", "\n", "\n  "]
)
pieces = st.lists(words | st.text(string.printable + "\x85\u2028é", max_size=4), max_size=12)


@given(pieces, st.sampled_from(["cases", "thresholds"]))
@settings(max_examples=examples(60, 20_000))
def test_any_pieces_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, found: list[str], reader: str
) -> None:
    start = ENTRY if reader == "cases" else '"*": 3%\n'
    read(tmp_path_factory.mktemp("yaml") / "file.yaml", start + "".join(found), reader)
