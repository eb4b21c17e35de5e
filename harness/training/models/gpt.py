"""``gpt``: a decoder in Llama's style, from half a million parameters to eight billion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from attnbench.errors import InputError

from ..config import TrainConfig
from ..data.corpus import BYTE_TOKENS
from ..data.seeds import derived
from .attention import AttentionCore
from .loss import head_loss

__all__ = ["SIZES", "Gpt", "GptSize", "gpt_size", "initialise"]

_DEVIATION = 0.02


@dataclass(frozen=True)
class GptSize:
    """Widths and counts.  ``hidden`` is SwiGLU's; ``tied`` shares the embedding with the head."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    tied: bool = False
    theta: float = 10_000.0

    @property
    def block_weights(self) -> int:
        """Elements of the matrices of one block: query, key, value, output, and the three of SwiGLU."""
        return self.width * self.head_dim * 2 * (self.heads + self.kv_heads) + 3 * self.width * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters: blocks with two norms each, a last norm, embedding and head."""
        blocks = self.layers * (self.block_weights + 2 * self.width)
        return blocks + self.width + self.width * self.vocab * (1 if self.tied else 2)


# 1b and 3b are Llama 3.2's sizes and 8b is Llama 3's, without the scaling of long positions.  The vocabulary of the
# larger sizes is what their kin have, for its cost, although bytes use 257 rows of it.
SIZES = {
    "tiny": GptSize(128, 2, 2, 1, 64, 384, 384),
    "small": GptSize(768, 12, 12, 4, 64, 2048, 32768),
    "medium": GptSize(1024, 24, 8, 2, 128, 3072, 32768),
    "1b": GptSize(2048, 16, 32, 8, 64, 8192, 128256, tied=True, theta=500_000.0),
    "3b": GptSize(3072, 28, 24, 8, 128, 8192, 128256, tied=True, theta=500_000.0),
    "8b": GptSize(4096, 32, 32, 8, 128, 14336, 128256, theta=500_000.0),
}


def gpt_size(config: TrainConfig) -> GptSize:
    """The size of a config.  Raises InputError on a vocabulary that is too small for bytes."""
    size = SIZES[config.size]
    if 0 < config.vocab < BYTE_TOKENS:
        raise InputError(f"text is learnt in bytes, which need a vocabulary of {BYTE_TOKENS}, not {config.vocab}")
    return replace(size, vocab=config.vocab or size.vocab, layers=config.layers or size.layers)


class Gpt(nn.Module):
    """Tokens and targets (B, S) to their loss.  Attention is causal over the whole sample, or over each document of a
    packed one, (1, T), whose tokens have ``positions`` (1, T) and which ``starts`` (N + 1,) divides.
    """

    def __init__(self, size: GptSize, core: Callable[[], AttentionCore]) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(_Block(size, core()) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=1e-5)
        self.head = None if size.tied else nn.Linear(size.width, size.vocab, bias=False)

    def forward(
        self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """The mean loss of predicting ``targets``, an fp32 scalar; ``positions`` (1, S) of the tokens, None for all."""
        x = self.embedding(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions[0]
        rotation = _rotation(places, self.size)
        for block in self.blocks:
            x = block(x, *rotation, starts)
        head = self.embedding if self.head is None else self.head
        return head_loss(self.norm(x), head.weight, targets)


class _Block(nn.Module):
    def __init__(self, size: GptSize, core: AttentionCore) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width, eps=1e-5)
        self.attention = _Attention(size, core)
        self.feed_norm = nn.RMSNorm(size.width, eps=1e-5)
        self.feed = _SwiGlu(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, starts)
        return x + self.feed(self.feed_norm(x))  # type: ignore[no-any-return]


class _Attention(nn.Module):
    def __init__(self, size: GptSize, core: AttentionCore) -> None:
        super().__init__()
        self._heads = (size.heads, size.kv_heads, size.kv_heads)
        self.query = nn.Linear(size.width, size.heads * size.head_dim, bias=False)
        self.key = nn.Linear(size.width, size.kv_heads * size.head_dim, bias=False)
        self.value = nn.Linear(size.width, size.kv_heads * size.head_dim, bias=False)
        self.output = nn.Linear(size.heads * size.head_dim, size.width, bias=False)
        self.core = core

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for projection, heads in zip((self.query, self.key, self.value), self._heads, strict=True)
        )
        options = {} if starts is None else {"starts": starts}
        out = self.core(_rotated(q, cos, sin), _rotated(k, cos, sin), v, True, **options)
        return self.output(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _SwiGlu(nn.Module):
    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def _rotation(places: Tensor, size: GptSize) -> tuple[Tensor, Tensor]:
    """Cosines and sines (S, D/2) of the rotary embedding in fp32 (arXiv 2104.09864, equation 15)."""
    pair = torch.arange(0, size.head_dim, 2, device=places.device, dtype=torch.float32) / size.head_dim
    angles = torch.outer(places.to(torch.float32), size.theta**-pair)
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, S, D), the first half of each head rotated against the second, in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@torch.no_grad()
def initialise(model: Gpt, seed: int) -> None:
    """Draw the weights in place: normal with deviation 0.02, for projections to the residual stream over √(2·layers).

    Each parameter has its own generator, seeded by the seed and its name, so that nothing else affects its values; a
    GPU draws other numbers than a CPU.
    """
    narrow = _DEVIATION / (2 * model.size.layers) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
            continue
        generator = torch.Generator(parameter.device).manual_seed(derived(seed, "weights", name))
        last = name.endswith((".output.weight", ".down.weight"))
        parameter.normal_(0.0, narrow if last else _DEVIATION, generator=generator)
