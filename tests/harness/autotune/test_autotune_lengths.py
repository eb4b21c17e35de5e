"""Packed and padded calls of a program are measured with the lengths that they had."""

import torch
from planted import CPU, setup

import attnbench
from attnbench import AttentionSpec
from attnbench.harness.autotune.observed_specs import ObservedSpec
from attnbench.harness.autotune.tuning import TuningTask, tuning_task
from attnbench.harness.cases.inputs import draw
from attnbench.harness.measure.setup import INSTALLED
from attnbench.harness.sequence_lengths import SequenceLengths
from attnbench.problem.lengths_kind import LengthsKind
from attnbench.tables.table import Table

HERE = setup(INSTALLED)
NOTHING = Table(HERE.environment, {})


def task_of(asked: ObservedSpec) -> TuningTask | str:
    return tuning_task(asked, HERE, True, ("sdpa-flash", "emulated:fp8"), NOTHING, False)


def test_sequences_are_measured_as_long_as_they_were():
    q, k, v = torch.randn(3, 40, 2, 16, dtype=torch.bfloat16)
    starts = torch.tensor([0, 9, 9, 40], dtype=torch.int32)
    with attnbench.autotune(seconds=0) as tuned:
        attnbench.attention(q, k, v, layout="thd", cu_seqlens_q=starts, max_seqlen_q=36, is_causal=True)
        starts.zero_()  # the copy is what was called
    (seen,) = tuned._asked.heaviest_first
    task = task_of(seen)
    assert task.case.lengths == SequenceLengths(layout="packed", q=(9, 0, 31))
    assert task.case.spec == seen.spec
    assert {str(plan) for plan in task.plans} >= {"sdpa-flash:bf16", "emulated:fp8"}
    assert draw(seen.spec, "normal", CPU, task.case.lengths).lengths.longest_q == 40  # no more than there are tokens
    alone = task_of(ObservedSpec(seen.spec, CPU, choices=seen.choices)).case.lengths
    assert (len(alone.q), max(alone.q), sum(alone.q)) == (3, 46, 46)


def test_padded_rows_are_measured_as_full_as_they_were_and_those_of_no_call_are_not():
    x = torch.randn(2, 2, 8, 16, dtype=torch.bfloat16)
    with attnbench.autotune(seconds=0) as tuned:
        attnbench.attention(x, x, x, kv_lengths=torch.tensor([3, 8], dtype=torch.int32), padding_side="left")
    (seen,) = tuned._asked.heaviest_first
    assert task_of(seen).case.lengths == SequenceLengths(layout="left-padded", q=(8, 8), kv=(3, 8))
    padded = AttentionSpec.make(batch=2, heads=2, seqlen_q=8, head_dim=16, lengths=LengthsKind(batch="padded"))
    assert "does not say how long" in task_of(ObservedSpec(padded, CPU))
