"""Documents of their own lengths: the files of a text, packed end to end or padded to rows.

Batch n of a run is a function of the seed and n alone, and holds the same documents packed and padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnbench.errors import InputError

from .seeds import derived
from .text import Text

__all__ = ["IGNORED", "Documents", "packed", "padded"]

IGNORED = -100  # the target of padding
_STRIDE = 128  # padded rows have a multiple of so many tokens, so that few shapes occur


class Documents:
    """The files of a text, those of more than ``longest`` tokens in pieces of that length and a rest.

    The tokens of a document are those that a model reads; each one's target follows it, the last one's is the boundary
    behind the file, or the token with which the next piece begins.  Empty files are no documents.
    """

    def __init__(self, text: Text, longest: int) -> None:
        spans = text.spans()
        spans = spans[spans[:, 1] > 1]
        self._text, self._longest = text, longest
        self._starts, self._tokens = spans[:, 0], spans[:, 1] - 1
        self._last = np.cumsum(-(-self._tokens // longest))  # the number of pieces up to each file's end

    def __len__(self) -> int:
        return int(self._last[-1]) if len(self._last) else 0

    def draw(self, seed: int, number: int, tokens: int) -> list[Tensor]:
        """Documents with ``tokens`` tokens together, each (n + 1,) int64 with the last token's target.

        Drawn with equal chances; the last one is cut to fit.  Raises InputError if there is
        none, or if a file has changed.
        """
        if not len(self):
            raise InputError("the text holds no document of a token and one that follows it")
        found: list[Tensor] = []
        while tokens:
            piece = derived(seed, "documents", number, len(found)) % len(self)
            file = int(np.searchsorted(self._last, piece, side="right"))
            place = (piece - (int(self._last[file - 1]) if file else 0)) * self._longest
            length = min(self._longest, int(self._tokens[file]) - place, tokens)
            found.append(torch.from_numpy(self._text.read(int(self._starts[file]) + place, length + 1)))
            tokens -= length
        return found

    def mean(self, cost: Callable[[int], float]) -> float:
        """``cost`` of a document by its tokens, over that of a token, in the mean of all documents."""
        whole, rest = np.divmod(self._tokens, self._longest)
        total = float(whole.sum()) * cost(self._longest) if whole.any() else 0.0
        for length, count in zip(*np.unique(rest[rest > 0], return_counts=True), strict=True):
            total += float(count) * cost(int(length))
        return total / float(self._tokens.sum())


def packed(documents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tokens, targets and positions (1, T), which count from 0 in each document, and int32 starts (N + 1,)."""
    lengths = torch.tensor([len(each) - 1 for each in documents])
    ends = lengths.cumsum(0)
    positions = torch.arange(int(ends[-1])) - (ends - lengths).repeat_interleave(lengths)
    starts = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
    return (*(torch.cat(each)[None] for each in _sides(documents)), positions[None], starts)


def padded(documents: Sequence[Tensor], longest: int) -> tuple[Tensor, ...]:
    """Tokens and targets (N, S), one document a row; S fits the longest of them and is at most ``longest``."""
    length = min(longest, -(-max(len(each) - 1 for each in documents) // _STRIDE) * _STRIDE)
    wide = torch.zeros(length, dtype=torch.int64)
    return tuple(
        pad_sequence([*side, wide], batch_first=True, padding_value=filling)[:-1].contiguous()
        for side, filling in zip(_sides(documents), (0, IGNORED), strict=True)
    )


def _sides(documents: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return [each[:-1] for each in documents], [each[1:] for each in documents]
