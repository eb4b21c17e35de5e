"""The pages are true of the code: links lead somewhere, commands parse, examples import what exists."""

import ast
import importlib
import logging
import re
import textwrap
from collections.abc import Iterator
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import hooks
import pytest
from figures import page_of
from markdown_it import MarkdownIt
from markdown_it.token import Token
from places import ROOT
from shell_commands import command_of, commands

from attnbench.choosing.candidate import Basis
from attnbench.harness.cases.inputs import FAMILIES
from attnbench.harness.results.records import STATUSES

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
OURS = {"attnbench", "torch"}  # of the modules that examples import, those that are always there
EXAMPLE = ROOT / "examples/attnbench-backend-example"
COMMAND_SPAN = re.compile(r"attnbench (?!\.)[a-z].*", re.DOTALL)
NAME_SPAN = re.compile(r"(attnbench(?:\.\w+)+)(?:\(.*\))?", re.DOTALL)


def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def inline(page: Path) -> Iterator[Token]:
    for token in tokens(page):
        yield from token.children or ()


def links(page: Path) -> list[str]:
    return [str(each.attrGet("href")) for each in inline(page) if each.type == "link_open"]


def spans(page: Path) -> list[str]:
    return [each.content for each in inline(page) if each.type == "code_inline"]


def fences(page: Path, *languages: str) -> list[str]:
    return [each.content for each in tokens(page) if each.type == "fence" and each.info.strip() in languages]


def anchors(page: Path) -> set[str]:
    """The ids that code hosts give to headings; mkdocs, whose rule is a little different, checks its own."""
    found: dict[str, int] = {}
    for before, token in pairwise(tokens(page)):
        if before.type == "heading_open":
            text = "".join(each.content for each in token.children or () if each.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found[slug] = found.get(slug, -1) + 1
    return {slug if number == 0 else f"{slug}-{number}" for slug, most in found.items() for number in range(most + 1)}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_to_what_is_there(page: Path) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            assert link.startswith("https://"), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), f"{link}: the headings are {sorted(anchors(target))}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_in_a_shell_block_parses(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (each for script in fences(page, "sh", "bash") for each in commands(script)):
        command, rest = command_of(words)
        if not words or set(rest) & {"--help", "--version"}:
            continue
        for word in rest:  # files that a command reads have to be there
            place = tmp_path / word
            if not word.startswith("-") and place.is_relative_to(tmp_path) and ".." not in word:
                is_file = place.suffix or place.parent.name == "bin"
                (place.parent if is_file else place).mkdir(parents=True, exist_ok=True)
                if is_file and not place.exists():
                    place.touch()
        try:
            command.make_context(command.name, rest)  # which parses, checks and runs nothing
        except Exception as error:
            pytest.fail(f"attnbench {' '.join(words)}: {getattr(error, 'message', error)}")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_in_a_sentence_exists_with_its_options(page: Path) -> None:
    there = page.read_text(encoding="utf-8")
    for span in spans(page):
        if not COMMAND_SPAN.fullmatch(span) or f"`{span}` does not exist" in there:
            continue
        words = [word for word in span.replace("=", " ").split()[1:] if word != "..."]
        if not re.fullmatch("[a-z-]+", words[0]):
            continue
        command, rest = command_of(words)
        known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"--help"}
        assert {word for word in rest if word.startswith("-")} <= known, span


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_name_of_ours_in_a_sentence_exists(page: Path) -> None:
    groups = {group for group in entry_points().groups if group.startswith("attnbench.")}
    for span in spans(page):
        found = NAME_SPAN.fullmatch(span)
        if found and found[1] not in groups:
            assert resolved(found[1]) is not None, span


def resolved(name: str) -> object:
    """What a dotted name stands for; ImportError or AttributeError where it is nothing."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            value = getattr(value, part)
        return value
    raise ImportError(name)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_example_is_python_and_imports_what_exists(page: Path) -> None:
    for example in fences(page, "python", "py"):
        for node in ast.walk(ast.parse(textwrap.dedent(example))):
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{each.name}" for each in node.names]
            else:
                continue
            for name in names:
                if name.partition(".")[0] in OURS:
                    assert resolved(name) is not None


def test_what_is_quoted_of_the_example_stands_there() -> None:
    sources = [path.read_text(encoding="utf-8") for path in EXAMPLE.iterdir() if path.is_file()]
    page = ROOT / "docs/how-to/adding-a-kernel.md"
    quoted = [block for block in fences(page, "python", "toml") if "check_backend" not in block]
    assert len(quoted) >= 5
    for block in quoted:
        assert any(block in source for source in sources), block


def test_every_backend_of_ours_has_a_page_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs/backends").glob("*.md")}
    ours = {
        point.name for point in entry_points(group="attnbench.backends") if point.value.startswith("attnbench.backends")
    }
    assert {"triton", "fa3"} <= ours
    assert {str(page_of(name)).partition("#")[0] for name in ours} == {f"backends/{page}" for page in pages}
    assert [page for page in sorted(pages) if f"backends/{page}" not in navigation] == []


def test_the_pages_name_every_status_family_and_basis() -> None:
    def first_cells(page: str) -> list[str]:
        return re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)

    assert first_cells("concepts.md")[: len(STATUSES)] == list(STATUSES)
    assert first_cells("budget.md")[: len(FAMILIES)] == list(FAMILIES)
    assert set(get_args(Basis)) <= set(spans(ROOT / "docs/concepts.md"))


def moved(markdown: str, page: str = "a.md", repository: str = "") -> str:
    config = SimpleNamespace(extra={"repository": repository, "branch": "main"})
    place = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    return str(hooks.on_page_markdown(markdown, page=place, config=config, files=None))


def test_the_site_names_files_of_a_repository_that_nobody_can_open() -> None:
    assert moved("See [the rows](../results/nvidia-h200/facts).") == "See the rows (`results/nvidia-h200/facts`)."
    assert moved("[tiles.py](../../backends/triton/forward/tiles.py)", "b/a.md") == "`backends/triton/forward/tiles.py`"
    assert moved("[README](../README.md#use-it)") == "`README.md`"


def test_the_site_leads_to_the_repository_where_it_is_known() -> None:
    for place, there in (
        ("../README.md#use-it", "blob/main/README.md#use-it"),
        ("../results/nvidia-h200/facts", "tree/main/results/nvidia-h200/facts"),
    ):
        expected = f"[x](https://host/us/it/{there})"
        assert moved(f"[x]({place})", repository="https://host/us/it/") == expected


def test_the_site_complains_of_files_that_are_not_there(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        moved("[a](../nowhere.py)")
        moved("[a](../../outside.md)")
    assert len(caplog.records) == 2
