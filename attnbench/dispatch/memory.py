"""What was chosen before: a question that was asked already costs one look-up."""

from __future__ import annotations

import threading
import weakref
from typing import Any, TypeVar

from ..choosing.budget import class_bound, default_budget
from ..kernels.execution import Execution
from ..kernels.registry import registry
from . import choice_hook
from .question import Question, decide

__all__ = ["Memory", "ask_again", "execution_of"]

_LARGEST = 4096  # questions, of about a KiB each: more than a program asks that does not ask ever new ones
_Value = TypeVar("_Value")


class Memory(dict[tuple[Any, ...], _Value]):
    """A dictionary that keeps the last ``size`` keys and may be emptied while others write to it."""

    def __init__(self, size: int = _LARGEST) -> None:
        super().__init__()
        self.era = 0
        self._size = size
        self._lock = threading.Lock()
        _all.append(weakref.ref(self, _all.remove))

    def remember(self, key: tuple[Any, ...], value: _Value, era: int) -> _Value:
        """The value that is kept under the key, which is the first one's of several threads.

        What was made in an earlier ``era``, before ``forget``, is not kept.
        """
        with self._lock:
            if era != self.era:
                return value
            if key not in self and len(self) >= self._size:
                del self[next(iter(self))]
            return self.setdefault(key, value)

    def forget(self) -> None:
        """Empty it."""
        with self._lock:
            self.era += 1
            self.clear()


_all: list[weakref.ref[Memory[Any]]] = []


def ask_again() -> None:
    """Answer every question anew at its next call.

    What the answers rest on is not read again, so they are the same, and what was compiled stays as it is.
    """
    for reference in list(_all):
        memory = reference()
        if memory is not None:
            memory.forget()


def execution_of(question: Question) -> Execution:
    """What runs for a question.  Raises what ``decide`` raises."""
    choice = decide(question)
    known = registry()
    backward = None if choice.plan.backward is None else known.backward(choice.plan.backward)
    budget = choice.budget
    if budget is None:  # a plan that was named without an error is held to what its precision and its inputs' allow
        budget = max(default_budget(choice.spec, fp8=False), class_bound(choice.plan, choice.spec))
    execution = Execution(choice.spec, known.forward(choice.plan.forward), backward, budget)
    listener = choice_hook.listener
    return execution if listener is None else listener.chosen(question, choice, execution)
