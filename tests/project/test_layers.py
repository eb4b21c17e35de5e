"""Who imports whom, as the design has it: kernels and the harness stand on the core, and the command on top of all."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from places import ROOT

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
        ("attnbench.harness.cases.case", "from attnbench.backends.flex.backend import BACKEND"),
        ("attnbench.backends.flex.backend", "from attnbench.harness.measure import timing"),
        ("attnbench.cli.sweep", "from ..backends import flex"),
    ],
)
def test_an_import_that_goes_up_is_found(name: str, source: str) -> None:
    assert wrong(name, Path("module.py"), source)


def room(name: str) -> str:
    """The folder of the harness that a module lies in: ``attnbench.harness.compare.gate``."""
    return max((each for each in ROOMS if f"{name}.".startswith(f"{each}.")), key=len, default="attnbench.harness")


ROOMS = {
    name.removesuffix(".__init__") for name, path in modules() if path.name == "__init__.py" and ".harness." in name
}


def neighbours(sources: Iterator[tuple[str, Path, str]]) -> dict[str, set[str]]:
    """Which rooms each room of the harness imports from."""
    found: dict[str, set[str]] = {}
    for name, path, source in sources:
        known = {each for each in imported(name, path, source) if each.startswith("attnbench.harness")}
        found.setdefault(room(name), set()).update({room(each) for each in known} - {room(name)})
    return found


def test_rooms_of_the_harness_stand_on_one_another() -> None:
    files = [(name, path) for name, path in modules() if name.startswith("attnbench.harness")]
    sources = [(name, path, path.read_text(encoding="utf-8")) for name, path in files]
    order = list(TopologicalSorter(neighbours(iter(sources))).static_order())  # raises CycleError
    assert len(order) >= 10
    assert order.index("attnbench.harness.measure") < order.index("attnbench.harness.compare.gate")
    upwards = ("attnbench.harness.measure.timing", Path("timing.py"), "from ..compare.gate import run")
    with pytest.raises(CycleError):
        TopologicalSorter(neighbours(iter([*sources, upwards]))).prepare()
