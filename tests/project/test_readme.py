"""Every figure of the README's tables is a committed measurement's."""

import math
import re
import statistics
from pathlib import Path

import figures_training
import pytest
from command_line import attnbench
from places import ROOT

from attnbench.choosing.evidence import Evidence
from attnbench.choosing.regret import Asked, chosen_at
from attnbench.choosing.regret_fixed import against_fixed
from attnbench.harness.results.records import Measurement, read_measurements
from attnbench.kernels.registry import registry
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.table import Table
from attnbench.tables.user_table import Known

README = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
HEAD = re.compile(r"\| (b\d.*?) \| (kernel|backward) \| (call) \| error \|")
ROW = re.compile(r"\| `(.+?)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) / ([\d.]+) \|")
KEYS = re.compile(r"\| b1 h8 q(\d+) d128, V with a mean.* \| (\d+)k keys \| (\d+)k keys \| (\d+)k keys \|")
DRIFT = re.compile(r"\| (`.+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|")
ALWAYS = re.compile(r"\| (?:`(\S+)`|(torch's default)) ((?:\| (?:[\d.]+, [\d.]+)? ){4})\|")
FRESH = re.compile(r"\| (NVIDIA .+?) \| (\d+(?: and \d+)?(?: of \d+)?) \| ([\d., %]+) \| ([\d., %]+) \|")


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], Measurement]:
    """By case and plan, the newest; what a case's entry was called stands before the spec."""
    folders = [ROOT / "results/nvidia-h200" / name for name in ("facts", "keys", "forward", "inference", "step")]
    files = [file for folder in folders for file in folder.glob("measurements.jsonl*")]
    measured = [row for file in files for row in read_measurements(file) if row.measured]
    return {(str(row.spec), str(row.plan)): row for row in sorted(measured, key=lambda row: row.started)}


def worst(row: Measurement, family: str) -> float:
    return max(error for name, error in row.error[family].items() if name != "lse")


def agrees(figure: str, truth: float) -> bool:
    return float(figure) == round(truth, len(figure.partition(".")[2]))


def test_times_and_errors_come_from_committed_results(rows: dict[tuple[str, str], Measurement]) -> None:
    case, costs, seen = "", [], 0
    for line in README:
        if head := HEAD.fullmatch(line):
            case, costs = head[1], [head[2], head[3]]
        elif shown := ROW.fullmatch(line):
            row, figures = rows[case, shown[1]], shown.groups()[1:]
            truths = [statistics.median(row.time_ms[cost]) for cost in costs]
            truths += [worst(row, family) for family in ("normal", "outlier")]
            for figure, truth in zip(figures, truths, strict=True):
                assert agrees(figure, truth), (case, shown[1], figure, truth)
            seen += 1
    assert seen >= 9


def test_drift_over_keys_comes_from_committed_results(rows: dict[tuple[str, str], Measurement]) -> None:
    queries, keys, seen = 0, [], 0
    for line in README:
        if head := KEYS.fullmatch(line):
            queries, *keys = int(head[1]), *(int(each) * 1024 for each in head.groups()[1:])
        elif keys and (shown := DRIFT.fullmatch(line)) and not ROW.fullmatch(line):
            for plan in re.findall("`(.+?)`", shown[1]):
                for count, figure in zip(keys, shown.groups()[1:], strict=True):
                    lengths = f"q{queries}-k{count}" if queries != count else f"s{count}"
                    mask = "causal/bottom-right" if queries != count else "causal"
                    case = f"b1 h8 {lengths} d128 bf16 {mask} forward"
                    truth = rows[case, plan].error["biased-v"]["out"]
                    assert agrees(figure, truth), (case, plan, figure, truth)
                    seen += 1
    assert seen >= 12


def test_sentences_agree_with_the_rows_of_their_tables(rows: dict[tuple[str, str], Measurement]) -> None:
    def cost(case: str, plan: str, name: str) -> float:
        return statistics.median(rows[case, plan].time_ms[name])

    text = " ".join(README)
    long = "b1 h16 s16384 d128 bf16 forward"
    assert "for two of them the whole call is slower than all 16-bit calls" in text
    assert "quantising in eager torch takes more than half as long as the kernel itself" in text
    wide = [cost(long, plan, "call") for case, plan in rows if case == long and plan in ("fa3:bf16", "fa4:bf16")]
    for plan in ("fa3:fp8", "cudnn:fp8"):
        kernel = cost(long, plan, "kernel")
        assert 0.5 < (cost(long, plan, "prepared") - kernel) / kernel < 0.7
        assert cost(long, plan, "call") > max(*wide, cost(long, "sdpa-cudnn:bf16", "call"))
    for plan in ("te:fp8", "triton:fp8"):
        assert cost(long, plan, "call") < min(wide)
    quarter = "b4 h16 s4096 d128 bf16 causal forward"
    assert "At a quarter of this length, under a causal mask, it pays off only where heads share keys" in text
    ours = "triton:fp8", "triton:fp8-onepass"
    assert min(cost(quarter, plan, "call") for plan in ours) > cost(quarter, "fa3:bf16", "call")
    shared = quarter.replace("h16", "h16 kv4")
    assert min(cost(shared, plan, "call") for plan in ours) < cost(shared, "fa3:bf16", "call")
    assert (
        "at 64k keys it is then ten times as fast as the kernels that do not split, and its drift is a tenth of theirs"
        in text
    )
    few = "b1 h8 q128-k65536 d128 bf16 causal/bottom-right forward"
    for plan in ("flashinfer:fp8", "flex:fp8"):
        assert 9 <= cost(few, plan, "kernel") / cost(few, "fa3:fp8", "kernel") <= 12
        drifts = [rows[few, each].error["biased-v"]["out"] for each in (plan, "fa3:fp8")]
        assert 9 <= drifts[0] / drifts[1] <= 12
    step, own, best = "b1 h16 s16384 d128 bf16 causal training", "triton:fp8>triton:fp8", "fa3:bf16>fa4:bf16"
    shown = re.search(
        r"FP8 plan is (\d+) % off, .* of (\d+) % for FP8 training"
        r".* are (\d+) % off at most, and its step is (\d+) % faster",
        text,
    )
    assert shown
    other = rows[step, "te:fp8>te:fp8"]
    truths = (
        worst(other, "outlier"), other.correctness.bound,
        max(worst(rows[step, own], family) for family in ("normal", "outlier")),
        1 - cost(step, own, "call") / cost(step, best, "call"),
    )  # fmt: skip
    for figure, truth in zip(shown.groups(), truths, strict=True):
        assert agrees(figure, 100 * truth), (figure, truth)
    spec, table = rows[step, own].spec, Table.load(ROOT / "attnbench/tables/nvidia-h200.json")
    chosen = chosen_at(spec, table.at(spec), Evidence(spec, Known.of(table)), Asked(True), registry())
    assert chosen
    assert str(chosen[0].plan) == own


def test_shares_of_the_fastest_16_bit_step_are_those_of_the_newer_rows() -> None:
    def shares(*folders: str, mla: bool) -> list[float]:
        """Of all shapes that are in them, by the last folder that has the shape."""
        calls: dict[tuple[AttentionSpec, bool], float] = {}
        for folder in folders:
            found: dict[tuple[AttentionSpec, bool], float] = {}
            for row in read_measurements(ROOT / "results/nvidia-h200" / folder / "measurements.jsonl.gz"):
                spec, key = row.spec, (row.spec, row.plan.fp8)
                asked = spec.training and spec.seqlen_q >= 4096 and mla == (spec.head_dim != spec.head_dim_v)
                if asked and row.status == "ok":
                    found[key] = min(row.median_ms(), found.get(key, math.inf))
            calls.update(found)
        return sorted(call / calls[spec, False] for (spec, fp8), call in calls.items() if fp8)

    shown = re.search(
        r"take ([\d.]+) to ([\d.]+) of .* 64 to 256, and ([\d.]+) and ([\d.]+) with MLA's", " ".join(README)
    )
    assert shown
    others = shares("current", "bars", mla=False)
    for figure, truth in zip(shown.groups(), (others[0], others[-1], *shares("zoo", mla=True)), strict=True):
        assert agrees(figure, truth), (figure, truth)


def test_the_gap_of_a_training_run_is_that_of_its_rows() -> None:
    heads, lines = figures_training.learning()
    rows = [dict(zip(heads, line, strict=True)) for line in lines]
    (gap,) = [row["gap"] for row in rows if "medium" in row["model"] and row["attention"] == "`te:fp8>te:fp8`"]
    (higher,) = re.findall(r"ended\s+([\d.]+) % higher", "\n".join(README))
    assert gap.startswith(f"+{higher}%")


def test_what_choosing_saves_comes_from_the_table_that_ships() -> None:
    table = Table.load(ROOT / "attnbench/tables/nvidia-h200.json")
    columns = [(fp8, direction) for fp8 in (False, True) for direction in ("forward", "training")]
    found = {
        (row.backend, fp8, row.direction): row
        for fp8 in (False, True)
        for row in against_fixed(table, registry(), Asked(fp8))
    }
    truths = {key: f"{1 + row.slow_down:.2f}, {1 + row.worst:.2f}" for key, row in found.items()}
    shown = [each for line in README if (each := ALWAYS.fullmatch(line))]
    for each in shown:
        cells = [cell.strip() for cell in each[3].split("|")[1:]]
        assert cells == [truths.get((each[1] or each[2], *column), "") for column in columns]
    assert len(shown) >= 8
    judged = re.search(r"`fa3` \(with `fa4`'s backward\) at (\d+) of (\d+) shapes in training", " ".join(README))
    assert judged
    of_fa3 = found["fa3", False, "training"]
    assert judged.groups() == (str(of_fa3.serves), str(of_fa3.specs))


def test_the_fresh_regret_is_that_of_the_coverage_table() -> None:
    """Which docs/figures.py writes (``test_docs_figures``)."""
    pattern = r"\| (NVIDIA [^|]+) \|.*; 16 bits ([\d of]+): ([\d., %]+); FP8 ([\d of]+): ([\d., %]+%)(.*?) \|"
    known = re.findall(pattern, (ROOT / "docs/tables.md").read_text(encoding="utf-8"))
    shown = [found.groups() for line in README if (found := FRESH.fullmatch(line))]
    assert len(known) == len(list((ROOT / "results").glob("*/fresh")))
    assert shown == [
        (device, count if count == other else f"{count.split()[0]} and {other}", in_16_bits, in_fp8)
        for device, count, in_16_bits, other, in_fp8, _ in known
    ]
    assert {each[-1] for each in known} == {""}  # none was beyond its budget


def test_where_fp8_is_the_fastest_is_counted_in_the_page_of_models() -> None:
    """Which docs/figures.py writes (``test_docs_figures``)."""
    page = (ROOT / "docs/explanation/models.md").read_text(encoding="utf-8").partition("### NVIDIA H200")[2]
    counted = {each: re.search(rf"\| {each} \| (\d+) \|.*?\| (\d+) of \1 \|", page) for each in ("forward", "training")}
    shown = re.search(r"Of the (\d+) layers .* fastest at (\d+) forward and at (\d+) in training", " ".join(README))
    assert shown
    layers, *wins = shown.groups()
    assert [found and found.groups() for found in counted.values()] == [(layers, each) for each in wins]


def test_the_picture_is_of_the_rows_of_the_table_that_ships(tmp_path: Path) -> None:
    """Label by label; the drawing library places them.  Each shape of the others would be a row of its own."""
    command = re.search(
        r"attnbench table build (.+) -o attnbench/tables/nvidia-h200.json",
        (ROOT / "docs/tables.md").read_text(encoding="utf-8"),
    )
    assert command
    others = "/design", "/table", "/raced", "/zoo", "/training", "/bars", "/packed"
    folders = [ROOT / each for each in command[1].split() if not each.endswith(others)]
    made = tmp_path / "made.svg"
    done = attnbench("report", *folders, "--format", "svg", "--figure", "winners", "-o", made)
    assert done.returncode == 0, done.stderr
    labels = [
        re.findall(r">([^<>]+)</text>", picture.read_text(encoding="utf-8"))
        for picture in (made, ROOT / "docs/what-wins.svg")
    ]
    assert len(labels[0]) > 100
    assert labels[0] == labels[1]
