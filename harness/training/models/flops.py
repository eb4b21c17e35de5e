"""The operations of a training step, from which MFU is computed.

A matrix of n elements costs 2·n floating-point operations per token forward and twice that backward (the gradients of
its input and its own).  Attention costs 2·(D + Dv) per visible pair of query and key and head forward, twice that
backward; a causal mask shows half the pairs.  Only what the mathematics needs is counted: no recomputation by
checkpointing, by a fused attention's backward or by a long batch's loss, no padding, and no norms, activations, softmax
or optimiser.  This follows PaLM's appendix B (arXiv 2204.02311), and takes the mask into account.
"""

from __future__ import annotations

from attnbench.problem.mask import Mask

from .gpt import GptSize
from .vit_sizes import VitSize

__all__ = ["attention_flops", "gpt_attention_flops", "gpt_flops", "matrix_flops", "vit_flops"]


def matrix_flops(elements: float, tokens: float) -> float:
    """Forward and backward of matrices with ``elements`` elements in all, applied to each token."""
    return 6.0 * elements * tokens


def attention_flops(batch: int, heads: int, seqlen: int, head_dim: int, head_dim_v: int, mask: Mask) -> float:
    """Forward and backward of one layer's attention over square samples."""
    return 3.0 * 2.0 * batch * heads * mask.area(seqlen, seqlen) * (head_dim + head_dim_v)


def gpt_flops(size: GptSize, batch: int, seqlen: int) -> float:
    """One step of ``batch`` samples: blocks, head (tied or not) and causal attention; look-ups cost nothing."""
    elements = size.layers * size.block_weights + size.width * size.vocab
    return matrix_flops(elements, batch * seqlen) + gpt_attention_flops(size, batch, seqlen)


def gpt_attention_flops(size: GptSize, batch: int, seqlen: int) -> float:
    """The attention's part of ``gpt_flops``."""
    return size.layers * attention_flops(batch, size.heads, seqlen, size.head_dim, size.head_dim, Mask(right=0))


def vit_flops(size: VitSize, batch: int) -> float:
    """One step of ``batch`` images: patches (whose images need no gradient), blocks, head, attention without a mask."""
    patches = 4.0 * size.patch_weights * size.patches * batch
    blocks = matrix_flops(size.depth * size.block_weights, batch * size.tokens)
    head = matrix_flops(size.width * size.classes, batch)
    attention = attention_flops(batch, size.heads, size.tokens, size.head_dim, size.head_dim, Mask())
    return patches + blocks + head + size.depth * attention
