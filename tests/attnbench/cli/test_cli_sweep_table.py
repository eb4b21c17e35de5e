"""A sweep whose table cannot be written: reported before measuring, and no measurement is lost."""

import os
import sys
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from command_line import attnbench, fails_in_one_line
from sweep_parts import HERE, ROWS

from attnbench.errors import OutputError
from attnbench.harness.results.condense import condense
from attnbench.harness.results.store import Store
from attnbench.tables import files as table_files
from attnbench.tables import user_table
from attnbench.tables.table import Table
from attnbench.tables.user_table import update_user_table, user_table_path

sweep_command = import_module("attnbench.cli.sweep")


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Runs a sweep that yields ``ROWS``; (whether it measured, the output before that)."""

    def run(*, update=True, meanwhile=lambda: None, stop=None):
        output_before = []

        def measures(tasks, setups, store):
            output_before.append(sys.stderr.getvalue() if hasattr(sys.stderr, "getvalue") else "")
            meanwhile()
            for row in ROWS:
                store.append(row)
                if stop is not None:
                    raise stop
                yield row

        monkeypatch.setattr("attnbench.harness.sweep.run.run_sweep", measures)
        monkeypatch.setattr("attnbench.harness.sweep.progress.show_progress", lambda events, console, verbose: events)
        with Store(tmp_path / "a sweep", HERE) as store:
            return sweep_command._measure(
                [], [SimpleNamespace(environment=HERE)], store, "json", update=update, verbose=False
            )

    return run


@pytest.fixture
def file(own_cache):
    """A file: in place of a folder it also prevents root from creating that."""
    (own_cache / "file").touch()
    return str(own_cache / "file")


SWEEP = ("sweep", "--device", "cpu", "--backends", "sdpa-math")
COMMAND = "`attnbench table build '{}'` puts these results into it"


def test_an_unwritable_table_is_reported_first_and_loses_only_the_table(sweep, file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", file)
    before = []
    assert sweep(meanwhile=lambda: before.append(capsys.readouterr().err))
    captured = capsys.readouterr()
    command = COMMAND.format(tmp_path / "a sweep")
    for text in (before[0], captured.err):
        assert "Not a directory" in text
        assert command in text
    assert captured.out.count('"case"') == len(ROWS)
    assert len(Table.load(tmp_path / "a sweep" / "table.json").entries) == len(condense(ROWS)) < len(ROWS)


def test_a_disk_that_fills_during_a_sweep_is_reported_with_the_command_to_build_the_table(
    sweep, tmp_path, monkeypatch, capsys
):
    full = Mock(side_effect=OutputError("the table cannot be written: No space left on device"))
    assert sweep(meanwhile=lambda: monkeypatch.setattr(user_table, "locked", full))
    assert f"No space left on device; {COMMAND.format(tmp_path / 'a sweep')}" in capsys.readouterr().err


def test_an_unwritable_table_folder_prints_the_results_and_fails(sweep, tmp_path, monkeypatch, capsys):
    original = table_files.replace_file

    def full(path, content):
        if path.parent.name == "a sweep":
            raise OutputError(f"{path} cannot be written: No space left on device")
        return original(path, content)

    with pytest.raises(OutputError, match="No space left on device; the rows are safe, --resume --out"):
        sweep(meanwhile=lambda: monkeypatch.setattr(table_files, "replace_file", full))
    assert capsys.readouterr().out.count('"case"') == len(ROWS)
    assert user_table_path(HERE).exists()


def test_the_no_table_option_leaves_the_users_table_unchanged(sweep, capsys):
    path = update_user_table(Table.from_entries(HERE, []))
    before = path.read_bytes()
    assert sweep(update=False)
    assert path.read_bytes() == before


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OutputError("no room")], ids=["interrupted", "full disk"])
def test_a_sweep_that_is_stopped_writes_no_table(sweep, tmp_path, stop):
    with pytest.raises(type(stop)):
        sweep(stop=stop)
    assert not (tmp_path / "a sweep" / "table.json").exists()
    assert not user_table_path(HERE).exists()


def test_the_table_is_updated_even_if_the_output_pipe_is_closed(sweep, monkeypatch):
    monkeypatch.setattr(sweep_command, "print_json", Mock(side_effect=BrokenPipeError(32, "Broken pipe")))
    with pytest.raises(BrokenPipeError):
        sweep()
    assert user_table_path(HERE).exists()


def test_an_uncreatable_output_folder_is_an_error_before_measuring(file, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", file)
    fails_in_one_line(attnbench(*SWEEP), 1, "cannot be written: Not a directory; name another with --out")


@pytest.mark.parametrize("home", ["unknown to platformdirs", "as older versions say it"])
def test_without_a_home_folder_explain_works_and_sweep_reports_an_error(home, own_cache, monkeypatch, tmp_path):
    def ask(_):
        if home == "unknown to platformdirs":
            raise RuntimeError("could not determine the home directory")
        return user_table.Path("~/.cache/attnbench")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("attnbench.files.user_folders.user_cache_path", ask)
    monkeypatch.setattr("attnbench.files.user_folders.user_data_path", ask)
    run = attnbench("explain", "--heads", "1", "--seqlen", "8", "--head-dim", "8", "--device", "cpu")
    assert run.returncode == 0, run.stderr
    fails_in_one_line(attnbench(*SWEEP), 1, "no home folder to write in; set HOME or XDG_DATA_HOME")
    with pytest.raises(OutputError, match="XDG_CACHE_HOME"):
        update_user_table(Table.from_entries(HERE, []))
    assert os.listdir(tmp_path) == []
