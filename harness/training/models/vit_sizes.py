"""The sizes of ``vit-huge``: the article's, and one that a test can run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["VIT_SIZES", "VitSize"]


@dataclass(frozen=True)
class VitSize:
    """Arguments of a vision transformer with a class token, biases and a feed-forward of four widths."""

    width: int
    depth: int
    heads: int
    pixels: int
    patch: int
    classes: int

    @property
    def head_dim(self) -> int:
        """Features a head."""
        return self.width // self.heads

    @property
    def patches(self) -> int:
        """Patches an image."""
        return (self.pixels // self.patch) ** 2

    @property
    def tokens(self) -> int:
        """Tokens an image: its patches and the class token."""
        return self.patches + 1

    @property
    def patch_weights(self) -> int:
        """Elements of the matrix that makes a token of a patch."""
        return 3 * self.patch**2 * self.width

    @property
    def block_weights(self) -> int:
        """Elements of the matrices of one block: 4·width² around attention, 8·width² of the feed-forward."""
        return 12 * self.width**2


VIT_SIZES = {
    "huge": VitSize(width=1280, depth=32, heads=16, pixels=224, patch=16, classes=1000),
    "tiny": VitSize(width=128, depth=2, heads=2, pixels=32, patch=8, classes=16),
}
