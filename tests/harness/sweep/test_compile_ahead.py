"""What is compiled ahead, with processes that live in the test: each set of kernels once, and failures passed over."""

import os
import threading
from dataclasses import replace

import pytest
import torch
from patience import PATIENCE
from planted import FakeBackward, FakeForward, backend, setup
from scripted_workers import ScriptedWorker, wait_until

from attnbench.harness.cases.case import Case
from attnbench.harness.sequence_lengths import SequenceLengths
from attnbench.harness.sweep import compile_ahead as module
from attnbench.harness.sweep.compile_ahead import FirstRuns
from attnbench.harness.sweep.worker_process import LostError
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry
from attnbench.problem.spec import AttentionSpec

SPEC = AttentionSpec.make(batch=1, heads=1, seqlen_q=16, head_dim=8, direction="training")
CASES = [Case(f"case{number}", SPEC, ("normal", "outlier")) for number in range(3)]
COMPILED, MIXED, OTHER = (Plan.parse(f"{name}>wide:bf16") for name in ("flexible:bf16", "flexible:fp8", "wide:bf16"))
ANOTHER, PAIR = (Plan.parse(f"{name}>flexible:bf16") for name in ("flexible:bf16", "flexible:fp8"))


def compiling() -> Registry:
    flexible = backend(FakeForward("flexible:bf16"), FakeForward("flexible:fp8"), FakeBackward("flexible:bf16"))
    wide = backend(FakeForward("wide:bf16"), FakeBackward("wide:bf16"))
    return Registry([replace(flexible, compiles=True), wide])


@pytest.fixture
def ahead(monkeypatch):
    """FirstRuns of work on a GPU that is not there, and the workers that are asked."""
    workers = []

    def made(work, answer=lambda method, case, plan: 1.0, device="cuda", cores=8, memory=2**36):
        def worker(setting):
            assert setting.threads == 1  # each has a core
            workers.append(ScriptedWorker(answer))
            return workers[-1]

        monkeypatch.setattr(module, "Worker", worker)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        here = replace(setup(), device=torch.device(device))
        here = replace(here, environment=replace(here.environment, memory_bytes=memory))
        monkeypatch.setattr(type(here), "registry", compiling())
        return FirstRuns(work, here), workers

    return made


def test_each_compiling_kernel_and_pair_of_one_backend_is_compiled_once_a_case(ahead):
    covered = [Plan.parse(name) for name in ("wide:bf16>flexible:bf16", "flexible:bf16>absent:bf16")]
    plans = [COMPILED, MIXED, OTHER, ANOTHER, PAIR, *covered]
    work = [(case, plans) for case in CASES]
    first, workers = ahead(work, lambda method, case, plan: float(case.name[-1]))
    assert first.needed
    first_ms = first.run()
    assert first_ms == {(c.name, plan): float(c.name[-1]) for c in CASES for plan in (COMPILED, MIXED, ANOTHER, PAIR)}
    asked = [arguments for worker in workers for _, *arguments in worker.requests]
    assert len(asked) == len(first_ms)
    assert all(method == "compile" and case.families == ("normal",) for method, case, _ in asked)
    assert not any(worker.alive for worker in workers)


@pytest.mark.parametrize(
    ("count", "device", "cores"), [(3, "cpu", 8), (1, "cuda", 8), (3, "cuda", 1)], ids=["cpu", "little", "one core"]
)
def test_it_is_not_done_where_it_would_not_pay(ahead, count, device, cores):
    first, workers = ahead([(case, [COMPILED, MIXED]) for case in CASES[:count]], device=device, cores=cores)
    assert not first.needed
    assert first.run() == {}
    assert workers == []


@pytest.mark.parametrize(("cores", "gigabytes", "count"), [(8, 64, 6), (4, 64, 4), (8, 9, 4), (8, 3, 0)])
def test_there_are_as_many_processes_as_cores_and_the_memory_allow(ahead, cores, gigabytes, count):
    work = [(case, [COMPILED, MIXED]) for case in CASES]
    _, workers = ahead(work, cores=cores, memory=gigabytes * 2**30)
    assert len(workers) == count


PACKED = SequenceLengths(layout="packed", q=(8,) * 4)


@pytest.mark.parametrize(
    ("batch", "lengths", "status", "asked"),
    [(4, None, "oom", [4, 1]), (1, None, "oom", [1]), (4, None, "crashed", [4]), (4, PACKED, "oom", [4])],
)
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_has_no_memory_beside_others_is_compiled_for_a_batch_of_one(ahead, batch, lengths, status, asked):
    def answer(method, case, plan):
        if case.name == "large" and case.spec.batch == batch:
            raise LostError(status, "no more", died=status == "crashed")
        return float(case.spec.batch)

    sizes = {"batch": batch, "seqlen_q": 16} if lengths is None else lengths.sizes()
    large = Case("large", AttentionSpec.make(heads=1, head_dim=8, direction="training", **sizes), lengths=lengths)
    first, workers = ahead([(case, [COMPILED]) for case in (large, *CASES)], answer)
    first_ms = first.run()
    sent = [case.spec.batch for worker in workers for _, _, case, _ in worker.requests if case.name == "large"]
    assert sorted(sent, reverse=True) == asked
    others = {(case.name, COMPILED): 1.0 for case in CASES}  # which are compiled whatever fails
    assert first_ms == (others | {("large", COMPILED): 1.0} if len(asked) > 1 else others)
    assert not any(worker.alive for worker in workers)


def test_an_interrupt_ends_every_process(ahead, monkeypatch):
    under_way, killed = threading.Semaphore(0), threading.Event()

    def answer(method, case, plan):
        under_way.release()
        assert killed.wait(PATIENCE)
        raise LostError("crashed", "killed", died=True)

    first, workers = ahead([(case, [COMPILED, MIXED]) for case in CASES], answer)
    monkeypatch.setattr(ScriptedWorker, "kill", lambda self: killed.set())
    join, main = threading.Thread.join, threading.current_thread()

    def interrupted(self, timeout=None):
        if not killed.is_set() and threading.current_thread() is main:
            for _ in workers:
                assert under_way.acquire(timeout=PATIENCE)
            raise KeyboardInterrupt
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    asked = sum(len(worker.requests) for worker in workers)
    wait_until(lambda: not any(worker.alive for worker in workers))
    assert asked == sum(len(worker.requests) for worker in workers) == 6
