"""``attention`` and ``explain``: one call in front of every kernel, and the reasons behind its choice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function_variadic

from .choosing.choice import Choice
from .dispatch import operators
from .dispatch.memory import Memory, execution_of
from .dispatch.question import Question, ask, check_askable, decide
from .kernels.contract import Inputs
from .kernels.devices import describe
from .kernels.execution import Execution
from .problem.mask import Alignment
from .problem.tensor_kinds import as_autocast, intercepted, ordinary, plain
from .problem.tensors import quantised
from .tables.user_table import forget

__all__ = ["attention", "explain", "forget_choices"]

_executions: Memory[Execution] = Memory()


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
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ) v by the fastest plan that is accurate enough.

    ``q`` (B, H, Sq, D), ``k`` (B, Hkv, Skv, D), ``v`` (B, Hkv, Skv, Dv), or with
    ``layout="bshd"`` the middle axes swapped, without copies; H a multiple of Hkv.  fp64,
    fp32, bf16, fp16, or float8 with a ``*_descale`` each (true value = stored · descale; one
    element, (B, H), (B, H, ceil(S / 128)) or (B, H, S), and for q also the shape of k's).
    Any strides.  Within torch's autocast for their device, q, k and v are cast first, as torch does for its own
    attention: all but fp64 and float8.  Returns out (B, H, Sq, Dv) in ``layout`` and the input's dtype (bf16 for
    float8), and with ``return_lse`` also the natural log-sum-exp (B, H, Sq) in fp32
    (fp64 for fp64), through which no gradient flows.

    ``is_causal`` hides keys after the query; ``window=(before, after)`` shows that many keys
    on either side, None being unlimited.  With Sq ≠ Skv, ``causal_alignment`` says where the
    queries stand: ``top-left``, the default of every backend, puts query 0 at key 0 (as
    torch's SDPA does), ``bottom-right`` the last query at the last key (as FlashAttention
    does).  A query that sees no key gives 0, LSE minus infinity and no gradient.
    ``scale`` defaults to D ** -0.5; ``softcap`` c makes scores c · tanh(score / c).

    FP8 is opted into: ``dtype="fp8"`` admits plans that compute in FP8 beside the others,
    and so does a ``max_error`` (relative L2 against exact attention, worst over out, dq,
    dk, dv and input families); naming the tensors' own dtype keeps them out whatever the
    context says.  ``backend`` names a backend (``sdpa-flash``), a kernel (``fa3:fp8``) or a
    plan (``fa3:fp8>fa4:bf16``); ``auto`` leaves it to ``use_backend``, then to
    ``ATTNBENCH_BACKEND``, then to measurement.

    Raises InputError for what describes no attention, UnknownBackendError, RefusedError
    with reasons and alternatives when a named plan cannot serve, BudgetError when it is
    not known to keep a named ``max_error``, NoPlanError when nothing can serve or keep it.
    """
    if is_compiling():
        return operators.attention(
            q, k, v, is_causal, window, causal_alignment, scale, softcap, enable_gqa, layout, dtype, backend, max_error,
            return_lse, q_descale, k_descale, v_descale,
        )  # fmt: skip
    if has_torch_function_variadic(q, k, v):  # a subclass or mode with a say of its own, a symbol of torch.fx
        return handle_torch_function(
            attention, (q, k, v), q, k, v, is_causal=is_causal, window=window, causal_alignment=causal_alignment,
            scale=scale, softcap=softcap, enable_gqa=enable_gqa, layout=layout, dtype=dtype, backend=backend,
            max_error=max_error, return_lse=return_lse, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
    try:
        if not ordinary(q, k, v):
            if intercepted(q, k, v):
                return operators.attention(
                    q, k, v, is_causal, window, causal_alignment, scale, softcap, enable_gqa, layout, dtype, backend,
                    max_error, return_lse, q_descale, k_descale, v_descale,
                )  # fmt: skip
            q, k, v = as_autocast(*plain(q, k, v))
        key = ask(
            q, k, v, is_causal, window, causal_alignment, scale, softcap, enable_gqa, layout, dtype, backend, max_error,
            return_lse, q_descale, k_descale, v_descale,
        )  # fmt: skip
        execution = _executions.get(key)
    except (AttributeError, TypeError, RuntimeError):  # no tensors or nested ones, or what cannot be hashed
        check_askable(q, k, v, window)
        raise
    if execution is None:
        execution = _first(key)
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if q_descale is None or k_descale is None or v_descale is None:
        inputs = Inputs(q, k, v)
    else:
        inputs = Inputs(
            quantised("q", q, q_descale, execution.spec),
            quantised("k", k, k_descale, execution.spec),
            quantised("v", v, v_descale, execution.spec),
        )
    out, lse = execution(inputs)
    if layout == "bshd":
        out = out.transpose(1, 2)
    if not return_lse:
        return out
    assert lse is not None, "kernels without an LSE refuse a spec that wants it"
    return out, lse if q.dtype == torch.float64 else lse.to(torch.float32)


def explain(
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
) -> Choice:
    """What ``attention`` would run for the same arguments, with every candidate and why it lost.

    Nothing is computed.  The choice is data (``to_dict``) that prints as a table of the plans that could run here;
    ``to_text(all=True)`` has the others too.  Raises what ``attention`` raises.
    """
    check_askable(q, k, v, window)
    q, k, v = as_autocast(q, k, v)
    key = ask(
        q, k, v, is_causal, window, causal_alignment, scale, softcap, enable_gqa, layout, dtype, backend, max_error,
        return_lse, q_descale, k_descale, v_descale,
    )  # fmt: skip
    return decide(Question(*key))


def _first(key: tuple[Any, ...]) -> Execution:
    """What runs for a question that is asked for the first time."""
    era = _executions.era
    return _executions.remember(key, execution_of(Question(*key)), era)


def forget_choices() -> None:
    """Choose anew at the next call: after a sweep has written the user's table, or a device has changed.

    Compiled functions are compiled anew; a backward pass still follows the plan of its own forward.
    """
    describe.cache_clear()
    forget()
    _executions.forget()
    operators.forget_choices()
