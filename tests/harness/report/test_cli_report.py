"""``attnbench report`` end to end: the page, single figures, and a row measured again by the command that it names."""

import json
import re
import subprocess
from html import unescape

import pytest
from command_line import expect
from planted import in_haste
from report_rows import sweep_rows
from scripted_workers import LocalWorkers
from small_training import run_of

from attnbench.harness.measure.timing import Timer
from attnbench.harness.results.records import read_measurements

TINY = "- {batch: 1, heads: 2, kv_heads: 1, seqlen_q: 96, head_dim: 32, mask: causal}\n"


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Whatever names no folder is written in one of the test's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    (folder / "measurements.jsonl").write_text("".join(row.to_line() + "\n" for row in sweep_rows()))
    runs = [run_of([3, 2, 1], role) for role in ("candidate", "baseline")]
    (folder / "training.jsonl").write_text("".join(run.to_line() + "\n" for run in runs))
    return folder


@pytest.mark.parametrize(
    ("figure", "format", "more"),
    [
        ("winners", "png", ()),
        ("speed-error", "svg", ("--direction", "training")),
        ("loss", "svg", ()),
    ],
)
def test_a_single_figure_is_written_as_a_picture(results, tmp_path, figure, format, more):
    file = tmp_path / f"{figure}.{format}"
    expect("report", results, "--figure", figure, "--format", format, "-o", file, *more)
    start = {"png": b"\x89PNG", "svg": b"<?xml"}[format]
    assert file.read_bytes().startswith(start)
    if format == "svg":
        assert b"fa4:bf16" in file.read_bytes() or b"baseline" in file.read_bytes()


def test_markdown_is_printed_and_marks_the_fp8_plans(results):
    winners = expect("report", results, "--format", "markdown").stdout
    assert "### Forward" in winners
    assert "**fa3:fp8** 2.00×" in winners
    plans = expect("report", results, "--format", "markdown", "--figure", "speed-error").stdout
    assert "te:fp8" in plans
    assert "candidate" in expect("report", results, "--format", "markdown", "--figure", "loss").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "measurements.jsonl"), "ends in .html or .htm"),
        (("--format", "png", "-o", "a.html"), "ends in .png"),
        (("--figure", "loss"), "the page has every figure"),
        (("--format", "svg", "--figure", "speed-error"), "--direction forward or --direction training"),
    ],
)
def test_misuse_is_reported_and_writes_nothing(results, arguments, message, monkeypatch):
    monkeypatch.chdir(results)
    before = sorted(results.iterdir()), (results / "measurements.jsonl").read_bytes()
    assert message in expect("report", results, *arguments, code=2).stderr
    assert (sorted(results.iterdir()), (results / "measurements.jsonl").read_bytes()) == before


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept")
    (folder / "tiny.yaml").write_text(TINY)
    names = "emulated:fp8,sdpa-math:bf16"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(Timer, "for_device", in_haste)
        LocalWorkers(patch)
        asked = ("--device", "cpu", "--preset", folder / "tiny.yaml", "--backends", names, "--out", folder / "a")
        expect("sweep", *asked)
    return folder


def test_the_command_of_a_row_measures_that_row_again(swept, tmp_path, monkeypatch):
    """A shell takes the command apart; what it would call runs here, in haste."""
    expect("report", swept / "a", "-o", tmp_path / "page.html")
    shown = (tmp_path / "page.html").read_text(encoding="utf-8")
    ((plan, command),) = re.findall(r'<code data-plan="(.*?)">(.*?)</code>', shown)
    wanted = unescape(command).replace(f"--backends '{unescape(plan)}'", "--backends 'emulated:fp8'")
    assert wanted != unescape(command)  # what the page's own script does for any row
    taken = f'attnbench() {{ printf "%s\\0" "$@" > words; }}; {wanted}'
    subprocess.run(taken, shell=True, cwd=tmp_path, check=True)
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    monkeypatch.setattr(Timer, "for_device", in_haste)
    LocalWorkers(monkeypatch)
    (again,) = json.loads(expect(*words, "--format", "json").stdout)
    (before,) = [
        row for row in read_measurements(swept / "a" / "measurements.jsonl") if str(row.plan) == "emulated:fp8"
    ]
    assert (again["plan"], again["spec"], again["status"]) == (str(before.plan), before.spec.to_dict(), before.status)
    error = again["correctness"]["error"]
    assert error.keys() == before.error.keys()
    assert error["normal"]["out"] == pytest.approx(before.error["normal"]["out"], rel=1e-3)


def test_a_case_of_a_preset_is_swept_alone_by_its_name():
    name = "b1 h4 s512 d128 bf16 forward"
    plans = ("--preset", "quick", "--device", "cpu", "--backends", "sdpa-math:bf16", "--dry-run", "--format", "json")
    found = json.loads(expect("sweep", *plans, "--case", name).stdout)
    assert [(each["case"], each["plan"]) for each in found] == [(name, "sdpa-math:bf16")]
    wrong = expect("sweep", *plans, "--case", "b1 h4 s512 d128 bf16 backward", code=2).stderr
    assert f"did you mean '{name}'" in wrong
