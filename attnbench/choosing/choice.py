"""The plan chosen for a spec, with every candidate and why it lost, as data and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..kernels.plan import Plan
from ..problem.spec import AttentionSpec
from ..text.digits import three_digits
from ..text.printable import printable
from .candidate import ORDER, Candidate, CandidateVerdict, Margin, Trade

__all__ = ["Choice"]

_COLUMNS = ("plan", "verdict", "call ms", "error", "basis", "why not")
_WIDTH = 70  # of the reasons on a terminal
_CANNOT_RUN: tuple[CandidateVerdict, ...] = ("refused", "unavailable")


@dataclass(frozen=True)
class Choice:
    """What ``attention`` runs for ``spec`` on ``device``, and the candidates it was chosen from.

    ``asked`` is the backend that was asked for, ``asked_by`` its source (``argument``, ``context``,
    ``ATTNBENCH_BACKEND`` or ``default``).  ``budget`` is the largest accepted error, None if a backend or plan was
    named without ``max_error``.  ``basis`` is what decided: ``measured``, ``predicted``, ``scaled``,
    ``rule``, ``explicit``, or ``frozen`` in the file ``frozen_in``.  ``margin`` is the lead over the runner-up, None if
    fewer than two plans have a time; ``trades`` are what other budgets would choose, the tightest first; ``hint`` is
    how to get a better choice.
    """

    spec: AttentionSpec
    device: str
    plan: Plan
    budget: float | None
    basis: Literal["measured", "predicted", "scaled", "rule", "explicit", "frozen"]
    candidates: tuple[Candidate, ...]
    asked: str = "auto"
    asked_by: str = "default"
    hint: str | None = None
    margin: Margin | None = None
    trades: tuple[Trade, ...] = ()
    frozen_in: str | None = None

    @property
    def chosen(self) -> Candidate:
        """The candidate that won."""
        return next(each for each in self.candidates if each.plan == self.plan)

    @property
    def ranked(self) -> list[Candidate]:
        """The candidates, the chosen one first, then by verdict and time."""

        def rank(each: Candidate) -> tuple[int, float, str]:
            time = float("inf") if each.time_ms is None else each.time_ms
            return ORDER.index(each.verdict), time, str(each.plan)

        return sorted(self.candidates, key=rank)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "spec": self.spec.to_dict(),
            "device": self.device,
            "plan": str(self.plan),
            "budget": self.budget,
            "basis": self.basis,
            "frozen_in": self.frozen_in,
            "asked": self.asked,
            "asked_by": self.asked_by,
            "hint": self.hint,
            "margin": None if self.margin is None else self.margin.to_dict(),
            "trades": [each.to_dict() for each in self.trades],
            "candidates": [each.to_dict() for each in self.ranked],
        }

    def to_text(self, *, all: bool = False) -> str:
        """The choice and a table of the plans that could run here, for a terminal; ``all`` adds the others."""
        return _text(self, "simple", all)

    def to_markdown(self, *, all: bool = False) -> str:
        """The same for a pull request."""
        return _text(self, "github", all)

    def __str__(self) -> str:
        return self.to_text()


def _text(choice: Choice, style: Literal["simple", "github"], all_plans: bool) -> str:
    """The choice as text or Markdown, without control characters; plans that cannot run need ``all_plans``."""
    from tabulate import tabulate  # attention() imports this module, and prints nothing

    cell = _markdown if style == "github" else printable
    shown = [each for each in choice.ranked if all_plans or each.verdict not in _CANNOT_RUN]
    rows = [[cell(each) for each in _row(candidate)] for candidate in shown]
    widths = [*[None] * (len(_COLUMNS) - 1), _WIDTH if style == "simple" else None]
    table = tabulate(rows, _COLUMNS, tablefmt=style, maxcolwidths=widths, disable_numparse=True)
    before = [printable(line) for line in _head(choice)]
    after = [printable(line) for line in (*([] if all_plans else _left_out(choice)), *_tail(choice))]
    if style == "github":  # a line alone would be joined to the next one
        before, after = ["- " + line for line in before], ["- " + line for line in after]
    return "\n".join([*before, "", table, *(["", *after] if after else [])])


def _head(choice: Choice) -> Iterator[str]:
    basis = f"asked for by {choice.asked_by}" if choice.basis == "explicit" else f"by {_basis(choice)}"
    yield f"{choice.spec} on {choice.device}"
    budget = "" if choice.budget is None else f", error budget {choice.budget:g}"
    yield f"plan {choice.plan} ({basis}){budget}"
    margin = choice.margin
    if margin is not None:
        lead = f"{margin.gap:.1%} ahead of" if margin.gap >= 0 else f"{-margin.gap:.1%} behind"
        meaning = "inside" if margin.inside_noise else "beyond"
        kind = "noise" if choice.chosen.basis == "measured" else "error of the prediction"
        yield f"{lead} {margin.runner_up}, {meaning} the {kind} of {margin.noise:.1%}"


def _basis(choice: Choice) -> str:
    if choice.basis == "predicted":
        return "prediction from measured neighbours"
    if choice.basis == "scaled":
        return f"prediction scaled from {choice.chosen.scaled_from}"
    if choice.basis == "frozen":
        return f"the choices frozen in {choice.frozen_in}"
    return {"measured": "measurement"}.get(choice.basis, choice.basis)


def _left_out(choice: Choice) -> Iterator[str]:
    """How many plans cannot run here, and how to see them with their reasons."""
    verdicts = [each.verdict for each in choice.candidates]
    counts = [f"{number} {verdict}" for verdict in _CANNOT_RUN if (number := verdicts.count(verdict))]
    if counts:
        plans = "plan" if counts[0].startswith("1 ") and len(counts) == 1 else "plans"
        yield f"not shown: {' and '.join(counts)} {plans}; `attnbench explain --all` or `to_text(all=True)` says why"


def _tail(choice: Choice) -> Iterator[str]:
    for trade in choice.trades:
        if trade.change < 0:
            effect = f"allow {trade.plan} and save {-trade.change:.0%}"
        elif trade.change < 1:
            effect = f"choose {trade.plan} and cost {trade.change:.0%}"
        else:
            effect = f"choose {trade.plan} and take {1 + trade.change:.1f} times as long"
        instead = "" if trade.max_error == choice.budget else f" instead of {choice.budget:g}"
        yield f"max_error={trade.max_error:g}{instead} would {effect}"
    if choice.hint:
        yield f"hint: {choice.hint}"


def _row(each: Candidate) -> tuple[str, ...]:
    return (
        str(each.plan),
        each.verdict,
        "" if each.time_ms is None else f"{three_digits(each.time_ms)}{_doubt(each)}",
        _error(each),
        each.basis if each.time_ms is not None else "",
        "; ".join(each.reasons),
    )


def _error(each: Candidate) -> str:
    """The worst error seen and the input family, or what the kernels declare."""
    if each.error is not None:
        declared = "" if each.declared_beyond is None else f", declared beyond {each.declared_beyond} keys"
        return f"{each.error:.2g} ({each.family}{declared})"
    return "" if each.needs is None else f"{each.needs:.2g} (declared)"


def _doubt(each: Candidate) -> str:
    """How well the time is known: half the interquartile range, or the standard error of a prediction."""
    assert each.time_ms, "asked only of plans with a time"
    if each.spread_ms is not None:
        return f" ± {each.spread_ms / each.time_ms / 2:.0%}"
    return "" if each.time_error is None else f" ± {each.time_error:.0%}"


def _markdown(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
