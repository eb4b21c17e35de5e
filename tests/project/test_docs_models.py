"""The page of the published models says what the rows say, and no row breaks its tables."""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from figures_models import model_tables
from markdown_it import MarkdownIt
from places import ROOT
from report_rows import GPU, at_later_time, failed_row, in_environment, row

from attnbench.harness.cases.models import model_layers
from attnbench.harness.results.records import Measurement
from attnbench.harness.results.store import MEASUREMENTS
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import registry
from attnbench.tables.table import Table

LAYERS = model_layers("cuda")
FORWARD = next(spec for spec, names in LAYERS.items() if "Llama 3.1 8B" in names and not spec.training)
SWEEP = [
    row("sdpa-cudnn:bf16", 3.0, spec=FORWARD),
    row("sdpa-flash:bf16", 9.0, spec=FORWARD),
    row("fa3:bf16", 2.5, 0.003, spec=FORWARD),
    row("triton:fp8", 2.0, 0.07, spec=FORWARD),
    row("fa3:fp8", 1.0, 0.4, spec=FORWARD, status="inaccurate", reason="beyond 0.12", check="error"),
]


def written(place: Path, rows: Iterable[Measurement], gpu: str = "gpu", name: str = MEASUREMENTS) -> Path:
    folder = place / gpu / "zoo"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(each.to_line() + "\n" for each in rows))
    return place


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table, as a reader of Markdown sees them; nothing but tables, text and headings is in it."""
    found: list[list[list[str]]] = []
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for before, token in pairwise(tokens):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "inline" and before.type in ("td_open", "th_open"):
            kinds = {each.type for each in token.children or ()}
            assert kinds <= {"text", "code_inline", "text_special"}, token.content
            found[-1][-1].append("".join(each.content for each in token.children or ()))
    for table in found:
        assert len({len(line) for line in table}) == 1
    return found


def page(place: Path) -> list[list[list[str]]]:
    return tables(model_tables(place, registry()))


def test_a_layer_without_fp8_has_the_reason(tmp_path: Path) -> None:
    refused = [failed_row("triton:fp8", "refused", "needs | `D` <= *8*\n<b>x</b>", FORWARD)]
    refused += [failed_row("te:fp8", "unavailable", "is not installed", FORWARD)]
    _, (_, layer) = page(written(tmp_path, [*SWEEP[:3], *refused]))
    assert layer[6] == "refused: needs | `D` <= *8* <b>x</b>"
    untimed = SWEEP[0].performance.model_copy(update={"time_ms": {}, "visits": {}})
    lost = failed_row("flex:fp8", "slower", "by the tables; " + "x" * 40, FORWARD, performance_=untimed)
    _, (_, layer) = page(written(tmp_path, [*SWEEP[:3], lost, *refused]))
    assert layer[6] == "slower: by the tables"
    _, (_, layer) = page(written(tmp_path, [*SWEEP[:3], SWEEP[4], lost, *refused]))
    assert layer[6] == "inaccurate: beyond 0.12"
    _, (_, layer) = page(written(tmp_path, refused))
    assert layer[5:] == ["not measured", "refused: needs | `D` <= *8* <b>x</b>", "not measured", "not measured"]


def test_the_newest_row_of_all_files_counts_and_each_gpu_has_its_tables(tmp_path: Path) -> None:
    written(tmp_path, SWEEP)
    written(tmp_path, [at_later_time(row("triton:fp8", 1.5, 0.07, spec=FORWARD))], name="measurements-1.jsonl")
    written(tmp_path, [in_environment(each, device_name="A <b>|GPU") for each in SWEEP], gpu="other")
    text = model_tables(tmp_path, registry())
    assert f"### {GPU.device_name}\n" in text
    assert "### A &#60;b&#62;&#124;GPU\n" in text
    assert tables(text)[1][1][6].startswith("triton:fp8 1.5 ms, 2.00×")
    assert tables(text)[3][1][6].startswith("triton:fp8 2 ms, 1.50×")


def test_a_layer_that_ran_on_another_gpu_alone_has_what_the_tables_choose(tmp_path: Path) -> None:
    table = Table.load(ROOT / "attnbench/tables/nvidia-h100-80gb-hbm3.json")
    exact, low = (table.entries[FORWARD, Plan(name)].time_ms for name in ("fa3:bf16", "triton:fp8-onepass"))
    assert exact is not None
    assert low is not None
    assert low < exact
    other = next(spec for spec, names in LAYERS.items() if "Llama 3.1 70B" in names and not spec.training)
    ran = row("fa3:bf16", 1.0, spec=other).model_copy(update={"environment": table.environment})
    onepass = row("triton:fp8-onepass", 1.9, 0.07, spec=FORWARD)
    for there, name in ((onepass, "ran"), (failed_row("triton:fp8-onepass", "refused", "no", FORWARD), "refused")):
        written(tmp_path / name, [*SWEEP, there])
        *_, here = page(written(tmp_path / name, [ran], gpu="here"))
        (layer,) = (each for each in here if "Llama 3.1 8B" in each[0])
        assert layer[5] == f"expected: fa3:bf16 {exact:.3g} ms"
        assert (layer[6] == f"expected: triton:fp8-onepass {low:.3g} ms") == (name == "ran")
        assert layer[7:] == ["not measured", "not measured"]


def test_a_layer_whose_plans_with_fp8_nobody_looked_at_is_not_counted(tmp_path: Path) -> None:
    summary, _ = page(written(tmp_path, SWEEP[:3]))
    assert summary[1][1:] == ["0", "not measured", "not measured", "0 of 0", "nowhere"]
    summary, _ = page(written(tmp_path, SWEEP))
    assert summary[1][4] == "1 of 1"
