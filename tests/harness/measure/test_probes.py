"""Probes see what one run cannot show, and never accuse a kernel that depends on what it may depend on."""

import math

import pytest
import torch
from dense import dense_attention, visible
from hypothesis import given
from hypothesis import strategies as st
from problems import masks

from attnbench.harness.cases.inputs import draw
from attnbench.harness.measure.probes import LeakProbe, same_bits
from attnbench.kernels.registry import registry
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

CPU = torch.device("cpu")
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
