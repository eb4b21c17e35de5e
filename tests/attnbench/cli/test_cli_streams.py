"""The command with closed standard streams, or with encodings that lack characters."""

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from command_line import SHAPE, attnbench
from sweep_parts import ROWS, part

from attnbench import cli
from attnbench.cli import main

CPU = ("--device", "cpu")
COMMANDS = {
    "help": (("--help",), 0),
    "misuse": (("sweep", "--no-such"), 2),
    "json": (("explain", *SHAPE, *CPU, "--format", "json"), 0),
    "no results": (("report", "/proc/none"), 2),
    "table": (("table", "show", *CPU), 1),
}


def forked(arguments: tuple[str, ...], closed: tuple[int, ...], folder: Path) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a forked child with torch loaded and these streams closed."""
    outputs = [folder / "stdout", folder / "stderr"]
    child = os.fork()
    if child == 0:
        try:
            for number, path in enumerate(outputs, start=1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
            for number in closed:
                os.close(number)
            # What the interpreter makes of them when it starts.
            sys.stdin = None if 0 in closed else sys.stdin
            for number, name in ((1, "stdout"), (2, "stderr")):
                stream = None if number in closed else io.TextIOWrapper(io.FileIO(number, "w", closefd=False))
                setattr(sys, name, stream)
            sys.argv = ["attnbench", *arguments]
            try:
                main()
            except SystemExit as end:
                os._exit(end.code or 0)
        except BaseException:
            os._exit(99)
        os._exit(98)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), *(path.read_text() for path in outputs)


@pytest.fixture(scope="module")
def warm():
    """Caches backend availability, which every child would otherwise detect again."""
    attnbench(*COMMANDS["json"][0])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_stream_changes_neither_the_exit_code_nor_the_other_stream(tmp_path, warm, command):
    arguments, code = COMMANDS[command]
    expected = forked(arguments, (), tmp_path)
    assert expected[0] == code
    assert "Traceback" not in expected[2]
    for closed in ((1,), (2,), (0, 1, 2)):
        found = forked(arguments, closed, tmp_path)
        assert found == (code, "" if 1 in closed else expected[1], "" if 2 in closed else expected[2]), closed


def test_a_newly_opened_file_does_not_become_standard_output(tmp_path):
    """Its file descriptor is free, so a library's output would go to a file that attnbench opens."""
    folder = part(tmp_path / "results", ROWS)
    command = ("table", "build", str(folder), "-o", str(tmp_path / "table.json"))
    assert forked(command, (0, 1, 2), tmp_path)[0] == 0
    json.loads((tmp_path / "table.json").read_text())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("format", ["table", "markdown", "json", "junit"])
def test_an_unencodable_character_is_replaced(tmp_path, monkeypatch, encoding, format):
    rows = [each.model_copy(update={"case": f"{each.case} é→"}) for each in ROWS]
    new = [each.model_copy(update={"environment": replace(each.environment, commit="1234567")}) for each in rows]
    paths = [part(tmp_path / name, each) for name, each in (("before", rows), ("after", new[1:]))]
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding=encoding, errors="strict"))
    monkeypatch.setattr(sys, "argv", ["attnbench", "compare", *map(str, paths), "--format", format])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    text = printed.getvalue().decode(encoding)
    if format == "json":
        assert json.loads(text)["rows"][0]["case"] == rows[0].case
    elif format == "junit":
        assert ET.fromstring(text.encode(encoding))[0][0].get("classname") == rows[0].case
    else:
        assert ("case 0 ??" if encoding == "ascii" else "case 0 é?") in text


def test_a_full_disk_does_not_change_the_commands_result(monkeypatch):
    """The exit codes 1 and 3 of compare are kept although nothing could be printed."""
    monkeypatch.setattr(cli, "_run", lambda: print("x") or 3)
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 3
