"""All threads of a process on one core for a while, with real threads."""

import os
import threading

import pytest

from attnbench.harness.measure.cores import core_for, on_core

pytestmark = pytest.mark.skipif(core_for(0) is None, reason="this system cannot move threads to a core")


class Parked:
    """A thread that waits until it is released."""

    def __init__(self) -> None:
        self._ready, self._release = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._wait)
        self.thread.start()
        self._ready.wait()

    def _wait(self) -> None:
        self._ready.set()
        self._release.wait()

    @property
    def cores(self) -> set[int]:
        return os.sched_getaffinity(self.thread.native_id)

    def end(self) -> None:
        self._release.set()
        self.thread.join()


@pytest.fixture
def parked():
    made = []

    def one() -> Parked:
        made.append(Parked())
        return made[-1]

    yield one
    for each in made:
        each.end()


@pytest.mark.parametrize("raised", [False, True])
def test_every_thread_is_on_the_core_and_afterwards_where_it_was(parked, raised):
    usual, core = os.sched_getaffinity(0), core_for(0)
    before, bound = parked(), parked()
    os.sched_setaffinity(bound.thread.native_id, {min(usual)})
    try:
        with on_core(core):
            during = parked()
            assert before.cores == bound.cores == during.cores == os.sched_getaffinity(0) == {core}
            if raised:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert raised
    assert before.cores == during.cores == os.sched_getaffinity(0) == usual
    assert bound.cores == {min(usual)}


def test_a_thread_that_ends_meanwhile_or_a_core_that_is_gone_does_no_harm(parked):
    usual, ended = os.sched_getaffinity(0), parked()
    with on_core(core_for(0)):
        ended.end()
    with on_core(1023):
        pass
    assert os.sched_getaffinity(0) == usual


def test_devices_have_cores_of_their_own_while_there_are_enough():
    cores = os.sched_getaffinity(0)
    assert {core_for(index) for index in range(len(cores) + 1)} == cores
