"""Choices by scaled times of another GPU: never treated as measured, and labelled as scaled in every output."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from fakes import FakeForward, an_environment, fake_backend, fake_registry

from attnbench import AttentionSpec, Plan
from attnbench.choosing import table_advice
from attnbench.choosing.selector import choose
from attnbench.choosing.table_advice import warn_of_rule
from attnbench.errors import AttnbenchWarning, NoPlanError
from attnbench.kernels.capabilities import Device
from attnbench.tables.scaling import scaled
from attnbench.tables.table import Entry, Table
from attnbench.tables.user_table import Known

CPU = torch.device("cpu")
KNOWN = fake_registry(
    fake_backend("slow", FakeForward("slow:bf16", preference=10)),
    fake_backend("fast", FakeForward("fast:bf16", preference=20), FakeForward("fast:fp8")),
)
H200 = replace(an_environment(), device_type="cuda", device_name="NVIDIA H200", capability="9.0")
H100 = replace(H200, device_name="NVIDIA H100 80GB HBM3")
ERRORS = {"slow:bf16": 0.002, "fast:bf16": 0.002, "fast:fp8": 0.08}
LENGTHS = (1024, 4096, 16384)


def spec(length: int = 4096, **more) -> AttentionSpec:
    return AttentionSpec.make(**{"batch": 1, "heads": 16, "seqlen_q": length, "head_dim": 128, **more})


def table(environment=H200, lengths=LENGTHS, **rates: float) -> Table:
    """A table of plans with these TFLOPS at every length."""
    names = {"slow": "slow:bf16", "fast": "fast:bf16", "fp8": "fast:fp8"}
    return Table.from_entries(
        environment,
        [
            Entry(at, Plan(names[name]), "ok", 0.01 + at.flops / rate / 1e9, 0.0, {"outlier": ERRORS[names[name]]})
            for at in map(spec, lengths)
            for name, rate in rates.items()
        ],
    )


def known(**rates: float) -> Known:
    return Known.of(scaled(table(**rates), H100))


@pytest.fixture
def choose_with(monkeypatch):
    """A function that chooses by given tables."""

    def pick(tables: Known, asked: AttentionSpec | None = None, **more):
        monkeypatch.setattr("attnbench.choosing.selector.known_tables", lambda device: tables)
        return choose(asked or spec(), CPU, known=KNOWN, **more)

    return pick


@pytest.mark.parametrize("length", [4096, 6000])
def test_a_scaled_choice_is_labelled_in_every_output(choose_with, length):
    choice = choose_with(known(slow=300, fast=500, fp8=800), spec(length))
    assert (str(choice.plan), choice.basis, choice.chosen.scaled_from) == ("fast:bf16", "scaled", "NVIDIA H200")
    assert "(by prediction scaled from NVIDIA H200)" in str(choice)
    assert "`attnbench sweep --preset table`" in choice.hint
    data = json.loads(json.dumps(choice.to_dict()))
    assert {each["basis"] for each in data["candidates"]} == {"scaled"}
    assert {each["scaled_from"] for each in data["candidates"]} == {"NVIDIA H200"}
    assert {each["spread_ms"] for each in data["candidates"]} == {None}
    assert all(each["time_error"] >= 0.05 for each in data["candidates"])
    assert " ± 0%" not in str(choice)
    assert "error of the prediction" in str(choice)


def test_fp8_is_chosen_by_the_errors_of_the_other_gpu(choose_with):
    tables = known(slow=300, fp8=800)
    assert str(choose_with(tables, fp8=True).plan) == "fast:fp8"
    assert str(choose_with(tables, fp8=True, max_error=0.05).plan) == "slow:bf16"
    with pytest.raises(NoPlanError, match=r"the best, .*measured on NVIDIA H200"):
        choose_with(known(slow=300, fast=500), max_error=1e-4)


def test_a_lead_within_the_scaling_error_does_not_decide(choose_with):
    """A measured lead of 4 % decides, a scaled one does not; the margin states the lead that would be needed."""
    rates = {"slow": 400, "fast": 416}
    assert str(choose_with(Known.of(table(**rates))).plan) == "fast:bf16"
    choice = choose_with(known(**rates))
    assert choice.margin.noise >= 0.05
    assert choice.margin.inside_noise
    assert not choose_with(known(slow=400, fast=600)).margin.inside_noise


def test_a_table_of_this_gpu_decides_for_the_classes_that_it_measured(choose_with):
    own = table(H100, lengths=(8192,), slow=500, fast=300)
    tables = Known((own, scaled(table(slow=300, fast=500), H100)))
    for length in (8192, 8000):
        choice = choose_with(tables, spec(length))
        assert (str(choice.plan), choice.basis) == ("slow:bf16", "measured" if length == 8192 else "predicted")
    other = choose_with(tables, spec(4096))  # measured on the H200 alone
    assert (str(other.plan), other.basis) == ("fast:bf16", "scaled")
    assert {each.basis for each in other.candidates if each.time_ms} == {"scaled"}  # times of two machines never meet
    swapped = Known(tables.tables[::-1])
    assert choose_with(swapped, spec(6000)).basis == "predicted"


def test_pooled_predictions_give_more_weight_to_the_table_with_more_measurements(choose_with):
    """This GPU's table has one length, far from the others; between them the other GPU's has three."""
    own = table(H100, lengths=(512,), slow=500, fast=300)
    other = scaled(table(slow=300, fast=500, fp8=800), H100)
    far, near = (
        {str(each.plan): each for each in choose_with(Known((own, other)), spec(length), fp8=True).candidates}
        for length in (640, 8192)
    )
    alone = {str(each.plan): each for each in choose_with(Known.of(other), spec(8192), fp8=True).candidates}
    assert far["slow:bf16"].time_ms < far["fast:bf16"].time_ms
    assert near["fast:bf16"].time_ms < near["slow:bf16"].time_ms
    assert {each.basis for each in (near["slow:bf16"], near["fast:bf16"])} == {"predicted"}
    assert (near["fast:fp8"].basis, near["fast:fp8"].scaled_from) == ("scaled", "NVIDIA H200")  # it alone has it
    assert all(near[name].time_error <= alone[name].time_error for name in near)
    assert near["fast:fp8"].time_ms == alone["fast:fp8"].time_ms


def test_leads_between_plans_of_different_tables_have_the_largest_uncertainty(choose_with):
    own, other = table(H100, lengths=(1024, 4096), slow=500), scaled(table(fast=520), H100)
    apart = choose_with(Known((own, other)), spec(2048)).margin
    together = choose_with(Known.of(table(H100, lengths=(1024, 4096), slow=500, fast=520)), spec(2048)).margin
    assert apart.noise > together.noise
    assert apart.inside_noise


# --- one warning a GPU ---


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(table_advice, "describe", lambda device: Device("cuda", "NVIDIA\x1b H100", (9, 0)))
    table_advice._warned.forget()
    yield torch.device("cuda", 0)
    table_advice._warned.forget()


def warnings_for(choice, *devices) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for device in devices:
            warn_of_rule(choice, device)
    assert all(each.category is AttnbenchWarning for each in found)
    return [str(each.message) for each in found]


def test_a_choice_by_rule_on_a_gpu_warns_once_per_device_in_one_line(choose_with, gpu):
    choice = choose_with(Known())
    assert choice.basis == "rule"
    (warning,) = warnings_for(choice, gpu, gpu)
    assert warning.isprintable()
    assert warning.startswith(
        f"nothing like {spec()} was measured on NVIDIA  H100, so a fixed order of kernels decides; "
    )
    assert "`attnbench sweep --preset table` makes a table of this device in about 10 minutes" in warning
    assert warnings_for(choice, gpu) == []
    assert len(warnings_for(choice, torch.device("cuda", 1))) == 1


def test_a_choice_on_a_cpu_or_not_by_rule_does_not_warn(choose_with, gpu):
    assert warnings_for(choose_with(Known()), CPU) == []
    chosen = [
        choose_with(known(slow=300)),
        choose_with(Known.of(table(slow=300))),
        choose_with(known(slow=300), backend="slow"),
    ]
    assert [each.basis for each in chosen] == ["scaled", "measured", "explicit"]
    assert [each.hint is None for each in chosen] == [False, True, True]
    assert [warnings_for(each, gpu) for each in chosen] == [[], [], []]


def test_the_next_call_works_after_the_rule_warning_was_raised_as_an_error(choose_with, gpu):
    choice = choose_with(Known())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AttnbenchWarning):
            warn_of_rule(choice, gpu)
        warn_of_rule(choice, gpu)
