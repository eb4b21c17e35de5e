"""A spec as tables and frozen choices hold it: without the fields that ``AttentionSpec.make`` fills in by itself."""

from __future__ import annotations

from typing import Any

from .spec import AttentionSpec

__all__ = ["short_fields", "spec_order"]


def short_fields(spec: AttentionSpec) -> dict[str, Any]:
    """The fields that differ from what ``AttentionSpec.make`` would fill in."""
    fields = spec.to_dict()
    mask = {side: reach for side, reach in fields["mask"].items() if reach not in (None, "top-left")}
    usual = {
        "kv_heads": spec.heads, "seqlen_kv": spec.seqlen_q, "head_dim_v": spec.head_dim, "scale": spec.head_dim**-0.5,
        "mask": {}, "softcap": 0.0, "return_lse": False, "descale": None,
    }  # fmt: skip
    return {
        name: value for name, value in {**fields, "mask": mask}.items() if name not in usual or value != usual[name]
    }


def spec_order(spec: AttentionSpec) -> tuple[object, ...]:
    """What specs are sorted by: direction, type, head size and mask first, then from small to large."""
    shape = spec.batch, spec.heads, spec.kv_heads, spec.seqlen_q, spec.seqlen_kv
    return spec.direction, spec.dtype, spec.head_dim, spec.head_dim_v, str(spec.mask), shape, str(spec)
