"""The matrix products of the blocks: torch's own, TransformerEngine's FP8, or torchao's float8.

Only linears inside a transformer block are converted.  Embedding, head, a last norm and the patches of an image stay in
the policy's dtype: they are a small share of the work, and the loss is most sensitive to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn

from attnbench.errors import InputError

from ..config import Linears

__all__ = ["convert_linears", "linears_context", "refusal", "transformer_engine"]

_MULTIPLE = 16  # what FP8 matrix products want of every size
_ADA = (8, 9)
_HOPPER = (9, 0)
_INSTALL_TE = "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.20'"
_INSTALL_TORCHAO = "pip install 'torchao>=0.10'"


def refusal(kind: Linears, device: torch.device) -> str | None:
    """Why these linears cannot be used on the device, with the command to install what is missing, or None."""
    if kind == "bf16":
        return None
    needed = _HOPPER if kind == "float8-rowwise" else _ADA
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability < needed:
        return f"linears={kind} need a GPU of compute capability {needed[0]}.{needed[1]} or later, and this is {device}"
    package, install = ("torchao.float8", _INSTALL_TORCHAO)
    if kind == "te-fp8":
        package, install = ("transformer_engine.pytorch", _INSTALL_TE)
    try:
        import_module(package)
    except (ImportError, OSError, RuntimeError) as error:  # what a library compiled for another torch raises
        return f"linears={kind} need {package}, which cannot be imported ({error}): {install}"
    return None


def transformer_engine() -> Any:
    """``transformer_engine.pytorch``.  Raises InputError where it cannot be imported."""
    try:
        return import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        raise InputError(f"TransformerEngine cannot be imported ({error}): {_INSTALL_TE}") from None


def convert_linears(blocks: Sequence[nn.Module], kind: Linears, tokens: int, emulate: bool = False) -> None:
    """Replace every Linear inside the blocks, in place; weights keep their values, names and dtypes.

    ``tokens`` is the number of tokens in a step.  ``emulate`` lets torchao emulate float8 on any device.  Raises
    InputError if a size does not suit FP8 or a block multiplies by a matrix that is not a Linear's, which would
    silently stay in bf16.
    """
    if kind == "bf16":
        return
    for block in blocks:
        _check(block, kind, tokens)
    if kind == "te-fp8":
        te = transformer_engine()
        for block in blocks:
            for parent, name, linear in _linears(block):
                setattr(parent, name, _te_linear(te, linear))
        return
    float8 = import_module("torchao.float8")
    config: Any = float8.Float8LinearConfig.from_recipe_name(kind.removeprefix("float8-"))
    if emulate:
        object.__setattr__(config, "emulate", True)  # frozen, and a recipe's name takes no options
    for block in blocks:
        float8.convert_to_float8_training(block, config=config)


def linears_context(kind: Linears) -> AbstractContextManager[Any]:
    """The context of a forward pass: TransformerEngine's FP8 autocast with the device's default recipe, or nothing."""
    if kind != "te-fp8":
        return nullcontext()
    context: AbstractContextManager[Any] = transformer_engine().autocast(enabled=True)
    return context


def _linears(block: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    return [
        (parent, name, child)
        for parent in block.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]


def _check(block: nn.Module, kind: Linears, tokens: int) -> None:
    if tokens % _MULTIPLE:
        raise InputError(
            f"linears={kind} take tokens by {_MULTIPLE}, and batch · seqlen is {tokens}; choose another batch"
        )
    linears = _linears(block)
    own = {id(linear.weight) for _, _, linear in linears}
    for name, parameter in block.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in own:
            raise InputError(
                f"linears={kind} cannot serve this model: its blocks multiply by {name}, no torch Linear's"
            )
    for _, name, linear in linears:
        if linear.in_features % _MULTIPLE or linear.out_features % _MULTIPLE:
            sizes = f"{linear.in_features} × {linear.out_features}"
            raise InputError(f"linears={kind} take sizes by {_MULTIPLE}, and {name} is {sizes}")


@cache
def _uncompiled(linear: type[nn.Module]) -> type[nn.Module]:
    """The class, left alone by torch.compile.

    TransformerEngine 2.20 runs its Linear eagerly where the compiler cannot follow it, but from a frame that is
    compiled anew for each linear of a model, and torch gives up after a few.
    """
    forward = torch.compiler.disable(linear.forward)  # type: ignore[no-untyped-call]
    return type(linear.__name__, (linear,), {"forward": forward, "__module__": linear.__module__})


def _te_linear(te: Any, old: nn.Linear) -> nn.Module:
    weight = old.weight
    new: nn.Module = _uncompiled(te.Linear)(
        old.in_features, old.out_features, bias=old.bias is not None, params_dtype=weight.dtype, device=weight.device
    )
    with torch.no_grad():
        for name, parameter in old.named_parameters():
            new.get_parameter(name).copy_(parameter)
    return new
