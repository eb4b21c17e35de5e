"""The report answers first, fits a terminal, and hides nothing that failed."""

import io

import pytest
import torch
from planted import REPORTED, laboratory
from rich.console import Console

from attnbench.harness.cases import Case
from attnbench.harness.progress import followed
from attnbench.harness.report import report, sentences
from attnbench.harness.store import Store
from attnbench.harness.sweep import run_sweep, tasks_of
from attnbench.spec import AttentionSpec

CPU = torch.device("cpu")
LONG = REPORTED


def sweep(folder, console):
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=64, head_dim=16)
    cases = [Case("first", spec), Case("second", spec.replace(direction="training"))]
    lab = laboratory("planted:reported")
    with Store(folder, lab.environment) as store:
        return list(followed(run_sweep(tasks_of(cases, lab.registry, CPU, "fp8"), [lab], store), console))


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    log = io.StringIO()
    rows = sweep(tmp_path_factory.mktemp("report"), Console(file=log))
    return rows, log.getvalue()


def test_it_fits_a_terminal_of_100_columns(shown):
    text = report(shown[0], "text")
    tables = [line for line in text.splitlines() if not line.startswith(("- ", "  "))]
    assert max(map(len, tables)) <= 100
    assert "\x1b" not in text


def test_it_names_the_fastest_within_the_bound_and_those_beyond(shown):
    first = [row for row in shown[0] if row.case == "first"]
    ok = {str(row.plan): sorted(row.time_ms["call"]) for row in first if row.status == "ok"}
    fastest = min(ok, key=lambda plan: ok[plan][len(ok[plan]) // 2])
    said = " ".join(sentences(first))
    assert f"Fastest within its bound: {fastest}," in said
    assert f"Most accurate in FP8: {LONG}, at worst" in said
    assert "Out of bounds: bad:fp8-scaled (1" in said
    lines = report(shown[0], "text").splitlines()
    assert next(line for line in lines if f"{fastest} *" in line)
    assert next(line for line in lines if line.startswith("bad:fp8-scaled !"))


def test_nothing_within_its_bound_is_said(shown):
    beyond = [row for row in shown[0] if row.status == "inaccurate"]
    assert sentences(beyond)[0] == "No plan stayed within its bound."


def test_refusals_of_one_cause_are_one_line_and_failures_come_first(shown):
    text = report(shown[0], "text")
    passed_over = text[text.index("Not measured") :].split("\n- ")[1:]
    assert passed_over[0].startswith("error, ")
    assert "no such tile" in passed_over[0]
    refused = [each for each in passed_over if "takes fp32 tensors" in each]
    assert len(refused) == 1
    assert all(f"picky{number}:fp8" in refused[0] for number in range(20))
    for row in shown[0]:
        assert row.plan.forward in text


def test_markdown_keeps_its_cells(shown):
    text = report(shown[0], "markdown")
    assert "### first" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {8}
    assert r"its package \| \`is\` not" in text


def test_a_log_has_one_plain_line_a_row(shown):
    rows, log = shown
    lines = log.splitlines()
    assert len(lines) == len(rows) + 1
    assert " s preparing, " in lines[-1]
    assert lines[0].startswith(f"[1/{len(rows)}] first: ")
    assert any("ok, " in line and "error normal " in line for line in lines)
    assert "\x1b" not in log


def test_a_terminal_gets_a_bar_and_no_line_a_row(tmp_path):
    screen = io.StringIO()
    rows = sweep(tmp_path, Console(file=screen, force_terminal=True, width=100))
    assert f"/{len(rows)}" in screen.getvalue()
    assert "no such tile" not in screen.getvalue()
