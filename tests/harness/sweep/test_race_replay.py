"""Races run again on committed rows of full sweeps: how often the plan that a full sweep found fastest is lost."""

from itertools import groupby
from statistics import median

from places import ROOT

from attnbench.harness.results.records import read_measurements
from attnbench.harness.results.store import measurements_file
from attnbench.harness.sweep.interleave import Samples
from attnbench.harness.sweep.race import LOOKED_AT, Race


def visit(row, number):
    """About one visit of a row as the samples of a look: 10 ms of each cost, 50 samples at most."""
    parts = {}
    for cost in LOOKED_AT:
        if cost in row.time_ms:
            taken = row.time_ms[cost]
            count = max(1, min(50, int(10 / median(taken))))
            parts[cost] = list(taken[number * count :][:count] or taken[-count:])
    return Samples(parts, spans=[(0.0, 1.0)])


def replayed(rows):
    """The race of one case, its looks the first visits of a full sweep."""
    race = Race(list(rows))
    while True:
        while unseen := race.unseen():
            race.looks |= {plan: visit(rows[plan], 0) for plan in unseen}
        for plan in race.doubtful():
            again = visit(rows[plan], 1)
            for cost, taken in again.time_ms.items():
                race.looks[plan].time_ms[cost] += taken
            race.looks[plan].spans += again.spans
        entrants = race.entrants()
        race.timed |= {plan: Samples({"call": list(rows[plan].time_ms["call"])}) for plan in entrants}
        finalists = race.finalists()
        if not (entrants or finalists):
            return race
        for plan in finalists:
            if rows[plan].status != "ok":
                race.leave(plan)


def test_a_race_of_what_was_measured_in_full_finds_the_same_winners():
    folders = [measurements_file(ROOT / "results/nvidia-h200" / name) for name in ("inference-plans", "training-plans")]
    measured = [row for folder in folders for row in read_measurements(folder) if row.measured]
    cases = {
        case: {row.plan: row for row in own}
        for case, own in groupby(sorted(measured, key=lambda row: row.case), key=lambda row: row.case)
    }
    losses, timed, looked, plans = [], 0, 0, 0
    for own in cases.values():
        race = replayed(own)
        timed, plans = timed + len(race.timed), plans + len(own)
        looked += sum(len(look.spans) for look in race.looks.values())
        for fp8 in (False, True):
            times = {plan: row.median_ms() for plan, row in own.items() if row.status == "ok" and (fp8 or not plan.fp8)}
            if times:
                losses.append(min(times[plan] for plan in race.judged & times.keys()) / min(times.values()) - 1)
    assert len(losses) > 150
    assert sum(loss > 0.01 for loss in losses) <= 0.02 * len(losses)
    assert max(losses) < 0.06
    assert timed < 0.3 * plans
    assert looked < 0.95 * plans  # the passes of some pairs say that they cannot win, and few are looked at twice
