"""Whom a first call tells what was chosen for it: nobody, unless an autotune is open.

Apart from the autotune, so that a call without one loads nothing of it.  Only a question that
is not remembered comes here: a later call of the same question pays nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..choosing.choice import Choice
    from ..kernels.execution import Execution
    from .question import Question

__all__ = ["Listener"]


class Listener(Protocol):
    """What an open autotune is told."""

    def chosen(self, question: Question, choice: Choice, execution: Execution) -> Execution:
        """The question was answered by the choice; what is returned runs instead of the execution."""


listener: Listener | None = None
