"""Plans that the tables predict to be surely slower do not run, and have a row that says so."""

import pytest
import torch
from planted import setup
from stations import Shop

from attnbench.harness.cases.case import Case
from attnbench.harness.results.store import Store
from attnbench.harness.sweep import contending as module
from attnbench.harness.sweep import devices
from attnbench.harness.sweep.contending import contending
from attnbench.harness.sweep.run import run_sweep, tasks_of
from attnbench.kernels.devices import describe
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.user_table import Known

CPU = torch.device("cpu")
CASES = [
    Case(f"case{n}", AttentionSpec.make(batch=1, heads=1, seqlen_q=8 + n, head_dim=8), ("normal",)) for n in range(3)
]


@pytest.fixture
def shop(monkeypatch):
    return Shop(monkeypatch)


def test_what_cannot_win_has_a_row_without_times_in_either_part_of_a_sweep(shop, tmp_path, monkeypatch):
    lab = setup()
    monkeypatch.setattr(devices, "_FIRST", 1)
    monkeypatch.setattr(
        module, "contenders", lambda spec, plans, *_: {p: True for p in plans if p.forward == "wide:bf16"}
    )
    swept = tasks_of(CASES, lab.registry, CPU, "fp8", ["wide", "small"])
    tasks = contending(swept, Known(()), lab.registry, describe(CPU))
    assert not any(task.required for task in tasks)
    assert any(task.required for task in contending(swept, Known(()), lab.registry, describe(CPU), fresh=True))
    with Store(tmp_path, lab.environment) as store:
        list(run_sweep(tasks, [lab], store))
        assert sorted(row.key for row in store.rows) == sorted(task.key for task in tasks)
        status = {(row.case, row.plan.forward): row for row in store.rows}
    for case in CASES:
        assert status[case.name, "wide:bf16"].status == "ok"
        lost = status[case.name, "small:fp8"]
        assert (lost.status, dict(lost.time_ms)) == ("slower", {})
        assert "predict" in lost.reason
