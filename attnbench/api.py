"""``attention`` and ``explain``: one call for every kernel, and the reasons behind its choice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function_variadic

from .choosing.choice import Choice
from .dispatch import more_tensors, operators, ring
from .dispatch.context import asked_in_context, asked_in_environment, current, wished
from .dispatch.memory import execution_of, executions
from .dispatch.question import Question, check_askable, decide, inputs_of, key_of, settled, wants_gradients
from .dispatch.sequences import Jagged
from .errors import InputError
from .kernels.contract import Inputs
from .problem.mask import Alignment
from .problem.tensor_kinds import as_autocast, intercepted, ordinary, plain
from .state import forget as forget_choices

__all__ = ["attention", "explain", "forget_choices"]

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    causal_alignment: Alignment = "top-left",
    scale: float | None = None,
    softcap: float | None = None,
    enable_gqa: bool = True,
    layout: str = "bhsd",
    dtype: str | torch.dtype | None = None,
    backend: str = "auto",
    max_error: float | None = None,
    return_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    q_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    padding_side: str = "right",
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ) v by the fastest plan that is accurate enough.

    ``q`` (B, H, Sq, D), ``k`` (B, Hkv, Skv, D), ``v`` (B, Hkv, Skv, Dv), or with ``layout="bshd"`` the middle axes
    swapped, without copies; H is a multiple of Hkv; any strides.  fp64, fp32, bf16, fp16, or float8 with a
    ``*_descale`` each (true value = stored · descale; one element, (B, H), (B, H, ceil(S / 128)) or (B, H, S), for q
    also the shape of k's).  Within torch's autocast for their device, q, k and v are cast first, all but fp64 and
    float8.  Returns out (B, H, Sq, Dv) in ``layout`` and the input's dtype (bf16 for float8), and with ``return_lse``
    also the natural log-sum-exp (B, H, Sq) in fp32 (fp64 for fp64), which carries no gradient.

    ``is_causal`` hides keys after the query; ``window=(before, after)`` shows that many keys on either side, None is
    unlimited.  With Sq ≠ Skv, ``causal_alignment="top-left"``, the default of every backend, puts query 0 at key 0 (as
    torch's SDPA does), ``bottom-right`` the last query at the last key (as FlashAttention does).  A query that sees no
    key gives 0, LSE minus infinity and no gradient.  ``scale`` defaults to D ** -0.5; ``softcap`` c makes scores c ·
    tanh(score / c).

    FP8 is opted into: ``dtype="fp8"`` allows plans that compute in FP8, and so does a ``max_error`` (relative L2
    against exact attention, worst over out, dq, dk, dv and input families); naming the tensors' own dtype excludes them
    whatever the context says.  ``backend`` names a backend (``sdpa-flash``), a kernel (``fa3:fp8``) or a plan
    (``fa3:fp8>fa4:bf16``); ``auto`` leaves it to ``use_backend``, then to ``ATTNBENCH_BACKEND``, then to measurement.

    Sequences of unequal length: ``layout="thd"`` takes them packed end to end, q (Tq, H, D), k (Tkv, Hkv, D), v (Tkv,
    Hkv, Dv), with ``cu_seqlens_q`` (N + 1,), the int32 place on the same device where each begins and the last ends,
    and ``cu_seqlens_kv``, the same tensor if left out; out is (Tq, H, Dv), the LSE (H, Tq).  ``max_seqlen_*`` bound the
    lengths; where they are left out the device is read once for each such tensor.  ``q_lengths`` and ``kv_lengths``
    (B,), int32, use that many tokens of each row, its first or (``padding_side="left"``) its last; the rest is never
    read and gives 0, LSE minus infinity and no gradient.  Masks are aligned within each sequence.  Jagged nested
    tensors give nested ones.

    ``sinks`` (H,): a logit for each query head that takes part in the softmax's sum and carries no value, as gpt-oss
    learns them; not scaled, capped or masked.  It has a gradient, and the LSE includes it; a query that sees no key
    has the sink as its LSE.

    Raises InputError for invalid arguments, UnknownBackendError, RefusedError with reasons and alternatives if a named
    plan cannot serve, BudgetError if it is not known to keep a named ``max_error``, NoPlanError if no plan can serve or
    keep it.
    """
    others = (
        is_causal, window, causal_alignment, scale, softcap, enable_gqa, layout, dtype, backend, max_error, return_lse,
        q_descale, k_descale, v_descale,
    )  # fmt: skip
    alone = (
        sinks is None and cu_seqlens_q is None and cu_seqlens_kv is None and q_lengths is None and kv_lengths is None
    )
    shared = ring.sharing.active
    if shared is not None or not (
        alone and max_seqlen_q is None and max_seqlen_kv is None and padding_side == "right" and layout != "thd"
    ):
        more = (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, q_lengths, kv_lengths, padding_side, sinks)
        question = Question(q, k, v, *others, *more)
        return more_tensors.attention(question) if shared is None else shared.attend(question)
    if is_compiling():
        return operators.attention(Question(q, k, v, *others))
    # A nested tensor, a subclass or mode with a say of its own, a symbol of torch.fx.
    if has_torch_function_variadic(q, k, v):
        if any(isinstance(x, Tensor) and x.layout is torch.jagged for x in (q, k, v)):
            return more_tensors.nested_attention(Question(q, k, v, *others))
        return handle_torch_function(attention, (q, k, v), q, k, v, **Question(q, k, v, *others).keywords)
    try:
        if not ordinary(q, k, v):
            if intercepted(q, k, v):
                return operators.attention(Question(q, k, v, *others))
            q, k, v = as_autocast(*plain(q, k, v))
        training = is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        wish, variable = asked_in_context(), asked_in_environment()
        key = key_of(q, k, v, others, training, wish, variable)
        execution = executions.entries.get(key)
    except (AttributeError, TypeError, RuntimeError):  # no tensors or nested ones, or what cannot be hashed
        check_askable(q, k, v, window)
        raise
    if execution is None:
        execution = executions.of(key, execution_of, Question(q, k, v, *others), training, wished(wish, variable))
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    inputs = Inputs(q, k, v) if q_descale is None else inputs_of(Question(q, k, v, *others), execution.spec)
    out, lse = execution(inputs)
    if layout == "bshd":
        out = out.transpose(1, 2)
    if not return_lse:
        return out
    assert lse is not None, "kernels without an LSE refuse a spec that wants it"
    return out, lse if q.dtype == torch.float64 else lse.to(torch.float32)


def _with_arguments_of(
    named: Callable[_Arguments, object],
) -> Callable[[Callable[[Question], _Answer]], Callable[_Arguments, _Answer]]:
    """Give a function of a ``Question`` the signature of ``named``, so that arguments are spelled once."""
    signature = inspect.signature(named)

    def decorate(answer: Callable[[Question], _Answer]) -> Callable[_Arguments, _Answer]:
        @wraps(answer)
        def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return answer(Question(*given.arguments.values()))

        returned = answer.__annotations__["return"]
        called.__annotations__ = {**named.__annotations__, "return": returned}
        called.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        return called

    return decorate


@_with_arguments_of(attention)
def explain(question: Question) -> Choice:
    """What ``attention`` would run for the same arguments, with every candidate and why it lost; computes nothing.

    The choice is data (``to_dict``) that prints as a table of the plans that could run here; ``to_text(all=True)`` has
    the others too.  Raises what ``attention`` raises.
    """
    if ring.sharing.active is not None:
        raise InputError("over several ranks each step has a plan of its own; call context_parallel.explain instead")
    if any(isinstance(x, Tensor) and x.layout is torch.jagged for x in question[:3]):
        question = question._replace(**Jagged(*question[:3], question.layout).arguments)
    check_askable(*question[:3], question.window)
    q, k, v = as_autocast(*question[:3])
    question = question._replace(q=q, k=k, v=v)
    return decide(question, wants_gradients(q, k, v, question.sinks), settled(question, current()))
