"""Random images and labels for vit-huge: its article measures speed, which does not depend on the images."""

from __future__ import annotations

import torch
from torch import Tensor

from .seeds import derived

__all__ = ["random_images"]


def random_images(seed: int, numbers: range, pixels: int, classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images (B, 3, pixels, pixels), normal, fp32, and labels (B,) below ``classes``, drawn on the device.

    Image n depends on seed and n alone.
    """
    images = torch.empty(len(numbers), 3, pixels, pixels, device=device)
    generator = torch.Generator(device)
    for image, number in zip(images, numbers, strict=True):
        generator.manual_seed(derived(seed, "image", "train", number))
        image.normal_(generator=generator)
    labels = [derived(seed, "label", "train", number) % classes for number in numbers]
    return images, torch.tensor(labels, device=device)
