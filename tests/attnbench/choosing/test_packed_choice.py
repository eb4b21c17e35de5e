"""Choices for packed batches: evidence from equal-length batches and from other packed batches."""

import pytest
from choices import entry, spec, table

from attnbench import AttentionSpec, Plan
from attnbench.choosing.evidence import Evidence
from attnbench.choosing.similarity import of_one_length
from attnbench.problem.lengths_kind import LengthsKind
from attnbench.tables.user_table import Known


def packed(sequences: int, longest: int, total: int) -> AttentionSpec:
    kind = LengthsKind(batch="packed", square=True, total_q=total, total_kv=total)
    return spec(batch=sequences, seqlen_q=longest, lengths=kind)


def test_equal_length_measurements_are_evidence_for_packed_batches():
    """Times are predicted from equal work, errors from the longest sequence; both with larger uncertainty."""
    fast, narrow = Plan.parse("fast:bf16"), Plan.parse("fast:fp8")
    at = [spec(batch=2, seqlen_q=n) for n in (1024, 2048, 4096)]
    measured = [entry(name, n.flops / 1e9, n) for n in at for name in ("fast:bf16", "fast:fp8")]
    asked = packed(16, 8192, 16384)
    equal = of_one_length(asked)
    assert equal.lengths is None
    assert 1024 < equal.seqlen_q < 4096
    assert equal.flops == pytest.approx(asked.flops, rel=0.1)
    known = Known.of(table(*measured))
    found, alone = (Evidence(each, known).candidate(fast, 0.1, 1.0) for each in (asked, equal))
    assert (found.verdict, found.basis) == ("eligible", "predicted")
    assert found.time_ms == pytest.approx(alone.time_ms, rel=0.03)
    assert found.time_error > alone.time_error
    assert 1 < found.error / alone.error < 1.1
    assert Evidence(asked, known).candidate(narrow, 0.1, None).verdict == "unmeasured"  # with 8,192 keys


def test_measured_packed_batches_outweigh_equal_length_measurements():
    """In times and in errors, at their spec and near it; a plan that has none is still predicted from the others."""
    fast, slow = Plan.parse("fast:bf16"), Plan.parse("slow:bf16")
    at = [spec(batch=16, seqlen_q=n) for n in (512, 1024, 2048, 4096)]  # enough to keep a GPU busy
    measured = [entry(name, n.flops / 1e9, n, normal=0.004) for n in at for name in ("fast:bf16", "slow:bf16")]
    own = [packed(n, 4096, 16384) for n in (6, 8, 12, 16)]
    measured += [entry("fast:bf16", 2 * n.flops / 1e9, n, normal=0.008) for n in own]
    asked = packed(8, 2896, 11586)
    known = Known.of(table(*measured))
    found, borrowed = (Evidence(asked, known).candidate(plan, 0.1, 1.0) for plan in (fast, slow))
    assert found.time_ms == pytest.approx(2 * asked.flops / 1e9, rel=0.15)
    assert borrowed.time_ms == pytest.approx(asked.flops / 1e9, rel=0.15)
    assert 0.008 <= found.error < 0.0105
    assert 0.004 <= borrowed.error < 0.005
    here = Evidence(own[0], known).candidate(fast, 0.1, 1.0)
    assert (here.basis, here.time_ms, here.error) == ("measured", 2 * own[0].flops / 1e9, 0.008)
    dense = spec(batch=16, seqlen_q=1448)  # of which packed ones say nothing: most of their tokens see fewer keys
    alone = Known.of(table(*(each for each in measured if each.spec.lengths is None)))
    assert Evidence(dense, known).candidate(fast, 0.1, 1.0) == Evidence(dense, alone).candidate(fast, 0.1, 1.0)
    assert Evidence(spec(batch=16, seqlen_q=8192), known).candidate(fast, 0.1, None).verdict == "unmeasured"
