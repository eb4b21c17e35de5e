"""Presets and case files: what a sweep is about, and how a malformed file is reported."""

import itertools

import pytest

from attnbench.errors import InputError, MalformedFileError
from attnbench.harness.cases.case import Case, tensor_dtype
from attnbench.harness.cases.file import read_cases
from attnbench.harness.cases.presets import PRESETS, preset_cases
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
