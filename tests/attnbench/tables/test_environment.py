"""Environments: fields that must match and informative ones, invalid fields, and queries of NVML that may fail."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import fake_nvml
import pytest
import torch
from command_line import attnbench
from hypothesis import given
from hypothesis import strategies as st
from places import RESULTS
from submission_rows import H200

from attnbench.errors import InputError
from attnbench.harness.results.records import read_measurements
from attnbench.harness.results.store import measurements_file
from attnbench.kernels.registry import Registry
from attnbench.state import forget
from attnbench.tables.environment import Environment, own_commit
from attnbench.tables.nvml import Nvml

FIELDS = H200.to_dict()
ONE, TWO = "00000000-aaaa-bbbb-cccc-000000000001", "00000000-aaaa-bbbb-cccc-000000000002"


@pytest.mark.parametrize("fault", ["no library", "no driver", "another GPU", "no answer"])
def test_facts_missing_from_nvml_are_none(monkeypatch, fault):
    failing = dict.fromkeys(["highest", "cap"], fake_nvml.NOT_SUPPORTED)
    board = fake_nvml.Board(f"GPU-{TWO if fault == 'another GPU' else ONE}", failing=failing)
    fake_nvml.install(monkeypatch, board, start="Driver Not Loaded" if fault == "no driver" else None)
    if fault == "no library":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    fake_nvml.pretend_cuda(monkeypatch, ONE)
    here = Environment.detect(torch.device("cuda", 0), Registry(()))
    assert here.clock_mhz is here.power_cap_w is None
    assert (here.driver is None) == (fault in ("no library", "no driver"))
    assert here.uuid_hash is not None


def test_committed_rows_bind_as_they_did_when_they_were_written():
    rows = read_measurements(measurements_file(RESULTS / "nvidia-h200/quick"))
    taken_in = max(rows, key=lambda row: row.started).environment
    assert taken_in.key == "8e4db5d8fc57"
    assert Environment.from_dict(taken_in.to_dict()) == taken_in


def git(folder: Path, *command: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", "-c", "commit.gpgsign=false"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    run = subprocess.run(["git", "-C", folder, *who, *command], env=outside, check=True, capture_output=True, text=True)
    return run.stdout.strip()


def make_checkout(folder: Path, pyproject: str = '[project]\nname = "attnbench"\n') -> Path:
    """Creates a repository with a package; returns the path of its module ``environment``."""
    (folder / "attnbench" / "tables").mkdir(parents=True)
    (folder / "attnbench" / "tables" / "environment.py").write_text("pass\n")
    (folder / "pyproject.toml").write_text(pyproject)
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "all of it")
    return folder / "attnbench" / "tables" / "environment.py"


def commit_at(monkeypatch, module: Path) -> str | None:
    monkeypatch.setattr("attnbench.tables.environment.__file__", str(module))
    return own_commit()


def test_the_commit_is_the_checkouts_and_marks_local_changes(monkeypatch, tmp_path):
    untracked, changed = (make_checkout(tmp_path / name) for name in ("untracked", "changed"))
    (untracked.parent / "results.jsonl").write_text("{}\n")
    changed.write_text("something else\n")
    monkeypatch.setenv("GIT_DIR", str(changed.parents[2] / ".git"))  # as in a hook of another repository
    monkeypatch.setenv("GIT_WORK_TREE", str(changed.parents[2]))
    for module, mark in ((untracked, ""), (changed, "-dirty")):
        assert commit_at(monkeypatch, module) == git(module.parents[2], "rev-parse", "HEAD")[:12] + mark
    assert Environment.detect(torch.device("cpu"), Registry(())).commit == own_commit()


def test_only_attnbenchs_own_repository_is_read(monkeypatch, tmp_path):
    other = make_checkout(tmp_path / "other", '[project]\nname = "theirs"\n')
    installed, damaged = (other.parents[2] / name / "attnbench/tables/environment.py" for name in ("site", "vendored"))
    for module in (installed, damaged):
        module.parents[2].mkdir()
        (module.parents[2] / "pyproject.toml").write_text('[project]\nname = "attnbench"\n')
    spy = tmp_path / "bin" / "git"
    spy.parent.mkdir()
    spy.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\n")
    spy.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(spy.parent))
        assert commit_at(patch, other) is None
        assert commit_at(patch, installed) is None
        assert not (tmp_path / "asked").exists()
    (damaged.parents[2] / ".git").mkdir()
    assert commit_at(monkeypatch, damaged) is None


def test_doctor_shows_the_facts_of_each_gpu(monkeypatch):
    boards = fake_nvml.Board(f"GPU-{TWO}"), fake_nvml.Board(f"GPU-{ONE}", highest=1755, cap=350_000)
    fake_nvml.install(monkeypatch, *boards)
    fake_nvml.pretend_cuda(monkeypatch, ONE, TWO)
    run = attnbench("doctor", "--format", "json")
    forget()
    assert run.returncode == 0, run.stderr
    found = {each["name"]: each["detail"] for each in json.loads(run.stdout)["findings"]}
    assert found["NVIDIA driver"] == "580.159.04"
    assert found["cuda:0"].endswith("140 GiB, up to 1755 MHz, power cap 350 W")
    assert found["cuda:1"].endswith("140 GiB, up to 1980 MHz, power cap 700 W")
    assert own_commit() is None or f"commit {own_commit()}" in found["attnbench"]


@given(
    st.sampled_from(sorted(FIELDS)),
    st.none() | st.integers() | st.lists(st.integers()) | st.text() | st.floats(),
)
def test_any_value_is_an_environment_or_an_input_error(name, value):
    data = {**FIELDS, name: value}
    try:
        found = Environment.from_dict(data)
    except InputError as error:
        message = str(error)
        assert name in message
    else:
        assert found.to_dict()[name] == value


@pytest.mark.parametrize(
    "wrong",
    [
        [], {}, {**FIELDS, "colour": "red"}, {**FIELDS, "\x1b" * 10**5: 1}, {**FIELDS, "threads": True},
        {**FIELDS, "threads": 10**10_000}, {**FIELDS, "cpu": "x" * 257}, {**FIELDS, "cpu": "\x1b" * 10**5},
        {**FIELDS, "backends": {"fa3": 3}}, {**FIELDS, "backends": {str(number): "1" for number in range(257)}},
        {**FIELDS, "backends": {"\x1b" * 10**5: 3}}, {**FIELDS, "origins": {"fa3": None}},
        {**FIELDS, "uuid_hash": "GPU-00000000-aaaa"}, {**FIELDS, "commit": "0123456789ab-dirty\n"},
        {**FIELDS, "clock_mhz": 1980.0}, {**FIELDS, "power_cap_w": 2**20}, {**FIELDS, "memory_bytes": 2**60},
    ],
)  # fmt: skip
def test_invalid_fields_are_refused_in_a_short_printable_line(wrong):
    with pytest.raises(InputError) as caught:
        Environment.from_dict(wrong)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("prefix", ["", "GPU-", "MIG-"])
def test_a_mig_instance_and_a_gpu_are_distinguished_by_their_prefix(monkeypatch, prefix):
    fake_nvml.install(monkeypatch, fake_nvml.Board(f"MIG-{ONE}"))
    with Nvml() as nvml:
        assert (nvml.gpu(prefix + ONE) is None) == (prefix == "GPU-")
        reason = "NVML finds no GPU of this device's UUID: Not Found"  # which does not disclose it
        assert nvml.reason == (reason if prefix == "GPU-" else None)


@pytest.mark.parametrize("query", ["nvmlSystemGetDriverVersion", "nvmlDeviceGetName", "nvmlShutdown"])
def test_a_refused_nvml_query_gives_a_reason(monkeypatch, query):
    fake_nvml.install(monkeypatch, fake_nvml.Board(f"GPU-{ONE}"))
    monkeypatch.setattr(f"pynvml.{query}", Mock(side_effect=fake_nvml.NVMLError("Insufficient Permissions")))
    with Nvml() as nvml:
        assert (nvml.driver() is None) == (query == "nvmlSystemGetDriverVersion")
        assert nvml.names() == ([] if query == "nvmlDeviceGetName" else ["NVIDIA H200"])
    assert "Insufficient Permissions" in (nvml.reason or "")


def test_a_value_that_nvml_marks_unavailable_is_none_with_a_reason(monkeypatch):
    fake_nvml.install(monkeypatch, fake_nvml.Board(f"GPU-{ONE}", milliwatts=2**32 - 1, cap=2**32 - 1))
    with Nvml() as nvml:
        gpu = nvml.gpu(ONE)
        assert gpu is not None
        assert (gpu.power_w(), gpu.power_cap_w(), gpu.clock_mhz()) == (None, None, 1980)
        assert gpu.silences == dict.fromkeys(("power", "power cap"), "NVML calls it not available")
