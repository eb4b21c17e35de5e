"""The checks and the tuner of the backward's Hopper kernels, emulated or with kernels that hang on purpose."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import dense
import hopper_backward
import pytest
import torch
import unruly
from compiled_for_hopper import compiled
from hopper_backward import CASES, Checks, Job, Kind, check_all, jobs_of, launch, wrong
from places import TESTS
from watched import Begun, Done, Lost, one_by_one

pytest.importorskip("triton", minversion="3.6")

from attnbench.backends.triton.backward.tiles import Ring, Tile, TileKey, Tiles

PATIENCE = 30.0  # seconds for one case with all of its truth; the kernels take milliseconds
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what is emulated where there is no GPU")


def test_every_ring_and_every_kind_of_case_is_tried() -> None:
    specs = [case.spec for case in CASES.values()]
    assert {spec.dtype for spec in specs} == {"bf16", "fp16", "fp32"}
    assert {spec.head_dim for spec in specs} >= {64, 96, 128}
    assert {spec.mask.alignment for spec in specs if spec.seqlen_q != spec.seqlen_kv} == {"top-left", "bottom-right"}
    assert {spec.mask.kind for spec in specs} >= {"none", "causal"}
    for (kind, size, narrow), rings in hopper_backward.RINGS.items():
        tried = {(job.ring, max(CASES[job.case].spec.head_dim, 64) // 128) for job in jobs_of(kind, narrow)}
        assert {(ring, size // 128) for ring in rings} <= tried


SMALL = [Job("keys", "few tokens", Ring(64, 4), True)]
LARGER = [
    Job("keys", "one block", Ring(64, 3)), Job("queries", "odd", Ring(64, 4)),
    Job("queries", "one block", Ring(64, 4), True), Job("all", "few tokens", Ring(64, 2)),
]  # fmt: skip


@without_gpu
@pytest.mark.parametrize(
    "right", [SMALL, pytest.param(LARGER, marks=pytest.mark.exhaustive)], ids=["a small case", "larger ones"]
)
def test_the_checks_run_emulated_and_name_what_hangs(right: list[Job]) -> None:
    """The emulator finds that two stages do not hold the three blocks of keys that are in use at a time."""
    hung = Job("queries", "odd", Ring(64, 2))
    found = one_by_one(check_all, [right[0], hung, *right[1:]], patience=PATIENCE)
    (line,) = wrong([*right, hung], found)
    assert line.startswith("queries, odd, Ring(block=64, stages=2): DeadlockError")


@without_gpu
@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ([1.0, 1.0, 1.0, 1.0], None),
        ([1.03] * 4, r"dk is off by 0\.029\d* from plain Triton, 0\.02 allowed; dv is off by 0\.029\d* from plain"),
        ([1.2] * 4, r"dv is off by 0\.19\d* from FP64, 0\.07 allowed"),
        ([1.0, 1.0, 1.0, 1.001], r"dk is off by 0\.0009\d* when it runs again; dv is off by"),
        ([float("nan")] * 4, "dk is off by inf from plain Triton.* off by inf from FP64"),
    ],
    ids=["right", "off", "far off", "not the same", "nan"],
)
def test_what_is_wrong_is_said(factors: list[float], message: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain kernel stands in for the Hopper one, its answers spoilt by a factor each time."""
    exact, left = hopper_backward.run, iter(factors)

    def spoilt(given: Any, kind: Kind, tile: Tile, *more: Any) -> tuple[torch.Tensor, ...]:
        factor = next(left) if tile.hopper else 1.0
        return tuple(x.float() * factor for x in exact(given, kind, tile._replace(hopper=None), *more))

    monkeypatch.setattr(hopper_backward, "run", spoilt)
    monkeypatch.setattr(dense, "visible", hopper_backward.visible)
    said = Checks("cpu").wrong(Job("keys", "one block", Ring(64, 3)))
    if message is None:
        assert said is None
    else:
        assert said is not None
        assert re.search(message, said), said


@pytest.mark.exhaustive
def test_programs_are_compiled_for_hopper_on_any_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fits, large = Job("queries", "D 64", Ring(64, 4)), Job("keys", "no rotation", Ring(64, 6))
    found = compiled(launch, [fits, large], 2)
    assert found[fits].problem is None
    assert found[fits].shared > 64 * 1024
    assert "bytes of shared memory" in str(found[large].problem)
    assert {"query_gradients_hopper.cubin", "query_gradients.cubin"} <= {x.name for x in tmp_path.rglob("*.cubin")}


def test_what_hangs_dies_or_raises_takes_no_other_along() -> None:
    heard: list[Any] = []
    items = ["a", "hangs", "b", "dies", "slow", "raises", "c"]
    found = one_by_one(unruly.work, items, patience=1.5, heard=heard.append)
    assert found == {
        **{item: item.upper() for item in ("a", "b", "c", "slow")},
        "hangs": Lost("silent for 2 s, and killed"),
        "dies": Lost("its process died, exit code 9"),
        "raises": Lost("ValueError: so it goes"),
    }
    assert heard[:3] == [Begun("a"), Done("a", "A"), Begun("hangs")]


def test_what_is_hopeless_after_those_that_were_lost_is_not_tried() -> None:
    items, heard = ["dies 1", "a", "dies 2", "dies 3", "b"], []
    found = one_by_one(
        unruly.work, items, patience=20.0, heard=heard.append,
        hopeless=lambda lost, item: item.startswith("dies") and len(lost) == 2,
    )  # fmt: skip
    assert found["dies 3"] == Lost("not tried after those that were lost")
    assert "exit code" in found["dies 2"].reason
    assert (found["a"], found["b"]) == ("A", "B")
    assert {said.item: said.found for said in heard if isinstance(said, Done)} == found


def test_time_that_runs_out_and_processes_that_never_start_are_said() -> None:
    found = one_by_one(unruly.work, ["a", "hangs", "b"], patience=60.0, limit=5.0)
    assert found == {"a": "A", "hangs": Lost("no time was left")}
    with pytest.raises(RuntimeError, match="no item under way: ValueError"):
        one_by_one(unruly.work, ["a", "before"], patience=20.0)


@pytest.fixture(scope="module")
def tuner() -> Any:
    path = TESTS / "gpu" / "tune" / "tune_triton_backward.py"
    spec = importlib.util.spec_from_file_location("tune_triton_backward", path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.setitem(sys.modules, "tune_triton_backward", module)
        spec.loader.exec_module(module)
        yield module


def test_the_tuner_commits_the_fastest_over_both_lengths_and_the_best_plain_tile_behind_a_ring(tuner: Any) -> None:
    key = TileKey((9, 0), False, 128, "causal")
    plain, fast_once, other, ring = Tile(64, 64, 4, 2), Tile(32, 64, 4, 2), Tile(128, 64, 8, 3), Ring(64, 3)
    job = {tile: tuner.Job(key, "keys", tile) for tile in (plain, fast_once, other, other._replace(hopper=ring))}
    short, long = tuner.LENGTHS
    found = {
        job[plain]: {short: 1.0, long: 4.0},
        job[other]: {short: 0.9, long: 5.0},
        job[fast_once]: {short: 0.1},
    }
    assert tuner.chosen(found) == (plain, {short: 1.0, long: 4.0})
    took = {short: 0.5, long: 2.0}
    best = tuner.chosen(found | {job[other._replace(hopper=ring)]: took})
    assert best == (plain._replace(hopper=ring), took)
    assert tuner.chosen(found | {job[other._replace(hopper=ring)]: {short: 2.0, long: 9.0}})[0] == plain
    assert tuner.chosen({job[other._replace(hopper=ring)]: took}) is None
    names = {each.__name__: each for each in (TileKey, Tiles, Tile, Ring)}
    for fused, more in ((None, ""), ({short: 0.8, long: 3.1}, ""), ({short: 0.9, long: 2.0}, "all")):
        comment, line = tuner.entry(key, best, (plain, {short: 0.25, long: 1.0}), fused).splitlines()
        assert comment.startswith("    # 0.50 and 0.25, 2.00 and 1.00")
        assert eval(f"{{{line}}}", names) == {key: Tiles(plain._replace(hopper=ring), plain, bool(more))}


def test_the_tuner_tries_rings_where_the_hopper_kernels_serve_and_gives_up_those_that_hang(tuner: Any) -> None:
    for head_dim, kind, narrow in (
        (64, "keys", False),
        (64, "queries", True),
        (128, "keys", True),
        (64, "all", False),
        (128, "queries", False),
    ):
        jobs = tuner.candidates(TileKey((9, 0), narrow, head_dim, "none"), kind)
        assert {job.tile.hopper for job in jobs} == {None, *hopper_backward.RINGS[kind, head_dim, narrow]}
        assert jobs[0].tile.hopper is None
    plain, *rings = (job for job in jobs if job == jobs[0] or job.tile.hopper)
    assert tuner.hopeless(rings[:1], rings[0]._replace(key=TileKey((9, 0), False, 128, "causal")))
    assert not tuner.hopeless(rings[:1], rings[1])
    assert not tuner.hopeless(rings[:1] * 2, rings[1])
    assert tuner.hopeless(rings[:2], rings[2])
    assert not tuner.hopeless(rings, plain)
    assert not tuner.hopeless(rings, rings[0]._replace(kind="keys"))
    assert not tuner.hopeless(rings, rings[0]._replace(key=TileKey((9, 0), False, 64, "none")))
    times = {job: float(i) for i, job in enumerate(reversed(jobs))}
    kept = tuner.finalists(times)
    assert [bool(job.tile.hopper) for job in kept] == [False] * 3 + [True] * 3
