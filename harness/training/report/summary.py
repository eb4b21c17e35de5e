"""The report of training runs: a verdict on each candidate, a table of all arms, and price-performance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from ...formatting import Style, change, escape, heading, number, prose, size
from ...results.visits import groups
from ...statistics import Noise, compare, median_interval
from ..judge.arms import Arm, arms_of, compare_arms, scaling_efficiency, title_of
from ..judge.learning import RULES, Learning
from ..judge.power import seeds_lacking
from ..rows import Share, TrainingRun
from .price import Offer, side_by_side

__all__ = ["offers_of", "report"]

_GROUPS = 10  # of consecutive steps, which are compared because neighbouring steps are alike
_NOISE = Noise(run=0.005)  # of two runs, one after the other
_LARGE = 1e4  # a loss that needs no fourth decimal
_HOST_BOUND = 0.8  # of a step: a GPU with less work than this waits for its host
_LEGEND = (
    "Step times are medians after the warm-up, with the 95% interval of the median. Attention is its measured share of "
    "what the device did in a step, forward and backward. MFU is over the device's bf16 peak. The loss is the mean of "
    "the last fifth of the steps and of the seeds; the gap is relative to the baseline's, seed by seed."
)


def report(runs: Sequence[TrainingRun], style: Style) -> str:
    """The runs of one folder or several, for a terminal or as Markdown."""
    arms = arms_of(runs)
    if not arms:
        return "No runs."
    found = compare_arms(arms)
    verdicts = [_verdict(arm, baseline, learning, style) for arm, baseline, learning in found]
    parts = [heading(escape(title_of(arms), style), style)]
    parts.append(prose(verdicts, style, bullets=len(verdicts) > 1) if verdicts else "")
    parts.append(_table(arms, {arm.label: learning for arm, _, learning in found}, style))
    parts.append(_remarks(arms, style))
    parts.append(_prices(arms, style))
    parts.append(prose([_LEGEND], style))
    if verdicts:
        rules = [f"{verdict}: {rule}." for verdict, rule in RULES]
        parts.append(prose(["The verdict is the first of these that holds.", *rules], style))
    return "\n\n".join(part for part in parts if part)


def offers_of(arms: Sequence[Arm]) -> list[Offer]:
    """The arms that have a price and a step time."""
    return [
        Offer(arm.label, arm.median_ms, arm.first.units_per_step, arm.first.price_per_hour)
        for arm in arms
        if arm.median_ms is not None and arm.first.price_per_hour is not None
    ]


def _verdict(arm: Arm, baseline: Arm, learning: Learning, style: Style) -> str:
    text = f"{escape(arm.label, style)} against {escape(baseline.label, style)}: "
    text += f"**{learning.verdict}**" if style == "markdown" else learning.verdict.upper()
    text += f", {escape(learning.reason, style)} ({learning.pairs} {'seed' if learning.pairs == 1 else 'seeds'})."
    if lacking := seeds_lacking(learning):
        text += f" If it loses nothing, {lacking} seeds that scatter like these show it in 9 of 10 cases."
    text += _speed(arm, baseline)
    if learning.gradient_ratio is not None and not math.isclose(learning.gradient_ratio, 1, abs_tol=0.1):
        text += f" Its gradient norm is {number(learning.gradient_ratio)} times the baseline's in the median step."
    if learning.spikes[0] > learning.spikes[1]:
        text += f" Its loss spiked {learning.spikes[0]} times, the baseline's {learning.spikes[1]} times."
    return text


def _speed(arm: Arm, baseline: Arm) -> str:
    """A sentence that says which is faster, if the step times are significant."""
    if not (arm.samples_ms and baseline.samples_ms):
        return ""
    ours, theirs = (groups(each.samples_ms, -(-len(each.samples_ms) // _GROUPS)) for each in (arm, baseline))
    found = compare(theirs, ours, noise=_NOISE)
    if found.verdict == "uncertain":
        return " The step times are too few or too uneven to say which is faster."
    if found.verdict == "same":
        return " Its steps take as long as the baseline's."
    return f" Its steps take {found.ratio:.2f} times as long as the baseline's: it trains {found.verdict}."


def _table(arms: Sequence[Arm], learnings: Mapping[str, Learning], style: Style) -> str:
    units = arms[0].first.units if len({arm.first.units for arm in arms}) == 1 else "units"
    rows = []
    for arm in arms:
        learning = None if arm.baseline else learnings.get(arm.label)
        scaling = scaling_efficiency(arm, arms)
        rows.append(
            {
                "attention": escape(arm.label, style),
                "seeds": str(len(arm.runs)),
                f"{units}/s": _or_dash(arm.units_per_second, number),
                "step ms": _step(arm),
                "share": _or_dash(arm.attention_share, "{:.1%}".format),
                "MFU": _or_dash(arm.mfu, "{:.1%}".format),
                "memory": _or_dash(arm.memory_bytes, size),
                "scaling": _or_dash(scaling, "{:.1%}".format),
                "loss": _or_dash(arm.end, _loss),
                "gap": "baseline" if arm.baseline else _or_dash(learning and learning.gap, change),
            }
        )
    columns = [name for name in rows[0] if any(row[name] != "–" for row in rows)]
    cells = [{name: row[name] for name in columns} for row in rows]
    form = "github" if style == "markdown" else "simple"
    return tabulate(cells, headers="keys", tablefmt=form, disable_numparse=True)


def _step(arm: Arm) -> str:
    if not arm.samples_ms:
        return "–"
    low, middle, high = median_interval(arm.samples_ms)
    return f"{number(middle)} ?" if math.isinf(high) else f"{number(middle)} ({number(low)}–{number(high)})"


def _remarks(arms: Sequence[Arm], style: Style) -> str:
    remarks = []
    for arm in arms:
        label = escape(arm.label, style)
        for run in arm.runs:
            if run.status != "ok":
                remarks.append(f"{label}, seed {run.seed}: {run.status}, {escape(run.reason or '', style)}.")
            if run.resumed_at:
                remarks.append(f"{label}, seed {run.seed}: resumed at step {', '.join(map(str, run.resumed_at))}.")
        plans = dict.fromkeys(escape(plan, style) for run in arm.runs for plan in run.plans)
        if plans and list(plans) != [label]:
            remarks.append(f"{label}: attention ran {', '.join(plans)}.")
        if share := arm.attention:
            times = f"{number(share.forward_ms)} ms forward and {number(share.backward_ms)} ms backward"
            remarks.append(
                f"{label}: attention takes {times} of {number(share.busy_ms)} ms that the device works in a step."
            )
            if waits := _waiting(arm, share):
                remarks.append(f"{label}: {waits}")
        if signs := [sign for run in arm.runs for sign in run.signs]:
            worst_q, worst_k = (max(getattr(sign, name) for sign in signs) for name in ("kurtosis_q", "kurtosis_k"))
            lost = ", ".join(
                f"{max(sign.ds_underflow[form] for sign in signs):.1%} in {form}" for form in signs[0].ds_underflow
            )
            if checks := sum(sign.checks for sign in signs):
                remarks.append(
                    f"{label}: a guard found {sum(sign.breaches for sign in signs)} breaches in {checks} checks."
                )
            kurtosis = f"kurtosis at most {number(worst_q)} of Q and {number(worst_k)} of K (3 is normal)"
            remarks.append(f"{label}: {kurtosis}{f'; of dS at most {lost} would underflow' if lost else ''}.")
    return prose(remarks, style, bullets=True) if remarks else ""


def _waiting(arm: Arm, share: Share) -> str | None:
    """A remark if the host cannot launch as fast as the GPU works."""
    if arm.first.environment.device_type != "cuda" or arm.median_ms is None:
        return None
    worked = share.busy_ms / arm.median_ms
    if worked >= _HOST_BOUND:
        return None
    remark = f"a step takes {number(arm.median_ms)} ms, so the device waits for its host in {1 - worked:.0%} of it"
    return f"{remark}; faster kernels would change that little."


def _prices(arms: Sequence[Arm], style: Style) -> str:
    offers = offers_of(arms)
    if not offers:
        return ""
    rows = [
        {
            "price-performance": escape(each.offer.label, style),
            "step s": f"{each.offer.step_ms / 1e3:.3g}",
            "a step": str(each.offer.units_per_step),
            "per s": number(each.offer.units_per_second),
            "price/h": f"{each.offer.price_per_hour:.2f}",
            "per price unit": number(each.offer.units_per_price),
            "speed": f"{each.faster:+.0%}",
            "value": f"{each.better:+.0%}",
        }
        for each in side_by_side(offers)
    ]
    form = "github" if style == "markdown" else "simple"
    return tabulate(rows, headers="keys", tablefmt=form, disable_numparse=True)


def _loss(value: float) -> str:
    return f"{value:.4f}" if abs(value) < _LARGE else number(value)


def _or_dash(value: object, form: object) -> str:
    return "–" if value is None or not callable(form) else str(form(value))
