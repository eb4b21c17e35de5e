""".github: the workflow runs what tox runs here, and the issue forms are forms."""

import re
from configparser import ConfigParser
from typing import Any

import pytest
import yaml
from places import ROOT
from setuptools.config.pyprojecttoml import read_configuration

TOX = ConfigParser(interpolation=None)
TOX.read(ROOT / "tox.ini", encoding="utf-8")
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))


def runs(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def environments(job: dict[str, Any]) -> list[str]:
    return [name for line in runs(job) for name in re.findall(r"^tox -e (\w+)$", line)]


JOBS = {name: job for name, job in WORKFLOW["jobs"].items() if environments(job)}


def test_every_environment_of_tox_that_runs_by_default_is_a_job() -> None:
    default = set(re.split(r"[,\s]+", TOX["tox"]["env_list"].strip()))
    assert default | {"browser", "package"} <= {name for job in JOBS.values() for name in environments(job)}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_runs_one_environment_of_tox_with_the_tested_versions(name: str) -> None:
    assert runs(JOBS[name]) == ["pip install -c constraints.txt tox", f"tox -e {name}"]
    assert TOX.has_section(f"testenv:{name}")


def test_the_pythons_that_are_tested_are_those_of_the_metadata() -> None:
    project = read_configuration(ROOT / "pyproject.toml", expand=False)["project"]
    found = [python for each in project["classifiers"] for python in re.findall(r"Python :: (3\.\d+)$", each)]
    assert WORKFLOW["jobs"]["tests"]["strategy"]["matrix"]["python"] == found
    assert project["requires-python"] == f">={found[0]}"


def test_nothing_is_published_before_the_checks() -> None:
    jobs = WORKFLOW["jobs"]
    for name, condition in (("site", "refs/heads/main"), ("release", "refs/tags/v")):
        assert condition in jobs[name]["if"]
        assert {"lint", "tests", "docs"} <= set(jobs[name]["needs"])
    assert set(jobs["release"]["needs"]) == JOBS.keys()
    assert WORKFLOW["permissions"] == {"contents": "read"}
