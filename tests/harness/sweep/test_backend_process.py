"""The requests that a worker needs, and needs again; every worker here is chosen answers without a process."""

import pytest
from scripted_workers import ScriptedWorker

from attnbench.harness.cases.case import Case
from attnbench.harness.measure.findings import Findings, Opened, Prepared, Visit
from attnbench.harness.sweep.backend_process import BackendProcess
from attnbench.harness.sweep.worker_process import LostError
from attnbench.kernels.plan import Plan
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
