"""FP8 formats, recipes and quantised tensors in plain torch: the definition that fused kernels are tested on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..errors import InputError
from ..graph_pools import permanent
from .dtypes import TO_TORCH
from .spec import GRANULARITIES, Granularity

__all__ = [
    "BLOCK",
    "LARGEST",
    "Quantised",
    "Recipe",
    "descale_of",
    "hadamard",
    "quantise",
    "quantise_with",
    "rotation_shrink",
]

Format = Literal["e4m3", "e5m2"]
LARGEST: dict[str, float] = {"e4m3": 448.0, "e5m2": 57344.0}  # OCP FP8 (OFP8) specification, table 1
BLOCK = 128  # tokens that share a scale in the block recipe: the tile of most kernels


@dataclass(frozen=True)
class Recipe:
    """How Q, K and V become FP8.

    ``granularity``: the elements that share a scale: a ``tensor``; a (batch, ``head``); a ``block`` of BLOCK tokens of
    a head; a ``token`` of a head.  ``rotation`` ``hadamard`` multiplies the head dimension of Q and K by one orthogonal
    matrix, which keeps q·k and spreads outliers (FlashAttention-3, section 3.3); the scale of a rotated head or tensor
    comes from a bound on its magnitudes.  ``smoothing`` subtracts K's mean over its tokens, which the softmax does not
    see (SageAttention, section 4.2).
    """

    granularity: Granularity = "head"
    format: Format = "e4m3"
    rotation: Literal["none", "hadamard"] = "none"
    smoothing: bool = False


@dataclass(frozen=True)
class Quantised:
    """An FP8 tensor that stands for ``data * descale``, rotated back, plus ``mean``.

    ``data`` is (B, H, S, D) in float8; ``descale`` is fp32 and broadcasts to it; ``mean`` (B, H, 1, D) was subtracted
    before quantising, None if nothing was.  ``kept`` names the attributes that are tensors, of which the others can be
    made.
    """

    kept: ClassVar[tuple[str, ...]] = ("data", "descale", "mean")
    data: Tensor
    descale: Tensor
    granularity: Granularity
    rotated: bool = False
    mean: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """As a tensor's."""
        return self.data.device

    @property
    def is_cuda(self) -> bool:
        """As a tensor's."""
        return self.data.is_cuda

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The value of the tensor, (B, H, S, D) in ``dtype``, computed in fp32 (fp64 for fp64)."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        value = self.data.to(wide) * self.descale.to(wide)
        if self.rotated:
            value = _rotated(value, back=True)
        if self.mean is not None:
            value = value + self.mean.to(wide)
        return value.to(dtype)


def quantise(x: Tensor, recipe: Recipe, *, rotate: bool = False, smooth: bool = False) -> Quantised:
    """Quantise x (B, H, S, D) with scales from its own largest magnitudes.

    ``rotate`` and ``smooth`` say whether the recipe's rotation and smoothing apply to this operand: both to K, the
    rotation to Q, neither to V.  Where a rotated head or tensor shares a scale, ``_rotation_bound`` gives it: two to
    three times the largest magnitude for normal numbers.  A kernel then rotates once, not twice, and FP8 loses no bits
    to a larger scale unless numbers become subnormal.

    All-zero groups get the scale 1.  A group with a value that is not finite becomes NaN as a whole.  Finite numbers
    that the rotation makes too large for fp32 become NaN with a token's or a block's scale, and saturate with a head's
    or a tensor's.
    """
    value = x.to(torch.float32)
    mean = None
    if smooth and recipe.smoothing:
        mean = value.mean(dim=2, keepdim=True)
        value = value - mean
    rotated = rotate and recipe.rotation == "hadamard"
    magnitudes = value
    if rotated:
        value = _rotated(value)
        magnitudes = _rotation_bound(magnitudes) if recipe.granularity in ("head", "tensor") else value
    descale = descale_of(_group_amax(magnitudes, recipe.granularity), recipe.format)
    data = quantise_with(value, descale, recipe.format)
    return Quantised(data, descale, recipe.granularity, rotated, mean)


def descale_of(amax: Tensor, format: Format) -> Tensor:
    """The descale of groups by their largest magnitudes in fp32; 1 where all is zero, NaN where that is NaN."""
    # Below fp32's smallest normal number the quotient could round to 0, and 0 / 0 is no number.
    smallest = torch.finfo(torch.float32).tiny
    return torch.where(amax == 0, 1.0, _over(amax, LARGEST[format]).clamp_min(smallest))


def quantise_with(x: Tensor, descale: Tensor | float, format: Format) -> Tensor:
    """x / descale rounded to nearest even in ``format``, saturated: torch's own cast makes NaN or infinity of large
    numbers.
    """
    largest = LARGEST[format]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # a quotient of 16 bits would be rounded twice
    return _over(wide, descale).clamp(-largest, largest).to(TO_TORCH[format])


def _over(x: Tensor, divisor: Tensor | float) -> Tensor:
    """x / divisor rounded by IEEE 754 on every device.

    On CUDA torch multiplies by the rounded reciprocal of a Python number or a CPU scalar; it divides by a tensor on the
    device.  Filling one does not synchronise and may be captured in a graph.
    """
    if not isinstance(divisor, Tensor):
        divisor = torch.full((), divisor, dtype=x.dtype, device=x.device)
    return x / divisor


def _rotated(x: Tensor, *, back: bool = False) -> Tensor:
    """x @ hadamard, or its transpose: what is too large for x's type becomes infinite, never NaN."""
    matrix = hadamard(x.shape[-1], x.device).to(x.dtype)
    small = rotation_shrink(x.shape[-1])
    return x @ ((matrix.mT if back else matrix) * small) * (1.0 / small)


def rotation_shrink(size: int) -> float:
    """A power of two that keeps the sums of a rotation from overflowing: half the reciprocal of the block's size."""
    return 0.5 / (size & -size)


def _rotation_bound(x: Tensor) -> Tensor:
    """Bounds on the magnitudes of the rotated x (B, H, S, D) in fp32, (B, H, S, blocks of the rotation).

    A rotated number is a signed sum of a block of x over √(block).  Clamped to fp32's range; NaN or infinite where x
    is.
    """
    size = x.shape[-1]
    block, small = size & -size, rotation_shrink(size)
    sums = (x.abs() * small).view(*x.shape[:-1], size // block, block).sum(-1)
    bound = (sums * (block**-0.5 / small)).clamp_max(torch.finfo(x.dtype).max)
    return torch.where(sums.isfinite(), bound, sums)


def hadamard(size: int, device: torch.device | str = "cpu") -> Tensor:
    """The orthogonal rotation (size, size) in fp32: diag(random ±1) · blocks of Hadamard / √(block).

    The block is the largest power of two that divides ``size``.  Raises InputError for a size below 1.
    """
    if size < 1:
        raise InputError(f"a rotation needs a positive size, got {size}")
    return _hadamard(size, torch.device(device))


@permanent
def _hadamard(size: int, device: torch.device) -> Tensor:
    block = size & -size
    generator = torch.Generator("cpu").manual_seed(size)
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while matrix.shape[0] < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    drawn = torch.randint(0, 2, (size, 1), generator=generator, device="cpu")
    blocks = torch.eye(size // block, dtype=torch.float32, device="cpu")
    signs = drawn.to(torch.float32) * 2.0 - 1.0
    rotation: Tensor = signs * torch.kron(blocks, matrix * block**-0.5)
    return rotation.to(device)


def _group_amax(x: Tensor, granularity: Granularity) -> Tensor:
    """Largest magnitude of the group that each element belongs to, broadcastable to x (B, H, S, D)."""
    magnitude = x.abs()
    if granularity == "tensor":
        return magnitude.amax().expand(1, 1, 1, 1)
    if granularity == "head":
        return magnitude.amax(dim=(2, 3), keepdim=True)
    token = magnitude.amax(dim=3, keepdim=True)
    if granularity == "token":
        return token
    if granularity == "block":
        length = x.shape[2]
        padded = torch.nn.functional.pad(token, (0, 0, 0, -length % BLOCK))
        blocks = padded.view(*padded.shape[:2], -1, BLOCK, 1).amax(dim=3, keepdim=True)
        return blocks.expand(-1, -1, -1, BLOCK, -1).flatten(2, 3)[:, :, :length]
    raise InputError(f"granularity must be one of {', '.join(GRANULARITIES)}, not {granularity!r}")
