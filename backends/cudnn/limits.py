"""What cuDNN's attention does not compute on Hopper, whoever calls it; each was seen on an H200 with cuDNN 9.19."""

from __future__ import annotations

from attnbench.kernels.capabilities import Device
from attnbench.problem.spec import AttentionSpec

__all__ = ["fp8_backward_refusals", "fp8_refusals", "refusals"]

_HOPPER = 9
_QUERIES = 16


def refusals(spec: AttentionSpec, device: Device) -> list[str]:
    """Other generations of GPU, which are not known here, and scales that are not positive."""
    reasons = []
    if device.capability[0] != _HOPPER:
        reasons.append(f"is known here on compute capability 9.x only, {device.name} has another")
    if spec.scale <= 0:
        # Keys that fill up a tile are hidden before the scale is applied, so this holds without a mask, too.
        reasons.append(f"hides keys before it scales, which needs a scale above 0, not {spec.scale}")
    return reasons


def fp8_refusals(spec: AttentionSpec) -> list[str]:
    """What the FP8 forward lacks besides: a kernel for one query, and one whose V is wider than Q."""
    reasons = []
    if spec.seqlen_q == 1:
        reasons.append("has no FP8 kernel for a single query")
    if spec.head_dim_v > spec.head_dim:
        reasons.append("reads memory that is not its own where head_dim_v is larger than head_dim")
    return reasons


def fp8_backward_refusals(spec: AttentionSpec) -> list[str]:
    """What the FP8 backward lacks besides: the queries of a last group that is not whole.

    Their rows of dQ were 0.75 off, whatever the number of keys and the head dimension, and no other row: among
    1000 queries that is 0.07 of the whole, which a relative error of the tensor hides behind its 0.11.
    """
    if spec.seqlen_q % _QUERIES:
        return [f"gets dQ wrong for the last queries where they are no multiple of {_QUERIES}"]
    return []
