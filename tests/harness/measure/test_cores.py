"""All threads of a process on one core for a while, and a core for each process, with real threads and processes."""

import os
import subprocess
import sys
import threading

import pytest

from attnbench.harness.measure import cores
from attnbench.harness.measure.cores import core_for, on_core
from attnbench.state import Cache

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system cannot move threads to a core"
)


@pytest.fixture
def parked():
    """A function that starts a thread, which waits until the test is over."""
    released, threads = threading.Event(), []

    def start() -> threading.Thread:
        threads.append(threading.Thread(target=released.wait))
        threads[-1].start()
        return threads[-1]

    yield start
    released.set()
    for each in threads:
        each.join()


def cores_of(thread: threading.Thread) -> set[int]:
    return os.sched_getaffinity(thread.native_id)


@pytest.mark.parametrize("raised", [False, True])
def test_every_thread_is_on_the_core_and_afterwards_where_it_was(parked, raised):
    usual, core = os.sched_getaffinity(0), core_for(0)
    before, bound = parked(), parked()
    os.sched_setaffinity(bound.native_id, {min(usual)})
    try:
        with on_core(core):
            during = parked()
            assert [cores_of(each) for each in (before, bound, during)] == [{core}] * 3
            assert os.sched_getaffinity(0) == {core}
            if raised:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert raised
    assert cores_of(before) == cores_of(during) == os.sched_getaffinity(0) == usual
    assert cores_of(bound) == {min(usual)}


def test_a_thread_that_ends_meanwhile_or_a_core_that_is_gone_does_no_harm():
    usual, ended = os.sched_getaffinity(0), threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    with on_core(core_for(0)):
        ended.set()
        thread.join()
    with on_core(1023):
        pass
    assert os.sched_getaffinity(0) == usual


CLAIM = """
import sys
from attnbench.harness.measure.cores import core_for
print(core_for(0), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def unclaimed(tmp_path, monkeypatch):
    """A process that has claimed no core, in a cache folder that no other uses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cores, "_claims", Cache(lasting=True))
    return tmp_path


def test_devices_have_cores_of_their_own_while_there_are_enough(unclaimed):
    usable = os.sched_getaffinity(0)
    assert core_for(0) == core_for(0)  # though it is taken
    assert {core_for(index) for index in range(len(usable) + 1)} == usable


def test_processes_that_each_see_one_device_have_cores_of_their_own(unclaimed):
    """As under CUDA_VISIBLE_DEVICES, where every process calls its device the first; also after one was killed."""
    usable = sorted(os.sched_getaffinity(0), reverse=True)
    others = [
        subprocess.Popen([sys.executable, "-c", CLAIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in usable
    ]
    try:
        assert sorted((int(each.stdout.readline()) for each in others), reverse=True) == usable
        assert core_for(0) == usable[0]  # of which none is left
        others[0].kill()
        others[0].communicate()
        cores._claims.forget()
        assert cores._claim(0)[1] is not None
    finally:
        for each in others:
            each.kill()
            each.communicate()


def test_a_folder_that_cannot_be_written_costs_only_the_promise(unclaimed):
    (unclaimed / "attnbench").write_text("a file", encoding="utf-8")
    assert core_for(0) == max(os.sched_getaffinity(0))
