"""Who imports whom, as the design has it: kernels and the harness stand on the core, and the command on top of all."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"attnbench": "attnbench", "backends": "attnbench.backends", "harness": "attnbench.harness"}
# Above the core: its commands, and what third parties test their kernels with.
ABOVE = ("attnbench.__main__", "attnbench.cli", "attnbench.testing")
# The one name of the core that leads to the harness, where it is asked for.
LAZY = {("attnbench", "attnbench.harness.autotune.run")}


def modules() -> Iterator[tuple[str, Path]]:
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


def imported(name: str, path: Path, source: str) -> set[str]:
    """All modules of attnbench that it imports anywhere, functions included."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{each.name}" for each in node.names)}
    return {each for each in found if each.startswith("attnbench")}


def forbidden(name: str) -> tuple[str, ...]:
    if name.startswith(ABOVE):
        return ("attnbench.backends",)
    if name.startswith("attnbench.backends"):
        return ("attnbench.cli", "attnbench.harness")
    if name.startswith("attnbench.harness"):
        return ("attnbench.cli", "attnbench.backends")
    return ("attnbench.cli", "attnbench.harness", "attnbench.backends")


def wrong(name: str, path: Path, source: str) -> list[str]:
    allowed = tuple(lazy for who, lazy in LAZY if who == name)
    return [
        each
        for each in sorted(imported(name, path, source))
        if each.startswith(forbidden(name)) and not each.startswith(allowed)
    ]


@pytest.mark.parametrize(("name", "path"), [pytest.param(*each, id=each[0]) for each in modules()])
def test_no_module_imports_one_above_it(name: str, path: Path) -> None:
    assert not wrong(name, path, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("attnbench.api", "from attnbench.harness.cases.case import Case"),
        ("attnbench.integrations.sdpa", "def f():\n    from ..harness import cases"),
        ("attnbench.harness.cases.case", "import attnbench.cli.sweep"),
        ("attnbench.harness.cases.case", "from attnbench.backends.flex import BACKEND"),
        ("attnbench.backends.flex", "from attnbench.harness.measure import timing"),
        ("attnbench.cli.sweep", "from ..backends import flex"),
    ],
)
def test_an_import_that_goes_up_is_found(name: str, source: str) -> None:
    assert wrong(name, Path("module.py"), source)
