"""The contract of a kernel: what a backend module implements, and all that other code may rely on.

Importing a backend module imports no vendor package and no torch extension; ``availability`` and ``run`` do.  What
vendors disagree on (layouts, descale shapes, causal alignment, output dtype, base of the LSE) ends inside the module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..problem.dtypes import TO_TORCH
from ..problem.fp8 import Quantised
from ..problem.lengths import Lengths
from ..problem.spec import AttentionSpec
from .capabilities import Capabilities, Device

__all__ = [
    "Availability",
    "Backend",
    "BackwardKernel",
    "ForwardKernel",
    "Inputs",
    "Kernel",
    "Library",
    "Operands",
    "Result",
    "Saved",
    "Whole",
    "gradient_dtype",
    "rounding_error",
]

Whole = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
Library = Literal["cudnn", "triton"]
_LIBRARIES: tuple[Library, ...] = get_args(Library)


@dataclass(frozen=True)
class Availability:
    """Whether a backend can be used on this machine: the version found, or the reason it cannot.

    ``origin`` names the distribution or build; ``install`` is the command that adds what is missing.
    """

    version: str | None = None
    reason: str | None = None
    origin: str | None = None
    install: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the backend can be used."""
        return self.reason is None


class Inputs(NamedTuple):
    """The tensors of one call, as ``prepare`` takes them.

    ``q`` (B, H, Sq, D), ``k`` (B, Hkv, Skv, D) and ``v`` (B, Hkv, Skv, Dv) have any strides.  All three are
    ``Quantised`` if the caller quantised them; only kernels whose row names descales get those.
    ``lengths`` are those of a packed batch, of which B is 1, or of a padded one; only kernels whose row names that
    batch get those.  ``sinks`` (H,) no kernel gets: ``Execution`` adds them to what a kernel returns.
    """

    q: Tensor | Quantised
    k: Tensor | Quantised
    v: Tensor | Quantised
    lengths: Lengths | None = None
    sinks: Tensor | None = None

    @classmethod
    def of(cls, tensors: Iterable[Tensor | Quantised], lengths: Lengths | None = None) -> Inputs:
        """q, k and v in order."""
        q, k, v = tensors
        return cls(q, k, v, lengths)

    def unquantised(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v.  Raises TypeError where the caller quantised them."""
        q, k, v = self.q, self.k, self.v
        if isinstance(q, Quantised) or isinstance(k, Quantised) or isinstance(v, Quantised):
            raise TypeError("this kernel declares no descales, so nothing quantised may reach it")
        return q, k, v

    def quantised(self) -> tuple[Quantised, Quantised, Quantised] | None:
        """q, k, v where the caller quantised them, else None."""
        q, k, v = self.q, self.k, self.v
        if isinstance(q, Quantised) and isinstance(k, Quantised) and isinstance(v, Quantised):
            return q, k, v
        return None

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.q.device


@dataclass(eq=False)  # a frozen one takes three times as long to make, in every call
class Operands:
    """What ``prepare`` made for ``run``, which changes none of it.

    ``q``, ``k``, ``v`` (B, H, S, D) are what the kernel computes with: the tensors as given, or quantised.  ``native``
    is whatever else ``run`` needs.  A backward does not see it: what a backward needs goes into the forward's
    ``state``.  ``lengths`` are those of the inputs.
    """

    spec: AttentionSpec
    q: Tensor | Quantised
    k: Tensor | Quantised
    v: Tensor | Quantised
    native: Any = None
    lengths: Lengths | None = None

    def kept(self) -> Operands:
        """What is kept for a backward."""
        return Operands(self.spec, self.q, self.k, self.v, lengths=self.lengths)

    def apart(self) -> tuple[list[Tensor | None], Callable[[Iterator[Tensor | None]], Operands]]:
        """The tensors of what is kept for a backward, and what makes that of them, or of such from elsewhere, again."""
        tensors: list[Tensor | None] = []
        rests, lengths = [_rest_of(x, tensors) for x in (self.q, self.k, self.v)], self.lengths
        if lengths is not None:
            tensors += lengths.q, lengths.kv
            lengths = replace(lengths, q=None, kv=None)
        return tensors, partial(_together, self.spec, rests, lengths)

    def tensors(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V as the forward saw them: as they are, or dequantised into ``dtype`` (the gradients' by default).

        A backward must use these and not the original tensors: exp(S - LSE) sums to one only for the S that made the
        LSE.
        """
        dtype = dtype or gradient_dtype(self.spec)
        q, k, v = (x.dequantised(dtype) if isinstance(x, Quantised) else x for x in (self.q, self.k, self.v))
        return q, k, v


_Rest = tuple[type[Quantised], dict[str, Any]] | None


def _rest_of(x: Tensor | Quantised, tensors: list[Tensor | None]) -> _Rest:
    """Adds what is a tensor of an operand to those; returns the class and other fields of a quantised one."""
    if not isinstance(x, Quantised):
        tensors.append(x)
        return None
    for name in x.kept:  # first: an operand may hold what it makes them of until they are read
        tensors.append(getattr(x, name))
    return type(x), {name: value for name, value in vars(x).items() if name not in x.kept}


def _operand(rest: _Rest, tensors: Iterator[Tensor | None]) -> Tensor | Quantised:
    """The operand that this was the rest of, of the next of these."""
    if rest is None:
        whole = next(tensors)
        assert whole is not None, "every forward has three operands"
        return whole
    kind, others = rest
    made = object.__new__(kind)
    vars(made).update(others, **{name: next(tensors) for name in kind.kept})  # the class is frozen
    return made


def _together(
    spec: AttentionSpec, rests: list[_Rest], lengths: Lengths | None, tensors: Iterator[Tensor | None]
) -> Operands:
    q, k, v = [_operand(rest, tensors) for rest in rests]
    if lengths is not None:
        lengths = replace(lengths, q=next(tensors), kv=next(tensors))
    return Operands(spec, q, k, v, lengths=lengths)


class Result(NamedTuple):
    """A forward's answer: ``out`` (B, H, Sq, Dv) in the input's dtype (bf16 for FP8 input),
    ``lse`` (B, H, Sq) natural log in fp32 or wider, minus infinity where no key is seen, None where the
    kernel's row says so; ``state`` is for this backend's own backward alone."""

    out: Tensor
    lse: Tensor | None
    state: Any = None


@dataclass(frozen=True)
class Saved:
    """What a backward is given: the operands, output, LSE and private state of the forward that ran."""

    operands: Operands
    out: Tensor
    lse: Tensor | None
    state: Any = None

    @property
    def spec(self) -> AttentionSpec:
        """What was asked."""
        return self.operands.spec


class Kernel(ABC):
    """What both passes share: a name, a row for each kind of device, and the evidence that it ran.

    ``name`` is ``backend:precision``; ``rows`` maps a device type (``cpu``, ``cuda``) to its row.  ``declared_error``
    is the relative L2 error on normal inputs (out of a forward, the worst of dq, dk, dv of a backward); ``error_on``
    gives it for one spec.  ``error_growth`` bounds the factor by which adding up more products makes the error of an
    8-bit kernel grow when the keys (for dK and dV: the queries) double; None if unknown, so that nothing measured
    vouches for more keys.  ``preference`` orders kernels where nothing was measured, smallest first; a forward with
    None is never chosen unmeasured.  ``evidence`` maps a device type to a regular expression that the name of a
    profiled operator or device kernel must match: proof that this kernel ran.
    """

    name: str
    rows: Mapping[str, Capabilities]
    declared_error: float
    error_growth: float | None = None
    evidence: Mapping[str, str] = MappingProxyType({})
    preference: int | None = None

    def refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Why this kernel cannot serve the spec on this device, one sentence each; none means that it can."""
        row = self.rows.get(device.type)
        if row is None:
            return [f"runs on {' and '.join(self.rows)}, not on {device.type}"]
        return row.refusals(spec, device) or self.further_refusals(spec, device)

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """What a row of facts cannot say; asked only when the row allows the spec."""
        return []

    def error_on(self, spec: AttentionSpec, device: Device) -> float:
        """The declared error for a spec, at least the rounding error of the results' type."""
        return max(self.declared_error, rounding_error(spec))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class ForwardKernel(Kernel):
    """out = softmax(scale · q kᵀ, capped and masked) v, in one precision.

    ``mixes`` says whether plans that pair an FP8 forward with other backends' backwards are listed.  ``leaves`` names
    what a backward may rely on in the operands; None: only their dequantised values.  ``"e4m3"`` stands for
    ``Quantised`` Q, K and V in that format with any granularity, not smoothed, V not rotated, Q and K rotated together
    or not at all.
    """

    mixes: bool = True
    leaves: str | None = None

    @abstractmethod
    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """Quantise, transpose and pad the inputs into what ``run`` reads.  They are not changed."""

    @abstractmethod
    def run(self, operands: Operands) -> Result:
        """The kernel itself.  Runs on the current stream, without synchronising."""

    def whole(self, spec: AttentionSpec, device_type: str) -> Whole | None:
        """``prepare`` and ``run`` in one function of q, k, v, for a library whose operator does both; None elsewhere.

        It takes the tensors (B, H, S, D) of an ``Inputs``, in any strides and without lengths, and returns (out, lse)
        as ``run`` does; lse may be None unless ``spec.return_lse``.  Where ``spec`` asks for training, torch
        must differentiate it, with the same kernel as the backward of this name.  It saves a small call the host's
        time for operands and for an autograd function in Python.  A library that encodes TMA descriptors needs a GPU
        context in the calling thread: ``devices.bind`` first, as ``Execution`` does before ``prepare``.
        """
        return None


class BackwardKernel(Kernel):
    """dq, dk, dv of a forward that has run.

    ``follows`` names the forwards that it can follow, by name (``te:fp8``) or by what they ``leave`` (``e4m3``); None
    stands for all.  ``needs_lse`` says whether it reads the forward's LSE; ``from_lse`` whether its probabilities are
    exp(S - LSE) and its deltas those of the output, for whatever LSE and output it is given and no private state: so it
    makes the gradients of attention with sinks, and of a part of the keys.
    """

    follows: tuple[str, ...] | None = None
    needs_lse: bool = True
    from_lse: bool = False

    def refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """As of any kernel; and sinks and parts, where gradients do not follow from the LSE alone."""
        reasons = super().refusals(spec, device)
        if (spec.sinks or spec.partial) and not self.from_lse:
            what = "those with sinks" if spec.sinks else "those of a part of the keys"
            reasons.append(f"computes no gradients from a given log-sum-exp, as {what} are")
        return reasons

    def accepts(self, forward: ForwardKernel) -> bool:
        """Whether ``follows`` names the forward or what it leaves."""
        return self.follows is None or forward.name in self.follows or forward.leaves in self.follows

    def cannot_follow(self, forward: ForwardKernel, device: Device) -> str | None:
        """Why it cannot take over from ``forward`` on this device, or None."""
        if not self.accepts(forward):
            known = (each if ":" in each else f"forwards that leave {each}" for each in self.follows or ())
            return f"the backward {self.name} follows only {', '.join(known)}"
        row = forward.rows.get(device.type)
        if self.needs_lse and row is not None and not row.lse:
            return (
                f"the backward {self.name} needs the log-sum-exp, which {forward.name} does not return on {device.type}"
            )
        return None

    @abstractmethod
    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients (B, H, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, Dv) in the input's dtype; changes nothing that was
        saved.

        ``grad_out`` (B, H, Sq, Dv) may have any strides.
        """


@dataclass(frozen=True)
class Backend:
    """A family of kernels: what an entry point of the group ``attnbench.backends`` names.

    ``availability`` is called once a process.  ``resolve`` makes further kernels from the precision part of a name
    (``fp8-token-hadamard``), or returns an empty tuple.  ``yardstick``: device types on which it is only a reference or
    is interpreted, so that a sweep measures it only if named.  ``compiles``: its kernels compile for every shape and
    cache that on the disk, so several processes may compile before anything is timed.  ``built_on``: libraries that
    choose or compile the kernels; measurements with another release of one are not used, and a frozen choice is
    refused.  Other libraries belong into the ``origin`` of the availability, with versions.  ``sdpa_order``: the place
    at which ``torch.nn.functional.scaled_dot_product_attention`` tries these kernels on compute capability 9.0; None:
    never.  Raises ValueError for an unknown library.
    """

    name: str
    summary: str
    availability: Callable[[], Availability]
    kernels: tuple[ForwardKernel | BackwardKernel, ...]
    resolve: Callable[[str], tuple[ForwardKernel | BackwardKernel, ...]] | None = None
    yardstick: tuple[str, ...] = ()
    compiles: bool = False
    built_on: tuple[Library, ...] = ()
    sdpa_order: int | None = None

    def __post_init__(self) -> None:
        for library in self.built_on:
            if library not in _LIBRARIES:
                raise ValueError(f"a backend can be built on {' or '.join(_LIBRARIES)}, not on {library!r}")


def gradient_dtype(spec: AttentionSpec) -> torch.dtype:
    """The dtype of out and of the gradients: the input's own, bf16 where the input is FP8."""
    return TO_TORCH[spec.dtype] if spec.descale is None else torch.bfloat16


def rounding_error(spec: AttentionSpec) -> float:
    """The relative L2 error of rounding exact results to the type that they are returned in: a quarter of its epsilon.

    For normally distributed numbers it is 0.21 epsilon (bf16: 0.0017), more for few numbers.
    """
    return torch.finfo(gradient_dtype(spec)).eps / 4
