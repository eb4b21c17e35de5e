"""What stays of a stream of calls: never more than fits, some of everything, nothing preferred for being early."""

from collections import Counter
from collections.abc import Iterable
from statistics import mean

from hypothesis import given
from hypothesis import strategies as st

from attnbench.harness.capture.reservoir import Reservoir

OFFERS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(1, 50)), max_size=80)


def filled(reservoir: Reservoir, offers: Iterable[tuple[str, str, int]]) -> list[tuple[int, str, str]]:
    for number, (kind, source, size) in enumerate(offers):
        reservoir.offer((number, kind, source), kind=kind, source=source, size=size)
    return reservoir.items


@given(OFFERS, st.integers(1, 120), st.integers(1, 20))
def test_the_budget_holds_at_every_moment_and_every_item_is_accounted_for(offers, max_bytes, most):
    reservoir = Reservoir(max_bytes, most)
    sizes, kept = {}, set()
    for number, (kind, source, size) in enumerate(offers):
        sizes[number] = size
        gone = reservoir.offer(number, kind=kind, source=source, size=size)
        assert number not in gone or gone == [number]
        kept = (kept | {number}) - set(gone)
        assert set(reservoir.items) == kept
        assert reservoir.held == sum(sizes[each] for each in kept) <= max_bytes
        assert len(kept) <= most
    if sum(sizes.values()) <= max_bytes and len(offers) <= most:
        assert len(kept) == len(offers)


def test_layers_and_kinds_share_what_there_is():
    # A prompt of long calls in 8 layers, then 200 steps of small ones.
    prompt = [("prompt", f"layer {layer}", 10) for layer in range(8)]
    steps = [("step", f"layer {layer}", 1) for _ in range(200) for layer in range(8)]
    kept = filled(Reservoir(100, 16), prompt + steps)
    assert Counter(kind for _, kind, _ in kept) == {"prompt": 8, "step": 8}
    for kind in ("prompt", "step"):
        assert {source for _, each, source in kept if each == kind} == {f"layer {layer}" for layer in range(8)}


def test_late_calls_are_as_likely_to_stay_as_early_ones():
    kept = filled(Reservoir(100, 100), [("a", "x", 1)] * 2000)
    assert len(kept) == 100
    # The mean of 100 uniform numbers has a deviation of 0.029.
    assert abs(mean(number / 2000 for number, _, _ in kept) - 0.5) < 0.1
