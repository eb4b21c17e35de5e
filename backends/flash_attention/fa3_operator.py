"""Call FlashAttention-3's operators by argument names, whatever the order in a build.

``fwd`` and ``bwd`` have about 35 positional arguments, which differ between builds (Dao-AILab's, SGLang's, vLLM's).  A
value in the wrong place is a wrong result, not an error, so places are read from the operator's schema.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from operator import itemgetter
from typing import Any

__all__ = ["BACKWARD", "FORWARD", "OperatorError", "bound"]

FORWARD = (
    "q", "k", "v", "q_descale", "k_descale", "v_descale", "softmax_scale",
    "is_causal", "window_size_left", "window_size_right", "softcap", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
    "max_seqlen_k",
)  # fmt: skip
BACKWARD = (
    "dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "softmax_scale",
    "is_causal", "window_size_left", "window_size_right", "softcap",
)  # fmt: skip
# What the other arguments have to be, so that nothing but plain attention is computed.
_CONSTANTS: dict[str, Any] = {
    "attention_chunk": 0,
    "is_rotary_interleaved": True,  # without rotary tensors it says nothing
    "num_splits": 0,  # the library's choice; 1, which its own Python gives, leaves a GPU idle over few queries
    "sm_margin": 0,
    "deterministic": False,
    "cp_world_size": 1,
    "cp_rank": 0,
}


class OperatorError(RuntimeError):
    """A build whose operator has other arguments than the ones known here."""


def bound(operator: Any, names: tuple[str, ...]) -> Callable[..., Any]:
    """A function of the arguments called ``names``, in that order, that calls ``operator`` with the rest filled in.

    ``operator`` is an overload such as ``torch.ops.sgl_kernel.fwd.default``.  Unknown optional arguments get None or
    their default.  Raises OperatorError if a name is missing, or an unknown argument is required.
    """
    arguments = list(operator._schema.arguments)
    known = {argument.name for argument in arguments}
    if missing := [name for name in names if name not in known]:
        raise OperatorError(f"{operator} has no argument {', '.join(missing)}")
    fillers = [_filler(operator, argument) for argument in arguments if argument.name not in names]
    behind = count(len(names))
    in_order = itemgetter(
        *(names.index(argument.name) if argument.name in names else next(behind) for argument in arguments)
    )

    def call(*values: Any) -> Any:
        if len(values) != len(names):
            raise TypeError(f"{operator} is called here with {len(names)} arguments, not {len(values)}")
        return operator(*in_order((*values, *fillers)))

    return call


def _filler(operator: Any, argument: Any) -> Any:
    if argument.name in _CONSTANTS:
        return _CONSTANTS[argument.name]
    if argument.has_default_value():
        return argument.default_value
    if str(argument.type).startswith("Optional"):
        return None
    raise OperatorError(f"{operator} wants {argument.name} ({argument.type}), which is not known here")
