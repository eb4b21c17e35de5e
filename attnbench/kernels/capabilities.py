"""What a kernel can serve on one kind of device: a row of facts that answers with sentences."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem.lengths_kind import Batch
from ..problem.spec import AttentionSpec, Granularity

__all__ = ["Capabilities", "Device"]


@dataclass(frozen=True)
class Device:
    """The device a spec is to run on; ``capability`` is CUDA's compute capability, (0, 0) on a CPU."""

    type: str
    name: str
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """One row of limits; the defaults limit nothing.

    ``head_dims`` are (least, most, multiple); ``head_dim_v`` says whether v's may differ from q's.  ``max_elements``
    bounds each of q, k, v and out.  ``training`` says whether gradients can follow (for a forward: with any backward),
    ``lse`` whether the log-sum-exp is returned, ``empty_rows`` whether queries without a visible key give 0.
    ``descales`` are the granularities accepted with quantised tensors, ``lengths`` the batches of sequences of unequal
    length that are served, ``isolates`` whether values of such a sequence that are not finite reach no other.
    ``emulated`` says that other arithmetic stands in for the kernel's (ordinary operations, an interpreter): its
    results count, its times do not.
    """

    dtypes: tuple[str, ...]
    capability: tuple[int, int] = (0, 0)
    capability_below: tuple[int, int] | None = None
    head_dims: tuple[int, int, int] = (1, 2**31, 1)
    head_dim_v: bool = True
    masks: tuple[str, ...] = ("none", "causal", "window")
    alignments: tuple[str, ...] = ("top-left", "bottom-right")
    gqa: bool = True
    softcap: bool = True
    empty_rows: bool = True
    training: bool = True
    lse: bool = True
    max_elements: int | None = None
    descales: tuple[Granularity, ...] = ()
    lengths: tuple[Batch, ...] = ()
    isolates: bool = True
    emulated: bool = False

    def refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """One sentence for each limit that the spec exceeds on this device; none means that the row allows it."""
        reasons = []
        if device.capability < self.capability:
            reasons.append(
                f"needs compute capability {_dotted(self.capability)}, {device.name} has {_dotted(device.capability)}"
            )
        if self.capability_below is not None and device.capability >= self.capability_below:
            reasons.append(
                f"exists only below compute capability {_dotted(self.capability_below)}, "
                f"{device.name} has {_dotted(device.capability)}"
            )
        if spec.dtype not in self.dtypes:
            reasons.append(f"takes {', '.join(self.dtypes)} tensors, not {spec.dtype}")
        elif spec.descale is not None and spec.descale not in self.descales:
            reasons.append(f"takes descales per {' or '.join(self.descales) or 'nothing'}, not per {spec.descale}")
        least, most, multiple = self.head_dims
        for name, size in {"head_dim": spec.head_dim, "head_dim_v": spec.head_dim_v}.items():
            if not least <= size <= most:
                reasons.append(f"{name} {size} is outside {least} to {most}")
            elif size % multiple:
                reasons.append(f"{name} {size} is no multiple of {multiple}")
            if spec.head_dim == spec.head_dim_v:
                break
        else:
            if not self.head_dim_v:
                reasons.append(f"head_dim_v ({spec.head_dim_v}) must equal head_dim ({spec.head_dim})")
        if spec.mask.kind not in self.masks:
            reasons.append(f"has no {spec.mask.kind} mask")
        elif (
            spec.mask.kind != "none" and spec.seqlen_q != spec.seqlen_kv and spec.mask.alignment not in self.alignments
        ):
            reasons.append(
                f"has no {spec.mask.alignment} alignment for {spec.seqlen_q} queries on {spec.seqlen_kv} keys"
            )
        if spec.group > 1 and not self.gqa:
            reasons.append(f"has no grouped heads ({spec.heads} on {spec.kv_heads})")
        if spec.softcap and not self.softcap:
            reasons.append("has no softcap")
        if spec.has_empty_rows and not self.empty_rows:
            reasons.append("does not define rows that see no key")
        if spec.training and not self.training:
            reasons.append("no gradients can follow")
        if spec.return_lse and not self.lse:
            reasons.append("returns no log-sum-exp")
        elif (spec.sinks or spec.partial) and not self.lse:
            what = "sinks are added" if spec.sinks else "parts are merged"
            reasons.append(f"returns no log-sum-exp, by which {what}")
        if spec.lengths is not None and spec.lengths.batch not in self.lengths:
            reasons.append(f"takes sequences of one length, not a {spec.lengths.batch} batch")
        queries, keys = spec.tokens
        size = max(spec.head_dim, spec.head_dim_v)
        largest = max(queries * spec.heads, keys * spec.kv_heads) * size
        if self.max_elements is not None and largest > self.max_elements:
            reasons.append(f"indexes at most {self.max_elements} elements, the largest tensor has {largest}")
        return reasons


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
