"""Draw the lengths of sequences: the same numbers for the same draw, on any machine and Python."""

from __future__ import annotations

import hashlib
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import NormalDist

import numpy as np

from attnbench.errors import InputError, MalformedFileError
from attnbench.files.untrusted import read_regular
from attnbench.problem.spec import AttentionSpec
from attnbench.text.printable import brief

from ..sequence_lengths import LARGEST_TOTAL, Draw, SequenceLengths

__all__ = ["draw_lengths", "draw_of_file", "typical_lengths"]

# Of the logarithm of a length: the mean is then 1.65 times the median.
_SPREAD = 1.0
_LARGEST_FILE = 2**24
_DIGITS = len(str(LARGEST_TOTAL))
_HASH_CHARACTERS = 16


def draw_lengths(draw: Draw, of_file: Sequence[int] = ()) -> tuple[int, ...]:
    """Lengths of at least 1 and at most ``draw.longest``, the last one cut so that they add up to ``draw.total``.

    ``constant``: ``longest`` each.  ``uniform``: from 1 to ``longest``.  ``lognormal``: of the given ``mean`` before
    they are cut to ``longest``; the logarithm has the deviation 1.  ``zipf``: n with a probability proportional to
    1 / n, up to ``longest``.  ``file``: those of ``of_file`` in their order, from the first again after the last.

    Raises InputError for a file's draw without its lengths.
    """
    found: list[int] = []
    left = draw.total
    for length in _endless(draw, of_file):
        found.append(min(length, draw.longest, left))
        left -= found[-1]
        if not left:
            break
    return tuple(found)


def draw_of_file(path: Path, total: int, longest: int | None) -> tuple[Draw, list[int]]:
    """The draw of a file that holds one length a line, and its lengths.

    ``longest`` is by default that of the file.  Raises MalformedFileError with the line and what was expected there,
    InputError for a draw that is none.
    """
    content = read_regular(path, _LARGEST_FILE, "lengths")
    lengths = []
    for number, line in enumerate(content.splitlines(), start=1):
        text = line.strip()
        if not text:
            continue
        if not (text.isdigit() and len(text) <= _DIGITS and 1 <= int(text) <= LARGEST_TOTAL):
            excerpt = brief(text.decode(errors="replace"))
            raise MalformedFileError(path, f"expected a length from 1 to {LARGEST_TOTAL}, not {excerpt}", number)
        lengths.append(int(text))
    if not lengths:
        raise MalformedFileError(path, "expected one length a line, there is none", 1)
    digest = hashlib.sha256(content).hexdigest()[:_HASH_CHARACTERS]
    most = min(total, max(lengths)) if longest is None else longest
    return Draw(distribution="file", total=total, longest=most, file=digest), lengths


def typical_lengths(spec: AttentionSpec) -> SequenceLengths | None:
    """Lengths that a packed spec may stand for; None for a padded one, which does not say how many tokens it has.

    As many sequences and tokens as its buckets allow, one as long as the longest, the others spread like
    ``LengthsKind.typical`` assumes.
    """
    kind = spec.lengths
    if kind is None or kind.total_q is None or kind.total_kv is None:
        return None
    q = _spread(spec.batch, spec.seqlen_q, kind.total_q)
    kv = None if kind.square else _spread(spec.batch, spec.seqlen_kv, kind.total_kv)
    return SequenceLengths(layout="packed", q=q, kv=kv)


def _spread(count: int, longest: int, total: int) -> tuple[int, ...]:
    """The quantiles of a Beta(1, b) distribution up to the longest, with this sum, in random order."""
    longest, total = min(longest, total), min(total, count * longest)
    rest, left = count - 1, total - min(longest, total)
    if not rest:
        return (total,)
    b = rest * longest / max(left, 1) - 1
    shares = [1 - (1 - (i + 0.5) / rest) ** (1 / b) if b > 0 else 1.0 for i in range(rest)]
    found = [min(longest, round(share * left / sum(shares))) for share in shares]
    step = 1 if sum(found) < left else -1
    while sum(found) != left:
        for i in range(rest):
            if sum(found) != left and 0 <= found[i] + step <= longest:
                found[i] += step
    return tuple(Random(0).sample([longest, *found], count))


def _endless(draw: Draw, of_file: Sequence[int]) -> Iterator[int]:
    # Of Python's generators only ``random()`` is promised to give the same numbers in later versions.
    uniform = iter(Random(draw.seed).random, None)
    if draw.distribution == "constant":
        return itertools.repeat(draw.longest)
    if draw.distribution == "file":
        if not of_file:
            raise InputError("lengths of a file are drawn with the file")
        return itertools.cycle(of_file)
    if draw.distribution == "uniform":
        return (1 + int(each * draw.longest) for each in uniform)
    if draw.distribution == "lognormal":
        assert draw.mean is not None, "a lognormal draw has a mean"
        middle = math.log(draw.mean) - _SPREAD**2 / 2
        normal = (NormalDist().inv_cdf(max(each, 2.0**-53)) for each in uniform)
        return (max(1, round(math.exp(min(middle + _SPREAD * each, 40.0)))) for each in normal)
    sums = np.cumsum(1.0 / np.arange(1, draw.longest + 1)).tolist()
    return (1 + bisect_left(sums, each * sums[-1]) for each in uniform)
