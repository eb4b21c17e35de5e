"""``attention`` inside a compiled or exported program: two operators that torch puts into its graph as they are.

``attnbench::attention`` and ``attnbench::attention_backward`` take tensors and plain values, and choose when they run,
for the shapes that they then see, as an eager call does: one look-up, no guard on a shape, no graph break.  What the
context and the environment asked for is a constant of the graph, which is compiled anew where they have changed.  A
program exported with fixed shapes names the plan that was chosen for them; where shapes are dynamic, or ``strict=True``
hides them, it chooses where it runs.  Who loads an exported program imports this module, so that the operators exist.

Operators answer with tensors whose number, shape and layout are known before a plan is, so what a kernel keeps for its
backward cannot all come out of the forward.  The backward operator therefore makes the forward's operands again: they
are a function of q, k and v, which a program keeps anyway, where a quantised copy beside them would cost memory.  out
and the log-sum-exp are the forward's own.  Where a kernel keeps more (a state of its own, or a log-sum-exp wider than
fp32) the forward runs once more in the backward: dearer, and the backward sees what that forward saw.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling, is_exporting

from ..errors import InputError
from ..kernels.contract import Inputs, Saved
from ..kernels.execution import Execution
from ..problem.dtypes import FROM_TORCH
from ..problem.mask import Alignment
from ..problem.spec import FP8_DTYPES
from ..problem.tensor_kinds import as_autocast, requires_gradient
from ..problem.tensors import quantised
from . import operator_rules
from .context import Wish, asked_in_context, asked_in_environment, asked_while_tracing, check_traced
from .memory import Memory, execution_of
from .question import Question, ask, check_askable, decide, settled

__all__ = ["attention", "forget_choices"]

_ASKED = (
    "bool training, bool is_causal, int? before, int? after, str alignment, float? scale, float? softcap, "
    "bool enable_gqa, bool return_lse, str? dtype, str backend, float? max_error, str asked_by, str era"
)


class _Asked(NamedTuple):
    """What the operators are given beside tensors; ``before`` and ``after`` are the window's sides."""

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


_EXPORTED = "exported"
_era = "0"  # a constant of every graph, guarded: what was compiled before choices were forgotten keeps its own


@dataclass
class _Program:
    """An execution, and what of its forward the operator's outputs can carry on; nothing before one has run."""

    execution: Execution
    carried: Literal["out and lse", "out", "nothing"] = "nothing"


_programs: Memory[_Program] = Memory()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    window: tuple[int | None, int | None] | None,
    alignment: Alignment,
    scale: float | None,
    softcap: float | None,
    enable_gqa: bool,
    layout: str,
    dtype: str | torch.dtype | None,
    backend: str,
    max_error: float | None,
    return_lse: bool,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What ``attnbench.attention`` answers, in code that is being compiled or exported."""
    check_askable(q, k, v, window)
    if window is not None and len(window) != 2:
        raise InputError(f"window must be a pair (keys before, keys after), None for unlimited, got {window!r}")
    if layout not in ("bhsd", "bshd"):
        raise InputError(f'layout must be "bhsd" or "bshd", not {layout!r}')
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    q, k, v = as_autocast(q, k, v)
    training = torch.is_grad_enabled() and any(requires_gradient(x) for x in (q, k, v))
    wish = _wish(
        Question(
            q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, training, is_causal,
            window, alignment, scale, softcap, enable_gqa, "bhsd", return_lse, None, dtype, backend, max_error,
            *(asked_while_tracing() if is_dynamo_compiling() else (asked_in_context(), asked_in_environment())),
        )
    )  # fmt: skip
    before, after = (None, None) if window is None else window
    transformed = not is_dynamo_compiling() and torch._C._are_functorch_transforms_active()
    operator = operator_rules.transformed if transformed else torch.ops.attnbench.attention
    out, lse = operator(
        q, k, v, q_descale, k_descale, v_descale, training, is_causal, before, after, alignment, scale, softcap,
        enable_gqa, return_lse, wish.dtype, wish.backend, wish.max_error, wish.asked_by,
        _era if is_dynamo_compiling() and not is_exporting() else _EXPORTED,
    )  # fmt: skip
    if layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _wish(key: Question) -> Wish:
    """What is asked for, or in an export of fixed shapes the plan that it comes to."""
    fixed = is_exporting() and not is_dynamo_compiling() and all(type(n) is int for n in (*key.q, *key.k, *key.v))
    if fixed and FROM_TORCH.get(key.k_dtype) not in FP8_DTYPES:  # those need their descales to be decided on
        return Wish(str(decide(key).plan), None, None, "the exported program")
    return settled(key)


def forget_choices() -> None:
    """Compile anew, and choose anew, at the next call; backwards that are still to come keep their plans."""
    global _era
    _era = str(int(_era) + 1)


def _program(q: Tensor, k: Tensor, v: Tensor, descales: tuple[Tensor | None, ...], asked: _Asked) -> _Program:
    key = ask(
        q, k, v, asked.is_causal, (asked.before, asked.after), asked.alignment, asked.scale, asked.softcap,
        asked.enable_gqa, "bhsd", None, "auto", None, asked.return_lse, *descales,
    )  # fmt: skip
    # Gradients and context are what they were in the program, not what they are where it runs.
    wish = Wish(asked.backend, asked.dtype, asked.max_error, asked.asked_by)
    question = Question(*key)._replace(training=asked.training, wish=wish, variable=None)
    # An exported program asks again once choices are forgotten: nothing was compiled for those.
    key_in_era = question, _era if asked.era == _EXPORTED else asked.era
    program = _programs.get(key_in_era)
    if program is None:
        program = _programs.remember(key_in_era, _Program(execution_of(question)), _programs.era)
    return program


@cache
def _usual_exclusions() -> torch._C.DispatchKeySet:
    """What the dispatcher leaves out for who has asked for nothing special: a new thread's state."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch._C._dispatch_tls_local_exclude_set).result()


def _as_called(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with autograd and functorch at hand, as a kernel finds them where it is called eagerly.

    torch runs an operator below both; a kernel that differentiates by autograd, or makes a mask by vmap, needs them.
    """

    @wraps(run)
    def usual(*args: Any) -> Any:
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), _usual_exclusions()):
            return run(*args)

    return usual


@_as_called
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    asked = _Asked(*rest)
    if asked.era != _EXPORTED:
        check_traced()
    program = _program(q, k, v, (q_descale, k_descale, v_descale), asked)
    execution = program.execution
    if q_descale is None or k_descale is None or v_descale is None:
        inputs = Inputs(q, k, v)
    else:
        inputs = Inputs(
            quantised("q", q, q_descale, execution.spec),
            quantised("k", k, k_descale, execution.spec),
            quantised("v", v, v_descale, execution.spec),
        )
    state = None
    if asked.training:
        out, lse, state = execution.answer(inputs)[1]
    else:
        out, lse = execution(inputs)
    shape, dtype = _lse(q, asked)
    if state is not None or (lse is not None and lse.dtype != dtype):
        program.carried = "nothing"
    else:
        program.carried = "out" if lse is None else "out and lse"
    if not shape[-1]:
        return _rows(out), q.new_empty(shape, dtype=dtype)
    if lse is None:  # nobody may take it for one
        return _rows(out), q.new_full(shape, math.nan, dtype=dtype)
    return _rows(out), _alone(lse.to(dtype).contiguous())


@_as_called
def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    program = _program(q, k, v, (None, None, None), _Asked(*rest))
    execution = program.execution
    if program.carried == "nothing":
        operands, answer = execution.answer(Inputs(q, k, v))
        saved = Saved(operands, *answer)
    else:
        saved = Saved(execution.prepare(Inputs(q, k, v)), out, lse if program.carried == "out and lse" else None)
    dq, dk, dv = (_rows(x) for x in execution.gradients(saved, grad_out))
    return dq, dk, dv


def _rows(x: Tensor) -> Tensor:
    """x (B, H, S, D) in memory as (B, S, H, D), where most kernels leave it; others are copied."""
    _, heads, length, size = x.shape
    if x.stride() == (length * heads * size, size, heads * size, 1):
        return _alone(x)
    rows = _alone(x.transpose(1, 2).contiguous())
    return rows.view(-1).view(rows.shape).transpose(1, 2)  # strides of sizes 1 in their one spelling


def _alone(x: Tensor) -> Tensor:
    """x, copied where it is part of something larger: an operator's outputs share no memory."""
    return x if x.untyped_storage().nbytes() == x.numel() * x.element_size() else x.clone()


def _lse(q: Tensor, asked: _Asked) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the log-sum-exp that the operator returns; its last axis is 0 where nobody wants it."""
    length = q.shape[2] if asked.training or asked.return_lse else 0
    return (q.shape[0], q.shape[1], length), torch.float64 if q.dtype == torch.float64 else torch.float32


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    for name, x in zip("qkv", (q, k, v), strict=True):
        if x.ndim != 4:
            raise InputError(f"{name} must have 4 dimensions, got shape {tuple(x.shape)}")
    dtype = torch.bfloat16 if FROM_TORCH.get(q.dtype) in FP8_DTYPES else q.dtype
    batch, heads, length, _ = q.shape
    shape, lse_dtype = _lse(q, _Asked(*rest))
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
