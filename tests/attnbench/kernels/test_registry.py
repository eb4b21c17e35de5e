"""The registry: names, plans, reasons, and invalid third-party backends."""

from dataclasses import fields

import pytest
from fakes import ROW, FakeBackward, FakeForward, fake_backend, fake_registry

from attnbench import AttentionSpec, Mask, Plan
from attnbench.errors import AttnbenchError, UnknownBackendError
from attnbench.kernels.capabilities import Capabilities, Device
from attnbench.problem.spec import DTYPES

CPU = Device("cpu", "A CPU")
H200 = Device("cuda", "NVIDIA H200", (9, 0))


def spec(**more) -> AttentionSpec:
    return AttentionSpec.make(**{"batch": 1, "heads": 4, "seqlen_q": 64, "head_dim": 64, **more})


def test_reasons_distinguish_unavailable_from_refused():
    only_64 = Capabilities(dtypes=("bf16",), head_dims=(64, 64, 1))
    known = fake_registry(
        fake_backend("gone", FakeForward("gone:bf16"), reason="not installed"),
        fake_backend("here", FakeForward("here:bf16", row=only_64)),
        fake_backend("back", FakeBackward("back:bf16")),
    )
    assert known.reasons(Plan("gone:bf16"), spec(), CPU) == ("unavailable", ["gone: not installed"])
    assert known.reasons(Plan("here:bf16"), spec(), CPU) == ("ok", [])
    status, reasons = known.reasons(Plan("here:bf16"), spec(head_dim=128, dtype="fp16"), CPU)
    assert (status, len(reasons)) == ("refused", 2)
    assert known.reasons(Plan("here:bf16"), spec(), H200) == ("refused", ["runs on cpu, not on cuda"])
    training = spec(direction="training")
    assert known.reasons(Plan("here:bf16"), training, CPU) == ("refused", ["the plan has no backward"])
    assert known.reasons(Plan("here:bf16", "back:bf16"), training, CPU) == ("ok", [])


def test_a_backward_follows_every_forward_that_saves_what_it_reads_and_gives_a_reason_for_others():
    known = fake_registry(
        fake_backend("a", FakeForward("a:bf16"), FakeForward("a:fp8", leaves="int8 rows")),
        fake_backend("b", FakeForward("b:fp8", leaves="e4m3")),
        fake_backend("silent", FakeForward("silent:bf16", row=Capabilities(dtypes=DTYPES, lse=False))),
        fake_backend("any", FakeBackward("any:bf16"), FakeBackward("any:fp32", needs_lse=False)),
        fake_backend(
            "own",
            FakeBackward("own:fp8", follows=("a:bf16", "e4m3")),
            FakeBackward("own:int8", follows=("int8 rows",)),
        ),
    )
    training = spec(direction="training")
    for plan in ("b:fp8>own:fp8", "a:bf16>own:fp8", "a:fp8>own:int8", "silent:bf16>any:fp32"):
        assert known.reasons(Plan.parse(plan), training, CPU) == ("ok", [])
    refused = known.reasons(Plan("a:fp8", "own:fp8"), training, CPU)[1]
    assert refused == ["the backward own:fp8 follows only a:bf16, forwards that leave e4m3"]
    assert "log-sum-exp" in known.reasons(Plan("silent:bf16", "any:bf16"), training, CPU)[1][0]
    assert [known.leader(f"own:{each}") for each in ("fp8", "int8")] == ["a:bf16", "a:fp8"]
    assert {Plan("a:bf16", "own:fp8"), Plan("a:fp8", "own:int8")} <= set(known.plans(training))


def test_a_plans_error_growth_is_the_largest_of_its_8_bit_kernels_and_none_if_any_is_undeclared():
    steady, growing = FakeForward("a:fp8", error_growth=1.0), FakeForward("a:int8", error_growth=1.5)
    known = fake_registry(fake_backend("a", steady, growing, FakeForward("a:fp8-x"), FakeForward("a:bf16")),
                          fake_backend("b", FakeBackward("b:fp8"), FakeBackward("b:bf16")))  # fmt: skip
    plans = {
        "a:bf16": 1.0, "a:bf16>b:bf16": 1.0, "a:fp8": 1.0, "a:int8>b:bf16": 1.5, "a:fp8-x": None, "a:fp8>b:fp8": None,
        "a:bf16>b:fp8": None, "unknown:fp8": None, "unknown:bf16": 1.0,
    }  # fmt: skip
    assert {text: known.error_growth(Plan.parse(text)) for text in plans} == plans


@pytest.mark.parametrize(
    ("row", "change", "word"),
    [
        ({"capability": (10, 0)}, {}, "compute capability 10.0"),
        ({"capability_below": (9, 0)}, {}, "only below compute capability 9.0"),
        ({"head_dims": (32, 128, 8)}, {"head_dim": 256}, "outside 32 to 128"),
        ({"head_dims": (32, 128, 8)}, {"head_dim": 36}, "no multiple of 8"),
        ({"head_dims": (32, 128, 8)}, {"head_dim_v": 16}, "head_dim_v 16 is outside"),
        ({"head_dim_v": False}, {"head_dim_v": 32}, "must equal head_dim"),
        ({"masks": ("none",)}, {"mask": (None, 0)}, "no causal mask"),
        ({"masks": ("none", "causal")}, {"mask": (3, 0)}, "no window mask"),
        ({"alignments": ("top-left",)}, {"mask": (None, 0, "bottom-right"), "seqlen_kv": 80}, "bottom-right alignment"),
        ({"gqa": False}, {"kv_heads": 2}, "grouped heads"),
        ({"softcap": False}, {"softcap": 2.0}, "softcap"),
        ({"empty_rows": False}, {"mask": (None, 0, "bottom-right"), "seqlen_kv": 8}, "see no key"),
        ({"training": False}, {"direction": "training"}, "gradients"),
        ({"lse": False}, {"return_lse": True}, "log-sum-exp"),
        ({"max_elements": 1000}, {}, "1000 elements"),
        ({"dtypes": ("fp16",)}, {}, "fp16 tensors, not bf16"),
        ({"dtypes": DTYPES, "descales": ("head",)}, {"dtype": "e4m3", "descale": "token"}, "descales per head"),
    ],
)
def test_each_limit_of_a_capability_row_gives_one_reason_only_when_exceeded(row, change, word):
    if "mask" in change:
        change = {**change, "mask": Mask(*change["mask"])}
    limited = Capabilities(**{"dtypes": ("bf16",), **row})
    (reason,) = limited.refusals(spec(**change), H200)
    assert word in reason
    assert Capabilities(dtypes=DTYPES, descales=("head", "token")).refusals(spec(**change), H200) == []
    if change:
        assert limited.refusals(spec(), H200) == ([] if "bf16" in limited.dtypes else limited.refusals(spec(), H200))


def test_a_capability_row_reads_every_field_of_a_spec():
    """A field that rows do not read would be ignored by kernels that do not support it."""
    read = set()

    class Watched(AttentionSpec):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    asked = Watched.make(batch=1, heads=4, kv_heads=2, seqlen_q=8, seqlen_kv=16, head_dim=16, softcap=1.0)
    read.clear()
    Capabilities(dtypes=("bf16",)).refusals(asked, H200)
    unread = {each.name for each in fields(AttentionSpec)} - read
    assert unread == {"scale"}, "any number is served; what a kernel cannot scale by it refuses in further_refusals"


def test_two_backends_of_one_name_and_foreign_kernels_are_errors():
    with pytest.raises(AttnbenchError, match="two installed packages"):
        fake_registry(fake_backend("a", FakeForward("a:bf16")), fake_backend("a", FakeForward("a:fp16")))
    with pytest.raises(AttnbenchError, match="must not provide"):
        fake_registry(fake_backend("a", FakeForward("b:bf16", row=ROW)))


@pytest.mark.parametrize(
    "text", ["", "fa3", "fa3:", ":fp8", "fa3:fp8>", "fa3:fp8>fa4", "fa3:fp8>fa4:bf16>x:y", "FA3:fp8", "a b:c"]
)
def test_invalid_plan_texts_are_refused(text):
    with pytest.raises(UnknownBackendError):
        Plan.parse(text)
