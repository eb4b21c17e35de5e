"""What is installed: the wheel, an editable install, and the commands that the README promises."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from configparser import ConfigParser
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from places import ROOT

from attnbench import __version__

PACKAGES = {"attnbench": "attnbench", "backends": "attnbench/backends", "harness": "attnbench/harness"}
README = (ROOT / "README.md").read_text(encoding="utf-8")


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr


def output(*command: object, cwd: Path, **environment: str) -> str:
    run = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env={**os.environ, **environment},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build in, so that nothing is left behind in the real one."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / file, copy)
    return copy


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """The files of the repository, those that nobody has committed yet included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("needs a checkout: git says which files are the repository's")
    return {name for name in found.stdout.splitlines() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, checkout)
    (built,) = folder.glob("attnbench-*.whl")
    return built


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel: Path) -> None:
    sources = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in PACKAGES.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    tables = {f"attnbench/tables/{path.name}" for path in (ROOT / "attnbench" / "tables").iterdir() if path.is_file()}
    assert "attnbench/tables/nvidia-h200.json" in tables
    page = {f"attnbench/harness/report/page/page.{suffix}" for suffix in ("html", "css", "js")}
    assert packed == sources | tables | page | {"attnbench/py.typed", "attnbench/harness/cases/models.yaml"}


def test_the_source_archive_is_the_repository(checkout: Path, tracked: set[str], tmp_path: Path) -> None:
    """So that what it holds can be built and tested, and nothing that lies about is published."""
    tree = tmp_path / "tree"
    shutil.copytree(checkout, tree)
    for name in {path.partition("/")[0] for path in tracked}:
        if not (tree / name).exists():
            (tree / name).symlink_to(ROOT / name)
    code = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"
    archive = tmp_path / output(sys.executable, "-c", code, tmp_path, cwd=tree).splitlines()[-1]
    with tarfile.open(archive) as content:
        names = {member.name.partition("/")[2] for member in content if not member.isdir()}
    made = {name for name in names if name.startswith("attnbench.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - made == tracked


def test_the_version_stands_in_one_place_and_others_follow_it() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert f'version = "{__version__}"' not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert headings[0] in ("Unreleased", __version__)
    assert released[:1] in ([], [__version__])


def test_the_wheel_carries_licence_and_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (licence,) = (name for name in names if name.endswith(".dist-info/licenses/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        points = ConfigParser()
        points.read_string(archive.read(licence.replace("licenses/LICENSE", "entry_points.txt")).decode())
    assert points["console_scripts"]["attnbench"] == "attnbench.cli:main"
    assert {"reference", "emulated", "sdpa-flash", "flex"} <= set(points["attnbench.backends"])
    for point in points["attnbench.backends"].values():
        module = point.partition(":")[0].replace(".", "/")
        assert {f"{module}.py", f"{module}/__init__.py"} & set(names)


def test_the_wheel_works_and_finds_its_tables(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "from dataclasses import replace; from attnbench.tables.table import Table;"
        "from attnbench.tables.shipped import shipped_table_path as find; import sys, attnbench.harness as harness;"
        "here = Table.load(sys.argv[1]).environment; path = find(here);"
        "print(harness.__file__, path, len(Table.load(path).entries) > 0,"
        "      find(replace(here, device_name='NVIDIA H100')))"
    )
    site, table = tmp_path / "site" / "attnbench", ROOT / "attnbench" / "tables" / "nvidia-h200.json"
    printed = output(sys.executable, "-c", code, table, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert printed.split() == [str(site / "harness" / "__init__.py"), str(site / "tables" / table.name), "True", "None"]
    printed = output(sys.executable, "-m", "attnbench", "--version", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert printed.startswith("attnbench ")


def test_an_editable_install_follows_the_checkout(checkout: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    pip(
        "install", "--no-deps", "--no-build-isolation", "--ignore-installed", "--no-warn-script-location",
        "--prefix", tmp_path / "venv", "--editable", checkout,
    )  # fmt: skip
    (checkout / "harness" / "added_later.py").write_text("ANSWER = 42\n")
    try:
        code = "import attnbench.backends, attnbench.harness.added_later as new; print(new.ANSWER, new.__file__)"
        printed = output(tmp_path / "venv" / "bin" / "python", "-c", code, cwd=tmp_path)
    finally:
        (checkout / "harness" / "added_later.py").unlink()
    assert printed == f"42 {checkout / 'harness' / 'added_later.py'}\n"


def test_ci_runs_the_readme_s_test_command_and_ends_with_its_code(tmp_path: Path) -> None:
    (command,) = [line for line in README.splitlines() if line.endswith("&& tox")]
    assert "pip install -c constraints.txt tox" in command
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "README.md").write_text("```sh\necho installed && tox\n```\n")
    (tmp_path / "tox").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "tox").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    run = subprocess.run(["bash", tmp_path / ".ci/run"], env=environ, stdout=subprocess.PIPE, text=True, check=False)
    assert (run.returncode, run.stdout.splitlines()) == (3, ["+ echo installed && tox", "installed"])


def test_the_readme_s_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert "plan" in output(sys.executable, "-c", example, cwd=tmp_path)


def test_every_direct_dependency_is_pinned() -> None:
    files = ROOT / "constraints.txt", ROOT / "tests" / "peers" / "constraints.txt"
    lines = [line for file in files for line in file.read_text().splitlines()]
    pinned = {line.partition("==")[0] for line in lines if not line.startswith("#")}
    needed = [Requirement(each) for each in requires("attnbench") or ()]
    wanted = {
        each.name.lower()
        for each in needed
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("test", "dev"))
    } - {"attnbench"}
    tox = ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    lines = [line for section in tox.sections() for line in tox.get(section, "deps", fallback="").splitlines() if line]
    wanted |= {each.name.lower() for each in map(Requirement, lines) if "==" not in str(each.specifier)}
    assert {"torch", "pytest", "tox", "twine"} <= wanted
    assert wanted <= pinned


# What only those who use it need: vendors' kernels, what integrates with others' libraries, models to train, pytest.
OPTIONAL = {
    "_pytest", "diffusers", "pytest", "pytest_benchmark", "timm", "torchao", "transformer_engine", "transformers",
    "triton",
}  # fmt: skip


def test_what_the_commands_import_comes_with_a_plain_installation() -> None:
    """Of a README that installs no extra: every package that is imported anywhere outside of the backends."""
    imported: dict[str, Path] = {}
    for path in (path for folder in ("attnbench", "harness") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {name.name.partition(".")[0]: path for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported[(node.module or "").partition(".")[0]] = path
    distributions = packages_distributions()
    plain = [Requirement(each) for each in requires("attnbench") or ()]
    needed = {
        canonicalize_name(each.name) for each in plain if each.marker is None or each.marker.evaluate({"extra": ""})
    }
    # Jinja2 needs and brings MarkupSafe, typer brings click.
    ours = needed | {"attnbench", "markupsafe", "click"}
    others = {
        name: str(path.relative_to(ROOT))
        for name, path in imported.items()
        if name not in sys.stdlib_module_names and name not in OPTIONAL
        and not ours & {canonicalize_name(each) for each in distributions.get(name, [name])}
    }  # fmt: skip
    assert others == {}
