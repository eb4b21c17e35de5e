"""The attention of a model in training: torch's own, or ``attnbench.attention`` with the config's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.api import attention, explain
from attnbench.errors import InputError
from attnbench.integrations.context_parallel import explain as explain_parts

from ..config import OWN, SDPA, TrainConfig

__all__ = ["Attend", "Attending", "AttentionCore", "note_plans"]


# (q (B, H, S, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv), is_causal) to (B, H, S, Dv).  scale, window (keys before and
# after) and softcap come by name, and only from models that ask for them; starts (N + 1,), int32, says where documents
# begin that are packed in a batch of one.
Attending = Callable[..., Tensor]


class Attend:
    """The attention of a config.  ``sdpa`` is torch's default choice among its own kernels."""

    def __init__(self, config: TrainConfig) -> None:
        if config.attention == OWN:
            raise InputError("attention=own is computed inside TransformerEngine's block")
        self._sdpa, self._ranks = config.attention == SDPA, config.context_parallel
        self._longest = config.seqlen  # of a document
        self._asked: dict[str, Any] = {
            "backend": config.attention,
            "max_error": config.max_error,
            "dtype": "fp8" if config.fp8 else None,
        }

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool,
        *,
        scale: float | None = None,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Raises InputError if torch's SDPA cannot serve the arguments, and what ``attnbench.attention`` raises."""
        if not self._sdpa:
            options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
            if starts is None:
                out = attention(q, k, v, is_causal=is_causal, **options, **self._asked)
                assert isinstance(out, Tensor)
                return out
            q, k, v = _tokens(q, k, v)
            out = attention(q, k, v, is_causal=is_causal, **options, **self._packed(starts))
            assert isinstance(out, Tensor)
            return out.transpose(0, 1)[None]
        self.check(window=window, softcap=softcap, starts=starts)
        grouped = q.shape[1] != k.shape[1]
        if grouped and self._ranks > 1:  # torch's ring has no grouped heads
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            grouped = False
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped)

    def plans(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, starts: Tensor | None = None, **options: Any
    ) -> list[str]:
        """The plans for a call with such tensors, none for torch's SDPA.  Raises what the call would raise."""
        if self._sdpa:
            return []
        if starts is not None:
            q, k, v = _tokens(q, k, v)
            return [str(explain(q, k, v, is_causal=is_causal, **options, **self._packed(starts)).plan)]
        asked = {"is_causal": is_causal, **options, **self._asked}
        if self._ranks == 1:
            return [str(explain(q, k, v, **asked).plan)]
        return [str(each.plan) for each in explain_parts(q, k, v, ranks=self._ranks, **asked).values()]

    def _packed(self, starts: Tensor) -> dict[str, Any]:
        return {"layout": "thd", "cu_seqlens_q": starts, "max_seqlen_q": self._longest, **self._asked}

    def check(self, *, window: object = None, softcap: object = None, starts: object = None, **_: object) -> None:
        """Raise InputError if torch's SDPA lacks an argument that a model needs."""
        if self._sdpa and (window is not None or softcap is not None or starts is not None):
            what = "a softcap" if softcap is not None else "a sliding window" if window is not None else "packing"
            raise InputError(f"it asks for {what}, which torch's SDPA has not; name attention=auto or a backend")


def _tokens(*tensors: Tensor) -> list[Tensor]:
    """(T, H, D) views of tensors (1, H, T, D)."""
    return [x[0].transpose(0, 1) for x in tensors]


@contextmanager
def note_plans(modules: Sequence[AttentionCore]) -> Iterator[list[str]]:
    """Collect the plans of the modules' calls, each once; not for timed steps, because it chooses each again."""
    noted: dict[str, None] = {}
    asked: set[object] = set()
    plans: list[str] = []

    def note(module: AttentionCore, args: tuple[Any, ...], options: dict[str, Any], out: Tensor) -> None:
        sizes = [(name, getattr(each, "shape", each)) for name, each in sorted(options.items())]
        question = (*(x.shape for x in args[:3]), args[3], *sizes)
        if isinstance(module.attend, Attend) and question not in asked:
            asked.add(question)
            noted.update(dict.fromkeys(module.attend.plans(*args, **options)))

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    try:
        yield plans
    finally:
        for handle in handles:
            handle.remove()
        plans += noted


class AttentionCore(nn.Module):
    """Each layer calls attention through this module without parameters, so that it can be hooked and timed."""

    def __init__(self, attend: Attending) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, **options: Any) -> Tensor:
        """q (B, H, S, D), k and v (B, Hkv, S, D) to (B, H, S, D)."""
        return self.attend(q, k, v, is_causal, **options)
