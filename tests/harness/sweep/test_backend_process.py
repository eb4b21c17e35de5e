"""The requests that a worker needs, and needs again, and what is compiled ahead; every worker lives in the test."""

import os
import threading
from dataclasses import replace

import pytest
import torch
from patience import PATIENCE
from planted import FakeBackward, FakeForward, backend, setup
from scripted_workers import ScriptedWorker, wait_until

from attnbench.harness.cases.case import Case
from attnbench.harness.measure.findings import Findings, Opened, Prepared, Visit
from attnbench.harness.sequence_lengths import SequenceLengths
from attnbench.harness.sweep import compile_ahead as module
from attnbench.harness.sweep.backend_process import BackendProcess
from attnbench.harness.sweep.compile_ahead import FirstRuns
from attnbench.harness.sweep.worker_process import LostError
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry
from attnbench.problem.spec import AttentionSpec

CASE, OTHER = (Case(name, AttentionSpec.make(batch=1, heads=1, seqlen_q=8, head_dim=8)) for name in ("one", "other"))
A, B, C = (Plan.parse(f"x:bf16-{name}") for name in "abc")
DIED = LostError("crashed", "the process was killed", died=True)
RAISED = LostError("error", "RuntimeError: no", died=False)
WORN = Visit({}, [], (0.0, 1.0), (), 0.0, worn=True)
ANSWERS = {
    "open": Opened("cpu", "a clock"),
    "prepare": Prepared(1.0, {}),
    "sample": Visit({}, [], (0.0, 1.0), (), 0.0),
    "conclude": Findings({}, truth="the truth", deterministic=True, leak=None, memory_bytes=None, retained_bytes=None),
    "drop": None,
    "close": None,
}


class Bench:
    """Answers everything; but raises what it is told to, once, and the first sample of a plan in ``wearing`` wears."""

    def __init__(self):
        self.raising, self.wearing = [], set()

    def __call__(self, method, *arguments):
        for number, (wanted, error) in enumerate(self.raising):
            if wanted == (method, *arguments):
                del self.raising[number]
                raise error
        if method == "sample" and arguments[0] in self.wearing:
            self.wearing.discard(arguments[0])
            return WORN
        return ANSWERS[method]

    def will(self, error, *wanted):
        self.raising.append((wanted, error))


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def worker(bench):
    return ScriptedWorker(bench)


@pytest.fixture
def process(worker):
    return BackendProcess(worker, 60.0)


def requests(worker, since=0):
    return [asked for _, *asked in worker.requests[since:]]


def prepared(process, *plans, case=CASE):
    process.open(case)
    for plan in plans:
        process.prepare(plan)


def test_after_a_death_the_next_process_gets_the_requests_that_it_needs_and_no_more(process, worker, bench):
    prepared(process, A, B, C)
    bench.will(DIED, "sample", A, True, None)
    with pytest.raises(LostError) as raised:
        process.sample(A)
    assert raised.value is DIED
    process.drop(A)
    since = len(worker.requests)
    process.sample(B)
    process.sample(B)
    process.sample(C)
    assert requests(worker, since) == [
        *(["open", CASE], ["prepare", B], ["sample", B, True, None], ["sample", B, True, None]),
        *(["prepare", C], ["sample", C, True, None]),
    ]
    assert {generation for generation, *_ in worker.requests[since:]} == {2}


def test_a_plan_is_judged_in_the_state_in_which_it_is_timed(process, worker, bench):
    prepared(process, A, B)
    for plan in (A, B):
        process.sample(plan)
    bench.will(DIED, "conclude", A)
    with pytest.raises(LostError):
        process.conclude(A)
    since = len(worker.requests)
    assert process.conclude(B) is ANSWERS["conclude"]
    assert requests(worker, since) == [["open", CASE], ["prepare", B], ["sample", B, True, None], ["conclude", B]]


def test_revivals_end_where_others_go_on_killing_the_worker(process, worker):
    prepared(process, A)
    for _ in range(3):
        worker.kill()
        process.sample(A)
    worker.kill()
    with pytest.raises(LostError, match="while other plans ran") as raised:
        process.sample(A)
    assert raised.value.status == "crashed"
    since = len(worker.requests)
    with pytest.raises(LostError):
        process.conclude(A)
    assert requests(worker, since) == []
    process.prepare(B)  # another plan has its own
    worker.kill()
    process.sample(B)
    prepared(process, A, case=OTHER)  # and so has another case
    worker.kill()
    process.sample(A)


@pytest.mark.parametrize("error", [DIED, RAISED])
def test_a_case_that_cannot_be_opened_is_not_tried_for_every_plan(process, worker, bench, error):
    bench.will(error, "open", CASE)
    for plan in (A, B, C):
        with pytest.raises(LostError) as raised:
            process.open(CASE)
        assert raised.value is error
        with pytest.raises(LostError):
            process.prepare(plan)
    assert requests(worker) == [["open", CASE]]
    process.open(OTHER)
    process.close()
    assert process.open(CASE) is ANSWERS["open"]


def test_a_case_that_cannot_be_opened_again_after_a_death_is_lost_for_all(process, worker, bench):
    prepared(process, A, B)
    worker.kill()
    bench.will(DIED, "open", CASE)
    for plan in (A, B, A, B):
        with pytest.raises(LostError) as raised:
            process.sample(plan)
        assert raised.value is DIED
    assert requests(worker)[3:] == [["open", CASE]]


@pytest.mark.parametrize("error", [DIED, RAISED])
@pytest.mark.parametrize("method", ["drop", "close"])
def test_a_worker_that_cannot_forget_is_replaced(process, worker, bench, error, method):
    prepared(process, A)
    arguments = (A,) if method == "drop" else ()
    bench.will(error, method, *arguments)
    getattr(process, method)(*arguments)
    assert not worker.alive
    prepared(process, B)
    assert requests(worker)[-2:] == [["open", CASE], ["prepare", B]]
    assert worker.generation == 2


def test_a_process_worn_by_a_recording_that_failed_is_replaced_and_the_plan_not_recorded_again(process, worker, bench):
    plans = [Plan.parse(f"x:bf16-{name}") for name in "abcdefg"]  # more than may die of each other
    prepared(process, *plans)
    bench.wearing = set(plans)
    for plan in plans:
        assert process.sample(plan).worn
        process.sample(plans[0])
    since, generation = len(worker.requests), worker.generation
    for plan in plans:
        process.sample(plan)
    process.open(OTHER)
    for plan in plans:
        process.prepare(plan)
        process.sample(plan)
    samples = [asked for asked in requests(worker, since) if asked[0] == "sample"]
    assert samples == [["sample", plan, False, None] for plan in (*plans, *plans)]
    assert worker.generation == generation


SPEC = AttentionSpec.make(batch=1, heads=1, seqlen_q=16, head_dim=8, direction="training")
CASES = [Case(f"case{number}", SPEC, ("normal", "outlier")) for number in range(3)]
COMPILED, MIXED, WIDE = (Plan.parse(f"{name}>wide:bf16") for name in ("flexible:bf16", "flexible:fp8", "wide:bf16"))
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
    plans = [COMPILED, MIXED, WIDE, ANOTHER, PAIR, *covered]
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
