"""The tables of docs/explanation/end-to-end.md, from rows in which the faster choice is planted."""

from pathlib import Path

import figures_training
import pytest
from places import ROOT

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
