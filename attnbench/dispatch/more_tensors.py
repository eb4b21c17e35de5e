"""``attention`` of more tensors than q, k and v: lengths of packed, padded or jagged nested sequences, and sinks.

The key under which a choice is remembered has the counts of a packed batch in buckets, so that a training with new
lengths at each step asks for few choices.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..errors import InputError
from ..kernels.contract import Inputs
from ..problem.tensor_kinds import as_autocast, intercepted, plain
from .context import asked_in_context, asked_in_environment, wished
from .memory import execution_of, executions
from .question import Question, check_askable, key_of, resolved, wants_gradients
from .sequences import Jagged, sizes_of

__all__ = ["attention", "nested_attention"]


def attention(question: Question) -> Tensor | tuple[Tensor, Tensor]:
    """``attnbench.attention`` with lengths or sinks.  Raises InputError in compiled code and under transforms of
    torch.func.
    """
    check_askable(*question[:3], question.window)
    if is_compiling() or intercepted(*question[:3]):
        raise InputError(
            "packed and padded batches and sinks are not served within torch.compile, torch.export, torch.func or fake "
            "tensors; call attention outside of them (torch.compiler.disable)"
        )
    q, k, v = as_autocast(*plain(*question[:3]))
    question = question._replace(q=q, k=k, v=v)
    seen, lengths = resolved(question)
    sinks = question.sinks
    if lengths is None and sinks is None:
        raise InputError("lengths were expected: cu_seqlens_q, q_lengths or kv_lengths")
    q, k, v = seen[:3]
    training = wants_gradients(q, k, v, sinks)
    wish, variable = asked_in_context(), asked_in_environment()
    heads_first = seen.layout == "bhsd"
    tokens = 2 if heads_first else 1
    sizes: tuple[object, ...] = () if sinks is None else (sinks.shape, sinks.dtype, sinks.device)
    if lengths is not None:
        sizes += tuple(sizes_of(lengths, q.shape[0], q.shape[tokens], k.shape[tokens]).items())
    is_packed = lengths is not None and lengths.batch == "packed"
    if is_packed:  # k and v are compared in full, before a remembered choice is used
        if k.shape[2] != v.shape[2]:
            raise InputError(f"k and v must agree in length, got {k.shape[2]} and {v.shape[2]}")
        shapes = [(*x.shape[:2], *x.shape[3:]) for x in (q, k, v)]
        key = (*shapes, *((x.dtype, x.device) for x in (q, k, v)), seen[3:14], training, wish, variable, sizes)
    else:
        key = (*key_of(q, k, v, seen[3:17], training, wish, variable), sizes)
    execution = executions.of(key, execution_of, question, training, wished(wish, variable))
    if not heads_first:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = execution(Inputs(q, k, v, lengths, sinks))
    if is_packed:
        out, lse = out[0].transpose(0, 1), None if lse is None else lse[0]
    elif not heads_first:
        out = out.transpose(1, 2)
    if not question.return_lse:
        return out
    assert lse is not None, "kernels without an LSE refuse a spec that wants it"
    return out, lse if q.dtype == torch.float64 else lse.to(torch.float32)


def nested_attention(question: Question) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` of jagged nested tensors: that of the packed tensors that they hold, nested again."""
    if question.q_lengths is not None or question.kv_lengths is not None or question.cu_seqlens_q is not None:
        raise InputError("nested tensors have lengths of their own; pass neither cu_seqlens_* nor *_lengths")
    jagged = Jagged(*question[:3], question.layout)
    answer = attention(question._replace(**jagged.arguments))
    if isinstance(answer, Tensor):
        return jagged.nested(answer)
    return jagged.nested(answer[0]), jagged.nested_lse(answer[1])
