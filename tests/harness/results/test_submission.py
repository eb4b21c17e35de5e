"""What a table for others must fulfil: honest rows pass, each lie and private word is named, none hides another."""

from __future__ import annotations

import getpass
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from report_rows import failed_row
from row_facts import with_facts
from submission_rows import H200, SPECS, valid_rows, with_visits

from attnbench import AttentionSpec, Mask
from attnbench.harness.results.condense import join_sweeps
from attnbench.harness.results.peaks import least_ms, peak_share
from attnbench.harness.results.privacy import local_names, private_part
from attnbench.harness.results.records import Measurement
from attnbench.harness.results.submission import (
    LEAST_SHAPES,
    agreement,
    submission_of,
    table_faults,
    visits_agree,
)
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import registry
from attnbench.tables.environment import Environment
from attnbench.tables.table import Table
from examples import examples

ROWS = valid_rows()
COMMITTED = [*(ROOT / "attnbench" / "tables").glob("*.json"), *(ROOT / "results").glob("*/submitted/*.json")]
Change = Callable[[list[Measurement]], list[Measurement]]


def faults(rows: Sequence[Measurement], names: Sequence[str] = ()) -> tuple[str, ...]:
    found = submission_of({"a folder": rows}, registry(), names)
    assert found is not None
    return found.faults


def one(place: int, **facts) -> Change:
    """One row with other facts."""
    return lambda rows: [*rows[:place], with_facts(rows[place], **facts), *rows[place + 1 :]]


def everywhere(**facts) -> Change:
    """Every row's environment with other facts."""
    here = replace(H200, **facts)
    return lambda rows: [with_facts(row, environment=here) for row in rows]


def faster(rows: list[Measurement]) -> list[Measurement]:
    """The second plan's call at a thousandth of its time, its kernels as they were."""
    calls = [each / 1000 for each in rows[1].time_ms["call"]]
    return one(1, time_ms={**rows[1].time_ms, "call": calls})(rows)


def impossible(rows: list[Measurement]) -> list[Measurement]:
    times = {cost: [each / 1000 for each in samples] for cost, samples in rows[1].time_ms.items()}
    return one(1, time_ms=times)(rows)


def crashed(reason: str) -> Change:
    return lambda rows: [*rows, failed_row("fa3:fp8", "crashed", reason, SPECS[0], environment=H200)]


LIES: dict[str, tuple[Change, list[str]]] = {
    "a call above the peak": (faster, ["above the device's peak", "its call takes"]),
    "kernels above the peak": (impossible, ["above the device's peak", "its kernels reach"]),
    "ok in spite of its error": (one(2, error={"normal": {"out": 0.3}, "outlier": {"out": 0.1}}), ["error on normal"]),
    "the bound set by itself": (one(1, error={"normal": {"out": 0.05}}, bound=0.5), ["beyond 0.01"]),
    "emulated": (one(2, emulated=True), ["is emulated"]),
    "emulated in its name": (one(2, plan=Plan("emulated:fp8")), ["no version of emulated", "is emulated"]),
    "a CPU": (everywhere(device_type="cpu"), ["only GPUs' tables"]),
    "another GPU": (everywhere(device_name="NVIDIA H900"), ["the peak of NVIDIA H900 is not known"]),
    "a GPU without an identity": (everywhere(uuid_hash=None, driver=None), ["does not say driver, uuid_hash"]),
    "other code": (everywhere(commit="740ed255f90d-dirty"), ["local changes are not in the repository"]),
    "a backend without a version": (everywhere(backends={**H200.backends, "fa3": "unknown"}), ["no version of fa3"]),
    "an unknown backend": (one(1, plan=Plan("acme:bf16")), ["no backend is named 'acme'", "no version of acme"]),
    "an unknown backward": (
        one(1, plan=Plan("fa3:bf16", "sdpa-flash:fp8")),
        ["no backward kernel is named 'sdpa-flash:fp8'", "with a backward is none for forward"],
    ),
    "two versions of torch": (one(1, environment=replace(H200, torch="2.10.0")), ["must not be mixed: torch was"]),
    "a path": (crashed("cannot open /home/alice/lib.so"), ["'/home/alice/lib.so'"]),
    "a name": (crashed("the job of Alice ended"), ["'Alice'"]),
    "an origin": (everywhere(origins={**H200.origins, "fa3": "git+ssh://build.acme.corp/fa3"}), ["origin of fa3"]),
    "a host": (everywhere(platform="Linux-6.18-node17.cluster.internal"), ["platform holds"]),
    "few shapes": (lambda rows: rows[: 3 * (LEAST_SHAPES - 1)], [f"{LEAST_SHAPES - 1} shapes with"]),
    "one plan": (lambda rows: rows[::3], ["0 shapes with at least 2 plans"]),
    "one visit each": (
        lambda rows: [with_visits(row, row.median_ms()) for row in rows[:9]] + rows[9:],
        ["no two visits agree on the time of 9 of 36 rows", "9 shapes with"],
    ),
}  # fmt: skip


def test_honest_rows_pass_and_make_the_table_that_build_makes(tmp_path: Path) -> None:
    found = submission_of({"a folder": ROWS}, registry(), ["alice"])
    assert found is not None
    assert (found.faults, found.left_out) == ((), ())
    assert found.table == join_sweeps({"a folder": ROWS}).condensed()
    found.table.save(tmp_path / "table.json")
    assert table_faults(Table.load(tmp_path / "table.json"), registry()) == []


@pytest.mark.parametrize(("change", "messages"), LIES.values(), ids=LIES)
def test_each_lie_is_named_and_no_honest_row_is_suspected(change: Change, messages: list[str]) -> None:
    found = faults(change(ROWS), ["alice"])
    for each in messages:
        assert [each in fault for fault in found].count(True) == 1, found
    assert len(found) == len(messages)


@given(st.integers(0, len(ROWS) - 1), st.floats(1e-3, 0.999))
def test_a_time_just_below_the_least_possible_is_found_wherever_it_stands(place: int, factor: float) -> None:
    table = join_sweeps({"a folder": ROWS})
    key = sorted(table.entries, key=str)[place]
    least = least_ms(key[1], key[0], H200.device_name)
    assert least is not None
    for time, expected in ((least * factor, 1), (least / factor, 0)):
        entries = {**table.entries, key: replace(table.entries[key], time_ms=time)}
        assert len(table_faults(Table(H200, entries), registry())) == expected


# --- visits ---


@given(st.lists(st.floats(0.97, 1.03), min_size=2, max_size=6))
def test_visits_that_scatter_a_little_agree(medians: list[float]) -> None:
    assert visits_agree(with_visits(ROWS[0], *medians))


@given(st.floats(1e-3, 1e3), st.floats(0.05, 0.8))
def test_one_lucky_visit_is_not_believed(usual: float, luck: float) -> None:
    """Alone, or with so many samples that they decide the median."""
    assert not visits_agree(with_visits(ROWS[0], usual))
    lucky, other = [usual * luck] * 30, [usual] * 5
    times = {"kernel": [usual * luck / 2] * 40, "call": [*lucky, *other, *other]}
    assert not visits_agree(with_facts(ROWS[0], time_ms=times, visits={"call": [30, 5, 5]}))


# --- the same bytes ---


@settings(max_examples=examples(10, 100))
@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_the_same_rows_make_the_same_bytes_in_any_order(shuffle: random.Random, folders: int) -> None:
    """Each row in the folder that it was in; folders and rows in any order, under any names."""
    other = [with_facts(row, environment=replace(H200, uuid_hash="ba9876543210")) for row in ROWS[::2]]
    same_time = [with_facts(row, started=ROWS[0].started) for row in ROWS[1::2]]
    sweeps = [ROWS, other, same_time][:folders]

    def built(sweeps: Sequence[Sequence[Measurement]]) -> str:
        found = submission_of({f"{place}": each for place, each in enumerate(sweeps)}, registry())
        assert found is not None
        assert found.faults == ()
        return found.table.file_text()

    shuffled = [shuffle.sample(each, len(each)) for each in sweeps]
    assert built(shuffle.sample(shuffled, len(shuffled))) == built(sweeps)


def raced(rows: Sequence[Measurement]) -> list[Measurement]:
    """Of each shape the first plan as it was judged, and the others' first looks."""
    looks = [
        failed_row(
            str(row.plan), "slower", "slower at a first look", row.spec, environment=H200, performance_=row.performance
        )
        for row in rows
    ]
    return [row if number % 3 == 0 else looks[number] for number, row in enumerate(rows)]


def test_what_lost_a_race_is_shared_with_its_time_and_counts_as_a_plan_to_choose_between() -> None:
    assert faults(raced(ROWS)) == ()
    table = join_sweeps({"a folder": raced(ROWS)})
    slower = next(entry for entry in table.entries.values() if entry.status == "slower")
    for change, message in (
        ({"time_ms": None}, "slower needs a time"),
        ({"errors": {"normal": 0.1}}, "must not carry errors"),
    ):
        wrong = Table(table.environment, {**table.entries, (slower.spec, slower.plan): replace(slower, **change)})
        (fault,) = table_faults(wrong, registry())
        assert message in fault


def test_no_row_makes_no_submission() -> None:
    assert submission_of({"a folder": []}, registry()) is None
    (fault, *_) = faults([with_visits(row, 1.0) for row in ROWS])
    assert "no two visits agree on the time of 36 of 36" in fault


# --- others' tables ---


def test_committed_tables_could_be_shared() -> None:
    assert COMMITTED
    for path in COMMITTED:
        table = Table.load(path)
        assert table_faults(table, registry()) == [], path
        assert table.condensed().file_text() == path.read_text(encoding="utf-8")


def shared(factor: float, environment: Environment = H200, count: int = len(ROWS)) -> Table:
    return join_sweeps({"a folder": valid_rows(environment, factor)[:count]})


def test_a_table_confirms_another_where_its_times_are_the_same() -> None:
    mine = shared(1.0)
    assert agreement(mine, shared(1.05)).ratio == pytest.approx(1.05)
    assert agreement(mine, shared(1.05)).confirms
    assert not agreement(mine, shared(1.2)).confirms
    assert not agreement(mine, shared(0.8)).confirms
    assert not agreement(mine, shared(1.0, count=5)).confirms
    assert agreement(mine, Table(H200, {})).shared == 0


def test_a_table_of_a_slower_host_confirms_another_where_hosts_limited_their_calls() -> None:
    rows = shared(1.0).entries.values()
    mine, slower = (
        Table.from_entries(H200, [replace(each, time_ms=ms, host_ms=ms, device_ms=0.01) for each in rows], ms / 10)
        for ms in (0.1, 0.2)
    )
    assert agreement(mine, slower).ratio == pytest.approx(1.0)


WORDS = st.text(st.characters(codec="utf-8"), max_size=40)
NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789_-", min_size=3, max_size=12)


@given(WORDS, NAMES, NAMES, WORDS, st.sampled_from(["/{}/{}", "~/{}/{}", "C:\\{}\\{}", "../{}/{}", "file:///{}/{}"]))
def test_a_path_is_found_in_any_text(before: str, one: str, two: str, after: str, form: str) -> None:
    assert private_part(f"{before} {form.format(one, two)} {after}")


@given(WORDS, NAMES, WORDS)
def test_a_name_is_found_as_a_whole_word_in_any_case(before: str, name: str, after: str) -> None:
    for text in (name, name.upper(), name.title()):
        assert private_part(f"{before} {text} {after}", {name})
    assert private_part(f"xx{name}xx", {name}) is None


@pytest.mark.parametrize(
    "text",
    [
        "see https://build.acme.example/1", "alice@acme", "connect to 10.1.2.3 failed", "on node7.acme.corp",
        "in /tmp", "File \"/root/x.py\", line 3", "~alice/x", "\\\\server\\share", "lib='/opt/x'", "scp host:/srv/data",
    ],
)  # fmt: skip
def test_places_of_all_kinds_are_found(text: str) -> None:
    assert private_part(text)


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: Ninja build failed. Ninja output:", "the error of out is 0.142, beyond 0.12", "3/4 of all",
        "transformer-engine 2.20.2 on cuDNN 91900", "Linux-6.18.44-x86_64-with-glibc2.39", "580.159.04", "1.2.3.4",
        "Intel(R) Xeon(R) Processor @ 2.70GHz", "forward/backward", "2.11.0+cu130", "torch.cuda.OutOfMemoryError: x",
        "captured:layers.0", "flash-attn-4 4.0.0b36 with nvidia-cutlass-dsl 4.8.1", "4 GB / 8 GB",
    ],
)  # fmt: skip
def test_messages_of_libraries_are_not_private(text: str) -> None:
    assert private_part(text, {"alice"}) is None


def test_the_names_of_here_are_asked_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.acme.example")
    assert {"alice", "node17", "node17.acme.example"} <= local_names()
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    assert "root" not in local_names()

    def nobody() -> str:
        raise KeyError("uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", nobody)
    assert "node17" in local_names()


SPEC = AttentionSpec.make(batch=4, heads=16, seqlen_q=4096, head_dim=128)
FLOPS = 4 * 4 * 16 * 4096**2 * 128


def test_an_h200_row_by_hand():
    # 5.5e11 operations in 0.9 ms are 611 TFLOPS; the datasheet says 989 in bf16 and twice that in FP8.
    assert peak_share(Plan("a:bf16"), SPEC, {"kernel": [0.9]}, "NVIDIA H200") == pytest.approx(FLOPS / 0.9e9 / 989.4)
    assert peak_share(Plan("a:fp8-token"), SPEC, {"kernel": [0.9]}, "NVIDIA H200") == pytest.approx(
        FLOPS / 0.9e9 / 1978.9
    )


def test_passes_count_each_at_its_own_precision():
    spec = SPEC.replace(direction="training", mask=Mask(None, 0))
    forward = spec.replace(direction="forward").flops
    found = peak_share(
        Plan("a:fp8", "b:bf16"), spec, {"kernel": [0.5], "backward": [1.5], "call": [9.0]}, "NVIDIA H200"
    )
    assert found == pytest.approx((forward / 1978.9 + 2.5 * forward / 989.4) / 1e9 / 2.0)


@pytest.mark.parametrize(
    ("plan", "times", "device"),
    [
        ("a:bf16", {"kernel": [1.0]}, "A CPU"),
        ("a:int4", {"kernel": [1.0]}, "NVIDIA H200"),
        ("a:fp8", {"kernel": [1.0]}, "NVIDIA A100-SXM4-80GB"),
        ("a:bf16", {"call": [1.0]}, "NVIDIA H200"),
        ("a:bf16>b:bf16", {"kernel": [1.0]}, "NVIDIA H200"),
    ],
)
def test_what_is_not_known_has_no_share(plan, times, device):
    assert peak_share(Plan.parse(plan), SPEC, times, device) is None
