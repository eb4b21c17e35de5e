"""The documentation's tables of figures, made from committed rows and from the code: ``python docs/figures.py``.

In a page, the function NAME below writes the text between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``.
``--check`` writes nothing and exits 1 if a page is not up to date.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from random import Random

import figures_lengths
import figures_training as training
from figures_coverage import HEADERS, coverage_rows
from figures_models import model_tables

from attnbench.choosing.budget import default_budget
from attnbench.choosing.evidence import Evidence
from attnbench.choosing.regret import Asked, chosen_at, served
from attnbench.guarding.check import pick_groups, pick_rows
from attnbench.harness.cases.inputs import FAMILIES
from attnbench.harness.cases.presets import PRESETS
from attnbench.harness.results.records import Measurement, read_measurements
from attnbench.harness.training.judge.learning import RULES
from attnbench.kernels.plan import Plan, backend_of
from attnbench.kernels.registry import Registry, registry
from attnbench.problem.spec import AttentionSpec, Direction
from attnbench.tables.entry import Entry
from attnbench.tables.table import Table
from attnbench.tables.user_table import Known

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
RESULTS = ROOT / "results" / "nvidia-h200"
SHIPPED = ROOT / "attnbench" / "tables" / "nvidia-h200.json"
BLOCK = re.compile(r"(<!-- figures: (?P<name>[a-z0-9-]+) -->\n)(?P<body>.*?)(<!-- end of figures -->)", re.DOTALL)

# How each kernel quantises Q, K and V, as its page says.  A measured kernel that is missing here is an error.
_SCALES = {
    "cudnn:fp8": "a tensor; O in e4m3 too",
    "te:fp8": "a tensor; O in e4m3 too",
    "fa3:fp8": "a head",
    "flashinfer:fp8": "a head",
    "flex:fp8": "a head",
    "fa3-vllm:fp8": "a head",
    "torch-fp8:fp8": "a head",
    "sage:int8": "128 or 64 tokens, INT8, smoothed; V in fp16",
    "sage:int8-fp8": "2 or 32 tokens, INT8, smoothed; V a channel",
    "triton:fp8": "a head, rotated",
    "triton:fp8-head": "a head",
    "triton:fp8-onepass": "a query, and 256 or 128 keys",
    "triton:fp8-pv": "a head, V only",
    "triton:fp8-token": "a token",
    "triton:fp8-token-hadamard": "a token, rotated",
}
_LADDER = AttentionSpec.make(batch=1, heads=16, seqlen_q=16384, head_dim=128)
_ASKED = (Asked(True), Asked(True, 0.06), Asked(True, 0.1), Asked(True, 0.15), Asked(True, 0.3))


@cache
def shipped() -> Table:
    """The H200's table, which a test rebuilds from the committed rows."""
    return Table.load(SHIPPED)


@cache
def rows(sweep: str) -> tuple[Measurement, ...]:
    """All rows of a committed sweep."""
    (path,) = (RESULTS / sweep).glob("measurements.jsonl*")
    return tuple(read_measurements(path))


@cache
def kernels() -> Registry:
    """The installed kernels, of which only names are used."""
    return registry()


def budgets() -> str:
    """The default budgets."""
    lines = []
    for dtype in ("bf16", "fp16", "fp32", "fp64"):
        forward, training = (
            AttentionSpec.make(batch=1, heads=1, seqlen_q=8, head_dim=8, dtype=dtype, direction=direction)
            for direction in ("forward", "training")
        )
        assert default_budget(forward, False) == default_budget(training, False), "one column serves both"
        cells = [default_budget(forward, False), default_budget(forward, True), default_budget(training, True)]
        lines.append([dtype, *(f"{cell:g}" for cell in cells)])
    return _table(["tensors", "default", '`dtype="fp8"`, forward', '`dtype="fp8"`, training'], lines)


def forward_errors() -> str:
    """The errors of each FP8 forward."""
    return _errors("forward", lambda plan: plan.forward if plan.fp8 else None, _scales)


def training_errors() -> str:
    """The worst of out, dq, dk and dv of each FP8 plan; 16-bit backwards are one."""

    def named(plan: Plan) -> str | None:
        if not plan.fp8 or plan.backward is None:
            return None
        low = not plan.backward.endswith(("bf16", "fp16"))
        return str(plan) if low else f"{plan.forward}>16 bits"

    return _errors("training", named, _scales)


def _scales(plan: str) -> str:
    """How the plan's forward scales.  Raises KeyError for a forward that is not in ``_SCALES``."""
    forward = plan.partition(">")[0]
    if forward not in _SCALES:
        raise KeyError(f"{forward} was measured: say in _SCALES of docs/figures.py what has a scale of its own there")
    return _SCALES[forward]


def _errors(direction: Direction, named: Callable[[Plan], str | None], scales: Callable[[str], str]) -> str:
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in shipped().entries.values():
        if entry.spec.direction != direction or not entry.errors:
            continue
        if not entry.plan.fp8 and entry.spec.dtype == "bf16" and _precision(entry.plan) == {"bf16"}:
            found["all of bf16"].append(entry)
        elif name := named(entry.plan):
            found[name].append(entry)
    bound = {name: default_budget(entries[0].spec, name != "all of bf16") for name, entries in found.items()}
    lines = [
        [
            name if name == "all of bf16" else f"`{name}`",
            "none" if name == "all of bf16" else scales(name),
            _spread(entry.errors.get("normal") for entry in entries),
            _spread(entry.errors.get("outlier") for entry in entries),
            f"{len({each.spec for each in entries if each.worst[0] > bound[name]})} of "
            f"{len({each.spec for each in entries})}",
        ]
        for name, entries in sorted(found.items(), key=lambda item: _hardest(item[1]))
    ]
    kind = "kernel" if direction == "forward" else "plan"
    return _table([kind, "a scale for", "normal", "outlier", "shapes beyond the default"], lines)


def _precision(plan: Plan) -> set[str]:
    return {kernel.partition(":")[2] for kernel in plan.kernels}


def _hardest(entries: Sequence[Entry]) -> float:
    return statistics.median([entry.errors["outlier"] for entry in entries if "outlier" in entry.errors] or [0.0])


def _spread(errors: Iterable[float | None]) -> str:
    known = [error for error in errors if error is not None]
    return f"{statistics.median(known):.2g}, {max(known):.2g}" if known else ""


def accumulator() -> str:
    """The error of each FP8 forward of 2048 queries over the keys, with a mean of 0.5 in V."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows("keys"):
        if row.spec.seqlen_q == 2048 and row.error and (row.plan.fp8 or str(row.plan) == "fa3:bf16"):
            found[str(row.plan)][row.spec.seqlen_kv] = row.error["biased-v"]["out"]
    lengths = sorted({keys for each in found.values() for keys in each})
    whole = {name: each for name, each in found.items() if len(each) == len(lengths)}
    lines = [
        [f"`{name}`", *(f"{each[keys]:.2g}" for keys in lengths)]
        for name, each in sorted(whole.items(), key=lambda item: (item[1][lengths[-1]], item[0]))
    ]
    return _table(["kernel", *(f"{keys // 1024}k keys" for keys in lengths)], lines)


def what_fp8_saves() -> str:
    """At how many measured shapes auto takes an FP8 plan under each budget, and how much time that saves."""
    lines = []
    for direction in ("forward", "training"):
        specs = sorted({spec for spec, _ in shipped().entries if spec.direction == direction}, key=str)
        for asked in _ASKED:
            pairs = [(_chosen(spec, Asked(False)), _chosen(spec, asked)) for spec in specs]
            complete = [(plain, opened) for plain, opened in pairs if plain is not None and opened is not None]
            saved = sorted(1 - _time(opened) / _time(plain) for plain, opened in complete if opened.plan.fp8)
            effect = f"{statistics.median(saved):.0%}, {saved[-1]:.0%}" if saved else ""
            lines.append([direction, f"`{_argument(asked)}`", f"{len(saved)} of {len(complete)}", effect])
    return _table(["direction", "argument", "shapes where FP8 runs", "time saved there: median, most"], lines)


def ladder() -> str:
    """What budgets choose at one shape."""
    steps = sorted({entry.worst[0] for entry in served(shipped(), _LADDER, kernels()).values()})
    lines, before = [], None
    for step in steps:
        entry = _chosen(_LADDER, Asked(True, step))
        if entry is None or entry.plan == before:
            continue
        before = entry.plan
        lines.append([f"{step:.2g}", f"`{entry.plan}`", f"{_time(entry):.3g}", f"{entry.worst[0]:.2g}"])
    return _table([f"{_LADDER}: `max_error` from", "plan", "call, ms", "its error"], lines)


def _chosen(spec: AttentionSpec, asked: Asked) -> Entry | None:
    here = served(shipped(), spec, kernels())
    found = chosen_at(spec, here, Evidence(spec, Known.of(shipped())), asked, kernels())
    return None if found is None else here[found[0].plan]


def _time(entry: Entry) -> float:
    assert entry.time_ms is not None, "what was chosen was timed"
    return entry.time_ms


def _argument(asked: Asked) -> str:
    return 'dtype="fp8"' if asked.max_error is None else f"max_error={asked.max_error:g}"


def presets() -> str:
    """How many cases each preset has, and the input families of its errors."""
    lines = [
        [f"`{name}`", str(len(list(each.on_gpu()))), str(len(list(each.on_cpu()))), ", ".join(each.families)]
        for name, each in PRESETS.items()
    ]
    assert {family for each in PRESETS.values() for family in each.families} <= set(FAMILIES)
    return _table(["`--preset`", "cases on a GPU", "on a CPU", "families"], lines)


def guard_rows() -> str:
    """How many rows a guard's check reads."""
    spec = AttentionSpec.make(batch=4, heads=64, kv_heads=8, seqlen_q=4096, head_dim=8)
    picks, groups = pick_rows(spec, Random(0)), pick_groups(spec, Random(0))
    (rows_of_head,) = {len(pick.rows) for pick in picks}
    ((queries, keys),) = {(len(group.queries), len(group.keys)) for group in groups}
    looked_at = f"{queries} queries' dQ, {keys} keys' dK and dV, of {len(groups)} groups of heads"
    return _table(
        ["pass", "checked", "compared with"],
        [
            ["forward", f"{rows_of_head} queries of each of {len(picks)} heads", "exact attention over all their keys"],
            ["backward", looked_at, "exact gradients; dK and dV need exact attention of the whole group"],
        ],
    )


def learning_rules() -> str:
    """The verdicts of ``attnbench train`` in the order in which they are asked."""
    return "\n".join(f"{place}. **{verdict}**: {rule}." for place, (verdict, rule) in enumerate(RULES, 1))


def page_of(backend: str) -> str | None:
    """The page of a backend, as pages in docs/ link to it: torch's own share one; None for a third party's."""
    page, _, anchor = (f"sdpa#{backend}" if backend.startswith("sdpa-") else backend).partition("#")
    place = f"backends/{page}.md"
    return f"{place}{anchor and '#'}{anchor}" if (DOCS / place).exists() else None


def backends() -> str:
    """Every backend with its page and its summary."""
    known = kernels()
    named = {backend_of(name) for name in (*known.forwards, *known.backwards)}
    pages = {name: page_of(name) for name in sorted(named)}
    return _table(
        ["backend", "what it is"],
        [[f"[`{name}`]({page})", known.backend(name).summary] for name, page in pages.items() if page],
    )


def coverage() -> str:
    """The GPUs that have a table, and how far each is to be trusted."""
    return _table(HEADERS, coverage_rows(SHIPPED.parent, ROOT / "results"))


def models() -> str:
    """What published models' attention layers take, on each GPU that has rows of them."""
    return model_tables(ROOT / "results", kernels())


def lengths() -> str:
    """The backends that serve sequences of unequal length."""
    return _table(figures_lengths.HEADERS, figures_lengths.lengths_rows())


def layouts() -> str:
    """What packed sequences cost beside other layouts of them."""
    return _table(figures_lengths.LAYOUT_HEADERS, figures_lengths.layout_rows(ROOT / "results"))


FIGURES: dict[str, Callable[[], str]] = {
    "accumulator": accumulator,
    "backends": backends,
    "budgets": budgets,
    "coverage": coverage,
    "forward-errors": forward_errors,
    "guard-rows": guard_rows,
    "ladder": ladder,
    "learning": lambda: _table(*training.learning()),
    "learning-rules": learning_rules,
    "models": models,
    "layouts": layouts,
    "lengths": lengths,
    "packing": lambda: _table(*training.packing()),
    "presets": presets,
    "policies": lambda: _table(*training.policies()),
    "ranks": lambda: _table(*training.ranks()),
    "recipe": lambda: _table(*training.recipe()) if training.turns("recipe") else "It was not measured yet.",
    "seeds": lambda: _table(*training.seeds()),
    "steps": lambda: _table(*training.steps()),
    "training-errors": training_errors,
    "vit": lambda: _table(*training.vit()),
    "vit-verdict": training.vit_verdict,
    "what-fp8-saves": what_fp8_saves,
    "where-it-pays": training.where_it_pays,
}


PICTURES: dict[str, Callable[[], bytes]] = {"explanation/packed-loss.svg": training.packed_loss}


def _table(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (headers, ["---"] * len(headers), *lines))


def written(text: str) -> str:
    """The page with its figures written again.  Raises KeyError for an unknown name."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{FIGURES[block['name']]()}\n\n{block[4]}", text)


def labels(picture: bytes) -> list[str]:
    """What is written in an SVG; where, and its lines, are the drawing library's."""
    return re.findall(r">([^<>]+)</text>", picture.decode())


def main(arguments: Sequence[str]) -> int:
    """Write all pages and pictures, or with ``--check`` say which are not up to date."""
    stale = []
    for name, draw in PICTURES.items():
        picture, made = DOCS / name, draw()
        if not picture.exists() or labels(picture.read_bytes()) != labels(made):
            stale.append(picture)
            if "--check" not in arguments:
                picture.write_bytes(made)
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            stale.append(page)
            if "--check" not in arguments:
                page.write_text(new, encoding="utf-8")
    for page in stale:
        print(f"{page.relative_to(ROOT)} {'is out of date' if '--check' in arguments else 'was written'}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
