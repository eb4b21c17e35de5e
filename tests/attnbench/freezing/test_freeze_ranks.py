"""Frozen choices over processes: two ranks of a training run, four that record at once, and one that is killed."""

import json
import multiprocessing
import os
import time
from itertools import pairwise
from pathlib import Path

import frozen_ranks
import pytest
import torch
from frozen_ranks import FAVOURITES, LENGTHS
from patience import PATIENCE
from ranks import KINDS, RANKS, run_ranks

from attnbench import attention, freeze
from attnbench.freezing import freeze as freezing
from attnbench.freezing.file import Frozen
from attnbench.kernels.execution import Execution

PROCESSES = 4
PLANS = ("sdpa-math:fp32", "sdpa-flash:fp32", "reference:fp32", "reference:fp64")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("kinds", [("fsdp2",), pytest.param(KINDS, marks=pytest.mark.exhaustive)], ids=["one", "all"])
def test_two_ranks_with_different_tables_make_the_same_choices(tmp_path, kinds):
    run_ranks(frozen_ranks.__file__, [[str(rank), str(tmp_path), *kinds] for rank in range(RANKS)], tmp_path)
    recorded, replayed = (
        [json.loads((tmp_path / f"{missing}-{rank}.json").read_text()) for rank in range(RANKS)]
        for missing in ("record", "raise")
    )
    for rank, found in enumerate(recorded):  # the tables do disagree
        assert found["alone"] == [f"{FAVOURITES[rank]}:fp32"] * len(LENGTHS)
    assert recorded[0]["ran"] == recorded[1]["ran"]
    assert len(recorded[0]["ran"]) == len(LENGTHS) + 1
    assert all(len(plans) == 1 for plans in recorded[0]["ran"].values())
    assert [found["alone"] for found in replayed] == [found["alone"] for found in recorded[::-1]]
    assert replayed[0]["ran"] == replayed[1]["ran"] == recorded[0]["ran"]
    assert (tmp_path / "run.choices.json").read_bytes() == (tmp_path / "recorded.json").read_bytes()


def _recorder(number: int, path: Path, start, answers) -> None:
    favourite = PLANS[number % len(PLANS)]
    choose, answer, ran = freezing.choose, Execution.answer, {}

    def answered(self, *args):
        ran[self.spec.seqlen_q] = str(self.plan)
        return answer(self, *args)

    freezing.choose = lambda spec, device, **rest: choose(spec, device, **{**rest, "backend": favourite})
    Execution.answer = answered
    Execution._whole = lambda self, device_type: None  # so that every call goes through ``answer``
    lengths = list(range(1, 9))
    with freeze(path):
        start.wait()
        for length in lengths[number:] + lengths[:number]:
            attention(*[torch.zeros(1, 1, length, 8)] * 3)
    answers.put(ran)


def test_four_concurrent_recorders_agree_and_every_read_is_complete(tmp_path):
    context = multiprocessing.get_context("fork")
    start, answers, path = context.Event(), context.Queue(), tmp_path / "run.choices.json"
    workers = [context.Process(target=_recorder, args=(n, path, start, answers)) for n in range(PROCESSES)]
    for worker in workers:
        worker.start()
    start.set()
    reads, found = [], []
    while len(found) < PROCESSES:
        time.sleep(0.002)
        if path.exists():
            reads.append(dict(Frozen.load(path).plans))  # raises on half a file
        while not answers.empty():
            found.append(answers.get())
        assert all(worker.exitcode in (None, 0) for worker in workers)
    for worker in workers:
        worker.join(PATIENCE)
    written = {asked.spec.seqlen_q: str(answer.plan) for asked, answer in Frozen.load(path).plans.items()}
    assert found == [written] * PROCESSES
    assert len(written) == 8
    for earlier, later in pairwise(reads):  # nothing that was written is taken back
        assert earlier.items() <= later.items()
    assert sorted(os.listdir(tmp_path)) == ["run.choices.json", "run.choices.json.lock"]
