"""Packed and padded cases on a bench: truths of each sequence alone, and faults that only such batches show."""

from dataclasses import replace

import planted
import pytest
import torch
from planted import CPU, FakeBackward, backend, healthy

from attnbench.errors import AttnbenchError
from attnbench.harness.cases.case import Case
from attnbench.harness.cases.inputs import draw
from attnbench.harness.measure.bench import Bench
from attnbench.harness.measure.probes import LeakProbe
from attnbench.harness.measure.timing import Timer
from attnbench.harness.measure.verdict import judge
from attnbench.harness.sequence_lengths import SequenceLengths
from attnbench.kernels.contract import ForwardKernel, Operands, Result
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry, registry
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

TIMER = Timer(CPU, visit=0.0, limit=0.01, patience=1.0)
LENGTHS = (30, 1, 0, 70, 12)
KEYS = (41, 3, 5, 70, 20)
CAUSAL = Mask(right=0)


def case(layout: str, direction: str = "training", mask: Mask = CAUSAL, keys: tuple[int, ...] | None = None) -> Case:
    own = SequenceLengths(layout=layout, q=LENGTHS, kv=keys)
    spec = AttentionSpec.make(heads=4, kv_heads=2, head_dim=16, mask=mask, direction=direction, **own.sizes())
    return Case(layout, spec, lengths=own)


class Exact(ForwardKernel):
    """The exact answer for sequences of any lengths, with ``change`` made to it."""

    def __init__(self, name: str, change=lambda out: None):
        self.name, self.rows, self.declared_error, self.change = name, {"cpu": planted.ROW}, 0.06, change

    def prepare(self, inputs, spec):
        return planted.EXACT.prepare(inputs, spec)

    def run(self, operands):
        found = planted.EXACT.run(operands)
        self.change(found.out)
        return found


def concluded(monkeypatch, kernel, asked, plan):
    made = Registry([*healthy().backends.values(), backend(*kernel)])
    monkeypatch.setattr(planted, "made_here", lambda: made, raising=False)
    bench = Bench("planted:made_here", TIMER)
    bench.open(asked)
    bench.prepare(Plan.parse(plan))
    visit = bench.sample(Plan.parse(plan))
    assert all(visit.time_ms.values())
    return bench.conclude(Plan.parse(plan))


@pytest.mark.parametrize("keys", [None, KEYS])
@pytest.mark.parametrize("layout", ["packed", "padded", "left-padded"])
def test_an_exact_kernel_is_timed_and_judged_without_an_error(monkeypatch, layout, keys):
    kernels = Exact("exact:bf16"), FakeBackward("exact:bf16")
    found = concluded(monkeypatch, kernels, case(layout, keys=keys), "exact:bf16>exact:bf16")
    assert {name for each in found.judged.values() for name in each} == {"out", "lse", "dq", "dk", "dv"}
    assert max(each.error for family in found.judged.values() for each in family.values()) < 0.004
    assert found.truth == "exact attention in FP64 on 2 of 2 key heads, each sequence alone"
    assert found.leak == 0
    assert found.deterministic


class Blind(Exact):
    """Attends to the whole packed batch: documents see one another."""

    def run(self, operands):
        x = operands.q
        whole = operands.spec.replace(batch=1, seqlen_q=x.shape[2], seqlen_kv=operands.k.shape[2], lengths=None)
        out, lse, _ = planted.EXACT.run(Operands(whole, x, operands.k, operands.v))
        return Result(out, lse)


def lose_the_shortest(out):
    out[:, :, LENGTHS[0]] = 0


def write_padding(out):
    out[1, :, -1] = 1.0


def test_a_kernel_that_mixes_sequences_or_loses_one_is_found(monkeypatch):
    for kernel, check in ((Blind("blind:bf16"), "error"), (Exact("lost:bf16", lose_the_shortest), "row")):
        found = concluded(monkeypatch, [kernel], case("packed", "forward"), kernel.name)
        verdict = judge(replace(found, bound=0.01 if check == "error" else 0.5))
        assert (verdict.status, verdict.check) == ("inaccurate", check), kernel.name


def test_what_is_written_into_padding_is_a_fault(monkeypatch):
    with pytest.raises(AttnbenchError, match="out holds 64 values beyond the sequences"):
        concluded(monkeypatch, [Exact("spill:bf16", write_padding)], case("padded", "forward"), "spill:bf16")


def answer(x, spec, over_batch: bool):
    """Out of a kernel with a scale for each token, after one that all sequences share or none."""
    kernel, factor = registry().forward("emulated:fp8-token"), float(x.k.abs().max()) if over_batch else 1.0
    shared = x.qkv._replace(k=(x.k * (3.0 / factor)).to(torch.bfloat16))
    return kernel.run(kernel.prepare(shared, spec)).out


@pytest.mark.parametrize("over_batch", [True, False])
def test_a_scale_over_the_batch_leaks_between_sequences(over_batch):
    """Without a mask too: the probe is a whole sequence then, and what it may not see are the others."""
    for mask, layout in ((CAUSAL, "packed"), (Mask(), "packed"), (Mask(), "left-padded")):
        asked = case(layout, "forward", mask)
        x = draw(asked.spec, "normal", CPU, asked.lengths)
        probe = LeakProbe.of(asked.spec, x)
        assert probe.rows - probe.begin == (70 if mask.kind == "none" else 24)
        before = answer(x, asked.spec, over_batch)
        probe.change(x.q, x.k, x.v)
        assert (probe.leak(before, answer(x, asked.spec, over_batch)) > 0) == over_batch
