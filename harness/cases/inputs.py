"""The tensors that kernels are measured on: named families of random inputs, drawn anew for every case.

The function that draws a family says what it is, why it exists, and its source.  A captured family has the tensors of a
real model instead (attnbench.harness.capture.file).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnbench.errors import InputError
from attnbench.kernels.contract import Inputs
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.lengths import Lengths
from attnbench.problem.spec import AttentionSpec

from ..capture.file import CapturedFamily, tensor_shapes
from ..sequence_lengths import SequenceLengths

__all__ = ["DEFAULT_FAMILIES", "FAMILIES", "Drawn", "draw"]

_OUTLIERS = 0.001  # the share of elements with a second, ten times larger term: N(0, 100) has deviation 10
_OUTLIER_DEVIATION = 10.0
_CHANNELS_PER_OUTLIER = 64
_CHANNEL_OFFSETS = (10.0, 20.0)
_VALUE_MEAN = 0.5
_SINK_ODDS = 3.0  # the sink's weight over that of all other keys together: 3 / (3 + 1) of a row's attention
# Times the deviation of the mean of seqlen_kv normal values: small, so that the other keys determine the output.
_SINK_VALUE = 0.25
_PEAKY_QUERIES = 3.0
# torch draws about 100 M normal numbers a second on one CPU core and a hundred times that on a GPU.  Up to this number
# (a tenth of a second) every machine draws the same numbers.
_SAME_EVERYWHERE = 2**24

_Tensors = dict[str, Tensor]


class _Layout(NamedTuple):
    """The shapes of the tensors, and of each sequence its rows of the batch, its first key, and its number of keys."""

    shapes: dict[str, tuple[int, ...]]
    sequences: list[tuple[slice, int, int]]


@dataclass(frozen=True)
class Drawn:
    """q (B, H, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv) and, in training, grad_out (B, H, Sq, Dv).

    ``drawn_on`` is the device type of the generator, cpu for tensors from a file.  The numbers are a function of the
    spec, the family and this.  ``lengths`` are those of a packed batch, whose B is 1 and whose tokens lie together in
    memory, or of a padded one, whose padding is drawn too: no kernel may read it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor | None
    drawn_on: Literal["cpu", "cuda"]
    lengths: Lengths | None = None

    @property
    def qkv(self) -> Inputs:
        """The inputs of a kernel's ``prepare``."""
        return Inputs(self.q, self.k, self.v, self.lengths)


def draw(spec: AttentionSpec, family: str, device: torch.device, lengths: SequenceLengths | None = None) -> Drawn:
    """The inputs of a family, contiguous, in the spec's dtype on ``device``; the same on every call.

    Drawn by torch's CPU generator up to 2**24 elements in all, else by the device's own; those of a CapturedFamily are
    read from its file and converted.  Raises InputError on an unknown family, a spec that the family cannot be drawn
    for, one of unequal lengths without ``lengths``, or captured tensors of another spec; MalformedFileError if their
    file is damaged.
    """
    if lengths is None and spec.lengths is not None:
        raise InputError(f"the tensors of a {spec.lengths.batch} batch are drawn with the lengths of its sequences")
    if isinstance(family, CapturedFamily):
        return _inputs(family.tensors(spec, lengths), spec, device, "cpu", lengths)
    if family not in _DRAWN:
        raise InputError(f"input families are {', '.join(FAMILIES)}, not {family!r}")
    layout = _Layout(tensor_shapes(spec, lengths), _sequences(spec, lengths))
    small = sum(torch.Size(shape).numel() for shape in layout.shapes.values()) <= _SAME_EVERYWHERE
    source = torch.device("cpu") if small else device
    seed = int.from_bytes(hashlib.sha256(f"{family} {spec}".encode()).digest()[:8], "big") >> 1
    drawn = _DRAWN[family](spec, layout, torch.Generator(source).manual_seed(seed))
    return _inputs(drawn, spec, device, "cuda" if source.type == "cuda" else "cpu", lengths)


def _inputs(
    drawn: _Tensors,
    spec: AttentionSpec,
    device: torch.device,
    drawn_on: Literal["cpu", "cuda"],
    lengths: SequenceLengths | None,
) -> Drawn:
    x = {name: values.to(TO_TORCH[spec.dtype]).to(device) for name, values in drawn.items()}
    if lengths is not None and lengths.layout == "packed":  # (T, H, D) in memory, as callers have them
        x = {name: values.transpose(1, 2).contiguous().transpose(1, 2) for name, values in x.items()}
    own = None if lengths is None else lengths.tensors(spec, x["q"], x["k"])
    return Drawn(x["q"], x["k"], x["v"], x.get("grad_out"), drawn_on, own)


def _sequences(spec: AttentionSpec, lengths: SequenceLengths | None) -> list[tuple[slice, int, int]]:
    """Rows of the batch, first key and number of keys of each sequence that has a key."""
    if lengths is None or not lengths.unequal:
        return [(slice(None), 0, spec.seqlen_kv)]
    found, end = [], 0
    for row, keys in enumerate(lengths.keys):
        if lengths.layout == "packed":
            place, end = (slice(None), end, keys), end + keys
        else:
            place = slice(row, row + 1), spec.seqlen_kv - keys if lengths.layout == "left-padded" else 0, keys
        found += [place] if keys else []
    return found


def _normal(spec: AttentionSpec, layout: _Layout, generator: torch.Generator) -> _Tensors:
    """All N(0, 1): the easiest input, on which published errors are usually quoted."""
    return {name: _randn(shape, generator) for name, shape in layout.shapes.items()}


def _outlier(spec: AttentionSpec, layout: _Layout, generator: torch.Generator) -> _Tensors:
    """All N(0, 1) + N(0, 100) · Bernoulli(0.001): a few large elements anywhere hurt scales that many others share.

    FlashAttention-3 (arXiv 2407.08608), section 4.3.
    """

    def values(shape: tuple[int, ...]) -> Tensor:
        base = _randn(shape, generator)
        chosen = _rand(shape, generator) < _OUTLIERS
        return base.add_(_randn(shape, generator).mul_(_OUTLIER_DEVIATION).mul_(chosen))

    return {name: values(shape) for name, shape in layout.shapes.items()}


def _outlier_channel(spec: AttentionSpec, layout: _Layout, generator: torch.Generator) -> _Tensors:
    """N(0, 1), and on one channel in 64 (at least one) of Q and K an offset of ±10 to ±20 that all tokens share.

    As in transformers, where keys and queries are large in the same few channels of a head for every token, while V is
    not: one rounding error there outweighs all other channels.  Large channels vary little from token to token
    (SmoothQuant, arXiv 2211.10438, section 3); K has them and V has none (KIVI, arXiv 2402.02750, section 3); Q has
    them too (arXiv 2502.01563).  Each key head has its own channels, shared by its query heads and the whole batch;
    sizes and signs are each head's own.
    """
    drawn = _normal(spec, layout, generator)
    count = max(1, spec.head_dim // _CHANNELS_PER_OUTLIER)
    places = _rand((spec.kv_heads, spec.head_dim), generator).argsort(dim=-1)[:, :count]
    low, high = _CHANNEL_OFFSETS
    for name, heads in (("q", spec.heads), ("k", spec.kv_heads)):
        sizes = low + (high - low) * _rand((heads, count), generator)
        signs = (_rand((heads, count), generator) < 0.5).float() * 2 - 1
        own = places.repeat_interleave(heads // spec.kv_heads, dim=0)
        offsets = torch.zeros(heads, spec.head_dim, device=generator.device, dtype=torch.float32)
        offsets.scatter_(1, own, sizes * signs)
        drawn[name] += offsets[:, None]
    return drawn


def _biased_v(spec: AttentionSpec, layout: _Layout, generator: torch.Generator) -> _Tensors:
    """N(0, 1), V with the mean 0.5: sums of P·V grow with the keys, and a short accumulator loses precision.

    On an H200 the error of FlashAttention-3's FP8 kernel on such V is 0.32 at 64k keys and 0.46 at 128k; promoting the
    accumulator to fp32 removes it.
    """
    drawn = _normal(spec, layout, generator)
    drawn["v"] += _VALUE_MEAN
    return drawn


def _sink(spec: AttentionSpec, layout: _Layout, generator: torch.Generator) -> _Tensors:
    """N(0, 1), but most attention goes to the first key, whose value is small: the other keys determine the output.

    As in language models (StreamingLLM, arXiv 2309.17453), whose first key lies in the queries' direction and whose
    first value is close to 0 (arXiv 2410.10781).  FP8 kernels scale P to the row's maximum, the sink, and the rest must
    not vanish below the smallest number.

    Every query of a key head's group is shifted by √D along one direction.  A sequence's first key is the multiple of
    that direction whose mean score (before softcap, with other scores of mean 0) gives it three times the weight of all
    other keys together: about 3/4 of the attention of a query that sees all of its keys, more if it sees fewer, none
    if the mask hides the first key.  That score is 9 nats for 1024 keys and 14 for 128k at the usual scale.  Raises
    InputError if the scale is too small for any key to reach it.
    """
    drawn = _normal(spec, layout, generator)
    direction = _randn((spec.kv_heads, 1, spec.head_dim), generator)
    direction /= torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
    shift = math.sqrt(spec.head_dim)
    drawn["q"] += shift * direction.repeat_interleave(spec.group, dim=0)
    # Scores of the other keys are normal around 0: D products of N(0, 1), and the shift along the keys.
    deviation = abs(spec.scale) * math.hypot(shift, shift)
    for rows, first, keys in layout.sequences:
        score = math.log(_SINK_ODDS) + _log_sum_exp(keys, deviation)
        length = score / (spec.scale * shift) if spec.scale else math.inf
        if abs(length) > torch.finfo(TO_TORCH[spec.dtype]).max:
            raise InputError(f"no key of {spec.dtype} can be a sink where the scale is {spec.scale!r}")
        drawn["k"][rows, :, first : first + 1] = length * direction
        drawn["v"][rows, :, first] *= _SINK_VALUE / math.sqrt(keys)
    return drawn


def _log_sum_exp(count: int, deviation: float) -> float:
    """The asymptotic log of the sum of exp over ``count`` normal numbers of mean 0.

    Beyond a deviation of √(2 ln count) the largest number dominates the sum: the random energy model (B. Derrida,
    Physical Review B 24, 2613, 1981).
    """
    critical = math.sqrt(2 * math.log(count))
    return (critical**2 + deviation**2) / 2 if deviation < critical else critical * deviation


def _peaky(spec: AttentionSpec, layout: _Layout, generator: torch.Generator) -> _Tensors:
    """N(0, 1), Q three times as large: rows attend to few keys, and an error in a score changes the output.

    At the usual scale the scores have a deviation of 3 nats.  The error of S = QKᵀ, which grows with S in a
    floating-point format, is exponentiated and is FP8 attention's largest.
    """
    drawn = _normal(spec, layout, generator)
    drawn["q"] *= _PEAKY_QUERIES
    return drawn


def _randn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)


def _rand(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float32)


_DRAWN: dict[str, Callable[[AttentionSpec, _Layout, torch.Generator], _Tensors]] = {
    "normal": _normal,
    "outlier": _outlier,
    "outlier-channel": _outlier_channel,
    "biased-v": _biased_v,
    "sink": _sink,
    "peaky": _peaky,
}
FAMILIES = tuple(_DRAWN)
DEFAULT_FAMILIES = ("normal", "outlier")  # the families of a case that names none
