"""The tables of docs/how-to/lengths.md: who serves sequences of unequal length, and what each layout costs."""

from __future__ import annotations

from pathlib import Path

from figures_models import head_dims

from attnbench.harness.formatting import number
from attnbench.harness.report.alternatives import sequences_key
from attnbench.harness.report.sentences import fastest
from attnbench.harness.results.records import Measurement, read_measurements
from attnbench.harness.results.store import measurements_file
from attnbench.kernels.capabilities import Capabilities
from attnbench.kernels.plan import backend_of
from attnbench.kernels.registry import registry
from attnbench.problem.lengths_kind import Batch

HEADERS = ("backend", "on", "precision", "packed", "padded", "NaN and infinity of a sequence")
LAYOUT_HEADERS = (
    "GPU",
    "lengths",
    "heads",
    "D",
    "direction",
    "packed, 16 bits",
    "packed, FP8",
    "times as fast",
    "padded rows with lengths",
    "padding computed",
)
_PADDED: tuple[Batch, ...] = ("padded", "left-padded")
_DEVICES = {"cpu": "CPU", "cuda": "CUDA"}


def lengths_rows() -> list[list[str]]:
    """A row for each backend that serves some such batch, and for each device where it serves others."""
    known = registry()
    kernels = [known.forward(name) for name in known.forwards], [known.backward(name) for name in known.backwards]
    rows = []
    for backend in sorted({backend_of(name) for name in known.forwards}):
        by_device: dict[tuple[str, ...], list[str]] = {}
        for device, title in _DEVICES.items():
            forwards, backwards = (
                {each.name: each.rows[device] for each in of_pass
                 if backend_of(each.name) == backend and device in each.rows and each.rows[device].lengths}
                for of_pass in kernels
            )  # fmt: skip
            if forwards or backwards:
                by_device.setdefault(_cells(forwards, backwards), []).append(title)
        rows += [[f"`{backend}`", ", ".join(titles), *cells] for cells, titles in by_device.items()]
    return rows


def _cells(forwards: dict[str, Capabilities], backwards: dict[str, Capabilities]) -> tuple[str, ...]:
    """From the precision on, of kernels by name."""
    # All recipes of FP8 are one precision here.
    precisions = dict.fromkeys(name.partition(":")[2].partition("-")[0] for name in sorted({*forwards, *backwards}))
    isolates = all(each.isolates for each in (*forwards.values(), *backwards.values()))
    return (
        ", ".join("FP8" if each == "fp8" else each for each in precisions),
        _passes(forwards, backwards, ("packed",)),
        _passes(forwards, backwards, _PADDED),
        "stay in it" if isolates else "reach others",
    )


def _passes(forwards: dict[str, Capabilities], backwards: dict[str, Capabilities], batches: tuple[Batch, ...]) -> str:
    forward, backward = (
        any(set(batches) <= set(each.lengths) for each in rows.values()) for rows in (forwards, backwards)
    )
    if forward and backward:
        return "both passes"
    return "forward" if forward else "backward" if backward else "no"


def layout_rows(results: Path) -> list[list[str]]:
    """What the same sequences cost in each layout, by its fastest accurate plan, in milliseconds a call; of every GPU
    with rows of the presets ``packed`` and ``padded`` in folders of these names.
    """
    rows = []
    for folder in sorted((*results.glob("*/packed"), *results.glob("*/padded"))):
        same: dict[object, dict[str, list[Measurement]]] = {}
        for row in read_measurements(measurements_file(folder)):
            if row.lengths is not None:
                layouts = same.setdefault(sequences_key(row.spec, row.lengths), {})
                layouts.setdefault(row.lengths.layout, []).append(row)
        rows += [_costs(layouts) for layouts in same.values() if "packed" in layouts]
    return rows


def _costs(layouts: dict[str, list[Measurement]]) -> list[str]:
    spec, lengths = layouts["packed"][0].spec, layouts["packed"][0].lengths
    drawn = None if lengths is None else lengths.drawn
    assert drawn is not None, "a preset's are drawn"
    documents = f"{drawn.distribution}, {'to' if drawn.mean is None else 'mean'} {drawn.mean or drawn.longest:,.0f}"
    heads = f"{spec.heads}" if spec.heads == spec.kv_heads else f"{spec.heads} over {spec.kv_heads}"
    exact, narrow = (_best(layouts["packed"], fp8) for fp8 in (False, True))
    ratio = number(exact.median_ms() / narrow.median_ms()) if exact and narrow else ""
    padded = _best([*layouts.get("padded", []), *layouts.get("left-padded", [])])
    others = [_ms(exact), _ms(narrow), ratio, _ms(padded), _ms(_best(layouts.get("dense", [])))]
    gpu = layouts["packed"][0].environment.device_name.removeprefix("NVIDIA ").partition(" ")[0]
    return [gpu, documents, heads, head_dims(spec), spec.direction, *others]


def _best(rows: list[Measurement], fp8: bool | None = None) -> Measurement | None:
    return next(iter(fastest(row for row in rows if fp8 in (None, row.plan.fp8))), None)


def _ms(row: Measurement | None) -> str:
    return "" if row is None else f"{number(row.median_ms())} ms, `{row.plan}`"
