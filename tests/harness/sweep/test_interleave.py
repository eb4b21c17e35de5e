"""The order of visits and their end, with a clock that goes only where it is told to."""

import statistics
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import CPU

from attnbench.harness.measure.findings import Visit
from attnbench.harness.measure.timing import Timer
from attnbench.harness.statistics import median_interval
from attnbench.harness.sweep.interleave import Samples, interleave
from attnbench.kernels.plan import Plan
from examples import examples

TIMER = Timer(CPU, visit=0.01, limit=0.4, patience=0.05, fewest=3)
A_VISIT = 5  # samples; the fewest that have an interval of their median


def plans(count):
    return [Plan.parse(f"x:bf16-{number}") for number in range(count)]


class Device:
    """A call takes its plan's milliseconds times ``noise(sample number)`` times ``drift(seconds since the start)``."""

    def __init__(self, ms, seconds=None, noise=lambda number: 1.0, drift=lambda now: 1.0):
        self.ms, self.seconds, self.noise, self.drift = ms, seconds or {}, noise, drift
        self.now, self.lost_at, self.visits = 0.0, {}, []

    def visit(self, plan):
        self.visits.append(plan)
        if self.visits.count(plan) == self.lost_at.get(plan):
            return None
        start, taken = self.now, []
        seen = self.visits.count(plan) * A_VISIT
        for number in range(seen, seen + A_VISIT):
            taken.append(self.ms[plan] * self.noise(number) * self.drift(self.now))
            self.now += taken[-1] / 1e3
        self.now = max(self.now, start + self.seconds.get(plan, 0.0))
        return Visit({"call": taken}, taken, (start, self.now), (), 0.0)


def noisy(number):
    return 1.0 + 0.3 * (number % 2)


def run(device, timer=TIMER, seed="case", steady=lambda: True):
    return interleave(list(device.ms), device.visit, timer, seed, steady)


counts = st.integers(1, 7)
seeds = st.text(max_size=20)
long = settings(max_examples=examples(6, 200))  # thousands of simulated visits each


@given(counts, seeds)
@long
def test_plans_go_forwards_then_backwards_until_the_last_has_enough(count, seed):
    device = Device(dict.fromkeys(plans(count), 2.0), noise=noisy)
    samples = run(device, seed=seed)
    order = device.visits[:count]
    assert set(order) == set(device.ms) == set(samples)
    turn = [*order, *order[::-1]]
    assert len(device.visits) > 4 * count
    full = device.visits[: len(device.visits) // len(turn) * len(turn)]
    assert full == turn * (len(full) // len(turn))


def test_the_order_is_that_of_the_seed_and_no_plan_always_leads():
    leaders, orders = Counter(), set()
    for number in range(120):
        devices = [Device(dict.fromkeys(plans(3), 2.0)) for _ in range(2)]
        for device in devices:
            run(device, seed=f"case {number}")
        first, again = (device.visits for device in devices)
        assert first == again
        leaders[first[0]] += 1
        orders.add(tuple(first[:3]))
    assert len(orders) == 6
    assert min(leaders.values()) > 24


@given(st.lists(st.sampled_from([None, 1, 2, 3, 4]), min_size=1, max_size=6), seeds, st.booleans())
def test_a_lost_plan_is_not_visited_again_and_costs_no_other_its_samples(lost_at, seed, cold):
    chosen = plans(len(lost_at))
    device = Device(dict.fromkeys(chosen, 2.0), noise=noisy)
    device.lost_at = {plan: at for plan, at in zip(chosen, lost_at, strict=True) if at is not None}
    samples = run(device, seed=seed, steady=lambda: not cold)
    assert set(samples) == set(chosen) - set(device.lost_at)
    visits = Counter(device.visits)
    for plan, at in device.lost_at.items():
        assert visits[plan] == at
    for plan in samples:
        assert samples[plan].enough(TIMER)


@given(counts, st.integers(1, 9), seeds)
def test_samples_that_agree_end_after_the_fewest_visits(count, fewest, seed):
    timer = Timer(CPU, visit=0.01, limit=1e9, patience=0.05, fewest=fewest)
    device = Device(dict.fromkeys(plans(count), 2.0))
    samples = run(device, timer, seed)
    for plan, each in samples.items():
        # Turns come in pairs, because only a pair cancels drift.
        assert len(each.spans) == device.visits.count(plan) == fewest + fewest % 2


def test_visits_that_do_not_agree_are_not_enough_however_alike_their_samples_are():
    for medians, enough in ([1.0] * 9, True), ([1.0] * 5 + [0.8, 0.8, 1.2, 1.2], False):
        samples = Samples()
        for number, ms in enumerate(medians):
            samples.add(Visit({"call": [ms] * A_VISIT}, [], (number, number + 0.001), (), 0.0))
        assert median_interval(samples.time_ms["call"])[::2] == (1.0, 1.0)
        assert samples.enough(TIMER) == enough


def test_replays_are_never_mixed_with_calls_and_the_rest_adds_up():
    samples = Samples()
    for start, replayed in enumerate([(), (), ("kernel",), ("kernel",)]):
        samples.add(
            Visit({"kernel": [1.0 + start], "call": [9.0]}, [8.0], (start, start + 0.5), replayed, 1.0 + abs(2 - start))
        )
    assert samples.time_ms == {"kernel": [3.0, 4.0], "call": [9.0] * 4}
    assert samples.visits == {"kernel": [1, 1], "call": [1] * 4}
    assert (samples.host_ms, samples.seconds, samples.late_ms, samples.replayed) == ([8.0] * 4, 2.0, 1.0, ("kernel",))


@given(st.lists(st.floats(0.001, 0.3), min_size=1, max_size=5), st.floats(0.01, 1.0), seeds)
@long
def test_noise_ends_at_the_limit_and_not_long_before(seconds, limit, seed):
    timer = Timer(CPU, visit=0.01, limit=limit, patience=0.05)
    chosen = plans(len(seconds))
    device = Device(dict.fromkeys(chosen, 0.01), dict(zip(chosen, seconds, strict=True)), noisy)
    for plan, each in run(device, timer, seed).items():
        last = each.spans[-1][1] - each.spans[-1][0]
        assert each.seconds == pytest.approx(sum(stop - start for start, stop in each.spans))
        assert each.seconds > limit
        assert each.seconds - last <= limit * (1 if len(each.spans) > 3 else 2) + 1e-9
        assert len(each.spans) == device.visits.count(plan)


@given(seeds)
@long
def test_one_visit_that_was_held_up_does_not_decide(seed):
    """A host that stalls for a while takes the time of two visits; the median of two would be half the stall."""
    slow, quick = plans(2)
    seconds = {slow: 0.4 * TIMER.limit, quick: 0.01}
    device = Device({slow: 2.0, quick: 1.0}, seconds, noise=lambda number: 1.0)
    visit, stalled = device.visit, []

    def stalling(plan):
        found = visit(plan)
        if plan == slow and not stalled:
            stalled.append(plan)
            start, stop = found.span
            device.now += 0.8 * TIMER.limit
            return Visit({"call": [200.0]}, [200.0], (start, stop + 0.8 * TIMER.limit), (), 0.0)
        return Visit({"call": found.time_ms["call"][:1]}, found.host_ms[:1], found.span, (), 0.0)

    samples = interleave([slow, quick], stalling, TIMER, seed, lambda: True)
    assert statistics.median(samples[slow].time_ms["call"]) == 2.0


@given(st.floats(1.8, 10), seeds)
@long
def test_what_is_slower_for_certain_is_not_measured_more_closely(ratio, seed):
    fast, beaten, close = plans(3)
    timer = Timer(CPU, visit=0.01, limit=2.0, patience=0.05, fewest=4, narrow=1e-6)
    device = Device({fast: 1.0, beaten: ratio, close: 1.1}, dict.fromkeys((fast, beaten, close), 0.01), noisy)
    samples = run(device, timer, seed)
    assert 2 <= len(samples[beaten].spans) < len(samples[fast].spans) / 3
    assert abs(len(samples[close].spans) - len(samples[fast].spans)) <= 2
    again = Device(device.ms, device.seconds, noisy)
    samples = interleave(list(again.ms), again.visit, timer, seed, lambda: True, required=[beaten])
    assert samples[beaten].over(timer)


@given(seeds)
@long
def test_few_samples_of_a_slow_plan_are_not_enough_to_pass_over_it(seed):
    """One a visit: two of them would give a median that one held-up sample moves."""
    fast, slow = plans(2)
    device = Device({fast: 1.0, slow: 30.0})

    def single(plan):
        found = device.visit(plan)
        return replace(found, time_ms={"call": found.time_ms["call"][:1]}) if plan == slow else found

    samples = interleave([fast, slow], single, TIMER, seed, lambda: True)
    assert len(samples[slow].spans) >= 3


def test_samples_taken_while_the_device_warms_are_thrown_away():
    device = Device(dict.fromkeys(plans(2), 2.0), drift=lambda now: 1.0 if now > 0.1 else 5.0)
    samples = run(device, steady=lambda: device.now > 0.1)
    assert device.now > 0.1
    for plan, each in samples.items():
        assert set(each.time_ms["call"]) == {2.0}
        assert device.visits.count(plan) > len(each.spans)
        assert all(start > 0.1 for start, _ in each.spans)


@given(seeds)
@long
def test_a_brief_plan_has_the_first_turns_alone_and_decides_nothing_for_the_others(seed):
    """However fast it is, a plan that is four times as slow is not taken for beaten."""
    brief, one, other = plans(3)
    device = Device({brief: 1.0, one: 4.0, other: 4.1}, noise=noisy)
    timer = replace(TIMER, limit=5.0, narrow=0.001)
    samples = interleave([brief, one, other], device.visit, timer, seed, lambda: True, [brief])
    assert len(samples[brief].spans) == 2
    assert min(len(samples[plan].spans) for plan in (one, other)) > 10
