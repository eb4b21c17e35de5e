"""The FP8 backward of the ``triton`` backend, after any forward that leaves plain e4m3.

``triton:fp8`` computes S = QKᵀ and dP = dO·Vᵀ in FP8 and sums over tokens in bf16; ``triton:fp8-all`` sums over tokens
in FP8 as well.  Both quantise dO per token.  They are deterministic if dQ has a kernel of its own; if one kernel
computes all gradients (``Tiles.fused``), dQ is added up in bf16 in no order, unless torch was asked for deterministic
algorithms.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch import Tensor

from attnbench.errors import InputError
from attnbench.kernels.capabilities import Capabilities, Device
from attnbench.kernels.contract import BackwardKernel, Saved
from attnbench.kernels.devices import describe
from attnbench.problem.fp8 import Quantised
from attnbench.problem.lengths_kind import BATCHES
from attnbench.problem.spec import AttentionSpec

from ...common.declared_errors import FIXED_SCALE
from ..forward.contract import check_plain
from ..interpreter import alone, misplaced
from ..quantise.stored import Stored
from .tiles import Tiles, tiles_of

__all__ = ["KERNELS", "TritonBackward"]

_DTYPES = ("bf16", "fp16", "fp32")
_MOST_HEADS = 65535  # of all batches: the second axis of a CUDA grid
# Only the fused kernel adds dQ up in bf16, of at most ``hopper.launch.MOST_SUMMED`` keys: on an H200 it was off by
# 0.062 at 8k and 0.065 at 32k keys, and by 0.061 at 128k, where dQ has a kernel of its own.
_FUSED = 1.03
_LARGEST_HEAD = 256  # dK of a block of 128 keys fills the registers of 8 warps


class TritonBackward(BackwardKernel):
    """Kernels over FP8 operands, after a pass that quantises dO and copies what tensor cores cannot transpose."""

    from_lse = True
    follows = ("e4m3",)

    def __init__(self, name: str, *, narrow: bool, declared_error: float, tiles: Tiles | None = None) -> None:
        """``narrow``: the sums over tokens are FP8 too.  ``tiles`` replaces the committed ones."""
        self.name, self.narrow, self.tiles, self.declared_error = name, narrow, tiles, declared_error
        self.error_growth = FIXED_SCALE if narrow else _FUSED
        self.rows = {
            "cuda": Capabilities(dtypes=_DTYPES, capability=(9, 0), head_dims=(1, _LARGEST_HEAD, 1), lengths=BATCHES),
            "cpu": Capabilities(dtypes=_DTYPES, head_dims=(1, _LARGEST_HEAD, 1), lengths=BATCHES, emulated=True),
        }
        self.evidence = {"cuda": r"\b_?(narrow_)?(all|key|query)_gradients"}

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """A CPU without Triton's interpreter, a GPU with it, and more heads than a grid holds."""
        reasons = misplaced(device)
        if spec.batch * spec.heads > _MOST_HEADS:
            reasons.append(f"takes at most {_MOST_HEADS} heads in all batches, not {spec.batch * spec.heads}")
        return reasons

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK, dV, contiguous.  Raises InputError where the operands are not plain e4m3."""
        q, k, v = _plain(saved, self.name)
        if saved.lse is None:
            raise InputError(f"{self.name} needs the forward's log-sum-exp")
        with alone(grad_out.device):
            return _launch()(
                saved.spec,
                q,
                k,
                v,
                saved.out,
                saved.lse,
                grad_out.detach(),
                self._tiles,
                self.narrow,
                saved.operands.lengths,
            )

    def _tiles(self, spec: AttentionSpec, head_dim: int, device: torch.device) -> Tiles:
        return self.tiles or _committed(spec, head_dim, device, self.narrow)


@lru_cache(maxsize=1024)
def _committed(spec: AttentionSpec, head_dim: int, device: torch.device, narrow: bool) -> Tiles:
    return tiles_of(spec, head_dim, describe(device).capability, narrow)


@cache
def _launch() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Imported when a kernel runs, once: importing a module again takes as long as a launch."""
    from .launch import launch

    return launch


def _plain(saved: Saved, name: str) -> tuple[Quantised, Quantised, Quantised]:
    q, k, v = saved.operands.q, saved.operands.k, saved.operands.v
    if not (isinstance(q, Quantised) and isinstance(k, Quantised) and isinstance(v, Quantised)):
        raise InputError(f"{name} follows FP8 forwards, and this one computed in 16 bits or more")
    if not type(q) is type(k) is type(v) is Stored:  # which are plain
        check_plain(name, q, k, v)
    return q, k, v


KERNELS = (
    TritonBackward("triton:fp8", narrow=False, declared_error=0.07),
    TritonBackward("triton:fp8-all", narrow=True, declared_error=0.08),
)
