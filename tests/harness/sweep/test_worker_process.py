"""Real processes: whatever a kernel does to its own, the sweep is told why, and nothing stays behind."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from itertools import count, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import PATIENCE
from places import SUPPORT
from planted import CPU
from scripted_workers import LONG, PIDS_FILE, is_running, noted_pids, wait_until

from attnbench.errors import OutputError
from attnbench.harness.cases.case import Case
from attnbench.harness.measure.findings import Opened, Prepared
from attnbench.harness.measure.timing import Timer
from attnbench.harness.measure.worker import Setting
from attnbench.harness.sweep import process_start, worker_process
from attnbench.harness.sweep.worker_process import LostError, Worker
from attnbench.kernels.plan import Plan
from attnbench.problem.spec import AttentionSpec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at through /proc")
CASE = Case("tiny", AttentionSpec.make(batch=1, heads=1, seqlen_q=8, head_dim=8), ("normal",))
SETTING = Setting("scripted_workers:faulty_registry", Timer(CPU, visit=0.0, limit=0.0, patience=1.0), 1)


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    path = tmp_path_factory.mktemp("noted") / "pids"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PIDS_FILE, str(path))
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        yield path
    for pid in noted_pids(path):  # of a test that failed
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def worker(notes):
    worker = Worker(SETTING)
    yield worker
    worker.close()


def plan(name):
    return Plan.parse(f"act:bf16-{name}")


def asked(worker, name, seconds=PATIENCE):
    """What comes of preparing that kernel on the open case; the case is opened anew where the process is new."""
    if not worker.alive:
        assert isinstance(worker.ask("open", CASE, seconds=PATIENCE), Opened)
    return worker.ask("prepare", plan(name), seconds=seconds)


def lost(worker, name, seconds=PATIENCE):
    with pytest.raises(LostError) as raised:
        asked(worker, name, seconds)
    return raised.value


def log_size(worker):
    return os.fstat(worker._process.log.fileno()).st_size


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("raises", "error", "RuntimeError: the first line"),
        ("silent", "error", r"KeyError in scripted_workers\.py:\d+: raise error"),
        ("interrupts", "error", r"KeyboardInterrupt in scripted_workers\.py:\d+: raise error"),
        ("memory", "oom", "MemoryError: no more"),
        ("allocates", "oom", r"RuntimeError: \[enforce fail\] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_what_is_raised_is_one_line_and_costs_no_process(worker, name, status, reason):
    assert isinstance(asked(worker, "fine"), Prepared)
    generation = worker.generation
    found = lost(worker, name)
    assert (found.status, found.died) == (status, False)
    assert re.fullmatch(reason, found.reason)
    assert asked(worker, "fine").first_ms > 0
    assert (worker.alive, worker.generation) == (True, generation)


def test_what_is_printed_stays_out_of_the_sweep_and_of_the_log(worker, capfd):
    asked(worker, "fine")
    for name in ("chats", "prints"):
        asked(worker, name)
        assert log_size(worker) == 0
    asked(worker, "floods")  # megabytes
    assert log_size(worker) == 0
    assert tuple(capfd.readouterr()) == ("", "")
    asked(worker, "reads")  # nothing, from a terminal that is not there


def test_an_exit_is_reported_with_code_and_the_last_output_of_its_request_and_a_new_process_takes_over(worker):
    asked(worker, "fine")
    assert lost(worker, "says-and-fails").reason == "ValueError: no"
    generation = worker.generation
    found = lost(worker, "leaves")
    assert (found.status, found.died) == ("crashed", True)
    words = "printed before leaving | last words before leaving"
    assert found.reason == f"the process ended with the exit code 7; its last output: {words}"
    assert not worker.alive
    with pytest.raises(LostError, match="case is opened first"):  # it knows nothing of what the other received
        worker.ask("prepare", plan("fine"), seconds=PATIENCE)
    assert worker.generation == generation + 1
    assert isinstance(worker.ask("open", CASE, seconds=PATIENCE), Opened)


@pytest.fixture
def no_server_yet(monkeypatch):
    server = process_start._Server()
    monkeypatch.setattr(process_start, "_SERVER", server)
    yield server
    server._users.clear()
    server.release(Worker(None))


@pytest.mark.parametrize(
    "failing", ["subprocess.Popen", "socket.socketpair", "socket.send_fds", "tempfile.TemporaryFile"]
)
def test_a_process_that_cannot_be_started_is_the_reason_and_leaves_nothing_open(monkeypatch, no_server_yet, failing):
    def full(*arguments, **options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    worker = Worker(SETTING)
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(failing, full)
    with pytest.raises(LostError, match=r"no process could be started: .*Too many open files") as raised:
        worker.ask("open", CASE, seconds=PATIENCE)
    assert (raised.value.status, raised.value.died) == ("error", False)
    assert (worker.alive, worker.generation) == (False, 0)
    worker.close()
    assert len(os.listdir("/proc/self/fd")) == before


REPORTING = """
import os, sys
from multiprocessing.connection import Connection

def main(descriptor, parent):
    connection = Connection(descriptor)
    for value in (None, (os.environ.get("ATTNBENCH_TEST_INHERITED"), sys.dont_write_bytecode, sys.pycache_prefix)):
        connection.recv()
        connection.send(("done", value))
"""


@pytest.fixture
def report(monkeypatch, tmp_path):
    """A function that starts a process and returns a variable of its environment and where it keeps its bytecode."""
    (tmp_path / "reporting.py").write_text(REPORTING)

    def report():
        monkeypatch.syspath_prepend(tmp_path)
        worker = Worker(None, module="reporting")
        found = worker.ask("report", seconds=PATIENCE)
        worker.close()
        return found

    return report


def homeless():
    raise OutputError("this user has no home folder")


@pytest.mark.parametrize(
    ("kept", "compiled", "home"),
    [(False, False, True), (False, True, True), (True, False, True), (False, False, False)],
)
def test_what_python_compiles_is_kept_where_neither_it_nor_a_compiled_torch_would_be(
    monkeypatch, tmp_path, no_server_yet, report, kept, compiled, home
):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "" if kept else "1")
    monkeypatch.setattr(sys, "dont_write_bytecode", not kept)
    torch = SimpleNamespace(cached=__file__ if compiled else str(tmp_path / "torch.pyc"))
    monkeypatch.setattr(process_start, "find_spec", lambda _: torch)
    monkeypatch.setattr(process_start, "cache_folder", (lambda: tmp_path) if home else homeless)
    usual = (not kept, sys.pycache_prefix)
    assert report()[1:] == (usual if kept or compiled or not home else (False, str(tmp_path / "bytecode")))


def test_a_segmentation_fault_is_reported_with_its_place(worker):
    found = lost(worker, "segfaults")
    assert (found.status, found.died) == ("crashed", True)
    assert "was killed by SIGSEGV" in found.reason
    assert "Fatal Python error: Segmentation fault" in found.reason
    assert "string_at" in found.reason


@pytest.mark.parametrize(
    ("kills", "status", "reason"),
    [
        (count(3), "oom", "the system ran out of memory and killed the process"),
        (repeat(3), "crashed", "the process was killed by SIGKILL"),
        (repeat(None), "crashed", "the process was killed by SIGKILL"),
    ],
    ids=["one more", "no more", "not reported"],
)
def test_a_process_that_is_killed_ran_out_of_memory_if_the_system_reports_so(
    worker, monkeypatch, kills, status, reason
):
    class Told:
        def __init__(self, path):
            self.path = path

        def read_text(self):
            assert self.path == "/proc/vmstat"
            if (number := next(kills)) is None:
                raise FileNotFoundError
            return f"nr_free_pages 7\noom_kill {number}\nnuma_hit 9\n"

    monkeypatch.setattr(worker_process, "Path", Told)
    found = lost(worker, "dies")
    assert (found.status, found.reason, found.died) == (status, reason, True)


def test_a_hang_ends_in_time_with_all_that_it_started(worker, notes):
    asked(worker, "fine")
    before = len(noted_pids(notes))
    start = time.perf_counter()
    found = lost(worker, "hangs", seconds=3.0)
    took = time.perf_counter() - start
    assert (found.status, found.died) == ("timeout", True)
    assert "no answer within 3 s" in found.reason
    assert 3.0 <= took < LONG
    started = noted_pids(notes)[before:]
    assert len(started) == 2
    wait_until(lambda: not any(map(is_running, started)))


SWEEP = """
import os, time
from scripted_workers import note_pid
from planted import CPU
from attnbench.harness.sweep.worker_process import Worker
from test_worker_process import CASE, SETTING, plan
worker = Worker(SETTING)
worker.ask("open", CASE, seconds=600.0)
holder = os.fork()  # which has all that is open here, and outlives the sweep
if holder == 0:
    time.sleep(1000.0)
note_pid(holder)
worker.ask("prepare", plan("locks"), seconds=1000.0)
"""


def test_where_the_server_dies_its_processes_die_too_and_the_next_request_starts_another(no_server_yet):
    worker = Worker(SETTING)
    asked(worker, "fine")
    server = no_server_yet._popen
    server.kill()
    server.wait()
    found = lost(worker, "fine")
    assert (found.status, found.died) == ("crashed", True)
    assert "was killed by SIGKILL" in found.reason
    assert asked(worker, "fine").first_ms > 0
    assert no_server_yet._popen.pid != server.pid
    worker.close()


def test_a_torch_that_cannot_be_imported_is_the_reason(monkeypatch, no_server_yet, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('a library is missing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LostError, match=r"exit code 1; its last output: .*ImportError: a library is missing"):
        Worker(SETTING).ask("open", CASE, seconds=PATIENCE)


def test_a_server_that_hangs_is_the_reason_and_is_killed(monkeypatch, no_server_yet, tmp_path):
    """As on a disk that does not answer."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(worker_process, "_STARTING_SECONDS", 0.5)
    monkeypatch.setattr(worker_process, "_DYING_SECONDS", 0.5)
    monkeypatch.setattr(process_start, "_ANSWERING_SECONDS", 0.5)
    monkeypatch.setattr(process_start, "_ENDING_SECONDS", 0.5)
    worker = Worker(SETTING)
    with pytest.raises(LostError, match=r"no answer within 0\.5 s"):
        worker.ask("open", CASE, seconds=PATIENCE)
    server = no_server_yet._popen
    worker.close()
    assert server.wait(PATIENCE) == -signal.SIGKILL


def test_a_process_has_the_variables_and_the_path_of_its_own_start(monkeypatch, no_server_yet, report):
    """Not those that the server was started with."""
    first = Worker(SETTING)
    asked(first, "fine")
    monkeypatch.setenv("ATTNBENCH_TEST_INHERITED", "later")
    assert report()[0] == "later"
    first.close()


def test_a_forked_process_has_a_server_of_its_own(no_server_yet):
    """As one that a program forked by itself: what it starts is its own to end, and not its parent's."""
    worker = Worker(SETTING)
    asked(worker, "fine")
    server = no_server_yet._popen.pid
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            other = Worker(SETTING)
            asked(other, "fine")
            other.close()
            code = int(no_server_yet._popen.pid == server)
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    generation = worker.generation
    asked(worker, "fine")
    assert worker.generation == generation
    worker.close()


def test_the_server_ends_with_the_last_of_its_workers(no_server_yet):
    workers = [Worker(SETTING) for _ in range(2)]
    for each in workers:
        asked(each, "fine")
    server = no_server_yet._popen
    workers.pop().close()
    assert server.poll() is None
    workers.pop().close()
    assert server.poll() == 0


def test_a_sweep_that_is_killed_takes_its_workers_along(notes):
    """Even one in a loop that lets no other thread run."""
    before = len(noted_pids(notes))
    path = os.pathsep.join([SUPPORT, str(Path(__file__).parent)])
    sweep = subprocess.Popen([sys.executable, "-c", SWEEP], env={**os.environ, "PYTHONPATH": path})
    try:
        wait_until(lambda: len(noted_pids(notes)) > before + 1 or sweep.poll() is not None)
        holder, pid = noted_pids(notes)[before:]
        assert is_running(pid)
    finally:
        sweep.kill()
        sweep.wait()
    wait_until(lambda: not is_running(pid))
    assert is_running(holder)
    os.kill(holder, signal.SIGKILL)
