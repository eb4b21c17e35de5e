"""Cache of choices: a question that was asked before costs one look-up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch

from ..choosing.budget import class_bound, default_budget
from ..choosing.choice import Choice
from ..choosing.table_advice import warn_of_rule
from ..kernels.execution import Execution
from ..kernels.registry import registry
from ..problem.spec import AttentionSpec
from ..state import Cache, Slot
from .context import Wish
from .question import Question, decide, settled

__all__ = ["Listener", "Program", "ask_again", "execution_of", "executions", "listening", "programs"]


class Listener(Protocol):
    """What an open autotune is notified of."""

    def chosen(self, device: torch.device, wish: Wish, choice: Choice, execution: Execution) -> Execution:
        """A question not asked before got ``choice``; the execution returned runs instead of ``execution``."""


@dataclass
class Program:
    """An execution, and which of its forward's results a compiled program can reuse; nothing before its first run."""

    execution: Execution
    carried: Literal["out and lse", "out", "nothing"] = "nothing"


listening: Slot[Listener] = Slot()
executions: Cache[tuple[Any, ...], Execution] = Cache()
programs: Cache[tuple[Any, ...], Program] = Cache(lasting=True)  # their keys name the era, for backwards still to come


def ask_again() -> None:
    """Answer every question anew at its next call, from the same tables; compiled code is kept."""
    executions.forget()
    programs.forget()


@lru_cache(maxsize=4096)
def _one_for_all(spec: AttentionSpec) -> AttentionSpec:
    """The first of equal specs: what kernels keep for a spec is then found by identity, which is faster."""
    return spec


def execution_of(question: Question, training: bool, wish: Wish) -> Execution:
    """The execution for a question under the wish of its context.  Raises what ``decide`` raises."""
    wish = settled(question, wish)
    choice = decide(question, training, wish)
    warn_of_rule(choice, question.q.device)
    known = registry()
    backward = None if choice.plan.backward is None else known.backward(choice.plan.backward)
    budget = choice.budget
    if budget is None:  # a plan that was named without an error is held to what its precision and its inputs' allow
        budget = max(default_budget(choice.spec, fp8=False), class_bound(choice.plan, choice.spec))
    execution = Execution(_one_for_all(choice.spec), known.forward(choice.plan.forward), backward, budget)
    listener = listening.active
    return execution if listener is None else listener.chosen(question.q.device, wish, choice, execution)
