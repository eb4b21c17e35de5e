"""Price-performance as in the article on FP8 workloads, for machines side by side.

The article (C. Rand, Accelerating PyTorch Training Workloads with FP8) divides what is trained in an hour by the hour's
price, and states how many per cent better or worse one machine or precision is than another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Offer", "PricePerformance", "side_by_side"]


@dataclass(frozen=True)
class Offer:
    """``units_per_step`` tokens or images in ``step_ms`` milliseconds, on a machine of ``price_per_hour``.

    All are positive and finite, as the fields of a training run are.
    """

    label: str
    step_ms: float
    units_per_step: int
    price_per_hour: float

    @property
    def units_per_second(self) -> float:
        """Throughput."""
        return self.units_per_step / self.step_ms * 1e3

    @property
    def units_per_price(self) -> float:
        """Tokens or images for one unit of the currency."""
        return self.units_per_second * 3600 / self.price_per_hour


@dataclass(frozen=True)
class PricePerformance:
    """An offer, and how much faster and better value it is than the first: 0.32 is 32 % better, −0.3 30 % worse."""

    offer: Offer
    faster: float
    better: float


def side_by_side(offers: Sequence[Offer]) -> list[PricePerformance]:
    """The offers in their order, each against the first."""
    return [
        PricePerformance(
            each,
            each.units_per_second / offers[0].units_per_second - 1,
            each.units_per_price / offers[0].units_per_price - 1,
        )
        for each in offers
    ]
