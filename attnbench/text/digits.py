"""Numbers as people read them: what was measured to a few percent has no fourth digit."""

from __future__ import annotations

import math

__all__ = ["three_digits"]


def three_digits(value: float) -> str:
    """Three digits that count, and no exponent up to a million."""
    if not math.isfinite(value):
        return "not finite"
    rounded = f"{value:.3g}"
    return f"{float(rounded):.0f}" if 1000 <= float(rounded) < 1e6 else rounded
