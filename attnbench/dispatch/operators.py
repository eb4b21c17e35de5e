"""``attention`` inside compiled or exported programs: two custom operators that stay opaque in torch's graph.

``attnbench::attention`` and ``attnbench::attention_backward`` choose a plan when they run, as an eager call does: one
look-up, no guard on shapes, no graph break.  The wishes of context and environment are constants of the graph.  A
program exported with fixed shapes names the plan chosen for them; with dynamic shapes or ``strict=True`` it chooses
when it runs.  Code that loads an exported program must import this module.

The lengths of packed and padded batches are arguments of the operators, which read and check them when they run, as an
eager call does.  Nothing can be read while code is compiled, so packed batches name ``max_seqlen_*`` there.

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
from ..problem.lengths import Lengths
from ..problem.mask import Alignment
from ..problem.spec import FP8_DTYPES
from ..problem.tensor_kinds import as_autocast, requires_gradient
from . import operator_rules
from .context import Wish, asked_while_tracing, check_traced, current, wished
from .memory import Program, execution_of, programs
from .operator_rules import TENSORS
from .question import (
    Question,
    check_askable,
    decide,
    has_lengths,
    inputs_of,
    key_of,
    key_with_more,
    resolved,
    settled,
)
from .sequences import packed_views

__all__ = ["attention"]

_EXPORTED = "exported"  # the era of such a program
_ASKED = (
    "bool training, bool is_causal, int? before, int? after, str alignment, float? scale, float? softcap, "
    "bool enable_gqa, bool return_lse, str? dtype, str backend, float? max_error, str asked_by, str era, "
    "bool packed, str padding_side, bool same_lengths, SymInt? max_seqlen_q, SymInt? max_seqlen_kv"
)


class _Asked(NamedTuple):
    """The operators' arguments other than tensors; ``before`` and ``after`` are the sides of the window.

    ``same_lengths``: the lengths of the queries are those of the keys.
    """

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
    packed: bool
    padding_side: str
    same_lengths: bool
    max_seqlen_q: int | None
    max_seqlen_kv: int | None

    def question(
        self, q: Tensor, k: Tensor, v: Tensor, own_q: Tensor | None, own_kv: Tensor | None, *descales: Tensor | None
    ) -> Question:
        """The question for q, k, v (B, H, S, D), B = 1 if packed; backend, dtype and budget are in ``wish``."""
        own_kv = own_q if self.same_lengths else own_kv
        lengths: dict[str, Any] = {"q_lengths": own_q, "kv_lengths": own_kv, "padding_side": self.padding_side}
        if self.packed:
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            longest = {"max_seqlen_q": self.max_seqlen_q, "max_seqlen_kv": self.max_seqlen_kv}
            lengths = {"cu_seqlens_q": own_q, "cu_seqlens_kv": own_kv, **longest}
        of_q, of_k, of_v = descales or (None, None, None)
        return Question(
            q, k, v, self.is_causal, (self.before, self.after), self.alignment, self.scale, self.softcap,
            self.enable_gqa, "thd" if self.packed else "bhsd", None, "auto", None, self.return_lse, of_q, of_k, of_v,
            **lengths,
        )  # fmt: skip

    @property
    def wish(self) -> Wish:
        """The wish where the program was compiled, not where it runs."""
        return Wish(self.backend, self.dtype, self.max_error, self.asked_by)


def attention(question: Question) -> Tensor | tuple[Tensor, Tensor]:
    """``attnbench.attention`` in code that is being compiled or exported."""
    q, k, v, window = question.q, question.k, question.v, question.window
    if any(getattr(x, "is_nested", False) for x in (q, k, v)):
        raise InputError(
            "nested tensors are not served within torch.compile, torch.export, torch.func or fake tensors; pass the "
            'packed values() of jagged ones with layout="thd", cu_seqlens_q and max_seqlen_q'
        )
    check_askable(q, k, v, window)
    if window is not None and len(window) != 2:
        raise InputError(f"window must be a pair (keys before, keys after), None for unlimited, got {window!r}")
    if question.layout not in ("bhsd", "bshd", "thd"):
        raise InputError(f'layout must be "bhsd", "bshd" or "thd", not {question.layout!r}')
    if question.sinks is not None:
        raise InputError(
            "sinks are not served within torch.compile, torch.export, torch.func or fake tensors; call attention "
            "outside of them (torch.compiler.disable)"
        )
    unequal, packed = has_lengths(question), question.layout == "thd"
    own_q, own_kv = (question.q_lengths, question.kv_lengths)
    if packed:
        own_q, own_kv = question.cu_seqlens_q, question.cu_seqlens_kv
        q, k, v = packed_views(q, k, v)
        if question.max_seqlen_q is None or (
            question.max_seqlen_kv is None and not (own_kv is None or own_kv is own_q)
        ):
            raise InputError(
                "lengths cannot be read while code is compiled or traced: pass max_seqlen_q, and max_seqlen_kv where "
                "keys have lengths of their own; any upper bound will do"
            )
    elif question.layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    same_lengths = own_q is not None and (own_kv is own_q or (packed and own_kv is None))
    q, k, v = as_autocast(q, k, v)
    training = torch.is_grad_enabled() and any(requires_gradient(x) for x in (q, k, v))
    wish = _wish(question._replace(q=q, k=k, v=v, layout="bhsd"), training, unequal)
    before, after = (None, None) if window is None else window
    asked = _Asked(
        training, question.is_causal, before, after, question.causal_alignment, question.scale, question.softcap,
        question.enable_gqa, question.return_lse, wish.dtype, wish.backend, wish.max_error, wish.asked_by,
        state.era if is_dynamo_compiling() and not is_exporting() else _EXPORTED, packed, question.padding_side,
        same_lengths, question.max_seqlen_q, question.max_seqlen_kv,
    )  # fmt: skip
    transformed = not is_dynamo_compiling() and torch._C._are_functorch_transforms_active()
    operator = operator_rules.transformed if transformed else torch.ops.attnbench.attention
    descales = question.q_descale, question.k_descale, question.v_descale
    out, lse = operator(q, k, v, own_q, None if same_lengths else own_kv, *descales, *asked)
    if packed:
        out, lse = out[0].transpose(0, 1), lse[0]
    elif question.layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if question.return_lse else out


def _wish(question: Question, training: bool, unequal: bool) -> Wish:
    """The wish; in an export of fixed shapes, the plan that it leads to."""
    wish = settled(question, wished(*asked_while_tracing()) if is_dynamo_compiling() else current())
    if not is_exporting() or is_dynamo_compiling() or unequal or FROM_TORCH.get(question.k.dtype) in FP8_DTYPES:
        return wish  # FP8 tensors need their descales to be decided on, batches of unequal length these
    if all(type(n) is int for x in question[:3] for n in x.shape):
        return Wish(str(decide(question, training, wish).plan), None, None, "the exported program")
    return wish


def _program(question: Question, lengths: Lengths | None, asked: _Asked) -> Program:
    # An exported program chooses again after forget(): nothing was compiled for the old choices.
    era = state.era if asked.era == _EXPORTED else asked.era
    # Gradients and context are what they were in the program, not what they are where it runs.
    if lengths is None:
        key = key_of(*question[:3], question[3:17], asked.training, asked.wish, era)
    else:
        key = key_with_more(question, lengths, asked.training, asked.wish, era)
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
    q, lengths = tensors[0], resolved(question)[1]
    program = _program(question, lengths, asked)
    execution = program.execution
    inputs = inputs_of(question, execution.spec) if lengths is None else Inputs.of(tensors[:3], lengths)
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
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, own_q: Tensor | None,
    own_kv: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    asked = _Asked(*rest)
    question = asked.question(q, k, v, own_q, own_kv)
    lengths = resolved(question)[1]
    program, inputs = _program(question, lengths, asked), Inputs(q, k, v, lengths)
    execution = program.execution
    if program.carried == "nothing":
        operands, answer = execution.answer(inputs)
        saved = Saved(operands, *answer)
    else:
        saved = Saved(execution.prepare(inputs), out, lse if program.carried == "out and lse" else None)
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
    lengths, descales = "Tensor? own_q, Tensor? own_kv", "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale"
    forward, backward = "attnbench::attention", "attnbench::attention_backward"
    torch.library.define(
        forward, f"(Tensor q, Tensor k, Tensor v, {lengths}, {descales}, {_ASKED}) -> (Tensor, Tensor)"
    )
    saved = "Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
    torch.library.define(backward, f"({saved}, {lengths}, {_ASKED}) -> (Tensor, Tensor, Tensor)")
    for name, run, fake in ((forward, _forward, _fake_forward), (backward, _backward, _fake_backward)):
        torch.library.impl(name, "CompositeExplicitAutograd")(run)
        torch.library.register_fake(name)(fake)
    torch.library.register_autograd(forward, operator_rules.derive, setup_context=operator_rules.save)
    torch.library.register_autograd(backward, operator_rules.underive)
    torch.library.register_vmap(forward, operator_rules.map_forward)
    torch.library.register_vmap(backward, operator_rules.map_backward)


_register()
