"""The place of a case in the grid of winners: its row is a shape, its column a length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnbench.kernels.plan import Plan
from attnbench.problem.spec import AttentionSpec, Direction

from .machines import DIRECTIONS, Case, Machine

__all__ = ["Grid", "grids_of", "short"]


@dataclass(frozen=True)
class Grid:
    """The cases of one direction with as many queries as keys, or with fewer or more.

    ``cells`` maps (row, column) to cases: several if only the batch, the dtype or another detail differs.
    """

    direction: Direction
    square: bool
    rows: Sequence[str]
    columns: Sequence[str]
    cells: dict[tuple[str, str], list[Case]]

    @property
    def title(self) -> str:
        """What the cases have in common."""
        label = "Forward" if self.direction == "forward" else "Training, forward and backward"
        return label if self.square else f"{label}: queries × keys"


def grids_of(machine: Machine) -> list[Grid]:
    """Both directions, each with its square cases first."""
    found = []
    for direction in DIRECTIONS:
        for square in (True, False):
            cases = [case for case in machine.of(direction) if (case.spec.seqlen_q == case.spec.seqlen_kv) == square]
            if cases:
                found.append(_grid(direction, square, cases))
    return found


def _grid(direction: Direction, square: bool, cases: Sequence[Case]) -> Grid:
    by_row = sorted(cases, key=lambda case: _row_order(case.spec))
    by_column = sorted(cases, key=lambda case: (case.spec.seqlen_kv, case.spec.seqlen_q))
    cells: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        cells.setdefault((_row(case.spec), _column(case.spec)), []).append(case)
    rows = list(dict.fromkeys(_row(case.spec) for case in by_row))
    return Grid(direction, square, rows, list(dict.fromkeys(_column(case.spec) for case in by_column)), cells)


def _row_order(spec: AttentionSpec) -> tuple[object, ...]:
    return spec.head_dim, spec.head_dim_v, spec.group, -spec.heads, spec.mask.kind != "none", _row(spec)


def _row(spec: AttentionSpec) -> str:
    """The head size, the heads, the mask and the batch; 16/4 are 16 heads that share 4 of K and V."""
    size = f"d{spec.head_dim}" if spec.head_dim == spec.head_dim_v else f"d{spec.head_dim}/{spec.head_dim_v}"
    heads = f"h{spec.heads}" if spec.group == 1 else f"h{spec.heads}/{spec.kv_heads}"
    parts = [size, heads, "" if spec.mask.kind == "none" else str(spec.mask)]
    parts.append("" if spec.lengths is None else spec.lengths.batch)
    parts += [f"cap {spec.softcap:g}" if spec.softcap else "", "" if spec.dtype == "bf16" else spec.dtype]
    return " ".join(part for part in parts if part)


def _column(spec: AttentionSpec) -> str:
    if spec.seqlen_q == spec.seqlen_kv:
        return _length(spec.seqlen_q)
    return f"{_length(spec.seqlen_q)}×{_length(spec.seqlen_kv)}"


def _length(length: int) -> str:
    """4096 as 4k; other lengths in full."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def short(plan: Plan) -> str:
    """The plan's name; one kernel name for a plan that uses it in both passes."""
    return plan.forward if plan.forward == plan.backward else str(plan)
