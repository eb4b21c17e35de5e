"""Whether a backend can run on this device: asks each of its forward kernels about plain attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..kernels.capabilities import Device
    from ..kernels.contract import Backend
    from ..kernels.registry import Registry

__all__ = ["command_for", "obstacle"]

_TYPES = ("bf16", "fp16", "fp32", "fp64")  # types of plain tensors that every forward kernel is asked about


def obstacle(known: Registry, backend: Backend, here: Device) -> str | None:
    """Why no forward kernel of the backend can run here (no kernel, old GPU, no compiler), or None if one can.

    Without its package only the capabilities rows are asked, because further refusals may need it.
    """
    from ..kernels.contract import ForwardKernel
    from ..problem.spec import AttentionSpec

    if not backend.kernels:
        return None
    installed = known.availability(backend.name).ok
    reasons: dict[str, None] = {}
    for kernel in backend.kernels:
        row = kernel.rows.get(here.type)
        if row is None or not isinstance(kernel, ForwardKernel):
            continue
        for dtype in (each for each in _TYPES if each in row.dtypes):
            spec = AttentionSpec.make(batch=1, heads=8, seqlen_q=256, head_dim=128, dtype=dtype)
            refusals = (kernel if installed else row).refusals(spec, here)
            if not refusals:
                return None
            reasons |= dict.fromkeys(refusals)
    return "; ".join(reasons) or f"has no kernel for {here.type}"


def command_for(known: Registry, backend: Backend, here: Device) -> str | None:
    """The command that makes the backend usable on this device; None if it is usable or if no command helps."""
    answer = known.availability(backend.name)
    if answer.ok or here.type in backend.yardstick or obstacle(known, backend, here):
        return None
    return answer.install
