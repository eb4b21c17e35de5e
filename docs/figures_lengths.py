"""The rows of the table in docs/how-to/lengths.md of who serves sequences of unequal length, from the kernels."""

from __future__ import annotations

from attnbench.kernels.capabilities import Capabilities
from attnbench.kernels.plan import backend_of
from attnbench.kernels.registry import registry
from attnbench.problem.lengths_kind import Batch

HEADERS = ("backend", "on", "precision", "packed", "padded", "NaN and infinity of a sequence")
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
