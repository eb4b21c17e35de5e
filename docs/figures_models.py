"""The tables of docs/explanation/models.md, from rows of ``attnbench sweep --preset models`` in ``results/GPU/zoo``.

A layer of published models has one line: in each direction the fastest 16-bit plan, and the fastest plan with FP8.
Where a GPU has no rows, the tables say which of the plans that ran on another one ``auto`` takes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from attnbench.choosing.evidence import Evidence
from attnbench.choosing.regret import Asked, chosen_at, geometric_mean
from attnbench.choosing.regret_fixed import torch_default
from attnbench.harness.cases.models import model_layers
from attnbench.harness.results.records import Measurement, read_measurements
from attnbench.kernels.plan import Plan, backend_of
from attnbench.kernels.registry import Registry
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.user_table import Known, tables_for
from attnbench.text.printable import printable

NOT_MEASURED = "No GPU's rows are here yet; `attnbench sweep --preset models --out results/GPU/zoo` makes them."
_HEADERS = ("models", "heads", "D", "mask", "length", "forward, 16 bits", "FP8", "training, 16 bits", "FP8")
_SUMMARY = ("pass", "layers", "16 bits", '`dtype="fp8"`', "FP8 is faster", "16 bits are faster")
_MARKUP = re.compile(r"[\\`*_{}\[\]<>|#~&]")
_LONGEST_REASON = 120
_STATUSES = ("inaccurate", "slower", "refused")  # whose reasons are shown, the first that a layer has
_UNKNOWN = "not measured"
Rows = Mapping[Plan, Measurement]
Layers = Mapping[AttentionSpec, Sequence[str]]
Ran = Mapping[AttentionSpec, set[Plan]]  # the plans that ran on any GPU
Expected = Callable[[AttentionSpec, bool], str]  # the cell of a layer without rows, and whether FP8 is asked for


def model_tables(results: Path, known: Registry, device_type: str = "cuda") -> str:
    """A summary and a table for each GPU; a sentence with the command where there are no rows.

    Rows of layers that the preset does not have are left out; of a plan that was measured twice the newest row counts.
    Raises MalformedFileError for a file that holds anything but measurements.
    """
    layers = model_layers(device_type)
    devices = [_rows(gpu / "zoo", layers) for gpu in sorted(results.iterdir()) if (gpu / "zoo").is_dir()]
    ran = defaultdict[AttentionSpec, set[Plan]](set)
    for row in (row for rows in devices for row in rows if row.status in ("ok", "slower")):
        ran[row.spec].add(row.plan)
    return "\n\n".join(_of_device(rows, known, layers, ran) for rows in devices if rows) or NOT_MEASURED


def _rows(folder: Path, layers: Layers) -> list[Measurement]:
    """Those of the layers, the newest last."""
    rows = [
        row
        for file in sorted(folder.rglob("measurements*.jsonl*"))
        for row in read_measurements(file)
        if row.spec in layers and row.lengths is None
    ]
    return sorted(rows, key=lambda row: row.started)


def _of_device(rows: Sequence[Measurement], known: Registry, layers: Layers, ran: Ran) -> str:
    measured: dict[AttentionSpec, dict[Plan, Measurement]] = {spec: {} for spec in layers}
    for row in rows:
        measured[row.spec][row.plan] = row
    here = rows[-1].environment
    tables = tables_for(here)

    def expected(spec: AttentionSpec, fp8: bool) -> str:
        return _expected(spec, fp8, ran[spec], tables, known)

    lines = []
    for spec, names in layers.items():
        pair = [spec.replace(direction=direction) for direction in ("forward", "training")]
        if not spec.training and any(measured[each] or ran[each] for each in pair):
            cells = (cell for each in pair for cell in _cells(each, measured[each], known, expected))
            lines.append([*_layer(spec, names), *cells])
    device = f"### {_plain(here.device_name)}"
    facts = {"driver": here.driver, "CUDA": here.cuda, "torch": here.torch}
    versions = "With " + ", ".join(f"{name} {_plain(version)}" for name, version in facts.items() if version) + "."
    summary = [_summed(direction, measured, layers, known) for direction in ("forward", "training")]
    return "\n\n".join([device, versions, _table(_SUMMARY, summary), _table(_HEADERS, lines)])


def head_dims(spec: AttentionSpec) -> str:
    """The head dimension, with V's behind it where that is another."""
    return str(spec.head_dim) if spec.head_dim_v == spec.head_dim else f"{spec.head_dim} ({spec.head_dim_v})"


def _layer(spec: AttentionSpec, names: Sequence[str]) -> list[str]:
    heads = str(spec.heads) if spec.kv_heads == spec.heads else f"{spec.heads}/{spec.kv_heads}"
    kind = spec.mask.kind
    if spec.mask.left is not None:
        kind = f"window {spec.mask.left + 1}" if spec.mask.right == 0 else f"{spec.mask.left} around"
    if spec.softcap:
        kind += f", cap {spec.softcap:g}"
    return [", ".join(map(_plain, names)), heads, head_dims(spec), kind, f"{spec.seqlen_q:,}"]


def _cells(spec: AttentionSpec, rows: Rows, known: Registry, expected: Expected) -> tuple[str, str]:
    """The fastest 16-bit plan, and the fastest FP8 plan or why none serves."""
    default, exact, low = _default(rows, known), _fastest(rows, fp8=False), _fastest(rows, fp8=True)
    first = (_why_not(rows, fp8=False) or expected(spec, False)) if exact is None else _plan_cell(exact, default)
    if low is None:
        looked = [row for row in rows.values() if row.plan.fp8 and row.status == "slower" and "call" in row.time_ms]
        if not looked or exact is None:
            return first, _why_not(rows, fp8=True) or expected(spec, True)
        near = min(looked, key=Measurement.median_ms)
        return first, f"slower: `{near.plan}` {near.median_ms():.3g} ms at a first look"
    behind = exact is not None and exact.median_ms() <= low.median_ms()
    return first, f"slower: {_plan_cell(low, default)}" if behind else _plan_cell(low, default)


def _plan_cell(row: Measurement, default: Measurement | None) -> str:
    gain = "" if default is None else f", {default.median_ms() / row.median_ms():.2f}×"
    other = "" if default is None or _by_sdpa(default) else " FlexAttention"
    return f"`{row.plan}` {row.median_ms():.3g} ms{gain}{other}, {_error(row):.2g}"


def _by_sdpa(row: Measurement) -> bool:
    """Whether scaled_dot_product_attention runs the row's plan; otherwise FlexAttention does."""
    return backend_of(row.plan.forward) != "flex"


def _error(row: Measurement) -> float:
    return max(error for each in row.error.values() for name, error in each.items() if name != "lse")


def _fastest(rows: Rows, fp8: bool) -> Measurement | None:
    timed = [row for row in rows.values() if row.status == "ok" and row.plan.fp8 == fp8 and not row.emulated]
    return min(timed, key=Measurement.median_ms, default=None)


def _default(rows: Rows, known: Registry) -> Measurement | None:
    """The row of torch's default among the plans that were timed."""
    timed = [plan for plan, row in rows.items() if "call" in row.time_ms and row.status != "inaccurate"]
    first = torch_default(timed, known)
    return None if first is None else rows[first]


def _why_not(rows: Rows, fp8: bool) -> str:
    """Why no such plan has a time: the first sentence of the shortest reason, by the order of ``_STATUSES``.

    Empty where nothing was run.
    """
    own = [row for row in rows.values() if row.plan.fp8 == fp8 and row.status != "ok"]
    first = next((found for status in _STATUSES if (found := [row for row in own if row.status == status])), own)
    reasons = dict.fromkeys(f"{row.status}: {row.reason}" for row in first)
    return _plain(min(reasons, key=len).partition("; ")[0][:_LONGEST_REASON]) if reasons else ""


def _expected(spec: AttentionSpec, fp8: bool, plans: set[Plan], tables: Known, known: Registry) -> str:
    """Which of the plans ``auto`` takes by the tables, and the time that they predict."""
    found = chosen_at(spec, sorted(plans, key=str), Evidence(spec, tables), Asked(fp8), known)
    if found is None or found[0].time_ms is None:
        return _UNKNOWN
    plan = found[0].plan
    return f"expected: `{plan}` {found[0].time_ms:.3g} ms" if plan.fp8 == fp8 else "expected: 16 bits"


def _summed(
    direction: str,
    measured: Mapping[AttentionSpec, Rows],
    layers: Layers,
    known: Registry,
) -> list[str]:
    """A line of the summary: gains over torch's default, geometric mean, least and most, and which pays where.

    Layers whose plans with FP8 nobody looked at are not counted.
    """
    exact_gains, best_gains, losses = list[float](), list[float](), list[str]()
    count = wins = 0
    for spec, rows in measured.items():
        default, exact, low = _default(rows, known), _fastest(rows, fp8=False), _fastest(rows, fp8=True)
        if spec.direction != direction or exact is None or not any(plan.fp8 for plan in rows):
            continue
        count += 1
        faster = low is not None and low.median_ms() < exact.median_ms()
        if faster:
            wins += 1
        else:
            losses.append(layers[spec][0] + ("" if spec.mask.left is None else " (window)"))
        if default is not None:
            exact_gains.append(default.median_ms() / exact.median_ms())
            best_gains.append(default.median_ms() / (low if faster and low else exact).median_ms())
    losing_layers = ", ".join(map(_plain, losses)) or "nowhere"
    return [direction, str(count), _gains(exact_gains), _gains(best_gains), f"{wins} of {count}", losing_layers]


def _gains(gains: Sequence[float]) -> str:
    return f"{geometric_mean(gains):.2f}×, {min(gains):.2f}× to {max(gains):.2f}×" if gains else _UNKNOWN


def _plain(text: str) -> str:
    """Text for a cell: no line ends, and markup as character references, which every reader of Markdown knows."""
    return _MARKUP.sub(lambda char: f"&#{ord(char[0])};", printable(text))


def _table(headers: Iterable[str], lines: Sequence[Sequence[str]]) -> str:
    heads = list(headers)
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *lines))
