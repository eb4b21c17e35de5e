"""Cases: presets and files, the lengths of their sequences, and how a malformed file is reported."""

import itertools

import pytest
import torch
from dense import visible
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from attnbench import explain
from attnbench.errors import InputError, MalformedFileError
from attnbench.harness.cases.case import Case, tensor_dtype
from attnbench.harness.cases.drawn_lengths import draw_lengths, typical_lengths
from attnbench.harness.cases.file import read_cases
from attnbench.harness.cases.inputs import FAMILIES, draw
from attnbench.harness.cases.presets import PRESETS, preset_cases
from attnbench.harness.sequence_lengths import LAYOUTS, Draw, SequenceLengths
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

SPEC = AttentionSpec.make(batch=1, heads=2, seqlen_q=8, head_dim=16)
ENTRY = "- batch: 1\n  heads: 2\n  seqlen_q: 8\n  head_dim: 16\n"


@pytest.mark.parametrize(("name", "device"), [*itertools.product(PRESETS, ("cpu", "cuda"))])
def test_presets_hold_different_specs_of_the_right_type(name, device):
    cases = preset_cases(name, "fp8", device)
    assert len({case.spec for case in cases}) == len({case.name for case in cases}) == len(cases) > 0
    assert {case.spec.dtype for case in cases} == {"bf16"}
    assert {case.spec.dtype for case in preset_cases(name, "fp32", device)} == {"fp32"}


def test_no_such_preset_or_dtype():
    with pytest.raises(InputError, match="quick, inference, training, long, packed, padded, models, table"):
        preset_cases("fast", "fp8", "cpu")
    with pytest.raises(InputError, match="fp8, bf16, fp16, fp32"):
        tensor_dtype("int4")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Case("", SPEC),
        lambda: Case("a\x1b[2J", SPEC),
        lambda: Case("a", SPEC, ()),
        lambda: Case("a", SPEC, ("normal", "normal")),
        lambda: Case("a", SPEC, ("zeros",)),
        lambda: Case("a", AttentionSpec.make(batch=1, heads=1, seqlen_q=8, head_dim=8, dtype="e4m3", descale="head")),
    ],
)
def test_impossible_cases(make):
    with pytest.raises(InputError):
        make()


def test_lists_are_multiplied_out(tmp_path):
    file = tmp_path / "cases.yaml"
    file.write_text(
        "- batch: 2\n"
        "  heads: 8\n"
        "  kv_heads: [8, 2]\n"
        "  seqlen_q: [128, 257]\n"
        "  seqlen_kv: 512\n"
        "  head_dim: 64\n"
        "  mask: [none, causal, causal/bottom-right, {left: 16, right: 0}]\n"
        "  direction: [forward, training]\n"
        "  softcap: 30\n"
        "  scale: 0.1\n"
        "- {name: mine, batch: 1, heads: 1, seqlen_q: 16, head_dim: 8, families: [outlier]}\n"
    )
    *many, mine = read_cases(file, "fp16")
    assert len(many) == 2 * 2 * 4 * 2
    expected = {
        AttentionSpec.make(
            batch=2, heads=8, kv_heads=kv, seqlen_q=q, seqlen_kv=512, head_dim=64, mask=mask, direction=direction,
            softcap=30, scale=0.1, dtype="fp16",
        )
        for kv, q, direction in itertools.product((8, 2), (128, 257), ("forward", "training"))
        for mask in (Mask(), Mask(right=0), Mask(right=0, alignment="bottom-right"), Mask(16, 0))
    }  # fmt: skip
    assert {case.spec for case in many} == expected
    assert mine == Case(
        "mine", AttentionSpec.make(batch=1, heads=1, seqlen_q=16, head_dim=8, dtype="fp16"), ("outlier",)
    )


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("", 1, "empty"),
        ("batch: 1\n", 1, "list of cases"),
        ("# a comment\n- 5\n", 2, "mapping"),
        ("- batch: 1\n  heads: [1\n", 3, "YAML"),
        ("- batch: 1\n  heads: 2\n", 1, "seqlen_q, head_dim"),
        (ENTRY + "  headdim: 3\n", 5, "'headdim'"),
        (ENTRY + "  dtype: bf16\n", 5, "--dtype"),
        (ENTRY + "  batch: 2\n", 5, "once"),
        (ENTRY + "  kv_heads:\n  - 1\n  - 1.5\n", 7, "a whole number for kv_heads"),
        (ENTRY + "  kv_heads: true\n", 5, "a whole number for kv_heads"),
        (ENTRY + "  kv_heads: []\n", 5, "at least one"),
        (ENTRY + "\n\n" + ENTRY + "  kv_heads: 7\n", 7, "multiple of kv_heads"),
        (ENTRY + "  direction: sideways\n", 1, "forward or training"),
        (ENTRY + "  mask: triangle\n", 5, "causal/bottom-right"),
        (ENTRY + "  mask: {left: -1}\n", 5, "negative"),
        (ENTRY + "  families: [zeros]\n", 1, "normal, outlier"),
        (ENTRY + ENTRY, 5, "once"),
        ("- &a\n  batch: *a\n", 1, "not a mapping"),
        (ENTRY + "  seqlen_kv: [" + ", ".join(map(str, range(1, 10_003))) + "]\n", 1, "at most 10000"),
    ],
)
def test_a_malformed_file_is_reported_with_its_line(tmp_path, text, line, expected):
    file = tmp_path / "cases.yaml"
    file.write_text(text)
    with pytest.raises(MalformedFileError, match=expected) as caught:
        read_cases(file, "fp8")
    assert caught.value.line == line
    assert str(caught.value).startswith(f"{file}:{line}: expected ")


def test_no_file_no_text_and_endless_nesting(tmp_path):
    with pytest.raises(MalformedFileError, match="No such file"):
        read_cases(tmp_path / "none.yaml", "fp8")
    file = tmp_path / "cases.yaml"
    file.write_bytes(b"- batch: 1\n  heads: \xff\n")
    with pytest.raises(MalformedFileError, match="UTF-8") as caught:
        read_cases(file, "fp8")
    assert caught.value.line == 2
    file.write_text("[" * 2_000)
    with pytest.raises(MalformedFileError):
        read_cases(file, "fp8")
    file.write_text("#" * 2**20 + "\n")
    with pytest.raises(MalformedFileError, match="bytes"):
        read_cases(file, "fp8")


CPU = torch.device("cpu")
OF_LENGTHS = "- heads: 4\n  kv_heads: 2\n  head_dim: 16\n  mask: causal\n"
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
    path.write_text(f"{OF_LENGTHS}  direction: [forward, training]\n  {DRAWN}, layout: [{', '.join(LAYOUTS)}]}}\n")
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
    path.write_text(OF_LENGTHS + "  lengths: {distribution: file, file: lengths.txt, total: 24}\n")
    (case,) = read_cases(path, "bf16")
    assert case.lengths.q == (5, 9, 2, 5, 3)
    path.write_text(OF_LENGTHS + "  lengths: {distribution: file, file: lengths.txt, total: 24, longest: 4}\n")
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
    path.write_text(f"{OF_LENGTHS}{entry}\n")
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
