"""The shapes of a table lie near the layers that users have, nearer than as many shapes drawn at random."""

from statistics import fmean

import pytest

from attnbench.choosing.similarity import distance
from attnbench.harness.cases.models import drawn_cases
from attnbench.harness.cases.spread import spread_specs


def from_the_nearest(spec, known):
    return min(
        distance(spec, other) + 3 * (spec.mask.kind != other.mask.kind) + 5 * (spec.head_dim != other.head_dim)
        for other in known
        if other.direction == spec.direction
    )


@pytest.mark.parametrize(("device", "count"), [("cuda", 80), ("cpu", 16)])
def test_they_lie_nearer_to_other_layers_than_shapes_drawn_at_random(device, count):
    asked = [case.spec for case in drawn_cases(100, 31, device)]

    def mean(known):
        return fmean(from_the_nearest(spec, known) for spec in asked)

    at_random = [mean([case.spec for case in drawn_cases(count, seed, device)]) for seed in range(3)]
    assert mean(spread_specs(count, device)) < 0.93 * min(at_random)
