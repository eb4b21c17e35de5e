"""FP8 operands that are made when they are first read, because the next kernel does not read them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from torch import Tensor

from attnbench.problem.fp8 import Quantised
from attnbench.problem.spec import Granularity

__all__ = ["Deferred"]


class Deferred(Quantised):
    """A ``Quantised`` whose ``data`` and ``descale`` come from functions, each called once and then released."""

    @classmethod
    def of(
        cls,
        data: Callable[[], Tensor],
        descale: Callable[[], Tensor],
        granularity: Granularity,
        *,
        rotated: bool = False,
        mean: Tensor | None = None,
    ) -> Quantised:
        """The tensor that the functions return."""
        made = cls.__new__(cls)
        fields = {"granularity": granularity, "rotated": rotated, "mean": mean}
        vars(made).update(fields, of_data=data, of_descale=descale)  # the class is frozen
        return made

    @cached_property
    def data(self) -> Tensor:  # a field of the base, whose initialiser sets it as it would any other
        """(B, H, S, D) in FP8."""
        made: Tensor = vars(self).pop("of_data")()
        return made

    @cached_property
    def descale(self) -> Tensor:
        """(B, H, S, 1) or 1 for any axis, in fp32."""
        made: Tensor = vars(self).pop("of_descale")()
        return made
