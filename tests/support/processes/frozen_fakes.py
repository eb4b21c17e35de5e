"""Fake kernels, specs and tables that rank the kernels, for the tests of frozen choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fakes import FakeBackward, FakeForward, an_environment, fake_backend, fake_registry

from attnbench import AttentionSpec, Mask, Plan
from attnbench.choosing import selector
from attnbench.choosing.demotion import demotions
from attnbench.freezing import freeze as freezing
from attnbench.freezing.file import Frozen
from attnbench.kernels.registry import Registry
from attnbench.tables.table import Entry, Table
from attnbench.tables.user_table import Known

CPU = torch.device("cpu")


def kernels(cuda: bool = False) -> Registry:
    """The backends slow and fast with 16-bit kernels, fast with an FP8 one too, and gone, which is unavailable."""
    found = [
        fake_backend("slow", FakeForward("slow:bf16", preference=10), FakeBackward("slow:bf16")),
        fake_backend(
            "fast", FakeForward("fast:bf16", preference=20), FakeBackward("fast:bf16"), FakeForward("fast:fp8")
        ),
        fake_backend("gone", FakeForward("gone:bf16", preference=1), reason="it is not installed"),
    ]
    for backend in found if cuda else ():
        for kernel in backend.kernels:
            kernel.rows["cuda"] = kernel.rows["cpu"]
    return fake_registry(*found)


def install(patch: pytest.MonkeyPatch, known: Registry) -> None:
    """Makes choices use this registry."""
    for module in (selector, freezing):
        patch.setattr(module, "registry", lambda: known)


def spec(**more) -> AttentionSpec:
    return AttentionSpec.make(**{"batch": 1, "heads": 4, "seqlen_q": 1024, "head_dim": 64, **more})


SPECS = [
    spec(), spec(seqlen_q=128), spec(kv_heads=2), spec(mask=Mask(None, 0)), spec(seqlen_kv=77, mask=Mask(5, 3)),
    spec(softcap=3.0, scale=0.3), spec(return_lse=True), spec(dtype="fp16"), spec(direction="training"),
    spec(dtype="e4m3", descale="head"),
]  # fmt: skip
ENTRIES = {"slow:bf16": 0.002, "fast:bf16": 0.003, "fast:fp8": 0.08}


def table(*order: str) -> Table:
    """A table of all specs in which earlier plans are faster."""
    entries = []
    for one in SPECS:
        for time, name in enumerate(order, 1):
            plan = Plan(name, "slow:bf16" if name == "fast:fp8" else name) if one.training else Plan(name)
            entries.append(Entry(one, plan, "ok", float(time), 0.0, {"outlier": ENTRIES[name]}))
    return Table.from_entries(an_environment(), entries)


@contextmanager
def fake_choices(patch: pytest.MonkeyPatch) -> Iterator[Callable[..., Registry]]:
    """Installs the fake kernels without a table; the yielded function installs a table that ranks plans in order."""
    known = kernels()
    install(patch, known)
    patch.setattr(selector, "known_tables", lambda device: Known())

    def use(*order: str) -> Registry:
        patch.setattr(selector, "known_tables", lambda device: Known.of(table(*order)))
        return known

    yield use
    demotions.forget()


def frozen_plans(path: Path) -> list[str]:
    return sorted(str(answer.plan) for answer in Frozen.load(path).plans.values())


def replace_in_file(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
