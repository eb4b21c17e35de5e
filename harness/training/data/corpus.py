"""The text that models learn, in bytes: the installed Python's own library, or the user's files.

Sample n of a run is a function of the seed and n alone.  At step s, rank r of w reads ``batch`` samples from number
``(s · w + r) · batch`` on, so a resumed run continues where it stopped, and another number of ranks with as many
samples per step sees the same ones.
"""

from __future__ import annotations

import os
import sysconfig
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from attnbench.errors import InputError

from .documents import Documents
from .seeds import derived
from .text import BYTE_TOKENS, File, Text, files_under

__all__ = ["BYTE_TOKENS", "STDLIB", "Corpus", "load", "samples_of"]

STDLIB = "stdlib"
_SHARE = 20  # one part in so many is held back
# Tests, which some distributions leave out, and packages outside the library.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Corpus:
    """Windows of ``seqlen`` + 1 tokens of a text, with a part held back for validation.

    Files are held back by a hash of their name, about a twentieth of them; if that leaves either side shorter than a
    window, the last twentieth of the text (at least a window) is held back.  Raises InputError if the text is too short
    for both.
    """

    def __init__(self, files: list[File], seqlen: int) -> None:
        window = seqlen + 1
        held = [each for each in files if _held_back(each.name)]
        train, validation = Text([each for each in files if not _held_back(each.name)]), Text(held)
        if min(len(train), len(validation)) < window:
            whole = Text(files)
            cut = len(whole) - max(len(whole) // _SHARE, window)
            if cut < window:
                raise InputError(
                    f"the text has {sum(each.size for each in files)} bytes, too few for a sample of {window} tokens "
                    "to learn and one to validate"
                )
            train, validation = whole.part(0, cut), whole.part(cut, len(whole))
        self.train, self.validation, self._window = train, validation, window

    @cached_property
    def documents(self) -> Documents:
        """The text by documents, for packing and padding."""
        return Documents(self.train, self._window - 1)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that depend on the names, sizes and split of the files."""
        return blake2b(f"{self.train.digest}{self.validation.digest}".encode(), digest_size=8).hexdigest()

    def sample(self, seed: int, number: int) -> Tensor:
        """Sample ``number`` (S + 1 tokens, int64) of the run with this seed."""
        start = derived(seed, "train", number) % (len(self.train) - self._window + 1)
        return torch.from_numpy(self.train.read(start, self._window))


def load(data: str, seqlen: int) -> Corpus:
    """The corpus for a config's ``data``: ``stdlib``, a text file or a folder.

    Raises InputError if it is missing, empty, unreadable, not text or too short.
    """
    return Corpus(_library() if data == STDLIB else files_under(Path(data).expanduser()), seqlen)


def samples_of(step: int, batch: int, rank: int, world: int) -> range:
    """The numbers of the samples that a rank reads at a step; steps count from 0."""
    if not 0 <= rank < world or step < 0:
        raise InputError(f"there is no rank {rank} of {world} at step {step}")
    first = (step * world + rank) * batch
    return range(first, first + batch)


def _held_back(name: str) -> bool:
    return derived("held back", name) % _SHARE == 0


def _library() -> list[File]:
    """The Python sources of the running interpreter's library, sorted, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [each for each in folders if each not in _LEFT_OUT]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    named = sorted((path.relative_to(root).as_posix(), path) for path in paths)
    files = [File(name, path, path.stat().st_size) for name, path in named]
    if not files:  # a Python in a zip file
        raise InputError(f"there are no library sources in {root}; name a text file or folder as data")
    return [each for each in files if each.size]
