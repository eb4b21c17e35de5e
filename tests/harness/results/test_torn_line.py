"""The half line that a killed sweep leaves: every reader names it with the command that completes it."""

import shlex
import warnings
from pathlib import Path

import pytest
from command_line import attnbench
from sweep_parts import PLANS, ROWS, part, row

from attnbench.errors import AttnbenchWarning, MalformedFileError
from attnbench.harness.results.records import read_measurements
from attnbench.harness.results.store import MEASUREMENTS

WHOLE = [row(number, plan) for number in range(2) for plan in PLANS[:2]]


@pytest.fixture
def torn(tmp_path):
    """A folder whose name a shell must be able to distinguish from options and words."""
    folder = part(tmp_path / "a sweep", WHOLE, finished=False)
    with (folder / MEASUREMENTS).open("a") as file:
        file.write(row(2).to_line()[:500])
    return folder


def sentence(folder):
    return (
        f"{folder / MEASUREMENTS}:{len(WHOLE) + 1}: the last line is incomplete, 500 bytes of a measurement, "
        f"as a killed sweep leaves it; `attnbench sweep --resume --out {shlex.quote(str(folder))}`, "
        "with the same options, completes it"
    )


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
    assert sentence(torn) in "\n".join([run.stdout, run.stderr, *(str(each.message) for each in caught)])
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
    with pytest.warns(AttnbenchWarning, match=f"--resume --out {tmp_path / 'run'}`, with the same launcher"):
        list(read_measurements(folder / MEASUREMENTS))
    monkeypatch.chdir(folder)
    with pytest.warns(AttnbenchWarning, match=f"--resume --out {tmp_path / 'run'}`, with the same launcher"):
        list(read_measurements(Path(MEASUREMENTS)))
    (tmp_path / "copy.jsonl").write_text(text + text[:100])
    with pytest.warns(AttnbenchWarning, match=r"copy\.jsonl:2: .* the sweep that wrote it, run again"):
        list(read_measurements(tmp_path / "copy.jsonl"))
