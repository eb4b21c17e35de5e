"""Probes see what one run cannot show, and accuse no honest kernel; faults that only packed and padded cases show."""

import math
from dataclasses import replace

import planted
import pytest
import torch
from dense import dense_attention, visible
from hypothesis import given
from hypothesis import strategies as st
from planted import CPU, FakeBackward, backend, healthy
from problems import masks

from attnbench.errors import AttnbenchError
from attnbench.harness.cases.case import Case
from attnbench.harness.cases.inputs import draw
from attnbench.harness.measure.bench import Bench
from attnbench.harness.measure.probes import LeakProbe, same_bits
from attnbench.harness.measure.timing import Timer
from attnbench.harness.measure.verdict import judge
from attnbench.harness.sequence_lengths import SequenceLengths
from attnbench.kernels.contract import ForwardKernel, Operands, Result
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry, registry
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

CAUSAL = AttentionSpec.make(batch=1, heads=2, kv_heads=1, seqlen_q=200, head_dim=32, mask=Mask(right=0))


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    return AttentionSpec.make(
        batch=1,
        heads=2,
        seqlen_q=draw(st.integers(1, 40)),
        seqlen_kv=draw(st.integers(1, 40)),
        head_dim=8,
        mask=draw(masks()),
    )


@given(specs())
def test_there_is_a_probe_where_some_row_sees_a_key_and_not_a_later_one(spec):
    # The masks' keys move to the right with the row, so what a row sees has no gaps.
    parted = [bool(row.any()) and not bool(row[-1]) for row in visible(spec)]
    probe = LeakProbe.of(spec)
    assert (probe is not None) == any(parted)
    if probe is not None:
        assert parted[probe.rows - 1]
        changes_what_its_rows_may_not_see(probe, spec)


def changes_what_its_rows_may_not_see(probe, spec):
    """All of it, and nothing else."""
    seen = visible(spec)[: probe.rows].any(0)
    before = draw(spec, "normal", CPU)
    after = draw(spec, "normal", CPU)
    addresses = [x.data_ptr() for x in (after.q, after.k, after.v)]
    probe.change(after.q, after.k, after.v)
    assert addresses == [x.data_ptr() for x in (after.q, after.k, after.v)]
    rows = torch.arange(spec.seqlen_q) < probe.rows
    first, last = int(seen.nonzero().min()), int(seen.nonzero().max())
    reached = (torch.arange(spec.seqlen_kv) >= first) & (torch.arange(spec.seqlen_kv) <= last)
    for old, new, kept in ((before.q, after.q, rows), (before.k, after.k, reached), (before.v, after.v, reached)):
        assert torch.equal(old[:, :, kept], new[:, :, kept])
        assert torch.equal(old.sign(), new.sign())
        assert bool((new[:, :, ~kept].abs() >= 8 * old[:, :, ~kept].abs()).all())
        assert bool(new.isfinite().all())
    assert torch.equal(
        dense_attention(before.q, before.k, before.v, spec)[0][:, :, : probe.rows],
        dense_attention(after.q, after.k, after.v, spec)[0][:, :, : probe.rows],
    )


@pytest.mark.parametrize("alignment", ["top-left", "bottom-right"])
@pytest.mark.parametrize("left", [None, 20])
def test_a_scale_over_the_sequence_leaks_and_one_for_each_token_does_not(left, alignment):
    spec = CAUSAL.replace(seqlen_kv=230, mask=Mask(left, 0, alignment))
    probe = LeakProbe.of(spec)
    for name, leaks in {
        "emulated:fp8": True,
        "emulated:fp8-tensor": True,
        "emulated:fp8-token-smooth": True,
        "emulated:fp8-token": False,
        "sdpa-math:bf16": False,
        "reference:fp32": False,
    }.items():
        kernel, inputs = registry().forward(name), draw(spec, "normal", CPU)
        before, lse, _ = kernel.run(kernel.prepare(inputs.qkv, spec))
        probe.change(inputs.q, inputs.k, inputs.v)
        after, lse_after, _ = kernel.run(kernel.prepare(inputs.qkv, spec))
        assert (probe.leak(before, after) > 0) == leaks, name
        assert lse is None or (probe.leak(lse, lse_after) > 0) == leaks, name
        assert not torch.equal(before[:, :, probe.rows :], after[:, :, probe.rows :]), name


def test_a_leak_is_a_number_and_what_is_not_finite_an_infinite_one():
    probe = LeakProbe(2, 0, 2)
    before = torch.ones(1, 1, 4, 8)
    after = before.clone()
    after[:, :, 2:] = 5
    assert probe.leak(before, after) == 0
    after[:, :, 1] = 2
    assert probe.leak(before, after) == pytest.approx(math.sqrt(0.5))
    after[:, :, 0, 3] = math.nan
    assert probe.leak(before, after) == math.inf
    assert probe.leak(after, after) == 0
    assert probe.leak(torch.zeros_like(before), before) == math.inf


def test_same_bits_sees_a_sign_of_zero_and_takes_a_nan_for_a_nan():
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.tensor([[1.0, math.nan], [0.0, -math.inf]], dtype=dtype)
        assert same_bits(x, x.clone())
        assert same_bits(x.t(), x.t().contiguous())
        for place, value in (((0, 0), math.nan), ((0, 1), 1.0), ((1, 0), -0.0), ((1, 1), math.inf)):
            other = x.clone()
            other[place] = value
            assert not same_bits(x, other)
    assert same_bits(torch.tensor([math.nan]), -torch.tensor([math.nan]))
    assert not same_bits(torch.zeros(2), torch.zeros(3))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))


TIMER = Timer(CPU, visit=0.0, limit=0.01, patience=1.0)
LENGTHS = (30, 1, 0, 70, 12)
KEYS = (41, 3, 5, 70, 20)
CAUSAL_MASK = Mask(right=0)


def case(
    layout: str, direction: str = "training", mask: Mask = CAUSAL_MASK, keys: tuple[int, ...] | None = None
) -> Case:
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
    for mask, layout in ((CAUSAL_MASK, "packed"), (Mask(), "packed"), (Mask(), "left-padded")):
        asked = case(layout, "forward", mask)
        x = draw(asked.spec, "normal", CPU, asked.lengths)
        probe = LeakProbe.of(asked.spec, x)
        assert probe.rows - probe.begin == (70 if mask.kind == "none" else 24)
        before = answer(x, asked.spec, over_batch)
        probe.change(x.q, x.k, x.v)
        assert (probe.leak(before, answer(x, asked.spec, over_batch)) > 0) == over_batch
