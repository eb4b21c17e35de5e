"""Tensors to quantise, and helpers to compare the results."""

from __future__ import annotations

import math

import torch


def laid_out(shape, layout, dtype, seed=0, exponent=0):
    """Normal numbers (B, H, S, D) of very different magnitudes, in the named memory layout."""
    generator = torch.Generator().manual_seed(seed)
    b, h, s, d = shape
    x = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(b, h, s, 1, generator=generator))
    x = (x * 2.0**exponent).clamp(-6e4, 6e4).to(dtype)  # fp16's numbers end at 65504
    if layout == "gaps":
        wide = x.new_full((b, h, 2 * s, d + 3), 7.0)
        wide[:, :, ::2, 1 : d + 1] = x
        return wide[:, :, ::2, 1 : d + 1]
    axes = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "bhds": (0, 1, 3, 2), "sbhd": (2, 0, 1, 3)}[layout]
    back = [axes.index(axis) for axis in range(4)]
    return x.permute(axes).contiguous().permute(back)


def bits(x):
    return x.view(torch.uint8)


def bound(x):
    """The largest that a signed sum over a block of the rotation can be, divided by √(block), (B, H, S, blocks)."""
    block = math.gcd(x.shape[3], 2**20)
    return x.abs().unflatten(3, (-1, block)).sum(4) / block**0.5
