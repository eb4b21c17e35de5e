"""docs/how-to/ci.md: its workflows have the forms that GitHub and GitLab take, and their commands and options exist."""

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from places import ROOT
from shell_commands import command_of, commands

from attnbench.harness.cases.file import read_cases
from attnbench.harness.compare.pytest_plugin.plugin import pytest_addoption
from attnbench.harness.compare.terms import read_thresholds

PAGE = (ROOT / "docs" / "how-to/ci.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def block(language: str, contains: str) -> str:
    """The one block of the page in that language with that in it."""
    (found,) = [text for kind, text in BLOCKS if kind == language and contains in text]
    return found


def test_the_cases_on_the_page_are_cases(tmp_path: Path) -> None:
    path = tmp_path / "attention.yaml"
    path.write_text(block("yaml", "# ci/attention.yaml"))
    assert len(read_cases(path, "fp8")) == 4


def test_the_limit_on_the_page_is_one(tmp_path: Path) -> None:
    (line,) = re.findall(r"such\sas\s`(.*?)`\sin\s`ci/limits\.yaml`", PAGE)
    path = tmp_path / "limits.yaml"
    path.write_text(line)
    assert [(each.pattern, each.time) for each in read_thresholds(path)] == [("fa3:fp8", 0.12)]


GITHUB = yaml.safe_load(block("yaml", "# .github/workflows/attention.yml"))


GITLAB = yaml.safe_load(block("yaml", "# .gitlab-ci.yml"))


SCRIPTS = {
    "workflow": (
        GITHUB["env"],
        [step["run"] for job in GITHUB["jobs"].values() for step in job["steps"] if "run" in step],
    ),
    "pipeline": (
        GITLAB[".attention"]["variables"],
        [line for job in GITLAB.values() for part in ("before_script", "script") for line in job.get(part, ())],
    ),
}


@pytest.mark.parametrize(("variables", "scripts"), SCRIPTS.values(), ids=SCRIPTS)
def test_scripts_are_shell_and_their_commands_parse(
    variables: dict[str, str], scripts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["bash", "-n"], input="\n".join(scripts), text=True, check=True)
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "base").mkdir()
    for file in ("base.jsonl", ".venv-before/bin/python"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    called = [words for script in scripts for words in commands(os.path.expandvars(script))]
    assert [words[0] for words in called] == ["sweep", "gate"]
    for words in called:
        command, rest = command_of(words)
        command.make_context(command.name, rest)  # which parses, checks and runs nothing


def test_the_options_of_the_plug_in_exist() -> None:
    known: list[Any] = []
    group = SimpleNamespace(addoption=lambda name, **_: known.append(name))
    pytest_addoption(SimpleNamespace(getgroup=lambda *_: group))  # type: ignore[arg-type]
    assert set(re.findall(r"--attention-[a-z-]+", PAGE)) == set(known)
