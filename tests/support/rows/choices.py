"""A registry of fake kernels, tables of their times, and choices from these."""

import torch
from fakes import FakeBackward, FakeForward, an_environment, fake_backend, fake_registry

from attnbench import AttentionSpec, Plan
from attnbench.choosing.selector import choose
from attnbench.tables.table import Entry, Table

CPU = torch.device("cpu")
KNOWN = fake_registry(
    fake_backend("slow", FakeForward("slow:bf16", preference=10), FakeBackward("slow:bf16")),
    fake_backend("fast", FakeForward("fast:bf16", preference=20), FakeBackward("fast:bf16"), FakeForward("fast:fp8")),
    fake_backend("study", FakeForward("study:bf16", preference=None)),
    fake_backend("gone", FakeForward("gone:bf16", preference=1), reason="not installed"),
)


def spec(**more) -> AttentionSpec:
    return AttentionSpec.make(**{"batch": 1, "heads": 4, "seqlen_q": 1024, "head_dim": 64, **more})


def table(*entries: Entry) -> Table:
    return Table.from_entries(an_environment(), entries)


def entry(plan: str, time: float, at: AttentionSpec | None = None, status: str = "ok", **errors: float) -> Entry:
    return Entry(at or spec(), Plan.parse(plan), status, time, 0.0, errors or {"normal": 0.002})


MEASURED = table(
    entry("slow:bf16", 3.0),
    entry("fast:bf16", 2.0),
    entry("fast:fp8", 1.0, normal=0.05, outlier=0.09),
)


def pick(asked: AttentionSpec | None = None, **more):
    return choose(asked or spec(), CPU, **{"known": KNOWN, "table": MEASURED, **more})


def verdicts(choice) -> dict[str, str]:
    return {str(each.plan): each.verdict for each in choice.candidates}
