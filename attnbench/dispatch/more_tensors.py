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
from . import operators
from .context import asked_in_context, asked_in_environment, wished
from .memory import execution_of, executions
from .question import Question, check_askable, key_with_more, resolved, wants_gradients
from .sequences import Jagged

__all__ = ["attention", "nested_attention"]


def attention(question: Question) -> Tensor | tuple[Tensor, Tensor]:
    """``attnbench.attention`` with lengths or sinks.  Raises InputError for sinks in compiled code and under transforms
    of torch.func.
    """
    if is_compiling():
        return operators.attention(question)
    check_askable(*question[:3], question.window)
    if intercepted(*question[:3]):
        return operators.attention(question)
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
    key = key_with_more(seen, lengths, training, wish, variable)
    execution = executions.of(key, execution_of, question, training, wished(wish, variable))
    if not heads_first:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = execution(Inputs(q, k, v, lengths, sinks))
    if lengths is not None and lengths.batch == "packed":
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
