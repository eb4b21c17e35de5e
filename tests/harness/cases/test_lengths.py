"""Lengths of the sequences of a case: drawn alike everywhere, asked as attention() asks, counted pair by pair."""

import pytest
import torch
from dense import visible
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from attnbench import Mask, explain
from attnbench.errors import InputError, MalformedFileError
from attnbench.harness.cases.case import Case
from attnbench.harness.cases.drawn_lengths import draw_lengths, typical_lengths
from attnbench.harness.cases.file import read_cases
from attnbench.harness.cases.inputs import FAMILIES, draw
from attnbench.harness.sequence_lengths import LAYOUTS, Draw, SequenceLengths
from attnbench.problem.spec import AttentionSpec

CPU = torch.device("cpu")
ENTRY = "- heads: 4\n  kv_heads: 2\n  head_dim: 16\n  mask: causal\n"
DRAWN = "lengths: {distribution: lognormal, mean: 64, longest: 256, total: 300, seed: 3"


def drawn(distribution: str, **facts: object) -> tuple[int, ...]:
    return draw_lengths(Draw(**{"distribution": distribution, "total": 65536, "longest": 16384, **facts}))


def test_the_same_draw_gives_the_same_lengths_on_any_machine():
    assert drawn("lognormal", mean=4096.0)[:6] == (6840, 5002, 2033, 1301, 2556, 1953)
    assert drawn("zipf", longest=4096)[:6] == (1027, 476, 24, 6, 53, 21)
    assert drawn("uniform", longest=512, total=2048) == (433, 389, 216, 133, 262, 208, 402, 5)
    assert drawn("constant", longest=4096) == (4096,) * 16
    assert drawn("lognormal", mean=4096.0, seed=1) != drawn("lognormal", mean=4096.0)


lengths = st.lists(st.integers(0, 9), min_size=1, max_size=5).map(tuple).filter(any)
MASKS = st.sampled_from([Mask(), Mask(right=0), Mask(2, 1), Mask(3, 0)])


@given(lengths, MASKS, st.sampled_from(["forward", "training"]))
@settings(deadline=None)
def test_operations_are_those_of_the_pairs_that_are_seen(each, mask, direction):
    own = SequenceLengths(layout="packed", q=each)
    spec = AttentionSpec.make(heads=4, kv_heads=2, head_dim=16, mask=mask, direction=direction, **own.sizes())
    alone = [AttentionSpec.make(batch=1, heads=4, seqlen_q=n, head_dim=16, mask=mask) for n in each if n]
    pairs = sum(int(visible(part).sum()) for part in alone)
    assert own.flops(spec) == pairs * 4 * 4 * 16 * (3.5 if direction == "training" else 1)
    assert spec.least_flops <= own.flops(spec)


@given(lengths, MASKS, st.sampled_from(["packed", "padded", "left-padded"]))
@settings(max_examples=12, deadline=None)
def test_a_case_asks_what_attention_is_asked(each, mask, layout):
    own = SequenceLengths(layout=layout, q=each)
    spec = AttentionSpec.make(heads=4, kv_heads=2, head_dim=16, mask=mask, **own.sizes())
    x = draw(spec, "normal", CPU, Case("a", spec, lengths=own).lengths)
    window = {} if mask.kind == "none" else {"window": (mask.left, mask.right)}
    if layout == "packed":
        q, k, v = (part[0].transpose(0, 1) for part in (x.q, x.k, x.v))
        assert all(part.is_contiguous() for part in (q, k, v))
        starts = torch.tensor((0, *each)).cumsum(0).int()
        asked = explain(q, k, v, layout="thd", cu_seqlens_q=starts, **window)
    else:
        used = torch.tensor(each, dtype=torch.int32)
        side = "left" if layout == "left-padded" else "right"
        asked = explain(x.q, x.k, x.v, q_lengths=used, kv_lengths=used, padding_side=side, **window)
    assert asked.spec == spec


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40).filter(any), st.booleans())
def test_typical_lengths_are_those_of_the_spec(each, square):
    own = SequenceLengths(layout="packed", q=tuple(each), kv=None if square else tuple(reversed(each)))
    if not any(map(min, own.q, own.keys)):
        return
    asked = AttentionSpec.make(heads=2, head_dim=16, **own.sizes())
    found = typical_lengths(asked)
    assert Case("typical", asked, lengths=found).lengths == found
    assert (found.kv is None) == square


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_drawn_for_sequences(family):
    """A sink is the first key of each sequence, not of the batch alone."""
    for layout in ("packed", "left-padded"):
        own = SequenceLengths(layout=layout, q=(40, 0, 90))
        spec = AttentionSpec.make(heads=2, head_dim=32, **own.sizes())
        x = draw(spec, family, CPU, own)
        assert torch.equal(x.k, draw(spec, family, CPU, own).k)
        if family == "sink":
            for part in x.lengths.sequences(spec, x.q, x.k):
                p = (part.q(x.q).float() @ part.kv(x.k).float().mT * spec.scale).softmax(-1)
                assert 0.5 < float(p[..., 0].mean()) < 0.95
    with pytest.raises(InputError, match="drawn with the lengths"):
        draw(spec, family, CPU)


def test_a_file_of_cases_draws_lengths_in_every_layout(tmp_path):
    path = tmp_path / "cases.yaml"
    path.write_text(f"{ENTRY}  direction: [forward, training]\n  {DRAWN}, layout: [{', '.join(LAYOUTS)}]}}\n")
    cases = read_cases(path, "fp8")
    assert [case.lengths.layout for case in cases if not case.spec.training] == list(LAYOUTS)
    assert len({case.name for case in cases}) == len(cases) == 2 * len(LAYOUTS)
    assert len({case.lengths.q for case in cases}) == 1
    of = {case.lengths.layout: case for case in cases}
    longest, count = max(of["packed"].lengths.q), len(of["packed"].lengths.q)
    assert (of["dense"].spec.batch, of["dense"].spec.seqlen_q) == (count, longest)
    assert (of["equal"].spec.batch, of["equal"].spec.seqlen_q) == (count, round(300 / count))
    assert of["equal"].flops < of["packed"].flops == of["padded"].flops < of["dense"].flops == of["dense"].spec.flops
    assert "lognormal mean64 longest256 total300 seed3" in of["packed"].name


def test_lengths_of_a_file_come_in_its_order_and_from_the_first_again(tmp_path):
    (tmp_path / "lengths.txt").write_text("5\n\n 9 \n2\n")
    path = tmp_path / "cases.yaml"
    path.write_text(ENTRY + "  lengths: {distribution: file, file: lengths.txt, total: 24}\n")
    (case,) = read_cases(path, "bf16")
    assert case.lengths.q == (5, 9, 2, 5, 3)
    path.write_text(ENTRY + "  lengths: {distribution: file, file: lengths.txt, total: 24, longest: 4}\n")
    assert read_cases(path, "bf16")[0].lengths.q == (4, 4, 2, 4, 4, 2, 4)
    (tmp_path / "lengths.txt").write_text("5\n0\n")
    with pytest.raises(MalformedFileError, match=r"lengths\.txt:2: expected a length from 1"):
        read_cases(path, "bf16")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (f"  batch: 2\n  {DRAWN}}}", "expected lengths or batch in this entry, not both"),
        ("  lengths: 5", "expected a mapping of distribution"),
        ("  lengths: {total: 5}", "expected distribution in lengths"),
        ("  lengths: {distribution: normal, total: 5}", "expected constant, uniform, lognormal, zipf, file"),
        ("  lengths: {distribution: lognormal, total: 5}", "mean goes with"),
        ("  lengths: {distribution: zipf, total: 5, mean: 2}", "mean goes with"),
        ("  lengths: {distribution: zipf, total: 5, longest: 6}", "longest is 6, beyond the total of 5"),
        ("  lengths: {distribution: constant, total: 100000, longest: 1}", "at most 65536 items"),
        ("  lengths: {distribution: zipf, total: 1e99}", "expected a whole number for total"),
        ("  lengths: {distribution: zipf, total: 5, file: a}", "file goes with"),
        ("  lengths: {distribution: file, total: 5}", "file goes with"),
        ("  lengths: {distribution: file, total: 5, file: no.txt}", "cannot be read"),
        ("  lengths: {distribution: file, total: 5, file: no.txt, seed: 1}", "no seed beside"),
        ("  lengths: {distribution: zipf, total: 5, layout: thd}", "expected packed, padded"),
        ("  lengths: {distribution: zipf, total: 5, longer: 2}", "expected one of distribution"),
    ],
)
def test_invalid_lengths_in_a_file_are_reported(tmp_path, entry, message):
    path = tmp_path / "cases.yaml"
    path.write_text(f"{ENTRY}{entry}\n")
    with pytest.raises(MalformedFileError, match=message):
        read_cases(path, "fp8")


def test_a_case_has_the_lengths_of_its_spec():
    own = SequenceLengths(layout="packed", q=(5, 9))
    spec = AttentionSpec.make(heads=2, head_dim=16, **own.sizes())
    with pytest.raises(InputError, match="needs the lengths"):
        Case("a", spec)
    with pytest.raises(InputError, match="make batch 2, not 3"):
        Case("a", spec.replace(batch=3), lengths=own)
    padded = SequenceLengths(layout="padded", q=(5, 9))
    row = AttentionSpec.make(heads=2, head_dim=16, **padded.sizes((12, 12)))
    assert Case("a", row, lengths=padded).flops == Case("a", spec, lengths=own).flops
    with pytest.raises(InputError, match="longer than its row of 8"):
        Case("a", row.replace(seqlen_q=8, seqlen_kv=8), lengths=padded)
    for wrong in ({"q": ()}, {"q": (0,)}, {"q": (1,), "kv": (1, 2)}, {"q": (3, 0), "kv": (0, 3)}, {"q": (-1,)}):
        with pytest.raises(ValidationError):
            SequenceLengths(layout="packed", **wrong)
