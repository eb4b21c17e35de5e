"""``attention`` inside compiled or exported programs: two custom operators that stay opaque in torch's graph.

``attnbench::attention`` and ``attnbench::attention_backward`` choose a plan when they run, as an eager call does: one
look-up, no guard on shapes, no graph break.  The wishes of context and environment are constants of the graph.  A
program exported with fixed shapes names the plan chosen for them; with dynamic shapes or ``strict=True`` it chooses
when it runs.  Code that loads an exported program must import this module.

The forward operator cannot return what a kernel keeps, because its outputs must be known before the plan.  The backward
operator makes the operands again from q, k and v; out and the log-sum-exp are reused.  If a kernel keeps more (private
state, or a log-sum-exp wider than fp32), the forward runs again in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling, is_exporting

from .. import state
from ..errors import InputError
from ..kernels.contract import Inputs, Saved
from ..problem.dtypes import FROM_TORCH
from ..problem.mask import Alignment
from ..problem.spec import FP8_DTYPES
from ..problem.tensor_kinds import as_autocast, requires_gradient
from . import operator_rules
from .context import Wish, asked_while_tracing, check_traced, current, wished
from .memory import Program, execution_of, programs
from .operator_rules import TENSORS
from .question import Question, check_askable, decide, inputs_of, key_of, settled

__all__ = ["attention"]

_ASKED = (
    "bool training, bool is_causal, int? before, int? after, str alignment, float? scale, float? softcap, "
    "bool enable_gqa, bool return_lse, str? dtype, str backend, float? max_error, str asked_by, str era"
)


class _Asked(NamedTuple):
    """The operators' arguments other than tensors; ``before`` and ``after`` are the sides of the window."""

    training: bool
    is_causal: bool
    before: int | None
    after: int | None
    alignment: Alignment
    scale: float | None
    softcap: float | None
    enable_gqa: bool
    return_lse: bool
    dtype: str | None
    backend: str
    max_error: float | None
    asked_by: str
    era: str

    def question(self, q: Tensor, k: Tensor, v: Tensor, *descales: Tensor | None) -> Question:
        """The question for these tensors; backend, dtype and budget are in ``wish``."""
        of_q, of_k, of_v = descales or (None, None, None)
        return Question(
            q, k, v, self.is_causal, (self.before, self.after), self.alignment, self.scale, self.softcap,
            self.enable_gqa, "bhsd", None, "auto", None, self.return_lse, of_q, of_k, of_v,
        )  # fmt: skip

    @property
    def wish(self) -> Wish:
        """The wish where the program was compiled, not where it runs."""
        return Wish(self.backend, self.dtype, self.max_error, self.asked_by)


_EXPORTED = "exported"  # the era of such a program


def attention(question: Question) -> Tensor | tuple[Tensor, Tensor]:
    """``attnbench.attention`` in code that is being compiled or exported."""
    q, k, v, window = question.q, question.k, question.v, question.window
    check_askable(q, k, v, window)
    if window is not None and len(window) != 2:
        raise InputError(f"window must be a pair (keys before, keys after), None for unlimited, got {window!r}")
    if question.layout not in ("bhsd", "bshd"):
        raise InputError(f'layout must be "bhsd" or "bshd", not {question.layout!r}')
    if question.layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    q, k, v = as_autocast(q, k, v)
    training = torch.is_grad_enabled() and any(requires_gradient(x) for x in (q, k, v))
    wish = _wish(question._replace(q=q, k=k, v=v, layout="bhsd"), training)
    before, after = (None, None) if window is None else window
    asked = _Asked(
        training, question.is_causal, before, after, question.causal_alignment, question.scale, question.softcap,
        question.enable_gqa, question.return_lse, wish.dtype, wish.backend, wish.max_error, wish.asked_by,
        state.era if is_dynamo_compiling() and not is_exporting() else _EXPORTED,
    )  # fmt: skip
    transformed = not is_dynamo_compiling() and torch._C._are_functorch_transforms_active()
    operator = operator_rules.transformed if transformed else torch.ops.attnbench.attention
    out, lse = operator(q, k, v, question.q_descale, question.k_descale, question.v_descale, *asked)
    if question.layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if question.return_lse else out


def _wish(question: Question, training: bool) -> Wish:
    """The wish; in an export of fixed shapes, the plan that it leads to."""
    wish = settled(question, wished(*asked_while_tracing()) if is_dynamo_compiling() else current())
    if not is_exporting() or is_dynamo_compiling() or FROM_TORCH.get(question.k.dtype) in FP8_DTYPES:
        return wish  # FP8 tensors need their descales to be decided on
    if all(type(n) is int for x in question[:3] for n in x.shape):
        return Wish(str(decide(question, training, wish).plan), None, None, "the exported program")
    return wish


def _program(question: Question, asked: _Asked) -> Program:
    # An exported program chooses again after forget(): nothing was compiled for the old choices.
    era = state.era if asked.era == _EXPORTED else asked.era
    # Gradients and context are what they were in the program, not what they are where it runs.
    key = key_of(*question[:3], question[3:], asked.training, asked.wish, era)
    return programs.of(key, lambda: Program(execution_of(question, asked.training, asked.wish)))


@cache
def _usual_exclusions() -> torch._C.DispatchKeySet:
    """The dispatch keys that a new thread excludes."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch._C._dispatch_tls_local_exclude_set).result()


def _as_called(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with autograd and functorch, which torch disables below an operator and some kernels need."""

    @wraps(run)
    def usual(*args: Any) -> Any:
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), _usual_exclusions()):
            return run(*args)

    return usual


@_as_called
def _forward(*given: Any) -> tuple[Tensor, Tensor]:
    tensors, asked = given[:TENSORS], _Asked(*given[TENSORS:])
    if asked.era != _EXPORTED:
        check_traced()
    question = asked.question(*tensors)
    program = _program(question, asked)
    execution = program.execution
    q, inputs = question.q, inputs_of(question, execution.spec)
    kept = None
    if asked.training:
        out, lse, kept = execution.answer(inputs)[1]
    else:
        out, lse = execution(inputs)
    shape, dtype = _lse(q, asked)
    if kept is not None or (lse is not None and lse.dtype != dtype):
        program.carried = "nothing"
    else:
        program.carried = "out" if lse is None else "out and lse"
    if not shape[-1]:
        return _rows(out), q.new_empty(shape, dtype=dtype)
    if lse is None:  # NaN, so that it is not mistaken for a log-sum-exp
        return _rows(out), q.new_full(shape, math.nan, dtype=dtype)
    return _rows(out), _alone(lse.to(dtype).contiguous())


@_as_called
def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    asked = _Asked(*rest)
    program = _program(asked.question(q, k, v), asked)
    execution = program.execution
    if program.carried == "nothing":
        operands, answer = execution.answer(Inputs(q, k, v))
        saved = Saved(operands, *answer)
    else:
        saved = Saved(execution.prepare(Inputs(q, k, v)), out, lse if program.carried == "out and lse" else None)
    dq, dk, dv = (_rows(x) for x in execution.gradients(saved, grad_out))
    return dq, dk, dv


def _rows(x: Tensor) -> Tensor:
    """x (B, H, S, D) in memory as (B, S, H, D), the layout of most kernels; copied if it is not."""
    _, heads, length, size = x.shape
    if x.stride() == (length * heads * size, size, heads * size, 1):
        return _alone(x)
    rows = _alone(x.transpose(1, 2).contiguous())
    return rows.view(-1).view(rows.shape).transpose(1, 2)  # strides of sizes 1 in their one spelling


def _alone(x: Tensor) -> Tensor:
    """x, copied if it is part of a larger storage: outputs of an operator must not share memory."""
    return x if x.untyped_storage().nbytes() == x.numel() * x.element_size() else x.clone()


def _lse(q: Tensor, asked: _Asked) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the operator's log-sum-exp; the last axis is 0 if it is not needed."""
    length = q.shape[2] if asked.training or asked.return_lse else 0
    return (q.shape[0], q.shape[1], length), torch.float64 if q.dtype == torch.float64 else torch.float32


def _fake_forward(*given: Any) -> tuple[Tensor, Tensor]:
    q, k, v = given[:3]
    for name, x in zip("qkv", (q, k, v), strict=True):
        if x.ndim != 4:
            raise InputError(f"{name} must have 4 dimensions, got shape {tuple(x.shape)}")
    dtype = torch.bfloat16 if FROM_TORCH.get(q.dtype) in FP8_DTYPES else q.dtype
    batch, heads, length, _ = q.shape
    shape, lse_dtype = _lse(q, _Asked(*given[TENSORS:]))
    out = q.new_empty(batch, length, heads, v.shape[3], dtype=dtype).transpose(1, 2)
    return out, q.new_empty(shape, dtype=lse_dtype)


def _fake_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    def like(x: Tensor) -> Tensor:
        batch, heads, length, size = x.shape
        return x.new_empty(batch, length, heads, size).transpose(1, 2)

    return like(q), like(k), like(v)


def _register() -> None:
    descales = "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale"
    forward, backward = "attnbench::attention", "attnbench::attention_backward"
    torch.library.define(forward, f"(Tensor q, Tensor k, Tensor v, {descales}, {_ASKED}) -> (Tensor, Tensor)")
    saved = "Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
    torch.library.define(backward, f"({saved}, {_ASKED}) -> (Tensor, Tensor, Tensor)")
    for name, run, fake in ((forward, _forward, _fake_forward), (backward, _backward, _fake_backward)):
        torch.library.impl(name, "CompositeExplicitAutograd")(run)
        torch.library.register_fake(name)(fake)
    torch.library.register_autograd(forward, operator_rules.derive, setup_context=operator_rules.save)
    torch.library.register_autograd(backward, operator_rules.underive)
    torch.library.register_vmap(forward, operator_rules.map_forward)
    torch.library.register_vmap(backward, operator_rules.map_backward)


_register()
