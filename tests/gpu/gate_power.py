"""Measures how often the gate finds injected slow-downs: a program, not a test.

Each run draws which rows are slowed and by how much, in NEW alone, and lets the gate decide within ``--minutes``.
Processes are kept from run to run where the gate keeps them.  A line a row of each run is written to OUT/power.jsonl,
and the rounds of the rows that were not slowed to OUT/rounds.jsonl.  With ``--record`` nothing is slowed, and every row
is visited as often in each of as many processes as a gate starts at the most: what simulations draw from.

    PYTHONPATH=tests/support/faulty python tests/gpu/gate_power.py OUT --device cuda --seconds 400 --fail-on 0.03
"""

from __future__ import annotations

import argparse
import json
import os
import random
import stat
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from attnbench.harness.cases.presets import preset_cases
from attnbench.harness.compare.gate.gate import Gate
from attnbench.harness.compare.gate.outcome import minutes_needed
from attnbench.harness.compare.gate.rounds import rounds_of
from attnbench.harness.compare.gate.series import GateRow, Series
from attnbench.harness.compare.gate.sides import Question, Sides
from attnbench.kernels.devices import find
from attnbench.kernels.plan import Plan

SOURCE = "injected_slowdowns:slowed_registry"
SIZES = {"cuda": (0.03, 0.05, 0.1), "cpu": (0.05, 0.1)}
RECORDED = 20  # rounds of a generation
PAIRS = {"cuda": ("triton:fp8", "sdpa-cudnn:bf16"), "cpu": ("sdpa-flash:bf16", "sdpa-math:bf16")}
COSTS = {"cuda": ("prepared", "backward", "host"), "cpu": ("call",)}


def questions(device: torch.device, most: int) -> list[Question]:
    found: list[Question] = []
    for case in preset_cases("quick", "fp8", device.type):
        for name in PAIRS[device.type]:
            plan = Plan.parse(f"{name}>{name}" if case.spec.training else name)
            found.append(Question(len(found), (case.name, plan), case.spec, "normal"))
    return found[:most]


class Recording(Series):
    """Decides nothing until a generation has all its rounds."""

    def look(self, *, last: bool = False) -> None:
        self.settled = len(self.generations[-1]) >= RECORDED


def rows_of(
    asked: list[Question], device: torch.device, limit: float, host: float, kind: type[Series] = Series
) -> list[GateRow]:
    return [
        GateRow(
            each,
            {
                cost: kind(cost, host if cost == "host" else limit, device.type)
                for cost in COSTS[device.type]
                if cost != "backward" or each.spec.training
            },
        )
        for each in asked
    ]


def verdict(row: GateRow) -> str:
    if row.lost:
        return f"lost: {row.lost}"
    found = {each.finding for cost, each in row.series.items() if cost != "host"}
    return next((each for each in ("slower", "open") if each in found), "same")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--fail-on", type=float, default=0.03)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument(
        "--unchanged", type=int, default=2, help="runs of so many in which nothing is slowed: the first"
    )
    parser.add_argument("--record", action="store_true", help="one run in which nothing is slowed or decided")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    device, rng, end = find(given.device), random.Random(given.seed), time.monotonic() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    slowed = given.out.absolute() / "slowed.json"
    slowed.write_text("{}")
    base = given.out.absolute() / "base-python"
    base.write_text(f'#!/bin/sh\nSLOWED= PYTHONPATH={os.environ["PYTHONPATH"]} exec {sys.executable} "$@"\n')
    base.chmod(base.stat().st_mode | stat.S_IXUSR)
    os.environ["SLOWED"] = str(slowed)
    asked, counts = questions(device, given.rows), Counter[tuple[float, str]]()
    kind = Recording if given.record else Series
    with (
        Sides(device, base, SOURCE) as sides,
        (given.out / "power.jsonl").open("w") as power,
        (given.out / "rounds.jsonl").open("w") as rounds,
    ):
        for run in range(1 if given.record else given.runs):
            if time.monotonic() > end:
                break
            planted = {} if run % given.unchanged == 0 else draw_slowdowns(asked, rng, SIZES[device.type])
            shares: dict[str, dict[str, float]] = {}
            for number, size in planted.items():
                shares.setdefault(str(asked[number].spec), {})[str(asked[number].plan)] = size
            slowed.write_text(json.dumps(shares))
            rows, start = rows_of(asked, device, given.fail_on, 0.5, kind), time.monotonic()
            Gate(sides, end if given.record else min(start + given.minutes * 60, end + 120), print).run(rows)
            taken = time.monotonic() - start
            for row in rows:
                size = planted.get(row.question.number, 0.0)
                counts[size, verdict(row)] += 1
                series = {
                    cost: {
                        "finding": each.finding,
                        "rounds": list(map(len, each.generations)),
                        "estimate": each.estimate,
                    }
                    for cost, each in row.series.items()
                }
                line = {"run": run, "case": row.question.key[0], "plan": str(row.question.plan), "planted": size}
                line |= {"verdict": verdict(row), "series": series, "seconds": row.seconds, "run_seconds": taken}
                power.write(json.dumps(line) + "\n")
            for each in rounds_of([row for row in rows if row.question.number not in planted]):
                rounds.write(each.model_dump_json(by_alias=True) + "\n")
            power.flush()
            if lost := next((row.lost for row in rows if row.lost), None):
                raise SystemExit(f"a row was lost in {lost[0]}: {lost[1]}")
            failed = sum(verdict(row) == "slower" for row in rows if row.question.number not in planted)
            print(
                f"run {run}: {taken:.0f} s, {len(planted)} slowed, {failed} false, more {minutes_needed(rows)}",
                flush=True,
            )
    for (size, found), number in sorted(counts.items()):
        print(f"{size:.0%} {found}: {number}")


def draw_slowdowns(asked: list[Question], rng: random.Random, sizes: tuple[float, ...]) -> dict[int, float]:
    """Half of the rows, each slowed by one of the sizes."""
    return {each.number: rng.choice(sizes) for each in rng.sample(asked, len(asked) // 2)}


if __name__ == "__main__":
    main()
