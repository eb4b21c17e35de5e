"""``attnbench train`` as a newcomer runs it, and what it refuses."""

import gzip
import json

import pytest
from typer.testing import CliRunner

from attnbench.cli import app
from attnbench.errors import AttnbenchError, InputError, MalformedFileError, MisuseError
from attnbench.harness.report.page.results import read_results
from attnbench.harness.report.training import PAGE, PICTURE
from attnbench.harness.training.rows import read_runs

TINY = ["--seqlen", "16", "--batch", "2"]


def _run(*arguments: str):
    result = CliRunner().invoke(app, ["train", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("train") / "out"
    line = "--model gpt --size tiny --attention emulated:fp8 --compare bf16 --steps 12 --price-per-hour 2"
    return _run(*line.split(), *TINY, "--out", str(folder)), folder


def test_the_first_look_gives_a_verdict_a_table_rows_and_plots(trained) -> None:
    result, folder = trained
    assert result.exit_code == 0
    assert "emulated:fp8 against auto: INCONCLUSIVE" in result.stdout
    for column in ("tokens/s", "step ms", "share", "loss", "gap", "per price unit"):
        assert column in result.stdout
    assert "tokens/s" in result.stderr  # progress
    rows = list(read_runs(folder))
    assert [(row.role, row.seed) for row in rows] == [
        (role, seed) for seed in range(3) for role in ("baseline", "candidate")
    ]
    assert {row.status for row in rows} == {"ok"}
    for baseline, candidate in zip(rows[::2], rows[1::2], strict=True):
        assert candidate.loss[0] == pytest.approx(baseline.loss[0], rel=0.01)  # the same weights and data
        assert candidate.loss != baseline.loss
        assert candidate.attention.share > 0
        assert candidate.settings["attention"] == "emulated:fp8"
        assert baseline.settings["fp8"] is False
    assert {(row.settings["attention"], *row.plans) for row in rows} == {
        ("auto", "sdpa-flash:bf16>sdpa-flash:bf16"),
        ("emulated:fp8", "emulated:fp8>emulated:fp8"),
    }
    assert "auto: attention ran sdpa-flash:bf16>sdpa-flash:bf16." in result.stdout
    assert (folder / PICTURE).read_bytes().startswith(b"\x89PNG")
    page = (folder / PAGE).read_text(encoding="utf-8")
    assert "emulated:fp8 against auto" in page
    assert "<figcaption>The loss" in page
    assert not list(folder.glob("checkpoints/*"))


def test_another_arm_is_added_and_the_baseline_is_not_run_again(trained) -> None:
    _, folder = trained
    before = {row.key: row.started for row in read_runs(folder)}
    line = "--attention sdpa-math --compare bf16 --steps 12 --seeds 1 --resume --format json"
    result = _run(*line.split(), *TINY, "--out", str(folder))
    rows = json.loads(result.stdout)
    assert len(rows) == 7
    assert {key: row.started for row in read_runs(folder) if (key := row.key) in before} == before


def test_compressed_runs_are_shown_and_reported_and_never_added_to(trained, tmp_path) -> None:
    _, folder = trained
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "training.jsonl.gz").write_bytes(gzip.compress((folder / "training.jsonl").read_bytes()))
    assert [row.key for row in read_runs(packed)] == [row.key for row in read_runs(folder)]
    shown = [_run("--show", f"{each}=4.5", "--format", "markdown").stdout for each in (packed, folder)]
    assert shown[0] == shown[1]
    assert "4.50" in shown[0]
    assert "| emulated:fp8" in shown[0]
    assert len(read_results([packed]).runs) == len(list(read_runs(folder)))
    with pytest.raises(MisuseError, match="holds compressed runs"):
        _run("--steps", "1", *TINY, "--resume", "--out", str(packed))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--resume"], MisuseError, "--out"),
        (["--price-per-hour", "-1"], MisuseError, "price"),
        (["--compare-linears", "te-fp8"], MisuseError, "--compare"),
        (["--compare-packing", "padded"], MisuseError, "--compare"),
        (["--compare", "bf16", "--compare-packing", "padded"], MisuseError, "learns other data than --packing none"),
        (["--attention", "auto", "--compare", "bf16"], MisuseError, "the candidate itself"),
        (["--attention", ""], InputError, "''"),
        (["--parallel", "ddp"], MisuseError, "--out"),
        (["--show", "nowhere=x"], MisuseError, "FOLDER=PRICE"),
        (["--show", "nowhere"], MalformedFileError, "nowhere"),
        *((f"{asked} --batch 16 --device cpu --out out".split(), AttnbenchError, message) for asked, message in (
            ("--attention te:fp8>te:fp8 --compare bf16", "te:fp8>te:fp8"),  # one side cannot run here
            ("--attention bad --compare bf16", "bad"),
            ("--attention sdpa --compare te:bf16", "te:bf16"),
            ("--linears te-fp8 --compare bf16 --compare-linears bf16", "linears=te-fp8"),
            ("--parallel ddp --context-parallel 2 --compare sdpa", "GPUs alone"),
            ("--model vit-huge --size tiny --block te --compare sdpa", "block=te"),
            ("--model vit-huge --size tiny --block te --attention auto", "cannot be chosen"),  # not left out silently
        )),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_trained(tmp_path, monkeypatch, arguments, error, message) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError if error is InputError else error, match=message):
        _run(*arguments)
    assert not list(tmp_path.iterdir())
