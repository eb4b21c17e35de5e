"""What a call of ``attention`` asks: its arguments, the key under which the answer is remembered, and the answer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..choosing.choice import Choice
from ..choosing.selector import choose
from ..errors import InputError
from ..kernels.contract import Inputs
from ..kernels.sinks import check_sinks
from ..problem.dtypes import FROM_TORCH
from ..problem.lengths import Lengths, packed, padded
from ..problem.mask import Alignment
from ..problem.spec import FP8_DTYPES, AttentionSpec, Granularity
from ..problem.tensor_kinds import check_plain
from ..problem.tensors import granularity, mask_of, quantised
from .context import Wish, check_budget
from .sequences import packed_views, sizes_of

__all__ = [
    "Question",
    "check_askable",
    "decide",
    "has_lengths",
    "inputs_of",
    "key_of",
    "key_with_more",
    "resolved",
    "settled",
    "spec_of",
    "wants_gradients",
]


class Question(NamedTuple):
    """The arguments of ``attnbench.attention``, in their order."""

    q: Tensor
    k: Tensor
    v: Tensor
    is_causal: bool
    window: tuple[int | None, int | None] | None
    causal_alignment: Alignment
    scale: float | None
    softcap: float | None
    enable_gqa: bool
    layout: str
    dtype: str | torch.dtype | None
    backend: str
    max_error: float | None
    return_lse: bool
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    q_lengths: Tensor | None = None
    kv_lengths: Tensor | None = None
    padding_side: str = "right"
    sinks: Tensor | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """All but q, k and v, by name."""
        return dict(zip(self._fields[3:], self[3:], strict=True))


def key_of(
    q: Tensor, k: Tensor, v: Tensor, others: tuple[Any, ...], training: bool, wish: Wish | None, where: object
) -> tuple[Any, ...]:
    """The cache key: everything that the answer depends on.

    ``training`` tells whether gradients are wanted, ``where`` is the environment variable or the era.  ``decide``
    checks the arguments.  Raises InputError for descales that do not fit, AttributeError if something is not a tensor.
    """
    shared = None
    if not (others[-1] is None and others[-2] is None and others[-3] is None):
        shared, others = _shared(Question(q, k, v, *others)), others[:-3]
    return (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, others, shared, training,
        wish, where,
    )  # fmt: skip


def key_with_more(
    seen: Question, lengths: Lengths | None, training: bool, wish: Wish | None, where: object
) -> tuple[Any, ...]:
    """``key_of`` a question, as ``resolved`` or not, with lengths or sinks.

    Tokens of a packed batch count in buckets.  Raises InputError where its k and v differ in length.
    """
    q, k, v, sinks = *seen[:3], seen.sinks
    sizes: tuple[object, ...] = () if sinks is None else (sinks.shape, sinks.dtype, sinks.device)
    if lengths is None or lengths.batch != "packed":
        if lengths is not None:
            sizes += lengths.batch, lengths.square
        return *key_of(q, k, v, seen[3:17], training, wish, where), sizes
    tokens = 2 if q.ndim == 4 else 0
    if k.shape[tokens] != v.shape[tokens]:  # compared in full, before a remembered choice is used
        raise InputError(f"k and v must agree in length, got {k.shape[tokens]} and {v.shape[tokens]}")
    sizes += tuple(sizes_of(lengths, 1, q.shape[tokens], k.shape[tokens]).items())
    shapes = [(*x.shape[:tokens], *x.shape[tokens + 1 :]) for x in (q, k, v)]
    return *shapes, *((x.dtype, x.device) for x in (q, k, v)), seen[3:14], training, wish, where, sizes


def wants_gradients(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is made of these."""
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)


def check_askable(q: object, k: object, v: object, window: object) -> None:
    """Raise InputError for arguments without a key: tensors that are not dense, a window that cannot be hashed."""
    for name, x in zip("qkv", (q, k, v), strict=True):
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
    check_plain(q, k, v)  # type: ignore[arg-type]
    if not (window is None or isinstance(window, tuple)):
        raise InputError(f"window must be a pair (keys before, keys after), None for unlimited, got {window!r}")


def _shared(question: Question) -> Granularity | None:
    """Which elements share a descale; None for tensors that have none."""
    k, descales = question.k, {name: getattr(question, f"{name}_descale") for name in "qkv"}
    eight_bits = FROM_TORCH.get(k.dtype) in FP8_DTYPES
    if not eight_bits and all(descale is None for descale in descales.values()):
        return None
    if not eight_bits:
        raise InputError(f"descales go with float8 tensors, and k is {k.dtype}")
    for name, descale in descales.items():
        if not isinstance(descale, Tensor):
            raise InputError(
                f"float8 tensors stand for stored · descale: pass {name}_descale, 1.0 if nothing was scaled"
            )
    if k.ndim != 4:
        raise InputError(f"k must have 4 dimensions, got shape {tuple(k.shape)}")
    batch, heads, length, size = k.shape if question.layout == "bhsd" else k.transpose(1, 2).shape
    return granularity(descales["k"], (batch, heads, length, size))


def inputs_of(question: Question, spec: AttentionSpec) -> Inputs:
    """The kernel's inputs: q, k, v (B, H, S, D), float8 with descales.  Raises InputError for a descale that does not
    fit.
    """
    tensors = question.q, question.k, question.v
    if question.q_descale is None:
        return Inputs.of(tensors)
    return Inputs.of(
        quantised(name, x, getattr(question, f"{name}_descale"), spec) for name, x in zip("qkv", tensors, strict=True)
    )


def has_lengths(question: Question) -> bool:
    """Whether sequences have lengths of their own; reads no value.

    Raises InputError for lengths that go with another layout, or are missing.
    """
    starts_q, starts_kv = question.cu_seqlens_q, question.cu_seqlens_kv
    if not (question.sinks is None or isinstance(question.sinks, Tensor)):
        raise InputError(f"sinks must be a torch.Tensor, not {type(question.sinks).__name__}")
    is_packed, is_padded = question.layout == "thd", not (question.q_lengths is None and question.kv_lengths is None)
    of_packed = (starts_q, starts_kv, question.max_seqlen_q, question.max_seqlen_kv)
    if not is_packed and any(each is not None for each in of_packed):
        raise InputError('cu_seqlens_* and max_seqlen_* go with packed tensors (T, H, D): pass layout="thd"')
    if question.padding_side != "right" and not is_padded:
        raise InputError("padding_side goes with q_lengths or kv_lengths, and neither is given")
    if is_packed and is_padded:
        raise InputError('q_lengths and kv_lengths go with padded rows; layout="thd" takes cu_seqlens_q')
    if (is_packed or is_padded) and any(each is not None for each in question[14:17]):
        raise InputError("descales go with sequences of one length; pass packed or padded tensors before quantising")
    if is_packed and starts_q is None:
        raise InputError('layout="thd" needs cu_seqlens_q, the cumulative lengths (N + 1,) of the sequences')
    return is_packed or is_padded


def resolved(question: Question) -> tuple[Question, Lengths | None]:
    """The question about tensors (B, H, S, D) or (B, S, H, D), of which B is 1 for a packed batch, and their lengths.

    Raises InputError for lengths that do not fit, or that go with another layout.
    """
    if not has_lengths(question):
        return question, None
    if question.layout != "thd":
        if any(x.ndim != 4 for x in question[:3]):
            raise InputError(f"q, k, v must have 4 dimensions ({', '.join(question.layout)})")
        q, k = (x if question.layout == "bhsd" else x.transpose(1, 2) for x in question[:2])
        return question, padded(q, k, question.q_lengths, question.kv_lengths, question.padding_side)
    starts_q, starts_kv = question.cu_seqlens_q, question.cu_seqlens_kv
    assert starts_q is not None, "packed questions without lengths are refused"
    q, k, v = packed_views(*question[:3])
    starts_kv = starts_q if starts_kv is None else starts_kv
    found = packed(q, k, starts_q, starts_kv, question.max_seqlen_q, question.max_seqlen_kv)
    return question._replace(q=q, k=k, v=v, layout="bhsd"), found


def settled(question: Question, wish: Wish) -> Wish:
    """What is asked for beyond the tensors: by argument, else by this wish of the context or environment.

    Its dtype is ``fp8`` where FP8 plans are opened, else the tensors' own.  Raises InputError for what cannot be.
    """
    backend, dtype, max_error, asked_by = wish
    if question.backend != "auto":
        backend, asked_by = question.backend, "argument"
    if not isinstance(backend, str):
        raise InputError(f"backend must be the name of a backend, kernel or plan, or auto, not {backend!r}")
    max_error = max_error if question.max_error is None else question.max_error
    check_budget(max_error)
    own = question.q.dtype
    fp8 = _opens_fp8(dtype if question.dtype is None else question.dtype, own, max_error)
    return Wish(backend, "fp8" if fp8 else FROM_TORCH.get(own), max_error, asked_by)


def decide(question: Question, training: bool, wish: Wish) -> Choice:
    """The choice that answers the question under this settled wish.  Raises InputError and what ``choose`` raises."""
    question, lengths = resolved(question)
    return choose(
        spec_of(question, training, lengths),
        question.q.device,
        backend=wish.backend,
        asked_by=wish.asked_by,
        fp8=wish.dtype == "fp8",
        max_error=wish.max_error,
    )


def spec_of(question: Question, training: bool, lengths: Lengths | None) -> AttentionSpec:
    """What is asked of a kernel.

    Raises InputError for a wrong rank, shapes that do not fit, types or devices that differ or are unsupported, flags
    that are neither True nor False, and numbers that describe no attention.
    """
    descale = _shared(question)
    for name in ("is_causal", "enable_gqa", "return_lse"):
        value = getattr(question, name)
        if isinstance(value, Tensor) or value not in (True, False):  # "no" would count as true
            raise InputError(f"{name} must be True or False, not {value!r:.60}")
    mask = mask_of(question.is_causal, question.window, question.causal_alignment)
    if question.layout not in ("bhsd", "bshd"):
        raise InputError(f'layout must be "bhsd", "bshd" or "thd", not {question.layout!r}')
    tensors = question[:3]
    for name, x in zip("qkv", tensors, strict=True):
        if x.ndim != 4:
            raise InputError(
                f"{name} must have 4 dimensions ({', '.join(question.layout)}), got shape {tuple(x.shape)}"
            )
    devices, dtypes = [x.device for x in tensors], [x.dtype for x in tensors]
    if len(set(devices)) > 1:
        raise InputError(f"q, k, v must be on one device, got {', '.join(map(str, devices))}")
    if devices[0].type not in ("cpu", "cuda"):
        raise InputError(f"attention runs on cpu and cuda, not on {devices[0].type}")
    if len(set(dtypes)) > 1:
        raise InputError(f"q, k, v must have one dtype, got {', '.join(map(str, dtypes))}")
    if dtypes[0] not in FROM_TORCH:
        raise InputError(f"dtype {dtypes[0]} is not supported; {', '.join(map(str, FROM_TORCH))} are")
    heads, length = (1, 2) if question.layout == "bhsd" else (2, 1)
    q, k, v = (x.shape for x in tensors)
    for what, axis in {"batch": 0, "heads": heads, "length": length}.items():
        if k[axis] != v[axis]:
            raise InputError(f"k and v must agree in {what}, got {k[axis]} and {v[axis]}")
    if q[0] != k[0]:
        raise InputError(f"q and k must agree in batch, got {q[0]} and {k[0]}")
    if q[3] != k[3]:
        raise InputError(f"q and k must agree in head dimension, got {q[3]} and {k[3]}")
    if not question.enable_gqa and q[heads] != k[heads]:
        raise InputError(
            f"q has {q[heads]} heads and k has {k[heads]}; enable_gqa=True lets query heads share key heads"
        )
    if question.sinks is not None:
        check_sinks(question.sinks, q[heads], devices[0])
    if lengths is None:
        sizes: dict[str, Any] = {"batch": q[0], "seqlen_q": q[length], "seqlen_kv": k[length]}
    else:
        sizes = sizes_of(lengths, q[0], q[length], k[length])
    return AttentionSpec.make(
        **sizes,
        heads=q[heads],
        kv_heads=k[heads],
        head_dim=q[3],
        head_dim_v=v[3],
        dtype=FROM_TORCH[dtypes[0]],
        scale=question.scale,
        mask=mask,
        softcap=0.0 if question.softcap is None else question.softcap,
        direction="training" if training else "forward",
        return_lse=question.return_lse,
        descale=descale,
        sinks=question.sinks is not None,
    )


def _opens_fp8(dtype: str | torch.dtype | None, own: torch.dtype, max_error: float | None) -> bool:
    if dtype is None:
        return max_error is not None
    if dtype == "fp8":
        return True
    name = FROM_TORCH.get(own, str(own))
    if dtype in (own, name):
        return False
    raise InputError(f'dtype must be "fp8" (admit FP8 plans) or the tensors\' own {name}, not {dtype!r}')
