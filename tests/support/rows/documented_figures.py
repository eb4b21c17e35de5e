"""The sentences of docs/ that contain figures, and the values from committed rows or code for each."""

import gzip
import inspect
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import figures
from places import ROOT

from attnbench.choosing import fresh_regret
from attnbench.choosing.fresh_regret import fresh_scores, summary_of
from attnbench.harness.cases.models import published_models
from attnbench.harness.compare.regression import compare_results
from attnbench.harness.compare.terms import Terms
from attnbench.harness.measure.clocks import Watch
from attnbench.harness.measure.timing import Cost
from attnbench.harness.results.condense import join_sweeps
from attnbench.harness.results.records import Measurement, read_measurements
from attnbench.harness.sweep import device_sweep, race
from attnbench.kernels.registry import registry
from attnbench.tables import entry as table_entry
from attnbench.tables import scaling
from attnbench.tables.entry import Entry
from attnbench.tables.scaling import scaled
from attnbench.tables.table import Table
from attnbench.tables.user_table import Known


def row(sweep: str, spec: str, plan: str) -> Measurement:
    found: list[Measurement] = [
        each for each in figures.rows(sweep) if (str(each.spec), str(each.plan)) == (spec, plan)
    ]
    return max(found, key=lambda each: each.started)


def median_ms(sweep: str, spec: str, plan: str, cost: Cost) -> float:
    return statistics.median(row(sweep, spec, plan).time_ms[cost])


LONG = "b1 h16 s16384 d128 bf16 forward"
FACT = "b4 h16 s4096 d128 bf16 forward"
FEW = "b1 h8 q128-k{} d128 bf16 causal/bottom-right forward"
MANY = "b1 h8 q2048-k{} d128 bf16 causal/bottom-right forward"


def tflops(plan: str) -> float:
    spec = row("facts", LONG, plan).spec
    products = 4 * spec.batch * spec.heads * spec.seqlen_q * spec.seqlen_kv * spec.head_dim
    return products / median_ms("facts", LONG, plan, "kernel") / 1e9


def error_of(spec: str, keys: int, plan: str, family: str = "biased-v") -> float:
    return row("keys", spec.format(keys), plan).error[family]["out"]


def normal_error_range(kernel: str) -> tuple[float, float]:
    entries: Sequence[Entry] = [
        entry
        for entry in figures.shipped().entries.values()
        if str(entry.plan) == kernel and entry.spec.direction == "forward" and "normal" in entry.errors
    ]
    errors = [entry.errors["normal"] for entry in entries]
    return min(errors), max(errors)


def time_changes_between_sweeps() -> list[float]:
    """Relative changes of a plan's median time on a spec from the first sweep to the second: 20-quantiles."""
    before, after = (
        {
            (each.spec, each.plan): statistics.median(each.time_ms["kernel"])
            for each in figures.rows(sweep)
            if each.time_ms
        }
        for sweep in ("facts", "inference")
    )
    changes = [after[key] / before[key] - 1 for key in before.keys() & after.keys()]
    return statistics.quantiles(changes, n=20, method="inclusive")


def largest_error_change() -> float:
    """The largest relative difference between sweeps of a plan's error on one spec, family and tensor."""
    seen: dict[tuple[object, ...], dict[str, float]] = {}
    for sweep in ("quick", "facts", "inference", "training", "step"):
        for each in figures.rows(sweep):
            for family, errors in each.error.items():
                for tensor, error in errors.items():
                    if 1e-6 < error < math.inf:  # the rounding of FP32
                        seen.setdefault((each.spec, each.plan, family, tensor), {})[sweep] = error
    return max(max(found.values()) / min(found.values()) - 1 for found in seen.values())


@cache
def detectable_slowdowns(sweep: str) -> list[float]:
    """The smallest slow-down that each row of a sweep could detect against an equal row."""
    rows = {each.key: each for each in figures.rows(sweep)}
    outcomes = compare_results(rows, rows, Terms()).outcomes
    return [each.visible for each in outcomes if each.visible is not None]


@cache
def memory_ratios() -> list[float]:
    """Ratios (at least 1) of the memory of a call between two sweeps, for each plan and case."""
    one, other = (
        {
            each.key: each.performance.memory_bytes
            for each in figures.rows(sweep)
            if each.measured and each.performance.memory_bytes
        }
        for sweep in ("inference", "inference-plans")
    )
    return [max(one[key] / other[key], other[key] / one[key]) for key in one.keys() & other.keys()]


def gate_power_figures(device: str) -> list[float]:
    """Figures of injected slow-downs: rows per run, runs, shortest and longest run, then found and all by size."""
    with gzip.open(ROOT / "results" / device / "gate" / "power.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    seconds = {each["run"]: round(each["run_seconds"]) for each in rows}
    figures_found = [len(rows) / len(seconds), len(seconds), min(seconds.values()), max(seconds.values())]
    for size in sorted({each["planted"] for each in rows if each["planted"]}):
        found = [each["verdict"] for each in rows if each["planted"] == size]
        assert set(found) <= {"slower", "open"}
        figures_found += [found.count("slower"), len(found)]
    others = [each["verdict"] for each in rows if not each["planted"]]
    return [*figures_found, others.count("slower"), len(others)]


def declared_error(kernel: str) -> float:
    return registry().forward(kernel).declared_error


@cache
def fresh_rows_of_an_h100() -> Table:
    """The measurements of fresh shapes."""
    files = sorted((ROOT / "results/nvidia-h100-80gb-hbm3/fresh").rglob("measurements.jsonl*"))
    return join_sweeps({str(file): list(read_measurements(file)) for file in files})


def fresh_on_an_h100(table: str) -> list[float]:
    """Geometric mean regret of choices by one shipped table alone, in per cent, without and with FP8."""
    truth = fresh_rows_of_an_h100()
    found = Table.load(ROOT / f"attnbench/tables/{table}.json")
    scores = fresh_scores(truth, Known.of(scaled(found, truth.environment) or found), registry())
    return [100 * each.geometric_mean for each in summary_of(scores)]


@cache
def ring() -> dict[tuple[str, int], dict[str, float]]:
    """``ms`` and the errors of each arm and length on the two H100s."""
    path = ROOT / "results" / "nvidia-h100-80gb-hbm3" / "ring" / "ring.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {(row["what"], row["length"]): {"ms": row["median_ms"], **row.get("error", {})} for row in rows}


def ring_speedups(slower: str, faster: str) -> list[float]:
    """The speed-up of one arm over another at 64k and 128k tokens."""
    return [ring()[slower, length]["ms"] / ring()[faster, length]["ms"] for length in (65536, 131072)]


def scaling_errors(*names: str) -> list[float]:
    """The time errors of scaling in per cent: between equal GPUs, and from the H200's table to each of these."""
    table = Table.load(ROOT / "attnbench/tables/nvidia-h200.json")
    moved = [scaled(table, replace(table.environment, device_name=name, power_cap_w=None)) for name in names]
    return [100 * scaling._EQUAL, *(100 * each.time_error for each in moved if each is not None)]


# Page, the sentence as a pattern with its figures as groups, and a function that returns their values.
HELD: list[tuple[str, str, Callable[[], Sequence[float]]]] = [
    (
        "backends/sdpa.md",
        r"(\d+) TFLOPS forward at 16k keys \(D = 128, bf16, no mask, H200\), where cuDNN reaches (\d+)\.",
        lambda: (tflops("sdpa-flash:bf16"), tflops("sdpa-cudnn:bf16")),
    ),
    (
        "backends/fa3.md",
        r"Declared error on normal inputs: ([\d.]+) \(([\d.]+) to ([\d.]+) was measured",
        lambda: (declared_error("fa3:fp8"), *normal_error_range("fa3:fp8")),
    ),
    (
        "backends/fa3.md",
        r"when V has a mean: ([\d.]+) at 64k keys and ([\d.]+) at 128k with a mean of 0.5, against ([\d.]+) on normal",
        lambda: (
            error_of(MANY, 65536, "fa3:fp8"),
            error_of(MANY, 131072, "fa3:fp8"),
            error_of(MANY, 65536, "fa3:fp8", "normal"),
        ),
    ),
    (
        "backends/fa3.md",
        r"on 64k keys take ([\d.]+) ms, where .* does not split, takes ([\d.]+)\. .* of 0.5 in V is ([\d.]+) and not "
        r"([\d.]+) \(",
        lambda: (
            median_ms("keys", FEW.format(65536), "fa3:fp8", "kernel"),
            median_ms("keys", FEW.format(65536), "flashinfer:fp8", "kernel"),
            error_of(FEW, 65536, "fa3:fp8"),
            error_of(FEW, 65536, "flashinfer:fp8"),
        ),
    ),
    (
        "backends/flex.md",
        r"Declared error on normal inputs: ([\d.]+) \(([\d.]+) to ([\d.]+) was measured",
        lambda: (declared_error("flex:fp8"), *normal_error_range("flex:fp8")),
    ),
    (
        "backends/flex.md",
        r"([\d.]+) ms for the kernel and ([\d.]+) ms for the whole call",
        lambda: (median_ms("facts", FACT, "flex:fp8", "kernel"), median_ms("facts", FACT, "flex:fp8", "call")),
    ),
    (
        "backends/emulated.md",
        r"Declared error on normal inputs: ([\d.]+) for O and ([\d.]+) for gradients in e4m3, ([\d.]+) and ([\d.]+) in",
        lambda: [
            kernel.declared_error
            for name in ("emulated:fp8", "emulated:fp8-e5m2")
            for kernel in (registry().forward(name), registry().backward(name))
        ],
    ),
    (
        "how-to/compare.md",
        r"of one kernel on one spec differ by −(\d+) % to \+(\d+) % \(the middle 90 %\)",
        lambda: (-100 * time_changes_between_sweeps()[0], 100 * time_changes_between_sweeps()[-1]),
    ),
    ("how-to/compare.md", r"at most (\d+) % apart", lambda: (100 * largest_error_change(),)),
    (
        "how-to/compare.md",
        r"a slow-down of ([\d.]+) % would have been found in the best row and of ([\d.]+) % in the median one",
        lambda: [100 * each(detectable_slowdowns("quick")) for each in (min, statistics.median)],
    ),
    (
        "how-to/compare.md",
        r"of (\d+) rows that two committed sets share none differs by more than ([\d.]+) %",
        lambda: (len(memory_ratios()), 100 * (max(memory_ratios()) - 1)),
    ),
    (
        "how-to/ci.md",
        r"an H200, (\d+) rows, limit 3 %, (\d+) runs of (\d+) to (\d+) s" + 4 * r"[ |]+(\d+) of (\d+)",
        lambda: gate_power_figures("nvidia-h200"),
    ),
    (
        "how-to/ci.md",
        r"two cores, (\d+) rows, limit 5 %, (\d+) runs of (\d+) to (\d+) s[ |]+not asked" + 3 * r"[ |]+(\d+) of (\d+)",
        lambda: gate_power_figures("amd-epyc"),
    ),
    (
        "tables.md",
        r"by the H200's table alone, scaled, cost ([\d.]+) % in 16 bits and ([\d.]+) % with FP8 in the geometric mean,"
        r" and those by the H100's own table alone ([\d.]+) % and ([\d.]+) %",
        lambda: fresh_on_an_h100("nvidia-h200") + fresh_on_an_h100("nvidia-h100-80gb-hbm3"),
    ),
    *(
        (
            "how-to/context-parallel.md",
            rf"\| {length:,} " + r"\| ([\d.]+) \| ([\d.]+) \| ([\d.]+); ([\d.]+) \| ([\d.]+); ([\d.]+) \|",
            lambda length=length: [
                ring()[arm, length]["ms"]
                for arm in (
                    "fp8, ring",
                    "bf16, ring",
                    "torch cudnn, ring",
                    "torch flash, ring",
                    "fp8, one",
                    "bf16, one",
                )
            ],
        )
        for length in (65536, 131072)
    ),
    (
        "how-to/context-parallel.md",
        r"is ([\d.]+) and ([\d.]+) times as fast as the 16-bit ring \(.*?\), and ([\d.]+) and ([\d.]+)"
        r" times as fast as torch's with cuDNN\. Two GPUs are ([\d.]+) and ([\d.]+) times as fast as one in FP8,"
        r" and ([\d.]+) and ([\d.]+) times in 16 bits",
        lambda: [
            *(ring_speedups("bf16, ring", "fp8, ring") + ring_speedups("torch cudnn, ring", "fp8, ring")),
            *(ring_speedups("fp8, one", "fp8, ring") + ring_speedups("bf16, one", "bf16, ring")),
        ],
    ),
    (
        "how-to/context-parallel.md",
        r"output is off by ([\d.]+), dQ and dK by ([\d.]+) and dV by ([\d.]+); the 16-bit ring's by at most ([\d.]+\d)",
        lambda: [
            *(ring()["fp8, ring", 131072][name] for name in ("out", "dq", "dv")),
            max(ring()["bf16, ring", length][name] for length in (65536, 131072) for name in ("out", "dq", "dk", "dv")),
        ],
    ),
    (
        "tables.md",
        r"one of (\d+) published[^|]* exceeds ([\d.]+) % in[^|]*\(([\d.]+) % with FP8\),\s+([\d.]+) % at"
        r"[^|]* or ([\d.]+) % at worst, if a rule decides more than ([\d.]+) %",
        lambda: (len(published_models()), *(100 * each for each in fresh_regret.BOUNDS)),
    ),
    ("tables.md", r"an error below ([\d.]+), which 8 bits", lambda: (table_entry._LEAST_FP8_ERROR,)),
    (
        "explanation/measuring.md",
        r"at most (\d+) % slower \(an FP8 plan: at most (\d+) %[^)]*\), until one is surely (\d+) %",
        lambda: [100 * (each - 1) for each in (race._MAY_WIN, race._FP8_MAY_WIN, device_sweep._BEATEN)],
    ),
    ("explanation/measuring.md", r"what is within (\d+) % of them", lambda: (100 * (race._ABOUT_AS_FAST - 1),)),
    (
        "tables.md",
        r"an error of (\d+) % for GPUs with equal rates, (\d+) % from an H200 to an H100, (\d+) % to an H100 PCIe\s+and"
        r"\s+(\d+) % to an H20",
        lambda: scaling_errors("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H20"),
    ),
    (
        "how-to/ci.md",
        r"every (\d+) ms into the row",
        lambda: (1000 * inspect.signature(Watch).parameters["every"].default,),
    ),
]
