"""Entries of a table that are valid elsewhere: none on another device, and none of another backend release."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from submission_rows import H200

from attnbench import AttentionSpec, Plan
from attnbench.kernels.registry import registry
from attnbench.tables.binding import Binding, release_of
from attnbench.tables.table import Entry, Table

SPEC = AttentionSpec.make(batch=1, heads=4, seqlen_q=1024, head_dim=64, direction="training")
THERE = replace(
    H200, driver="580.1",
    backends={
        "sdpa-flash": "2.11.0+cu130", "sdpa-cudnn": "2.11.0+cu130", "flex": "2.11.0+cu130", "te": "2.20.2",
        "fa3": "0.4.2.post2", "fa4": "4.0.0b36", "triton": "3.6.0", "cudnn": "1.32.0", "sage": "1.0.6",
    },
    origins={
        "sdpa-flash": "torch", "sdpa-cudnn": "torch", "te": "transformer-engine 2.20.2 on cuDNN 91900", "fa3": "sglang",
        "fa4": "flash-attn-4 4.0.0b36 with nvidia-cutlass-dsl 4.8.1",
    },
)  # fmt: skip
PLANS = (
    "sdpa-flash:bf16", "sdpa-cudnn:bf16", "flex:bf16", "te:fp8", "fa3:fp8>fa4:bf16", "fa4:bf16", "triton:fp8",
    "cudnn:bf16", "sage:int8",
)  # fmt: skip
ON_CUDNN, ON_TRITON = {"te:fp8", "sdpa-cudnn:bf16", "cudnn:bf16"}, {"flex:bf16", "triton:fp8", "sage:int8"}
ON_TORCH, ON_FA4 = {"sdpa-flash:bf16", "sdpa-cudnn:bf16", "flex:bf16"}, {"fa4:bf16", "fa3:fp8>fa4:bf16"}
TABLE = Table.from_entries(THERE, [Entry(SPEC, Plan.parse(plan), "ok", 1.0, 0.0, {"normal": 0.1}) for plan in PLANS])


def binding(table: Table = TABLE, **changes) -> Binding:
    return Binding.between(table, replace(THERE, **changes), registry())


def unused_plans(found: Binding) -> set[str]:
    return {str(plan) for _, plan in TABLE.entries.keys() - found.usable(TABLE).entries.keys()}


def installed_backends(**versions: str) -> dict[str, dict[str, str]]:
    return {"backends": {**THERE.backends, **{name.replace("_", "-"): found for name, found in versions.items()}}}


def torch_upgrade(torch: str, local: str = "+cu130") -> dict[str, object]:
    resident = dict.fromkeys(("sdpa_flash", "sdpa_cudnn", "flex"), torch + local)
    return {"torch": torch, **installed_backends(**resident)}


@pytest.mark.parametrize(
    ("changes", "gone", "message"),
    [
        (installed_backends(te="2.21.0"), {"te:fp8"}, "measured with te 2.20.2, here is 2.21.0"),
        (installed_backends(te="2.20.2rc1"), {"te:fp8"}, "measured with te 2.20.2, here is 2.20.2rc1"),
        (installed_backends(te="unknown"), {"te:fp8"}, "here is unknown"),
        (installed_backends(fa4="4.0.0b37"), ON_FA4, "measured with fa4 4.0.0b36, here is 4.0.0b37"),
        ({"cudnn": "9.20.0"}, ON_CUDNN, "measured with cudnn 9.19.0, here is 9.20.0"),
        ({"triton": "3.7.0"}, ON_TRITON, "measured with triton 3.6.0, here is 3.7.0"),
        (torch_upgrade("2.12.0"), ON_TORCH, r"here is 2.12.0\+cu130"),
        (torch_upgrade("2.11.0.dev20260101"), ON_TORCH, "dev20260101"),
        ({"origins": {"fa3": "flash-attn-3"}}, {"fa3:fp8>fa4:bf16"}, "from sglang, here it comes from flash-attn-3"),
        ({"origins": {"te": "transformer-engine 2.20.2 on cuDNN 92000"}}, {"te:fp8"}, "it comes from .* cuDNN 92000"),
        ({"origins": {"fa4": "flash-attn-4 4.0.0b36 with nvidia-cutlass-dsl 4.9.0"}}, ON_FA4, "cutlass-dsl 4.9.0"),
    ],
)
def test_another_release_of_a_backend_drops_only_its_entries(changes, gone, message):
    found = binding(**changes)
    assert found.refused == ()
    assert unused_plans(found) == gone
    assert set(found.dropped) <= {kernel.partition(":")[0] for plan in gone for kernel in plan.split(">")}
    assert any(re.search(message, reason) for reason in found.dropped.values())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (installed_backends(te="2.20.9"), ["te was 2.20.2, is 2.20.9"]),
        ({"origins": {"te": "transformer-engine 2.20.9 on cuDNN 91905"}}, []),
        ({"origins": {}}, []),
        (torch_upgrade("2.11.0", "+cpu"), []),
        ({"cudnn": "9.19.3"}, ["cudnn was 9.19.0, is 9.19.3"]),
        ({"driver": "590.1", "cuda": "13.1"}, ["driver was 580.1, is 590.1", "cuda was 13.0, is 13.1"]),
        ({"clock_mhz": 1700, "power_cap_w": 500}, ["clock_mhz was 1980, is 1700", "power_cap_w was 700, is 500"]),
        ({"device_count": 8, "python": "3.13", "platform": "x"}, 3),
        ({"threads": 4, "cpu": "B", "attnbench": "0.2.0", "memory_bytes": 1}, 4),
        ({"driver": None, "power_cap_w": None}, []),
    ],
)
def test_soft_differences_are_reported_and_entries_are_used(changes, expected):
    found = binding(**changes)
    assert unused_plans(found) == set()
    assert found.dropped == {}
    assert len(found.soft) == expected if isinstance(expected, int) else list(found.soft) == expected


def test_control_characters_in_a_files_names_are_escaped():
    table = Table(replace(THERE, device_name="\x1b[2J", driver="\n"), TABLE.entries)
    assert all(sentence.isprintable() for sentence in binding(table).refused)
    table = Table(replace(THERE, driver="\n", backends={**THERE.backends, "te": "\x1b"}), TABLE.entries)
    found = binding(table)
    assert all(sentence.isprintable() for sentence in (*found.soft, *found.dropped.values()))


@given(st.text(max_size=30) | st.from_regex(r"[0-9]{1,12}(\.[0-9]{1,12}){0,4}(\.?(a|b|rc|dev|post)[0-9]+)?(\+x)?"))
def test_the_release_of_any_version_text_is_stable(version):
    release = release_of(version)
    assert release == version or version.lstrip("0").startswith(release.partition(".")[0].lstrip("0"))
    assert release_of(release) == release
