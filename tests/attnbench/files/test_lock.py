"""One writer or many readers hold the lock of a file, and a reader needs nothing but to read it."""

import threading

import pytest

from attnbench.files.lock import FileLock


def test_readers_share_what_a_writer_has_alone(tmp_path):
    path = tmp_path / ".lock"
    with pytest.raises(FileNotFoundError):
        FileLock(path, read=True)
    with FileLock(path) as writer, FileLock(path, read=True) as early:
        assert writer.acquire()
        assert not early.acquire(shared=True)
    with FileLock(path, read=True) as one, FileLock(path, read=True) as other, FileLock(path) as late:
        assert one.acquire(shared=True)
        assert other.acquire(shared=True)
        assert not late.acquire()


def test_a_writer_that_waits_has_it_when_it_is_released(tmp_path):
    first = FileLock(tmp_path / ".lock")
    assert first.acquire()
    events: list[str] = []

    def release() -> None:
        events.append("released")
        first.close()

    with FileLock(tmp_path / ".lock") as second:
        threading.Timer(0.2, release).start()
        assert second.acquire(wait=True)
        assert events == ["released"]
        with FileLock(tmp_path / ".lock") as third:
            assert not third.acquire()
