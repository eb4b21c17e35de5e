"""The tables of docs/explanation/end-to-end.md, from rows in which the faster choice is planted."""

import re
from pathlib import Path

import figures_training
import pytest
from places import ROOT

from attnbench.harness.training.judge.power import seeds_needed
from attnbench.harness.training.rows import TrainingRun, read_runs, write_runs

ROW = next(read_runs(ROOT / "results/nvidia-h200/ranks"))
PLAN = "triton:fp8>triton:fp8"


def run(
    attention: str, factor: float, *, fp8: bool = False, seqlen: int = 32768, plans: tuple[str, ...] = ()
) -> TrainingRun:
    """A step of ``factor`` times 1,000 ms on a GPU that slows down by a tenth from round to round."""
    settings = {"size": "3b", "layers": 7, "seqlen": seqlen, "linears": "bf16", "attention": attention, "fp8": fp8}
    times = [1000 * factor * 1.1**number for number in range(8)]
    return ROW.model_copy(
        update={
            "settings": {**ROW.settings, **settings, "model": "gpt"}, "plans": list(plans),
            "status": "ok", "reason": None,
            "attention": ROW.attention.model_copy(update={"share": 0.09}),
            "step_ms": times, "loss": [1.0] * 8, "grad_norm": [1.0] * 8, "timed_from": 0, "untimed": [],
        }
    )  # fmt: skip


def in_turn(part: str, folder: Path, *runs: TrainingRun) -> Path:
    """Results of one GPU in which these took their steps in turn."""
    place = folder / "some-gpu" / part
    place.mkdir(parents=True)
    write_runs(place / "training.jsonl", [each.model_copy(update={"settings": {**each.settings, "interleaved": True}})
                                          for each in runs])  # fmt: skip
    return folder


def changed(one: TrainingRun, **settings: object) -> TrainingRun:
    return one.model_copy(update={"settings": {**one.settings, **settings}})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    runs = [
        *(run("sdpa", 1.2), run("auto", 1.0), run("auto", 0.8, fp8=True, plans=(PLAN,))),
        *(run("sdpa", 1.2, seqlen=8192), run("auto", 1.0, seqlen=8192)),  # auto --fp8 runs the same
        *(run("sdpa", 1.2, seqlen=16384), run("auto", 1.0, seqlen=16384), run(PLAN, 1.25, seqlen=16384, plans=(PLAN,))),
    ]
    folder = tmp_path / "some-gpu" / "steps"
    folder.mkdir(parents=True)
    write_runs(folder / "training.jsonl", runs)
    return tmp_path


def test_choices_are_compared_round_by_round(results: Path) -> None:
    heads, lines = figures_training.steps(results)
    assert [line[1] for line in lines] == ["16,384", "32,768"]  # at 8,192 no FP8 plan ran
    other, chosen = (dict(zip(heads, line, strict=True)) for line in lines)
    assert chosen["model"] == "3b, 7 of 28 layers"
    assert chosen["FP8 plan"] == f"`{PLAN}`, chosen"
    assert chosen["over `auto`"] == "1.250 (1.250 to 1.250)"  # although steps became twice as long from first to last
    assert chosen["over torch"] == "1.500 (1.500 to 1.500)"
    assert (other["FP8 plan"], other["over `auto`"]) == (f"`{PLAN}`, named", "0.800 (0.800 to 0.800)")


def test_a_plain_install_has_cells_of_its_own(results: Path) -> None:
    folder = results / "some-gpu" / figures_training.PLAIN
    folder.mkdir()
    write_runs(
        folder / "training.jsonl", [run("sdpa", 1.2), run("auto", 1.2), run("auto", 0.8, fp8=True, plans=(PLAN,))]
    )
    heads, lines = figures_training.steps(results)
    found = [dict(zip(heads, line, strict=True)) for line in lines if line[1] == "32,768"]
    assert [(each["installed"], each["over `auto`"][:5]) for each in found] == [
        ("everything", "1.250"),
        ("plain", "1.500"),
    ]
    assert "32,768 tokens, H200, a plain install**: 1.500" in figures_training.where_it_pays(results)


def test_where_it_pays_is_said_of_each_length(results: Path) -> None:
    slower, faster = figures_training.where_it_pays(results).splitlines()
    assert "**16,384 tokens, H200**: 0.800 times as fast as `auto` in 16 bits, 0.960 times as fast as torch" in slower
    assert "surely faster than `auto` in 0 of 1 models" in slower
    assert "1.250 times as fast as `auto` in 16 bits, 1.500 times as fast as torch" in faster
    assert "in 1 of 1 models.  Attention was 9% of the 16-bit step, and became 1.00 times as fast itself." in faster


def test_a_block_is_compared_with_timms_as_it_was_started_itself(tmp_path: Path) -> None:
    launched, replayed = run("sdpa", 2.0), changed(run("sdpa", 1.0), graphs=True)
    te = changed(run("own", 0.8), graphs=True, block="te", linears="te-fp8")
    slow = changed(run("own", 4.0), block="te")
    failed = changed(run("auto", 1.0), graphs=True).model_copy(update={"status": "oom", "reason": "no memory"})
    compiled = changed(run("sdpa", 0.5), graphs=True, compile=True)
    heads, lines = figures_training.vit(in_turn("vit", tmp_path, launched, slow, replayed, te, failed, compiled))
    found = [dict(zip(heads, line, strict=True)) for line in lines]
    ratios = [each["times as fast as plain"].partition(" ")[0] for each in found]
    assert ratios == ["", "0.500", "", "1.250", "", "2.000"]
    assert [each["how"] for each in found] == ["launched", "launched", "graph", "graph", "graph", "compiled, graph"]
    assert [each["step"] for each in found][4] == "oom"
    assert figures_training.vit_verdict(tmp_path) == ""  # what it compares was not measured


def test_what_the_page_says_of_the_article_is_in_the_rows() -> None:
    """A third of the block's gain without the host, less than by compiling; more than FP8's; auto a little slower."""
    verdict = figures_training.vit_verdict()
    block, eight, both, fused, ours = map(float, re.findall(r"([\d.]+) times", verdict)[:5])
    assert 0.27 < (block - 1) / 0.32 < 0.4
    assert block < fused < both
    assert eight > 1.2
    assert block < ours < both
    heads, lines = figures_training.vit()
    autos = [line for line in lines if line[heads.index("attention")] == "auto"]
    assert len(autos) == 2
    assert all(0.95 < float(auto[-1].partition(" ")[0]) < 1 for auto in autos)


def test_policies_and_recipes_are_compared_with_the_first(tmp_path: Path) -> None:
    first = changed(run("sdpa", 1.0), policy="autocast")
    other = changed(run("sdpa", 0.8), policy="bf16").model_copy(update={"loss": [1.02] * 8})
    heads, lines = figures_training.policies(in_turn("policies", tmp_path, first, other))
    found = [dict(zip(heads, line, strict=True)) for line in lines]
    assert [each["loss of their last fifth"] for each in found] == ["1.000", "1.020 (+2.00%)"]
    assert found[1]["times as fast as the first"] == "1.250 (1.250 to 1.250)"
    narrow = changed(run("auto", 0.5, fp8=True, plans=(PLAN,)), linears="te-fp8", compile=False)
    heads, lines = figures_training.recipe(in_turn("recipe", tmp_path, run(PLAN, 1.0, plans=(PLAN,)), narrow))
    found = [dict(zip(heads, line, strict=True)) for line in lines]
    assert [each["attention"] for each in found] == [f"`{PLAN}`", f"auto, FP8: `{PLAN}`"]
    assert found[1]["times as fast as the first"] == "2.000 (2.000 to 2.000)"


def test_seeds_are_those_for_the_committed_scatter() -> None:
    lines = figures_training.seeds()[1]
    deviation = figures_training.scatter(*(figures_training.H200 / "learning" / each for each in ("te", "triton")))
    assert 0.002 < deviation < 0.01
    assert f"{seeds_needed(deviation)} seeds" in lines[1]
    wide = figures_training.scatter(figures_training.H100 / "learning")
    assert f"{seeds_needed(wide)} seeds" in lines[3]
    assert deviation < wide
    assert seeds_needed(wide) <= 80  # pairs that each verdict rests on


def test_what_the_page_says_of_learning_at_d_128_is_in_the_rows() -> None:
    heads, lines = figures_training.learning()
    found = {
        each["attention"]: each
        for line in lines
        if "medium" in line[1]
        for each in [dict(zip(heads, line, strict=True))]
    }
    assert {name: (each["seeds"], each["verdict"]) for name, each in found.items()} == {
        f"`{PLAN}`": ("100", "equivalent"),
        "`te:fp8>te:fp8`": ("100", "degraded"),
        "`triton:fp8>fa4:bf16`": ("80", "equivalent"),
    }
    assert re.fullmatch(r"\+[\d.]+% \(\+[\d.]+% to \+[\d.]+%\)", found["`te:fp8>te:fp8`"]["gap"])
    assert all(each["guard's breaches"].startswith("0 in ") for each in found.values())
    (higher,) = re.findall(r"ended\s+([\d.]+) % higher", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert found["`te:fp8>te:fp8`"]["gap"].startswith(f"+{higher}%")


def test_what_the_page_says_of_packed_documents_is_in_the_rows() -> None:
    heads, lines = figures_training.packing()
    found = [dict(zip(heads, line, strict=True)) for line in lines]
    rates = {
        (each["longest"], each["documents"], each["attention"]): float(each["tokens/s"].replace(",", ""))
        for each in found
        if each["tokens/s"]
    }
    memory = {each["documents"]: float(each["memory"].split()[0]) for each in found if each["longest"] == "8,192"}
    assert memory["padded"] == pytest.approx(2 * memory["packed"], rel=0.2)
    assert [each["step"] for each in found if (each["longest"], each["documents"]) == ("32,768", "padded")] == [
        "oom"
    ] * 2
    for longest, gain, narrow in (("8,192", 1.25, 1.0), ("32,768", 1.5, 1.05)):
        torch_s, auto, fp8 = (rates[longest, "packed", each] for each in ("`sdpa-flash`", "auto", "auto, FP8"))
        assert auto / torch_s == pytest.approx(gain, abs=0.03)
        assert fp8 / auto == pytest.approx(narrow, abs=0.01)
    assert rates["8,192", "packed", "auto"] > rates["8,192", "padded", "auto"] > rates["8,192", "padded", "auto, FP8"]
    gaps = [float(gap) for each in found for gap in re.findall(r"\(([+-][\d.]+)%\)", each["loss of the last fifth"])]
    assert len(gaps) == 6
    assert max(map(abs, gaps)) < 100 * figures_training.scatter(figures_training.H100 / "learning")


def test_a_padded_model_is_compared_with_the_packed_one_of_torch(tmp_path: Path) -> None:
    padded = changed(run("auto", 2.0), packing="padded").model_copy(update={"loss": [1.02] * 8})
    cell = in_turn("packing", tmp_path, padded, changed(run("sdpa-flash", 1.0), packing="packed"))
    heads, lines = figures_training.packing(cell)
    found = [dict(zip(heads, line, strict=True)) for line in lines]
    assert [each["documents"] for each in found] == ["padded", "packed"]
    assert found[0]["times as fast as packed torch"] == "0.500 (0.500 to 0.500)"
    assert [each["loss of the last fifth"] for each in found] == ["1.020 (+2.00%)", "1.000"]
