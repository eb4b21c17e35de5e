"""The presets of sequences of unequal length, each beside what padding and equal lengths would cost.

``packed`` are documents of a training.  Of The Pile (arXiv 2101.00027, table 1) a web page (Pile-CC) has 4.33 KiB on
average, a court's opinion (FreeLaw) 15.06 KiB and a paper (ArXiv) 46.61 KiB: about 1k, 4k and 12k to 16k tokens, at 3
to 4 bytes a token.  That lengths about these means are lognormal is assumed.

``padded`` are the texts on which BERT was trained: in rows of 512 tokens half of Wikipedia is padding (arXiv
2107.02027, abstract of its first version), as of uniform lengths; and documents in rows of 8k tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec, Direction

from ..sequence_lengths import BatchLayout, Draw, SequenceLengths
from .drawn_lengths import draw_lengths

__all__ = ["Shape", "packed_on_cpu", "packed_on_gpu", "padded_on_cpu", "padded_on_gpu"]

Shape = tuple[AttentionSpec, SequenceLengths | None]

_WEB, _LAW, _PAPERS = 1024.0, 4096.0, 16384.0  # mean tokens of a document
_TOTAL, _CONTEXT = 65536, 32768
_CAUSAL = Mask(right=0)
_BOTH: tuple[Direction, ...] = ("forward", "training")
_ALL: tuple[BatchLayout, ...] = ("packed", "padded", "dense", "equal")


def packed_on_gpu() -> Iterator[Shape]:
    """64k tokens of documents in 16 heads, with and without groups."""
    documents = [_lognormal(mean, _TOTAL, _CONTEXT) for mean in (_LAW, _PAPERS)]
    equal = Draw(distribution="constant", total=_TOTAL, longest=4096)
    for kv_heads, direction in product((16, 4), _BOTH):
        own = {"heads": 16, "kv_heads": kv_heads, "head_dim": 128, "mask": _CAUSAL, "direction": direction}
        for draw in documents:
            yield from _shapes(draw, _ALL, **own)
        yield from _shapes(equal, ("packed", "equal"), **own)
        if kv_heads == 4:
            yield from _shapes(_lognormal(_WEB, _TOTAL, _CONTEXT), _ALL, **own)


def packed_on_cpu() -> Iterator[Shape]:
    """The same kinds of batches, small."""
    for direction in _BOTH:
        own = {"heads": 4, "kv_heads": 2, "head_dim": 64, "mask": _CAUSAL, "direction": direction}
        yield from _shapes(_lognormal(128.0, 768, 512), _ALL, **own)
    equal = Draw(distribution="constant", total=768, longest=128)
    yield from _shapes(equal, ("packed", "equal"), **{**own, "direction": "forward"})


def padded_on_gpu() -> Iterator[Shape]:
    """An encoder's texts, documents to learn from, and prompts, which are padded on the left."""
    texts, documents = Draw(distribution="uniform", total=16384, longest=512), _lognormal(_LAW, _TOTAL, 8192)
    for direction in _BOTH:
        yield from _shapes(texts, ("padded", "packed", "dense", "equal"), heads=16, head_dim=64, direction=direction)
    for layout, direction in (("left-padded", "forward"), ("padded", "training")):
        own = {"heads": 32, "kv_heads": 8, "head_dim": 128, "mask": _CAUSAL, "direction": direction}
        yield from _shapes(documents, (layout, "packed", "dense", "equal"), **own)


def padded_on_cpu() -> Iterator[Shape]:
    """The same kinds of batches, small."""
    texts = Draw(distribution="uniform", total=512, longest=128)
    for direction in _BOTH:
        yield from _shapes(texts, ("padded", "packed", "dense", "equal"), heads=4, head_dim=64, direction=direction)
    yield from _shapes(texts, ("left-padded", "dense"), heads=4, kv_heads=2, head_dim=64, mask=_CAUSAL)


def _lognormal(mean: float, total: int, longest: int) -> Draw:
    return Draw(distribution="lognormal", total=total, longest=longest, mean=mean)


def _shapes(draw: Draw, layouts: Iterable[str], **own: Any) -> Iterator[Shape]:
    each = draw_lengths(draw)
    for layout in layouts:
        lengths = SequenceLengths.model_validate({"layout": layout, "q": each, "drawn": draw})
        yield AttentionSpec.make(**own, **lengths.sizes()), lengths
