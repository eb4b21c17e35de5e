"""Detect and report models of transformers that never look up a registered attention.

Some build their layers from a table of their own (Falcon, SAM, Data2Vec), others compute attention themselves (BLOOM).
transformers asks each model for its implementation when it is constructed; that method is wrapped here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

from attnbench.errors import InputError

from .calls import Calls

__all__ = ["watch_models"]

_METHOD = "get_correct_attn_implementation"
_registered: dict[str, Calls] = {}


def watch_models(name: str, calls: Calls) -> None:
    """Raise InputError, or warn and use transformers' choice, when a model that cannot use ``name`` is constructed."""
    from transformers import PreTrainedModel

    method = getattr(PreTrainedModel, _METHOD, None)
    if not _registered and method is not None:
        setattr(PreTrainedModel, _METHOD, _watching(method))
    _registered[name] = calls


def _watching(method: Any) -> Any:
    @functools.wraps(method)
    def get_correct_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = method(self, *args, **kwargs)
        calls = _registered.get(found)
        if calls is None:
            return found
        reason = _reason(self, found)
        if reason is None:
            return found
        if not calls.hands_on:
            raise InputError(
                f"{reason}; build it with another attn_implementation, and call it within "
                "attnbench.integrations.sdpa.replaced() where that calls torch's SDPA"
            )
        calls.warn(reason)
        options = {key: value for key, value in kwargs.items() if key != "requested_attention"}
        found = method(self, None, *args[1:], **options)
        self.config._attn_implementation = found  # of the parts, too
        return found

    return get_correct_attn_implementation


def _reason(model: Any, name: str) -> str | None:
    """Why the model cannot use the implementation; None if it seems that it can.

    A model that computes attention itself would add the masks made for ``name`` to its scores.  transformers only has
    two flags of the class and its module's source.
    """
    kind = type(model)
    table = _table(kind.__module__, name)
    if table is not None:
        if not _everywhere(model.config, name):
            return None
        return f"{kind.__name__} takes its attention from {table}, which has no {name!r}"
    if getattr(kind, "_supports_sdpa", True) or getattr(kind, "_supports_attention_backend", True):
        return None
    if not getattr(kind, "_can_set_attn_implementation", lambda: True)():
        return f"{kind.__name__} computes attention itself, and does not ask for {name!r}"
    if hasattr(sys.modules.get(kind.__module__), "ALL_ATTENTION_FUNCTIONS"):  # no layer says whether it is causal
        return f"{kind.__name__} supports no attention but its own, as transformers declares"
    return None


def _table(module: str, name: str) -> str | None:
    """The name of the module's table of attention classes that lacks ``name``; None if there is none."""
    for each, value in vars(sys.modules.get(module, object)).items():
        if each.endswith("ATTENTION_CLASSES") and isinstance(value, Mapping) and name not in value:
            return each
    return None


def _everywhere(config: Any, name: str) -> bool:
    """Whether the configuration and all its parts use this implementation: else the table may serve another part."""
    parts = [getattr(config, key, None) for key in getattr(config, "sub_configs", {})]
    return all(part is None or getattr(part, "_attn_implementation", name) in (None, name) for part in parts)
