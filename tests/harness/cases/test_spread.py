"""The shapes of a table lie near the layers that users have, nearer than as many shapes drawn at random."""

from statistics import fmean

import pytest

from attnbench.choosing.similarity import distance
from attnbench.harness.cases.models import drawn_cases
from attnbench.harness.cases.spread import spread_shapes
from attnbench.harness.sequence_lengths import check_lengths


def from_the_nearest(spec, known):
    return min(
        distance(spec, other) + 3 * (spec.mask.kind != other.mask.kind) + 5 * (spec.head_dim != other.head_dim)
        for other in known
        if other.direction == spec.direction
    )


@pytest.mark.parametrize(("device", "count"), [("cuda", 112), ("cpu", 16)])
def test_they_lie_nearer_to_other_layers_than_shapes_drawn_at_random(device, count):
    asked = [case.spec for case in drawn_cases(100, 31, device)]

    def mean(known):
        return fmean(from_the_nearest(spec, known) for spec in asked)

    at_random = [mean([case.spec for case in drawn_cases(count, seed, device)]) for seed in range(3)]
    assert mean([spec for spec, _ in spread_shapes(count, device)]) < 0.93 * min(at_random)


def test_the_first_ones_are_the_same_whatever_the_count():
    assert spread_shapes(5, "cuda") == spread_shapes(12, "cuda")[:5]
    assert {spec.direction for spec, _ in spread_shapes(4, "cuda")} == {"forward", "training"}


def test_some_are_packed_and_fewer_padded_in_rows_that_fit():
    shapes = spread_shapes(112, "cuda")
    layouts = [lengths.layout for _, lengths in shapes if lengths is not None]
    assert 8 <= layouts.count("packed") <= 22
    assert 2 <= layouts.count("padded") < layouts.count("packed")
    for spec, lengths in shapes:
        if lengths is not None:
            check_lengths(spec, lengths)
            assert lengths.layout == "packed" or spec.batch * spec.seqlen_q <= 131072
