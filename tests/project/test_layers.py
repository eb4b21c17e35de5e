"""Who imports whom: packages and rooms stand on one another in the design's order, and no modules in a circle."""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from places import ROOT

PACKAGES = {"attnbench": "attnbench", "backends": "attnbench.backends", "harness": "attnbench.harness"}
# Above the core: its commands, and what third parties test their kernels with.
ABOVE = ("attnbench.__main__", "attnbench.cli", "attnbench.testing")
# The one name of the core that leads to the harness, where it is asked for.
LAZY = {("attnbench", "attnbench.harness.autotune.run")}
# Each room of the core, and the modules beside them, imports only from those before it.
CORE = (
    "text", "errors", "state", "files", "graph_pools", "problem", "kernels", "tables", "choosing.similarity",
    "choosing.cost_model", "choosing", "dispatch", "api", "guarding", "freezing", "integrations",
)  # fmt: skip

Sources = list[tuple[str, Path, str]]


def modules() -> Iterator[tuple[str, Path]]:
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


MODULES = dict(modules())
SOURCES: Sources = [(name, path, path.read_text(encoding="utf-8")) for name, path in MODULES.items()]
FOLDERS = {name for name, path in MODULES.items() if path.name == "__init__.py"}


@cache
def imported(name: str, path: Path, source: str) -> set[str]:
    """All modules of attnbench that it imports anywhere, in functions and for types too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            inner = {f"{module}.{each.name}" for each in node.names}
            found |= inner & MODULES.keys() or {module}
    return {each for each in found if each.startswith("attnbench") and each != "attnbench"}


def rank(name: str) -> int | None:
    """The place of a module of the core in ``CORE``; None for what stands above it."""
    return next((i for i, each in enumerate(CORE) if f"{name}.".startswith(f"attnbench.{each}.")), None)


def above(name: str, other: str) -> bool:
    """Whether the other module is one that this may not import."""
    if name.startswith(ABOVE):
        return other.startswith("attnbench.backends")
    if other.startswith("attnbench.cli"):
        return True
    if name.startswith("attnbench.backends"):
        return other.startswith("attnbench.harness")
    if other.startswith("attnbench.backends"):
        return True
    if name.startswith("attnbench.harness"):
        return False
    own, its = rank(name), rank(other)
    return (name != "attnbench" and (own is None or its is None or its > own)) or other.startswith("attnbench.harness")


def wrong(name: str, path: Path, source: str) -> list[str]:
    return [each for each in sorted(imported(name, path, source)) if above(name, each) and (name, each) not in LAZY]


def test_no_module_imports_one_above_it() -> None:
    assert len(SOURCES) > 300
    assert {name: found for name, path, source in SOURCES if (found := wrong(name, path, source))} == {}


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("attnbench.api", "from attnbench.harness.cases.case import Case"),
        ("attnbench.integrations.sdpa", "def f():\n    from ..harness.cases import case"),
        ("attnbench.harness.cases.case", "import attnbench.cli.sweep"),
        ("attnbench.harness.cases.case", "from attnbench.backends.reference import BACKEND"),
        ("attnbench.backends.reference", "from attnbench.harness.measure import timing"),
        ("attnbench.cli.sweep", "from ..backends import reference"),
        ("attnbench.kernels.plan", "from ..choosing.choice import Choice"),
        ("attnbench.choosing.cost_model.fit", "if TYPE_CHECKING:\n    from ..ranking import rank"),
        ("attnbench.errors", "from .guarding.breach import Breach"),
        ("attnbench.graph_pools", "from .problem import spec"),
    ],
)
def test_an_import_that_goes_up_is_found(name: str, source: str) -> None:
    assert wrong(name, Path("module.py"), source)


def order(sources: Iterable[tuple[str, Path, str]], place: Callable[[str], str]) -> list[str]:
    """The places of all modules, those that import nothing first; raises CycleError."""
    found: dict[str, set[str]] = {}
    for name, path, source in sources:
        if name != "attnbench":  # which names what each name of the package is loaded from
            found.setdefault(place(name), set()).update(
                place(each) for each in imported(name, path, source) & MODULES.keys() if place(each) != place(name)
            )
    return list(TopologicalSorter(found).static_order())


def room(name: str) -> str:
    """The folder of a package that a module lies in, without folders inside: ``attnbench.harness.compare``."""
    folder = name if name in FOLDERS else name.rpartition(".")[0]
    depth = 3 if name.startswith(("attnbench.harness.", "attnbench.backends.")) else 2
    if name.startswith("attnbench.harness.training."):
        depth = 4
    return ".".join(folder.split(".")[:depth]) if folder != "attnbench" else name


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert len(order(SOURCES, str)) == len(MODULES) - 1
    upwards = ("attnbench.errors", Path("errors.py"), "from .problem.mask import Mask")
    with pytest.raises(CycleError):
        order([*SOURCES, upwards], str)


@pytest.mark.parametrize("package", ["attnbench.harness", "attnbench.backends", "attnbench.backends.triton"])
def test_rooms_stand_on_one_another(package: str) -> None:
    def place(name: str) -> str:
        return room(name) if package != "attnbench.backends.triton" else ".".join(name.split(".")[:4])

    sources = [each for each in SOURCES if each[0].startswith(f"{package}.") and each[0] not in FOLDERS]
    found = order(sources, place)
    assert len({each for each in found if each.startswith(package)}) >= 5


def test_no_folder_has_more_than_sixteen_entries() -> None:
    for top in (*PACKAGES, "tests", "docs"):
        for folder in [ROOT / top, *(each for each in (ROOT / top).rglob("*/") if each.is_dir())]:
            entries = [each for each in folder.iterdir() if not each.name.startswith("__") and each.name != "py.typed"]
            assert len(entries) <= 16, folder
