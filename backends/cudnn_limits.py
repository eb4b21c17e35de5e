"""What cuDNN's attention does not compute on Hopper, whoever calls it; each was seen on an H200 with cuDNN 9.19."""

from __future__ import annotations

from attnbench.capabilities import Device
from attnbench.spec import AttentionSpec

__all__ = ["fp8_refusals", "refusals", "too_few"]

_HOPPER = 9
_FEWEST_KEYS = 32


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


def too_few(spec: AttentionSpec) -> list[str]:
    """Why the FP8 backward cannot serve so few keys, as a list of at most one reason.

    dS is P (dP − dO·O), in which dO·V and dO·O all but cancel over few keys, and O is e4m3: with two
    to five keys dQ was 0.3 to 0.6 off, with 77 and more 0.11 to 0.14.
    """
    if spec.seqlen_kv < _FEWEST_KEYS:
        return [f"rounds O to e4m3, which leaves nothing of dQ over fewer than {_FEWEST_KEYS} keys"]
    return []
