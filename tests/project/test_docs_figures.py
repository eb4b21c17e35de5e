"""Every figure of docs/ is made from committed rows or from the code, or stands here as one that is not."""

import inspect
import re
from collections.abc import Callable, Sequence

import figures
import pytest
from documented_figures import HELD
from markdown_it import MarkdownIt
from places import ROOT

from attnbench.cli.train import train
from attnbench.guarding.significance import Detector
from attnbench.harness.training.judge.learning import LEAST_SEEDS, LEAST_STEPS

DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page for page in sorted(DOCS.rglob("*.md"))}

# Figures that no committed row holds: seen while a backend was written, measured by its tuner, rules, mere examples.
ELSEWHERE = {
    "backends/cudnn.md": ["are 0.75 off"],
    "backends/te.md": ["are 0.75 off", "more than 256 times over"],
    "backends/fa3-vllm.md": ["556 to 650 TFLOPS at D = 64, 693 to 893 at 128, 359 to 1104 at 256"],
    "backends/flex.md": ["458 TFLOPS in bf16 and 602 in FP8", "at least 2 % faster than torch's default"],
    # The confidence is held in tests/attnbench/choosing/test_error_model.py.
    "budget.md": ["0.05 says that", "all plans within 0.06", "for bf16 tensors 0.002", "with 95 % confidence"],
    "concepts.md": ["with 95 % confidence"],
    "how-to/integrations.md": ["0.17 ms a call at 512", "0.35 ms at 2,048 and 0.60 ms at 8,192"],
    # Measured on other GPUs, and held in tests/attnbench/tables/test_scaling.py.
    "tables.md": [
        *("were within 4 %", "FP8 and 16 bits within 2 %", "cuDNN were within 8 %"),
        *("FlashAttention-2 27 % off", "FP8 kernels were 17 % off"),
    ],
    # How far sweeps of the same kernels lie apart, and thresholds.
    "how-to/compare.md": [
        *("(the middle 90 %)", "−13 % to +10 %"),
        *("25 %", "1.5 %", "3 %", "1 % for", "95 %", "100 % unless", "5 %", "10 %", "30 %", "50 %", "0.021", "2.1 %"),
    ],
    "how-to/ci.md": [
        "more than 3 % from run to run",
        "3 % 5 % 10 %",
        "limit 3 %",
        "limit 5 %",
        "of 5 %, of",
        "all of 10 %",
    ],
    "explanation/measuring.md": ["95 % interval"],
    "how-to/sweep.md": ["shown from 2 % on", "above 100 % the row is an error"],
    "explanation/end-to-end.md": [
        "their 95 % intervals",
        "cannot tell 0.25 %",
        "buys 32 % more, and FP8 another 20 %",
    ],
}
# Its figures are those of its tuners, of the interpreter and of results/nvidia-h200/triton.md.
NOT_LOOKED_AT = {"backends/triton.md"}
FIGURE = re.compile(r"(?<![\w.])(?:\d[\d.,]*\s?(?:%|(?:ms|µs|TFLOPS|TB/s|GB/s|times)(?!\w))|0\.\d\d+(?!\w|\.\d))")


def prose(page: str) -> str:
    """What stands in the page's own words, on one line."""
    text = PAGES[page].read_text(encoding="utf-8")
    return " ".join(figures.BLOCK.sub("", text).split())


def without_code(page: str) -> str:
    """The same without code, links' addresses and quoted blocks."""
    text = figures.BLOCK.sub("", PAGES[page].read_text(encoding="utf-8"))
    inline = (token for token in MarkdownIt("commonmark").enable("table").parse(text) if token.type == "inline")
    words = (" ".join(each.content if each.type == "text" else "" for each in token.children or ()) for token in inline)
    return " ".join(" ".join(words).split())


@pytest.mark.parametrize("name", figures.PICTURES)
def test_pictures_are_what_their_command_draws(name: str) -> None:
    """Label by label; the drawing library places them."""
    drawn = figures.labels(figures.PICTURES[name]())
    assert figures.labels((DOCS / name).read_bytes()) == drawn
    assert len(drawn) > 10
    shown = [page for page in PAGES.values() if f"]({name.rpartition('/')[2]})" in page.read_text(encoding="utf-8")]
    assert [page.parent for page in shown] == [(DOCS / name).parent]


@pytest.mark.parametrize("page", [name for name, path in PAGES.items() if "<!-- figures" in path.read_text("utf-8")])
def test_tables_are_what_their_command_writes(page: str) -> None:
    text = PAGES[page].read_text(encoding="utf-8")
    assert figures.written(text) == text, "python docs/figures.py writes it anew"


def test_every_table_is_in_a_page() -> None:
    used = {each["name"] for path in PAGES.values() for each in figures.BLOCK.finditer(path.read_text("utf-8"))}
    assert used == set(figures.FIGURES)
    assert len(used) == sum(path.read_text("utf-8").count("<!-- figures:") for path in PAGES.values())


@pytest.mark.parametrize(("page", "sentence", "truths"), HELD, ids=[each[0] for each in HELD])
def test_figures_in_sentences_are_those_of_the_rows_or_the_code(
    page: str, sentence: str, truths: Callable[[], Sequence[float]]
) -> None:
    (shown,) = re.finditer(sentence, prose(page))
    for figure, truth in zip(shown.groups(), truths(), strict=True):
        assert float(figure) == round(truth, len(figure.partition(".")[2])), (figure, truth)


@pytest.mark.parametrize("page", sorted(set(PAGES) - NOT_LOOKED_AT))
def test_no_figure_is_held_by_nothing(page: str) -> None:
    text = without_code(page)
    held = {
        found.start(group)
        for name, sentence, _ in HELD
        if name == page
        for found in re.finditer(sentence, text)
        for group in range(1, found.re.groups + 1)
    }
    for snippet in ELSEWHERE.get(page, []):
        places = [found.span() for found in re.finditer(re.escape(snippet), text)]
        assert places, f"{snippet} is not there and needs no exception"
        held |= {place for start, stop in places for place in range(start, stop)}
    assert [found[0] for found in FIGURE.finditer(text) if found.start() not in held] == []


def test_a_page_states_that_its_kernel_never_ran_where_no_row_has_it() -> None:
    ran = {
        kernel
        for sweep in ("facts", "quick", "keys", "inference", "training")
        for each in figures.rows(sweep)
        if each.time_ms
        for kernel in each.plan.kernels
    }
    for page, start in (("fa2", "fa2:"), ("sage", "sage:int8-fp8"), ("flashinfer", "flashinfer:"), ("fa3", "fa3:")):
        stated = "has not run on our GPU machine" in prose(f"backends/{page}.md")
        assert stated != any(kernel.startswith(start) for kernel in ran), page


def test_the_training_page_agrees_with_the_defaults() -> None:
    defaults = {name: each.default for name, each in inspect.signature(train).parameters.items()}
    text = prose("how-to/training.md")
    assert ("takes three seeds, which is the default, and a hundred steps, which is more" in text) == (
        LEAST_SEEDS == 3 == defaults["seeds"] and LEAST_STEPS == 100 > defaults["steps"]
    )
    assert ("thirty steps" in text) == (defaults["steps"] == 30)
    assert f"`{defaults['policy']}` (fp32 weights, bf16 passes; the default" in text


def test_the_guard_page_agrees_with_the_evidence() -> None:
    """Ten times beyond is a finding at the first check, twice as far is none."""
    text = prose("how-to/guard.md")
    assert "a head that is ten times beyond the bound, needs no second check" in text
    assert "one check beyond the bound is no breach" in text
    assert Detector(0.1).add([1.0] * 8, [1.0] * 8) is not None
    assert Detector(0.1).add([0.04] * 8, [1.0] * 8) is None
