"""The tables and sentences of docs/explanation/end-to-end.md, from committed rows of trainings (results/GPU/...)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from attnbench.harness.report.page.figures import bytes_of, loss_figure
from attnbench.harness.statistics import median_interval
from attnbench.harness.training.judge.arms import Arm, arms_of, compare_arms, scaling_efficiency
from attnbench.harness.training.judge.learning import pairs_of
from attnbench.harness.training.judge.power import chances, seeds_needed
from attnbench.harness.training.models.gpt import SIZES
from attnbench.harness.training.rows import ROWS, TrainingRun, read_runs

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
RESULTS = Path(__file__).resolve().parent.parent / "results"
H100, H200 = RESULTS / "nvidia-h100-80gb-hbm3", RESULTS / "nvidia-h200"
PLAIN = "steps-plain"  # rows of a plain install
_ANEW = 3  # times the median: compiling takes seconds
_GAPS = (0.005, 0.0075, 0.01)  # losses that a verdict should find


@cache
def arms(*folders: Path) -> tuple[Arm, ...]:
    """Of committed trainings that came to their end."""
    runs = (run for folder in folders for run in read_runs(folder))
    return tuple(arms_of([run for run in runs if run.status != "unfinished"]))


def _folders(results: Path, *patterns: str) -> list[Path]:
    """The folders with rows of trainings."""
    return sorted({path.parent for each in patterns for path in results.glob(f"{each}/{ROWS}*")})


@dataclass(frozen=True)
class Cell:
    """The choices that took the steps of one model in turn, by name; ``plain``: without another vendor's kernels."""

    runs: dict[str, TrainingRun]
    plain: bool = False

    @property
    def first(self) -> TrainingRun:
        """For what all have in common."""
        return next(iter(self.runs.values()))

    @property
    def narrow(self) -> list[tuple[str, TrainingRun]]:
        """The runs of FP8 plans, and whether ``auto --fp8`` chose the plan or it was named."""
        found = [("chosen", run) for name, run in self.runs.items() if name == "auto, FP8"]
        return found + [("named", run) for name, run in self.runs.items() if ":" in name]

    @property
    def best(self) -> TrainingRun | None:
        """The fastest of them."""
        timed = [run for _, run in self.narrow if run.median_ms is not None]
        return min(timed, key=lambda run: run.median_ms or 0.0, default=None)

    def times_as_fast(self, name: str, run: TrainingRun | None) -> tuple[float, float, float] | None:
        """(low, median, high) of how many times as fast a run is as the named one, step by step of the same rounds."""
        return _times_as_fast(run, self.runs.get(name))


def _times_as_fast(run: TrainingRun | None, other: TrainingRun | None) -> tuple[float, float, float] | None:
    if run is None or other is None or run is other or not (run.samples_ms and other.samples_ms):
        return None
    pairs = list(zip(run.samples_ms, other.samples_ms, strict=False))
    return median_interval([theirs / ours for ours, theirs in pairs[max(_compiling(run), _compiling(other)) :]])


def _compiling(run: TrainingRun) -> int:
    """How many timed steps of a compiled model passed until the last in which it was compiled anew."""
    if not run.settings["compile"]:
        return 0
    usual = float(np.median(run.samples_ms))
    return max((number for number, ms in enumerate(run.samples_ms, 1) if ms > _ANEW * usual), default=0)


def cells(results: Path = RESULTS) -> list[Cell]:
    """Every cell of ``results/GPU/steps`` and ``steps-plain``: by model, length, linears, GPU and installation."""
    found: dict[tuple[object, ...], dict[str, TrainingRun]] = {}
    for folder in _folders(results, "*/steps", f"*/{PLAIN}"):
        for run in read_runs(folder):
            settings, device = run.settings, run.environment.device_name
            place = (settings["size"], settings["seqlen"], settings["linears"], device, run.world, folder.name == PLAIN)
            found.setdefault(place, {})[_named(run)] = run
    return [Cell(found[place], bool(place[-1])) for place in sorted(found, key=str)]


def _named(run: TrainingRun) -> str:
    return f"{run.settings['attention']}, FP8" if run.settings["fp8"] else str(run.settings["attention"])


def steps(results: Path = RESULTS) -> Table:
    """Milliseconds of a step by choice, attention's share of it, and how many times as fast each FP8 plan is."""
    heads = ["model", "tokens", "GPU", "installed", "linears", "torch", "`auto`", "FP8 plan", "its step"]
    lines = []
    for cell in sorted(cells(results), key=_order):
        settings = cell.first.settings
        installed = "plain" if cell.plain else "everything"
        place = [_part(cell.first), f"{settings['seqlen']:,}", _gpus(cell.first), installed]
        place.append(str(settings["linears"]))
        place += [_step(cell.runs.get(name)) for name in ("sdpa", "auto")]
        for how, run in cell.narrow:
            ratios = [_ratio(cell.times_as_fast(name, run)) for name in ("auto", "sdpa")]
            lines.append([*place, f"{_plans(run)}, {how}", _step(run), *ratios])
    return [*heads, "over `auto`", "over torch"], lines


def where_it_pays(results: Path = RESULTS) -> str:
    """For each length, what the fastest FP8 plan gained over ``auto`` in 16 bits and over torch, and how surely."""
    found: dict[tuple[int, str, bool], list[Cell]] = {}
    for cell in sorted(cells(results), key=_order):
        seqlen: int = cell.first.settings["seqlen"]  # type: ignore[assignment]
        found.setdefault((seqlen, _gpus(cell.first), cell.plain), []).append(cell)
    bullets = []
    for (seqlen, gpus, plain), group in found.items():
        over = {name: [cell.times_as_fast(name, cell.best) for cell in group] for name in ("auto", "sdpa")}
        known = {name: [each for each in ratios if each is not None] for name, ratios in over.items()}
        if not known["auto"]:
            continue
        surely = sum(low > 1 for low, _, _ in known["auto"])
        shares = [cell.runs["auto"].attention.share for cell in group if cell.runs["auto"].attention is not None]
        own = [_attention_ms(cell.runs["auto"]) / _attention_ms(cell.best) for cell in group if cell.best is not None]
        place = f"{seqlen:,} tokens, {gpus}" + (", a plain install" if plain else "")
        bullets.append(
            f"- **{place}**: {_times(known['auto'])} as fast as `auto` in 16 bits, "
            f"{_times(known['sdpa'])} as fast as torch; surely faster than `auto` in {surely} of {len(known['auto'])} "
            f"models.  Attention was {_span(shares, '.0%')} of the 16-bit step, and became {_span(own, '.2f')} times "
            "as fast itself."
        )
    return "\n".join(bullets)


def _times(found: Sequence[tuple[float, float, float]]) -> str:
    return f"{_span([middle for _, middle, _ in found], '.3f')} times"


def _attention_ms(run: TrainingRun) -> float:
    assert run.attention is not None, "its step was profiled"
    return run.attention.forward_ms + run.attention.backward_ms


def _span(values: Sequence[float], form: str) -> str:
    ends = list(dict.fromkeys(format(each, form) for each in (min(values), max(values))))
    return " to ".join(ends)


def _order(cell: Cell) -> tuple[object, ...]:
    settings, device = cell.first.settings, cell.first.environment.device_name
    return settings["seqlen"], settings["linears"] != "bf16", settings["size"], device, cell.plain


def _part(run: TrainingRun) -> str:
    size, layers = SIZES[str(run.settings["size"])], run.settings.get("layers")
    return f"{run.settings['size']}, {layers} of {size.layers} layers" if layers else str(run.settings["size"])


def _gpus(run: TrainingRun) -> str:
    name = run.environment.device_name.removeprefix("NVIDIA ").partition(" ")[0]
    return name if run.world == 1 else f"{run.world} × {name}"


def _step(run: TrainingRun | None) -> str:
    if run is None or run.median_ms is None:
        return "" if run is None else run.status
    share = "" if run.attention is None else f", {run.attention.share:.0%}"
    return f"{run.median_ms:,.0f} ms{share}"


def _plans(run: TrainingRun | None) -> str:
    return "" if run is None else ", ".join(f"`{plan}`" for plan in dict.fromkeys(run.plans))


def _ratio(found: tuple[float, float, float] | None) -> str:
    if found is None:
        return ""
    low, middle, high = found
    return f"{middle:.3f} ({low:.3f} to {high:.3f})" if np.isfinite(high) else f"{middle:.3f}"


def turns(part: str, results: Path = RESULTS) -> list[list[TrainingRun]]:
    """The runs of ``results/GPU/part`` that took their steps in turn, by cell: each in the order of the choices."""
    found: dict[object, list[TrainingRun]] = {}
    for folder in _folders(results, f"*/{part}"):
        for run in read_runs(folder):
            if run.settings.get("interleaved"):
                cell = folder, *(run.settings[each] for each in ("size", "seqlen", "batch"))
                found.setdefault(cell, []).append(run)
    return list(found.values())


def vit(results: Path = RESULTS) -> Table:
    """The article's experiment: each block launched by the host, and replayed from a CUDA graph, over timm's block."""
    lines = []
    for cell in turns("vit", results):
        plain = {_replayed(run): run for run in cell if run.settings["attention"] == "sdpa" and _is_plain(run)}
        for run in cell:
            settings = run.settings
            named = "its own" if settings["block"] == "te" else _choice(run)
            how = ", ".join(each for each, on in (("compiled", settings["compile"]), ("graph", _replayed(run))) if on)
            own = _over(run, plain.get(_replayed(run)))
            shape = [_gpus(run), str(settings["batch"]), settings["block"], settings["linears"]]
            lines.append([*shape, named, how or "launched", *_speed(run), own])
    heads = ["GPU", "images a step", "block", "linears", "attention", "how", "step", "a second", "memory"]
    return [*heads, "times as fast as plain"], lines


def vit_verdict(results: Path = RESULTS) -> str:
    """The article's two gains beside those of here, of each cell with its graphs."""
    bullets = []
    for cell in turns("vit", results):
        plain, te, fp8 = (_find(cell, *each) for each in (("plain", "bf16"), ("te", "bf16"), ("te", "te-fp8")))
        launched = [_find(cell, *each, graphs=False) for each in (("plain", "bf16"), ("te", "bf16"), ("te", "te-fp8"))]
        ours, compiled = _find(cell, "plain", "te-fp8"), _find(cell, "plain", "bf16", compile=True)
        pairs = [(te, plain), (fp8, te), (fp8, plain), (compiled, plain), (ours, plain)]
        pairs += [(launched[1], launched[0]), (launched[2], launched[0])]
        ratios = [_times_as_fast(*pair) for pair in pairs]
        if None in ratios:
            continue
        block, eight, both, fused, own, *host = (f"{found[1]:.2f}" for found in ratios if found is not None)
        bullets += [
            f"- **Without the host** TransformerEngine's block is {block} times as fast as timm's in bf16, and in FP8 "
            f"{eight} times as fast as itself in bf16: {both} times together.",
            f"- **Timm's block** is {fused} times as fast when it is compiled, still in bf16, and {own} times with "
            "TransformerEngine's FP8 linears and attention chosen here.",
            f"- **Launched by the host**, as in the article, TransformerEngine's block is {host[0]} times as fast as "
            f"timm's in bf16 and {host[1]} times in FP8, because its host does more.",
        ]
    return "\n".join(bullets)


def _find(cell: list[TrainingRun], block: str, linears: str, **how: bool) -> TrainingRun | None:
    """The first run of a block, in bf16 with torch's or its own attention; from a graph and not compiled by default."""
    asked = block, linears, how.get("compile", False), how.get("graphs", True)
    for run in cell:
        settings = run.settings
        if (settings["block"], settings["linears"], settings["compile"], _replayed(run)) == asked:
            return run
    return None


def _is_plain(run: TrainingRun) -> bool:
    settings = run.settings
    return (settings["block"], settings["linears"], settings["compile"]) == ("plain", "bf16", False)


def _replayed(run: TrainingRun) -> bool:
    return bool(run.settings.get("graphs"))


def recipe(results: Path = RESULTS) -> Table:
    """FP8 linears and attention on packed documents, over 16 bits in both."""
    lines = []
    for cell in turns("recipe", results):
        for run in cell:
            compiled = "compiled" if run.settings["compile"] else "launched"
            own = _over(run, cell[0])
            own_ms = "" if run.attention is None else f"{_attention_ms(run):,.0f} ms"
            plan = _plans(run)
            named = _choice(run) if _choice(run).strip("`") == plan.strip("`") else f"{_choice(run)}: {plan}"
            lines.append([_gpus(run), str(run.settings["linears"]), named, compiled, *_speed(run), own_ms, own])
    heads = ["GPU", "linears", "attention", "blocks", "step", "tokens/s", "memory per GPU", "attention takes"]
    return [*heads, "times as fast as the first"], lines


def packing(results: Path = RESULTS) -> Table:
    """Documents end to end over rows padded to the longest, in 16 bits and FP8, each with a model of its own."""
    lines = []
    for cell in turns("packing", results):
        plain = next((run for run in cell if run.settings["packing"] == "packed"), cell[0])
        for run in cell:
            settings = run.settings
            share = "" if run.attention is None else f"{run.attention.share:.0%}"
            shape = [_gpus(run), f"{settings['seqlen']:,}", f"{run.units_per_step:,}", str(settings["packing"])]
            own = [share, _over(run, plain), _end(run, plain)]
            lines.append([*shape, _choice(run), _plans(run), *_speed(run), *own])
    heads = ["GPU", "longest", "tokens a step", "documents", "attention", "plan", "step", "tokens/s", "memory"]
    return [*heads, "attention's share", "times as fast as packed torch", "loss of the last fifth"], lines


def packed_loss() -> bytes:
    """The loss of every choice of the shorter documents, as an SVG."""
    cell = min(turns("packing"), key=lambda runs: runs[0].settings["seqlen"])
    return bytes_of(loss_figure(arms_of(cell)), "svg")


def _end(run: TrainingRun, first: TrainingRun) -> str:
    """The mean loss of the last fifth of its steps, and how far it is from that of the first run after as many."""
    if run.status not in _TIMED or not run.loss:
        return ""
    end, other = (float(np.mean(each.loss[-max(1, len(each.loss) // 5) :])) for each in (run, first))
    return f"{end:.3f}" + ("" if run is first else f" ({end / other - 1:+.2%})")


def policies(results: Path = RESULTS) -> Table:
    """What is kept and computed in which type: memory, speed and loss."""
    lines = []
    for cell in turns("policies", results):
        for run in cell:
            policy = str(run.settings["policy"])
            own = _over(run, cell[0])
            lines.append([_gpus(run), f"`{policy}`", *_POLICIES[policy], *_speed(run), own, str(len(run.loss)),
                          _end(run, cell[0])])  # fmt: skip
    heads = ["GPU", "policy", "weights", "passes", "updated", "step", "a second", "memory"]
    return [*heads, "times as fast as the first", "steps", "loss of their last fifth"], lines


_TIMED = ("ok", "unfinished")  # fewer rounds than were asked for are rounds
_POLICIES = {  # harness/training/run/policy.py
    "bf16": ("bf16", "bf16", "bf16"),
    "autocast": ("fp32", "bf16", "fp32"),
    "fp32-and-bf16": ("bf16", "bf16", "fp32 copies"),
    "fsdp-mixed": ("fp32 shards", "bf16", "fp32 shards"),
    "fp32": ("fp32", "fp32", "fp32"),
}


def _choice(run: TrainingRun) -> str:
    name = _named(run)
    return name if name.startswith(("auto", "sdpa")) and name != "sdpa-flash" else f"`{name}`"


def _over(run: TrainingRun, other: TrainingRun | None) -> str:
    """How many times as fast as the other it is, if it did not fail."""
    return _ratio(_times_as_fast(run, other)) if run.status in _TIMED else ""


def _speed(run: TrainingRun) -> list[str]:
    """Its step, its units a second and its memory, or how it failed."""
    if run.status not in _TIMED or run.units_per_second is None:
        return [run.status, "", ""]
    memory = "" if run.memory_bytes is None else f"{run.memory_bytes / 2**30:.1f} GiB"
    return [f"{run.median_ms:,.1f} ms", f"{run.units_per_second:,.0f}", memory]


def ranks() -> Table:
    """Two GPUs beside one."""
    every = arms(H200 / "ranks")
    lines = []
    for arm in every:
        efficiency = scaling_efficiency(arm, every)
        assert None not in (arm.units_per_second, arm.memory_bytes), "it trained"
        cells = [f"{arm.units_per_second:,.0f}", f"{arm.memory_bytes / 2**30:.1f} GiB"]
        scaling = "" if efficiency is None else f"{efficiency:.1%}"
        lines.append([str(arm.first.world), arm.first.settings["parallel"], _named(arm.first), *cells, scaling])
    return ["GPUs", "parallel", "attention", "tokens/s", "memory per GPU", "scaling efficiency"], lines


def learning() -> Table:
    """Loss curves of FP8 attention against 16 bits, of every folder of ``learning``, with the verdicts."""
    lines = []
    for arm, baseline, learned in compare_arms(arms(*_folders(RESULTS, "*/learning", "*/learning/*"))):
        assert None not in (learned.gap, learned.low, learned.high), "they ended"
        found = [sign for run in arm.runs for sign in run.signs]
        checks, breaches = sum(sign.checks for sign in found), sum(sign.breaches for sign in found)
        how = arm.first.settings
        lines.append([
            _gpus(arm.first),
            f"{_part(arm.first)}, {how['steps']} steps of {how['batch']} × {how['seqlen']:,} tokens",
            *(f"`{_named(arm.first)}`", str(len(arm.runs)), f"{baseline.end:.4f}", f"{arm.end:.4f}"),
            f"{learned.gap:+.2%} ({learned.low:+.2%} to {learned.high:+.2%})",
            *(learned.verdict, f"{breaches} in {checks} checks" if checks else ""),
        ])  # fmt: skip
    return ["GPU", "model", "attention", "seeds", "loss, 16 bits", "loss", "gap", "verdict", "guard's breaches"], lines


def scatter(*folders: Path) -> float:
    """The standard deviation of the gaps between committed pairs of one baseline, all candidates together."""
    runs = [run for folder in folders for run in read_runs(folder)]
    squares, freedom = 0.0, 0
    for attention in {run.settings["attention"] for run in runs if run.role == "candidate"}:
        pair = [run for run in runs if run.role == "baseline" or run.settings["attention"] == attention]
        gaps = np.array([each.gap for each in pairs_of(pair)])
        squares, freedom = squares + float(((gaps - gaps.mean()) ** 2).sum()), freedom + len(gaps) - 1
    return float(np.sqrt(squares / freedom))


def seeds() -> Table:
    """How many seeds a verdict takes, with 90 %, at the scatter of GPT small's pairs, around it, and at D = 128."""
    middle = scatter(H200 / "learning/te", H200 / "learning/triton")
    heads = ["scatter of a pair's gap", "3 seeds: chance of a verdict", "*equivalent* if there is no gap"]
    lines = []
    for deviation in (middle / 2, middle, 1.3 * middle, scatter(H100 / "learning")):
        chance = 1 - chances(3, deviation)["inconclusive"]
        needed = [seeds_needed(deviation, gap) for gap in (0.0, *_GAPS)]
        lines.append(
            [
                f"{deviation:.2%}",
                f"{chance:.0%}",
                *("more than 100" if each is None else f"{each} seeds" for each in needed),
            ]
        )
    return [*heads, *(f"*degraded* if it is {gap:.2%}" for gap in _GAPS)], lines
