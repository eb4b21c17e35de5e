"""Rows from anywhere through everything that reads them: refused with a short line, or shown as numbers and text.

Real rows with values that cannot be, that may just be, or that steer terminals and pages.
"""

import json
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import report_rows
from command_line import Run, attnbench
from file_corruption import restructure_json
from small_training import run_of

from attnbench.harness.report.text import report
from attnbench.harness.results.records import Measurement
from attnbench.harness.results.store import MEASUREMENTS
from attnbench.harness.training.rows import Share, TrainingRun
from examples import examples

STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
NO_NUMBER = re.compile(r"(?<![\w.:/(,\"'`-])[-+]?(nan|inf)(?:[%x]|\b)(?![:\w])")
ROWS = [each.to_dict() for each in report_rows.sweep_rows()]
ROWS[0]["correctness"]["detail"] = DETAIL = {
    "normal": {"out": {"sqnr_db": 54.0, "worst_head": 0.003, "worst_row": 0.01, "bias": 0.0, "nonfinite": 0}}
}
ROWS[1]["correctness"] |= {"leak": 0.0, "deterministic": False}
ROWS[1]["performance"] |= {"host_ms": [0.1] * 20, "first_ms": 900.0, "replayed": ["kernel"]}
ROWS[1]["performance"]["gpu"] = {
    "readings": 3, "clock_mhz": {"lowest": 1.0, "median": 2.0, "highest": 3.0}, "throttled": {},
}  # fmt: skip
SHARE = Share(steps=2, forward_ms=1.0, backward_ms=2.0, busy_ms=9.0, share=0.3, kernels=["a kernel"])
RUNS = [
    run_of([3.0, 2.5, 2.0, 1.5] * 6, role, seed, attention=SHARE, peak_tflops=10.0, price_per_hour=2.0).to_dict()
    for seed in (0, 1)
    for role in ("candidate", "baseline")
]


def changed(row: dict, chance: random.Random) -> dict:
    return json.loads(restructure_json(json.dumps(row).encode(), chance))


def hostile(rows: list[dict], model: type[Measurement] | type[TrainingRun], chance: random.Random) -> bytes:
    """A file of the rows, of which some are changed, most of them so that a reader takes them."""
    found, wild = [], chance.random() < 0.15
    for row in rows:
        made = [changed(row, chance) for _ in range(8)] if chance.random() < 0.4 else [row]
        found.append(next((each for each in made if wild or taken(each, model)), row))
    lines = [json.dumps(each).encode() for each in found]
    if chance.random() < 0.05:
        place = chance.randrange(len(lines))
        lines[place] = lines[place][: chance.randrange(400)] + chance.choice([b"\xff", b"[" * 10**5, b"9" * 10**4, b""])
    return b"".join(line + b"\n" for line in lines)


def taken(row: dict, model: type[Measurement] | type[TrainingRun]) -> bool:
    try:
        model.model_validate_json(json.dumps(row))
    except ValueError:
        return False
    return True


def command(*arguments: object, written: Path | None = None) -> str:
    """What became of a command, whose output is held to be fit for a terminal, and a page for a browser."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        run: Run = attnbench(*arguments)
    assert run.returncode in (0, 1, 2, 3, 4)
    shown = {"stdout": run.stdout, "stderr": run.stderr}
    if written is not None and written.exists():
        shown["page"] = written.read_text(encoding="utf-8")
        written.unlink()
    for text in shown.values():
        assert not STEERING.search(text)
    for text in (run.stdout, shown.get("page", "")):
        assert not NO_NUMBER.search(text)
        assert not re.search("[0-9]{60}", text)
    if run.returncode == 2:
        assert run.stderr.startswith("attnbench: ")
        assert run.stderr.count("\n") == 1
        assert len(run.stderr) < 2000
    if run.stdout.startswith("{"):
        json.loads(run.stdout, parse_constant=pytest.fail)
    if run.stdout.startswith("<"):
        ElementTree.fromstring(run.stdout)
    return "refused" if run.returncode == 2 else "shown"


def compared(folder: Path, chance: random.Random) -> str:
    rows = chance.sample(ROWS, 4)
    (folder / "base.jsonl").write_bytes(hostile(rows, Measurement, chance))
    (folder / "new.jsonl").write_bytes(hostile(rows, Measurement, chance))
    form = chance.choice(["table", "markdown", "json", "junit"])
    terms = chance.choice([[], [], ["--relative-to", "fa3:bf16"], ["--all"], ["--allow-missing", "*"]])
    return command("compare", folder / "base.jsonl", folder / "new.jsonl", "--format", form, *terms)


def merged(folder: Path, chance: random.Random) -> str:
    (folder / "rows.jsonl").write_bytes(hostile(ROWS, Measurement, chance))
    out = folder / f"merged-{chance.random()}"
    return command("merge", out, folder / "rows.jsonl", "--partial", "--format", chance.choice(["table", "json"]))


def condensed(folder: Path, chance: random.Random) -> str:
    (folder / "rows.jsonl").write_bytes(hostile(ROWS, Measurement, chance))
    became = command("table", "build", folder / "rows.jsonl", "-o", folder / "table.json")
    if became == "shown" and (folder / "table.json").exists():
        assert command("table", "show", folder / "table.json") == "shown"
        (folder / "table.json").unlink()
    return became


def trained(folder: Path, chance: random.Random) -> str:
    (folder / "training.jsonl").write_bytes(hostile(RUNS, TrainingRun, chance))
    return command("train", "--show", folder, "--format", chance.choice(["table", "markdown", "json"]))


def drawn(folder: Path, chance: random.Random) -> str:
    (folder / MEASUREMENTS).write_bytes(hostile(ROWS, Measurement, chance))
    (folder / "training.jsonl").write_bytes(hostile(RUNS, TrainingRun, chance))
    return command("report", folder, "-o", folder / "page.html", written=folder / "page.html")


def printed(folder: Path, chance: random.Random) -> str:
    """What a sweep prints of rows, those of a sweep that was gone on with among them."""
    made = [each if taken(each, Measurement) else row for row in ROWS for each in [changed(row, chance)]]
    text = report(
        [Measurement.model_validate_json(json.dumps(each)) for each in made], chance.choice(["text", "markdown"])
    )
    assert not STEERING.search(text)
    assert not NO_NUMBER.search(text)
    return "shown"


# How many files each reads in the default run.
READERS: dict[Callable[[Path, random.Random], str], int] = {
    compared: 10, merged: 6, condensed: 6, trained: 10, printed: 10, drawn: 2,
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_hostile_rows_are_refused_or_shown(tmp_path: Path, reader) -> None:
    numbers = range(examples(READERS[reader], 400 * READERS[reader]))
    became = [reader(tmp_path, random.Random(f"{reader.__name__} {number}")) for number in numbers]
    assert "shown" in became


def lines(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"performance": {"time_ms": {"call": [1e308, 1e-300]}}},
            "performance.time_ms.call.0: Input should be less than or equal to 1000000000",
        ),
        ({"correctness": {"detail": {"strange": DETAIL["normal"]}}}, "detail has 'strange: out', which error lacks"),
        ({"\x1b[2J": 1}, " [2J: Extra inputs are not permitted"),
        ({"spec": {"heads": 10**400}}, "got a number of 400 digits or more"),
        ({"environment": {"threads": 10**400}}, "environment.threads: Input should be less than 1048576"),
    ],
)
def test_what_cannot_be_is_refused_by_every_command(tmp_path: Path, change: dict, message: str) -> None:
    bad = ROWS[0] | {key: {**ROWS[0][key], **new} if isinstance(new, dict) else new for key, new in change.items()}
    rows = lines(tmp_path / "rows.jsonl", bad, ROWS[1])
    for arguments in (
        ("compare", rows, rows), ("report", rows), ("table", "check", rows), ("table", "build", rows),
        ("merge", tmp_path / "merged", rows),
    ):  # fmt: skip
        run = attnbench(*arguments)
        assert run.returncode == 2
        assert message in run.stderr
        assert run.stderr.startswith(f"attnbench: {rows}:1: expected a measurement, but ")
        assert len(run.stderr) < 600


@pytest.mark.parametrize("loss", [[1e308] * 9, [5e-324] * 9, ["NaN"] * 9, ["-Infinity"] * 9])
def test_losses_of_every_size_are_reported_without_a_warning(tmp_path: Path, loss: list) -> None:
    runs = [{**each, "loss": loss, "grad_norm": [1e308] * 9, "step_ms": [1.0] * 9} for each in RUNS]
    lines(tmp_path / "training.jsonl", *runs)
    assert command("train", "--show", tmp_path) == "shown"
    assert (
        command("report", tmp_path, "--format", "svg", "-o", tmp_path / "l.svg", written=tmp_path / "l.svg") == "shown"
    )
