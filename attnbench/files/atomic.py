"""Files that are replaced whole: content is written beside the old file, flushed to the disk and renamed over it.

Every user file is written this way, except append-only logs (attnbench.harness.results.store).
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from glob import escape
from pathlib import Path

from ..errors import OutputError

__all__ = ["Draft", "clear_drafts", "replace_file"]

_MOST_LINKS = 40  # as many as Linux follows


class Draft(AbstractContextManager["Draft"]):
    """The next content of a file, in ``scratch`` beside it until it is complete.

    Readers see the old or the new content, never a part.  Links are followed; a file keeps its permissions.
    ``scratch`` is None where nothing can be renamed over the path (a pipe, a device, an open descriptor such as
    /dev/stdout): that is written in place.  As a context manager it ends with ``keep``, or with ``discard`` if the
    block raises.  Every step raises OutputError with path and reason, and leaves the old file untouched.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.scratch: Path | None = None
        with self._reasons():
            target = _target(path)
            if target is None:
                return
            old = target.stat() if target.exists() else None
            if old is not None and not os.access(target, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            self._target, scratch = target, target.with_name(f"{_prefix(target)}{secrets.token_hex(4)}")
            handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                new = os.fstat(handle)
            finally:
                os.close(handle)
            self._facts, self.scratch = new if old is None else old, scratch

    def write(self, content: bytes) -> None:
        """Add to the content."""
        with self._reasons():
            # Not truncated: what is written in place may be a file that a shell has opened for appending.
            handle = os.open(self.scratch or self.path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC)
            try:
                left = memoryview(content)
                while left:
                    left = left[os.write(handle, left) :]
            finally:
                os.close(handle)

    @contextmanager
    def by_name(self) -> Iterator[Path]:
        """The file to write, for what writes files by their names; an OSError of the block is an OutputError."""
        with self._reasons():
            if self.scratch is None:
                raise OSError(None, "expected a file, not a pipe or a device")
            yield self.scratch

    def keep(self) -> os.stat_result | None:
        """Make this the content of the file; what ``os.stat`` then says of it, None of what is written in place."""
        if self.scratch is None:
            return None
        with self._reasons():
            handle = os.open(self.scratch, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(handle)
                new = os.fstat(handle)
            finally:
                os.close(handle)
            if (new.st_uid, new.st_gid) != (self._facts.st_uid, self._facts.st_gid):
                with suppress(OSError):  # only root gives files away
                    os.chown(self.scratch, self._facts.st_uid, self._facts.st_gid)
            if new.st_mode != self._facts.st_mode:
                os.chmod(self.scratch, stat.S_IMODE(self._facts.st_mode))
            os.replace(self.scratch, self._target)
            self.scratch = None
            return new

    def discard(self) -> None:
        """Leave the file as it is, and nothing beside it."""
        if self.scratch is not None:
            with suppress(OSError):
                self.scratch.unlink()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.keep()
        else:
            self.discard()

    @contextmanager
    def _reasons(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.discard()
            if not isinstance(error, OSError):
                raise
            raise OutputError(f"{self.path} cannot be written: {error.strerror or error}") from error


def replace_file(path: Path, content: bytes) -> os.stat_result | None:
    """Make this the whole content of the file, as a ``Draft`` does; answers what ``keep`` does.  Raises OutputError."""
    draft = Draft(path)
    draft.write(content)
    return draft.keep()


def clear_drafts(path: Path) -> None:
    """Remove the drafts of this file that killed processes have left, for a caller that keeps other writers out."""
    target = Path(os.path.realpath(path))
    for scratch in target.parent.glob(f"{escape(_prefix(target))}*"):
        with suppress(OSError):
            scratch.unlink()


def _target(path: Path) -> Path | None:
    """The regular file behind the path, links followed; None if it is written in place.  Raises OSError."""
    place = os.path.abspath(path)
    for _ in range(_MOST_LINKS):
        place = os.path.join(os.path.realpath(os.path.dirname(place)), os.path.basename(place))
        if place.startswith("/proc/"):  # an open descriptor: its file may be one that a shell is writing to
            return None
        if not os.path.islink(place):
            break
        place = os.path.join(os.path.dirname(place), os.readlink(place))
    try:
        mode = os.stat(place).st_mode
    except FileNotFoundError:
        return Path(place)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return Path(place) if stat.S_ISREG(mode) else None


def _prefix(target: Path) -> str:
    """How the names of a file's drafts begin; short enough for a name, however long the file's own is."""
    return f".{os.fsdecode(os.fsencode(target.name)[:200])}.attnbench-"
