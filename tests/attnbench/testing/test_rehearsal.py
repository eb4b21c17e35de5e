"""A rehearsal runs the specs of every check in other processes, whatever becomes of them, where that pays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conforming import Backward, Forward
from noting import NOTED, Noting
from noting import registry as noting

from attnbench.backends.reference import BACKEND as REFERENCE
from attnbench.harness.sweep import worker_pool
from attnbench.kernels.contract import Availability, Backend
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry
from attnbench.tables.environment import Environment
from attnbench.testing import check_backend
from attnbench.testing.conformance import suite
from attnbench.testing.conformance.checks import CHECKS
from attnbench.testing.conformance.one_check import FEW, specs_for
from attnbench.testing.conformance.rehearsal import Setting, rehearse
from attnbench.testing.conformance.subject import Subject

CPU = torch.device("cpu")
MINE = Backend("mine", "a test's", lambda: Availability(version="1"), (Forward(), Backward()), compiles=True)


def test_the_specs_of_each_check_are_run_in_other_processes_even_if_one_ends_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NOTED, str(tmp_path / "noted"))
    monkeypatch.setattr(worker_pool, "usable_cores", lambda: 2)
    subject = Subject(Plan(Noting.name), CPU, noting(), seed=3)
    rehearse([subject], Setting(CPU, 3, "noting:registry"), 2**33)
    lines = [line.partition(" ") for line in (tmp_path / "noted").read_text().splitlines()]
    assert str(os.getpid()) not in {process for process, _, _ in lines}
    assert (tmp_path / "noted.ended").exists()
    ran = {spec for _, _, spec in lines}
    one_each = [
        each for each in CHECKS if each.on is None and not (each.mixed or each.specs or each.only == "training")
    ]
    compiled = [each for each in one_each if each.name not in ("refusals", "descales")]  # which runs no such spec
    assert len(compiled) > 15
    assert {str(spec) for each in compiled for spec in specs_for(subject, each, FEW)} <= ran
    growth = next(each for each in CHECKS if each.name == "growth")
    assert not {str(spec) for spec in specs_for(subject, growth, FEW)} & ran


@pytest.mark.parametrize(
    ("device", "compiles", "given", "rehearsed"),
    [
        ("cuda", True, False, True),
        ("cpu", True, False, False),
        ("cuda", False, False, False),
        ("cuda", True, True, False),
    ],
)
def test_it_is_made_of_an_installed_backend_that_compiles_for_a_gpu(
    device: str, compiles: bool, given: bool, rehearsed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Registry([REFERENCE, replace(MINE, compiles=compiles)])
    asked: list[tuple[list[Plan], Setting]] = []

    def note(subjects: Sequence[Subject], setting: Setting, memory_bytes: int | None) -> None:
        asked.append(([each.plan for each in subjects], setting))

    monkeypatch.setattr(suite, "rehearse", note)
    monkeypatch.setattr(suite, "installed", lambda: known)
    monkeypatch.setattr(suite.devices, "find", lambda name: torch.device(name))
    here = Environment.detect(CPU, known)
    monkeypatch.setattr(suite.Environment, "detect", lambda *_: here)
    monkeypatch.setattr(suite, "_findings", lambda *_: iter(()))
    check_backend("mine", device, seed=5, known=known if given else None, quiet=True)
    plans = [Plan(Forward.name), Plan(Forward.name, Backward.name)]
    assert asked == ([(plans, Setting(torch.device(device), 5))] if rehearsed else [])
