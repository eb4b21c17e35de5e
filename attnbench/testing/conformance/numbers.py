"""Conformance of a kernel's numbers: each function says what is wrong on a spec, or None."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Literal

import torch
from torch import Tensor

from ...errors import InputError
from ...harness.measure.accuracy import TensorName, relative_l2
from ...harness.measure.probes import same_bits
from ...kernels.contract import Inputs, gradient_dtype
from ...problem.fp8 import BLOCK, Quantised, quantise_with
from ...problem.mask import Alignment, Mask
from ...problem.spec import AttentionSpec
from .subject import Subject, Values, exact_of, inputs_of, truth_of, wide_inputs

__all__ = [
    "check_alignment",
    "check_declared_error",
    "check_descales",
    "check_error",
    "check_grouping",
    "check_lse",
    "check_numbers",
    "check_returned",
    "check_strides",
    "check_window",
]

_NATS_PER_BIT = 0.6931471805599453
_FORMATS: dict[str, Literal["e4m3", "e5m2"]] = {"e4m3": "e4m3", "e5m2": "e5m2"}
_LOOSE = 4.0  # a kernel that declares so many times its error loses to slower ones where nothing was measured
_OF_TRUTH = 3e-15  # what exact attention in FP64 may itself be off by
_DATA_DEVIATION = 64.0  # of the numbers stored in FP8: far from the smallest, and hardly one is cut off


def check_returned(subject: Subject, spec: AttentionSpec) -> str | None:
    """Dtypes, shapes, device of what comes back, and memory of its own."""
    inputs = inputs_of(spec, subject.device)
    operands = subject.forward.prepare(inputs.qkv, spec)
    found = subject.answers_of(operands, inputs.grad_out)
    rows = (spec.batch, spec.heads, spec.seqlen_q)
    keys = (spec.batch, spec.kv_heads, spec.seqlen_kv)
    shapes = {
        "out": (*rows, spec.head_dim_v),
        "lse": rows,
        "dq": (*rows, spec.head_dim),
        "dk": (*keys, spec.head_dim),
        "dv": (*keys, spec.head_dim_v),
    }
    if "lse" not in found and subject.row is not None and subject.row.lse:
        return "lse is None, where the row says that it is returned"
    given = {x.untyped_storage().data_ptr() for x in (inputs.q, inputs.k, inputs.v)}
    for name in subject.tensors:
        if name not in found:
            continue
        value = found[name]
        types = (torch.float32, torch.float64) if name == "lse" else (gradient_dtype(spec),)
        if not isinstance(value, Tensor):
            return f"{name} is a {type(value).__name__}, not a tensor"
        if tuple(value.shape) != shapes[name]:
            return f"{name} has the shape {tuple(value.shape)}, not {shapes[name]}"
        if value.dtype not in types:
            return f"{name} is {value.dtype}, not {types[0]}"
        if value.device != inputs.q.device:
            return f"{name} is on {value.device}, not on {inputs.q.device}"
        if value.untyped_storage().data_ptr() in given:
            return f"{name} lies in the memory of an input"
    return None


def check_error(subject: Subject, spec: AttentionSpec) -> str | None:
    """Out or the gradients beside exact attention."""
    inputs = inputs_of(spec, subject.device)
    found = subject.answers(spec, inputs)
    return subject.wrong(spec, {name: x for name, x in found.items() if name != "lse"}, truth_of(subject, spec, inputs))


def check_declared_error(subject: Subject, spec: AttentionSpec) -> str | None:
    """The worst error of out or the gradients against the declared one, on enough numbers not to stray from it."""
    inputs = inputs_of(spec, subject.device)
    truth, found = truth_of(subject, spec, inputs), subject.answers(spec, inputs)
    errors = {name: relative_l2(found[name], exact_of(truth, name)) for name in subject.tensors if name != "lse"}
    worst = max(errors, key=errors.__getitem__, default=None)
    if worst is None:
        return None
    error, allowed = errors[worst], subject.declared(spec)
    message = f"{worst} of {spec.dtype} tensors is off by {error:.2g}, {allowed:.2g} declared"
    if not error <= allowed:
        return message
    subject.note("declared error", message + (": declare less" if allowed > _LOOSE * max(error, _OF_TRUTH) else ""))
    return None


def check_numbers(subject: Subject, spec: AttentionSpec) -> str | None:
    """Everything that the plan is judged by, beside exact attention."""
    inputs = inputs_of(spec, subject.device)
    return subject.wrong(spec, subject.answers(spec, inputs), truth_of(subject, spec, inputs))


def check_lse(subject: Subject, spec: AttentionSpec) -> str | None:
    """The LSE: natural logarithm, minus infinity where no key is seen."""
    inputs = inputs_of(spec, subject.device)
    found = subject.answers(spec, inputs)
    if "lse" not in found:
        return None
    truth = truth_of(subject, spec, inputs)
    problem = subject.wrong(spec, {"lse": found["lse"]}, truth)
    if problem is None:
        return None
    exact, lse = exact_of(truth, "lse"), found["lse"]
    empty = exact == -torch.inf
    if bool((lse[empty] != -torch.inf).any()):
        return f"lse is {float(lse[empty][0]):g}, not -inf, in a row that sees no key"
    if subject.wrong(spec, {"lse": lse * _NATS_PER_BIT}, truth) is None:
        return f"{problem}; it is a logarithm to base 2, where a natural one is wanted"
    return problem


def check_alignment(subject: Subject, spec: AttentionSpec) -> str | None:
    """Both causal alignments."""
    other: Alignment = "top-left" if spec.mask.alignment == "bottom-right" else "bottom-right"
    return _instead(subject, spec, [spec.replace(mask=Mask(spec.mask.left, spec.mask.right, other))])


def check_window(subject: Subject, spec: AttentionSpec) -> str | None:
    """Exactly the keys of the window, not one more or less on any side."""
    return _instead(subject, spec, _neighbours(spec))


def _neighbours(spec: AttentionSpec) -> Iterator[AttentionSpec]:
    mask = spec.mask
    for by_left in (-1, 0, 1):
        for by_right in (-1, 0, 1):
            left = None if mask.left is None else mask.left + by_left
            right = None if mask.right is None else mask.right + by_right
            if (by_left, by_right) != (0, 0) and min(left or 0, right or 0) >= 0:
                yield spec.replace(mask=Mask(left, right, mask.alignment))
    yield spec.replace(mask=Mask(None, mask.right, mask.alignment))
    yield spec.replace(mask=Mask(mask.left, None, mask.alignment))
    yield spec.replace(mask=Mask(mask.left, mask.right, "top-left"))


def _instead(
    subject: Subject, spec: AttentionSpec, others: Iterator[AttentionSpec] | list[AttentionSpec]
) -> str | None:
    """What is wrong, and which other mask the answer fits, if one of these."""
    inputs = inputs_of(spec, subject.device)
    found = subject.answers(spec, inputs)
    problem = subject.wrong(spec, found, truth_of(subject, spec, inputs))
    if problem is None:
        return None
    for other in others:
        if other != spec and subject.wrong(other, found, truth_of(subject, other, inputs)) is None:
            return f"{problem}; the answer is that of the mask {other.mask}"
    return problem


def check_grouping(subject: Subject, spec: AttentionSpec) -> str | None:
    """Query head h reads key head h // group; key heads in another order move the outputs along with them."""
    inputs = inputs_of(spec, subject.device)
    truth = truth_of(subject, spec, inputs)
    found = subject.answers(spec, inputs)
    if problem := subject.wrong(spec, found, truth):
        order = torch.arange(spec.heads, device=subject.device).view(spec.kv_heads, spec.group).mT.flatten()
        # Heads dealt out in turns: the answer for queries in their own order is that of h % kv_heads.
        dealt = replace(inputs, q=inputs.q[:, order], grad_out=_heads_of(inputs.grad_out, order))
        per_query = {name: x[:, order] if name in ("out", "lse", "dq") else x for name, x in found.items()}
        if subject.wrong(spec, per_query, truth_of(subject, spec, dealt)) is None:
            return f"{problem}; query head h read key head h % {spec.kv_heads}, not h // {spec.group}"
        return problem
    # Key heads in the reverse order, and each group of query heads with its own.
    keys = torch.arange(spec.kv_heads, device=subject.device).flip(0)
    queries = (keys[:, None] * spec.group + torch.arange(spec.group, device=subject.device)).flatten()
    q, k, v = inputs.q[:, queries], inputs.k[:, keys], inputs.v[:, keys]
    turned = replace(inputs, q=q, k=k, v=v, grad_out=_heads_of(inputs.grad_out, queries))
    answer = subject.answers(spec, turned)
    back = {name: x[:, keys if name in ("dk", "dv") else queries] for name, x in answer.items()}
    problem = subject.wrong(spec, back, truth)
    return None if problem is None else f"with key heads in another order {problem}"


def _heads_of(x: Tensor | None, heads: Tensor) -> Tensor | None:
    return None if x is None else x[:, heads]


def check_descales(subject: Subject, spec: AttentionSpec) -> str | None:
    """FP8 tensors with descales of random size, then each of them doubled."""
    random = Random(str(spec))
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    # A descale for each query head is what ``attention`` admits; a kernel that shares them must say so.
    given = _draw(spec, generator, subject.device, shared=False)
    try:
        problem = _descale_fault(subject, spec, given)
    except InputError as error:
        subject.note("descales", f"q's descale is one for each key head: {error}")
        given = _draw(spec, generator, subject.device, shared=True)
        problem = _descale_fault(subject, spec, given)
    if problem is not None:
        return problem
    before = [(x.data.clone(), x.descale.clone()) for x in given]
    subject.forward.run(subject.forward.prepare(Inputs.of(given), spec))
    for name, x, (data, descale) in zip("qkv", given, before, strict=True):
        if not (same_bits(x.data, data) and same_bits(x.descale, descale)):
            return f"{name} or its descale changed during the call"
    views = [replace(x, data=x.data.transpose(1, 2).contiguous().transpose(1, 2)) for x in given]
    if problem := _descale_fault(subject, spec, (views[0], views[1], views[2])):
        return f"with FP8 views of (B, S, H, D) memory {problem}"
    for index, name in enumerate("qkv"):
        doubled = [replace(x, descale=2 * x.descale) if index == each else x for each, x in enumerate(given)]
        if problem := _descale_fault(subject, spec, (doubled[0], doubled[1], doubled[2])):
            return f"with {name}_descale doubled {problem}"
    return None


_Triple = tuple[Quantised, Quantised, Quantised]


def _descale_fault(subject: Subject, spec: AttentionSpec, given: _Triple) -> str | None:
    result = subject.forward.run(subject.forward.prepare(Inputs.of(given), spec))
    found: dict[TensorName, Tensor] = {"out": result.out}
    if result.lse is not None:
        found["lse"] = result.lse
    values = {name: found[name] for name in subject.tensors if name in found}
    problem = _fault_beside_exact(subject, spec, values, given)
    if problem is None:
        return None
    for index, name in enumerate("qkv"):
        unit = [replace(x, descale=torch.ones_like(x.descale)) if index == each else x for each, x in enumerate(given)]
        if _fault_beside_exact(subject, spec, values, (unit[0], unit[1], unit[2])) is None:
            return f"{problem}; the answer is that of {name}_descale = 1"
    return problem


def _fault_beside_exact(subject: Subject, spec: AttentionSpec, values: Values, given: _Triple) -> str | None:
    wide = spec.replace(dtype="fp64", descale=None)
    return subject.wrong(spec, values, truth_of(subject, wide, wide_inputs(*given)))


def _draw(spec: AttentionSpec, generator: torch.Generator, device: torch.device, *, shared: bool) -> _Triple:
    """Q, K, V whose stored numbers are alike and whose descales are not."""
    shapes = {
        "q": (spec.batch, spec.heads, spec.seqlen_q, spec.head_dim),
        "k": (spec.batch, spec.kv_heads, spec.seqlen_kv, spec.head_dim),
        "v": (spec.batch, spec.kv_heads, spec.seqlen_kv, spec.head_dim_v),
    }
    made = []
    for name, shape in shapes.items():
        stored = quantise_with(torch.randn(shape, generator=generator) * _DATA_DEVIATION, 1.0, _FORMATS[spec.dtype])
        # Scores stay below a few units, where FP8 can tell keys apart; V may be of any size.
        low, high = (-6.0, 6.0) if name == "v" else (-1.5, 0.5)
        exponent = low + (high - low) * torch.rand(_scales(spec, shape), generator=generator)
        if shared and name == "q" and spec.descale != "tensor":
            exponent = exponent[:, :: spec.group].repeat_interleave(spec.group, dim=1)
        descale = 2.0**exponent / _DATA_DEVIATION
        if spec.descale == "block":
            descale = descale.repeat_interleave(BLOCK, dim=2)[:, :, : shape[2]]
        assert spec.descale is not None, "only specs of FP8 tensors come here"
        made.append(Quantised(stored.to(device), descale.to(device), spec.descale))
    return made[0], made[1], made[2]


def _scales(spec: AttentionSpec, shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    batch, heads, length, _ = shape
    if spec.descale == "tensor":
        return 1, 1, 1, 1
    return batch, heads, {"head": 1, "block": -(-length // BLOCK), "token": length}[str(spec.descale)], 1


def check_strides(subject: Subject, spec: AttentionSpec) -> str | None:
    """Views of every kind: (B, S, H, D) memory, slices, expanded batches, a storage that starts elsewhere."""
    inputs = inputs_of(spec, subject.device)
    exact = truth_of(subject, spec, inputs)
    for layout, view in _LAYOUTS.items():
        viewed = replace(
            inputs,
            q=view(inputs.q),
            k=view(inputs.k),
            v=view(inputs.v),
            grad_out=None if inputs.grad_out is None else view(inputs.grad_out),
        )
        if problem := subject.wrong(spec, subject.answers(spec, viewed), exact):
            return f"with {layout} {problem}"
    k, v = (x[:1].expand(spec.batch, -1, -1, -1) for x in (inputs.k, inputs.v))
    ones = None if inputs.grad_out is None else inputs.grad_out.new_ones(()).expand(inputs.grad_out.shape)
    expanded = replace(inputs, k=k, v=v, grad_out=ones)
    problem = subject.wrong(spec, subject.answers(spec, expanded), truth_of(subject, spec, expanded))
    return None if problem is None else f"with K, V and the gradient expanded (strides of 0) {problem}"


def _offset(x: Tensor) -> Tensor:
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return memory[1:].view(x.shape).copy_(x)


def _sliced(x: Tensor) -> Tensor:
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    return wide[..., ::2]


def _padded_rows(x: Tensor) -> Tensor:
    wide = torch.zeros(*x.shape[:2], x.shape[2] + 3, x.shape[3] + 5, dtype=x.dtype, device=x.device)
    wide[:, :, 1:-2, :-5] = x
    return wide[:, :, 1:-2, :-5]


_LAYOUTS = {
    "views of (B, S, H, D) memory": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "rows and columns cut out of larger tensors": _padded_rows,
    "every second column of wider tensors": _sliced,
    "a storage offset of one element": _offset,
}
