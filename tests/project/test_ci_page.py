"""docs/ci.md: its workflows are ones that GitHub and GitLab take, and every step of them runs, here on any device.

Stand-ins: for the actions (``uses:``), which copy files as the real ones do; for the server of GitLab's packages; and
for ``python3 -m venv`` with its ``pip``, whose environment is the one of these tests.  All else that a shell
is given is run as it stands, with the limits of this machine behind those of the page.
"""

import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from pages import command_of, commands
from patience import PATIENCE
from places import ROOT

from attnbench.harness.cases.file import read_cases
from attnbench.harness.compare.terms import read_thresholds
from attnbench.harness.results.records import read_measurements

PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TINY = "- {batch: 1, heads: 1, seqlen_q: 32, head_dim: 16}\n"
# In the place of those of the page, which need a GPU, and a limit that any machine can tell in a moment.
BACKENDS, LENIENT = "sdpa-math", "--fail-on 900%"
TOKEN = "a token of the job"

# `python3 -m venv FOLDER`, and a pip that asks for the file with the requirements.
VENV = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" && cp {stand_ins}/* "$3/bin/"; else exec {python} "$@"; fi
"""
STAND_INS = {
    "python": 'echo >> "$0.used"; exec {python} "$@"',
    "attnbench": 'exec {python} -m attnbench "$@"',
    "pytest": 'exec {python} -m pytest -p no:cacheprovider "$@"',
    "pip": '[ "$1 $2" = "install -r" ] && [ -s "$3" ]',
}


def block(language: str, contains: str) -> str:
    """The one block of the page in that language with that in it."""
    (found,) = [text for kind, text in BLOCKS if kind == language and contains in text]
    return found


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("{python}", shlex.quote(sys.executable)))
    path.chmod(0o755)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the shell of a runner finds."""
    folder = tmp_path_factory.mktemp("machine")
    for name, text in STAND_INS.items():
        script(folder / "stand-ins" / name, f"#!/bin/sh\n{text}\n")
    script(folder / "bin" / "python3", VENV.replace("{stand_ins}", shlex.quote(str(folder / "stand-ins"))))
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    # Without what says that xdist is on, where pytest-benchmark measures nothing.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return {**kept, "PATH": path, "STAND_INS": str(folder / "stand-ins")}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's repository, with cases that any machine measures in a moment."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "ci").mkdir()
    (folder / "ci" / "attention.yaml").write_text(TINY)
    (folder / "requirements.txt").write_text("attnbench\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], cwd=folder, check=True)
    return folder


def shell(text: str, folder: Path, env: Mapping[str, str], options: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "--noprofile", "--norc", options, "-c", text]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)


def small(variables: Mapping[str, str]) -> dict[str, str]:
    """A workflow's variables for this machine: of an option that is given twice the last one counts."""
    return {**variables, "BACKENDS": BACKENDS, "GATE": f"{variables['GATE']} {LENIENT}"}


def old_python_used(folder: Path, commands: str) -> bool:
    """Whether the old environment's Python, which the gate is given, has run."""
    (python,) = re.findall(r"-base-python (\S+)", commands)
    return (folder / f"{python}.used").is_file()


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
INPUTS = {
    "actions/checkout@v6": {"ref", "path"},
    "actions/cache/save@v5": {"path", "key"},
    "actions/cache/restore@v5": {"path", "key", "restore-keys", "fail-on-cache-miss"},
    "actions/upload-artifact@v6": {"name", "path"},
}


def test_the_workflow_has_the_form_of_one() -> None:
    assert GITHUB.keys() == {"name", True, "env", "jobs"}  # YAML 1.1 reads `on` as true, GitHub does not
    assert GITHUB[True].keys() == {"push", "pull_request", "schedule"}
    for name, job in GITHUB["jobs"].items():
        assert job.keys() == {"if", "runs-on", "timeout-minutes", "steps"}
        assert "self-hosted" in job["runs-on"]
        for step in job["steps"]:
            if "uses" in step:
                assert step.keys() <= {"uses", "with", "if"}
                assert step.get("with", {}).keys() <= INPUTS[step["uses"]]
            else:
                assert step.keys() == {"name", "run"}
                assert isinstance(step["run"], str)
        by_a_pull_request = "github.event_name == 'pull_request'" in job["if"]
        assert by_a_pull_request == (name == "gate")
    assert "head.repo.full_name == github.repository" in GITHUB["jobs"]["gate"]["if"]


class GitHub:
    """One run of one job after the other, as a runner makes them."""

    def __init__(self, folder: Path, repository: Path, env: Mapping[str, str]) -> None:
        self.folder, self.repository, self.cache = folder, repository, folder / "cache"
        self.files = {name: folder / name for name in ("GITHUB_PATH", "GITHUB_ENV", "GITHUB_STEP_SUMMARY")}
        self.env = {**env, **small(GITHUB["env"]), **{name: str(path) for name, path in self.files.items()}}
        self.facts = {"github.base_ref": "main", "github.run_id": "1", "github.run_attempt": "1"}

    def steps(self, name: str) -> str:
        """All that a job's shells are given."""
        return "\n".join(step.get("run", "") for step in GITHUB["jobs"][name]["steps"])

    def start(self, name: str) -> Iterator[tuple[dict[str, Any], bool]]:
        """Each step once it has run, and whether it went well; those after a failure run if they always do."""
        self.workspace = self.folder / f"workspace-{name}"
        self.workspace.mkdir()
        for path in self.files.values():
            path.write_text("")
        failed = False
        for step in GITHUB["jobs"][name]["steps"]:
            if failed and step.get("if") != "always()":
                continue
            good = self._use(step) if "uses" in step else self._run(step["run"])
            failed = failed or not good
            yield step, good

    @property
    def step_env(self) -> dict[str, str]:
        """What the steps before have left to the next one."""
        env = {**self.env, **dict(line.split("=", 1) for line in self.files["GITHUB_ENV"].read_text().splitlines())}
        return env | {"PATH": os.pathsep.join([*self.files["GITHUB_PATH"].read_text().splitlines(), env["PATH"]])}

    def _run(self, text: str) -> bool:
        done = shell(text, self.workspace, self.step_env, "-e")
        self.said = done.stdout + done.stderr
        return done.returncode == 0

    def _use(self, step: Mapping[str, Any]) -> bool:
        given = {name: self._filled(str(value)) for name, value in step.get("with", {}).items()}
        places = [self.workspace / line for line in given.get("path", ".").split()]
        action = step["uses"].partition("@")[0]
        if action == "actions/checkout":
            shutil.copytree(self.repository, places[0], dirs_exist_ok=True)
        elif action == "actions/cache/save":
            shutil.copytree(places[0], self.cache / given["key"])
        elif action == "actions/cache/restore":
            found = [path for path in self.cache.glob("*") if path.name.startswith(given["restore-keys"])]
            if found:
                shutil.copytree(found[-1], places[0])
            return bool(found)
        return True

    def _filled(self, text: str) -> str:
        return re.sub(r"\$\{\{ ([\w.]+) \}\}", lambda found: self.facts[found[1]], text)


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory, repository: Path, machine: dict[str, str]) -> GitHub:
    """A runner that has run both jobs, the base first."""
    runner = GitHub(tmp_path_factory.mktemp("github"), repository, machine)
    for name in ("base", "gate"):
        for step, good in runner.start(name):
            assert good, (step, runner.said)
    return runner


@pytest.mark.exhaustive
def test_the_steps_of_the_workflow_run(gated: GitHub) -> None:
    """The verdict is the job's summary, what was measured its artifact; the old code was measured as well."""
    summary = gated.files["GITHUB_STEP_SUMMARY"].read_text()
    assert "clean: nothing became slower" in summary
    assert summary == (gated.workspace / "gate" / "gate.md").read_text()
    assert (gated.folder / "workspace-base" / ".cache").is_dir()
    assert old_python_used(gated.workspace, gated.steps("gate"))
    upload = GITHUB["jobs"]["gate"]["steps"][-1]
    base, gate = (gated.workspace / path for path in upload["with"]["path"].split())
    (row,) = read_measurements(gate / "measurements.jsonl")
    assert row.key in {each.key for each in read_measurements(base / "measurements.jsonl")}


def test_without_a_base_the_job_fails(tmp_path: Path, repository: Path, machine: dict[str, str]) -> None:
    ran = list(GitHub(tmp_path, repository, machine).start("gate"))
    assert [good for _, good in ran] == [True, True, False, True]
    assert "upload" in ran[-1][0]["uses"]


GITLAB = yaml.safe_load(block("yaml", "# .gitlab-ci.yml"))
JOB = {"extends", "tags", "resource_group", "timeout", "variables", "before_script", "rules", "script", "artifacts"}


def test_the_pipeline_has_the_form_of_one() -> None:
    assert GITLAB.keys() == {".attention", "attention-base", "attention-gate"}
    for job in GITLAB.values():
        assert job.keys() <= JOB
        for line in (*job.get("before_script", ()), *job.get("script", ())):
            assert isinstance(line, str), "a colon makes a mapping of a line that is not in quotes"
    assert GITLAB[".attention"]["resource_group"]
    for name in ("attention-base", "attention-gate"):
        assert GITLAB[name]["extends"] == ".attention"
    assert GITLAB["attention-gate"]["artifacts"]["when"] == "always"


@pytest.mark.parametrize(
    ("variables", "lines"),
    [
        (GITHUB["env"], [step.get("run", "") for job in GITHUB["jobs"].values() for step in job["steps"]]),
        (GITLAB[".attention"]["variables"], [line for job in GITLAB.values() for line in job.get("script", ())]),
    ],
    ids=["workflow", "pipeline"],
)
def test_the_commands_of_attnbench_parse(
    variables: dict[str, str], lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "base").mkdir()
    for file in ("base.jsonl", ".venv-before/bin/python"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    called = [words for line in lines for words in commands(os.path.expandvars(line))]
    assert [words[0] for words in called] == ["sweep", "gate"]
    for words in called:
        command, rest = command_of(words)
        command.make_context(command.name, rest)  # which parses, checks and runs nothing


class Packages(http.server.BaseHTTPRequestHandler):
    """GitLab's generic packages, as far as a job's own token opens them."""

    kept: dict[str, bytes]

    def do_PUT(self) -> None:
        self.kept[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(b"{}")

    def do_GET(self) -> None:
        self._answer(self.kept.get(self.path))

    def _answer(self, body: bytes | None) -> None:
        allowed = self.headers["JOB-TOKEN"] == TOKEN
        self.send_response(200 if allowed and body is not None else 404)
        self.end_headers()
        if allowed and body is not None:
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def packages() -> Iterator[tuple[str, dict[str, bytes]]]:
    kept: dict[str, bytes] = {}
    handler = type("Handler", (Packages,), {"kept": kept})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/api/v4", kept
        server.shutdown()


def gitlab(name: str, repository: Path, folder: Path, env: Mapping[str, str]) -> int:
    """The exit code of a job: every line in one shell, up to the first that fails."""
    subprocess.run(["git", "clone", "-q", str(repository), str(folder)], check=True)
    job = {**GITLAB[".attention"], **GITLAB[name]}
    variables = [f'export {key}="{value}"' for key, value in small(job["variables"]).items()]
    done = shell("\n".join(["set -eo pipefail", *variables, *job["before_script"], *job["script"]]), folder, env, "-e")
    print(done.stdout, done.stderr)
    assert all((folder / path).exists() for path in job["artifacts"]["paths"])
    return done.returncode


@pytest.mark.exhaustive
def test_the_scripts_of_the_pipeline_run(
    tmp_path: Path, repository: Path, machine: dict[str, str], packages: tuple[str, dict[str, bytes]]
) -> None:
    url, kept = packages
    project = {"CI_API_V4_URL": url, "CI_PROJECT_ID": "7", "CI_JOB_TOKEN": TOKEN}
    env = {**machine, **project, "CI_MERGE_REQUEST_TARGET_BRANCH_NAME": "main", "no_proxy": "127.0.0.1"}
    assert gitlab("attention-base", repository, tmp_path / "base", env) == 0
    ((place, uploaded),) = kept.items()
    assert uploaded == (tmp_path / "base" / "base" / "measurements.jsonl").read_bytes()
    row = next(row for row in map(json.loads, uploaded.splitlines()) if row["status"] == "ok")
    row["correctness"]["error"]["normal"]["out"] /= 4
    kept[place] = json.dumps(row).encode() + b"\n"
    folder = tmp_path / "gate"
    assert gitlab("attention-gate", repository, folder, env) == 1, "its error is four times as large as it was"
    assert old_python_used(folder, "\n".join(GITLAB["attention-gate"]["script"]))
    report = ElementTree.parse(folder / GITLAB["attention-gate"]["artifacts"]["reports"]["junit"]).getroot()
    assert [each.get("name") for each in report.iter("testcase")] == ["sdpa-math:bf16"]
    assert [each.get("type") for each in report.iter("failure")] == ["inaccurate"]


SIZES = {"batch=4": "batch=1", "heads=16": "heads=1", "seqlen_q=4096": "seqlen_q=32", "head_dim=128": "head_dim=16"}
PLANS = {"sdpa-cudnn:bf16": "reference:fp32", "fa3:fp8": "reference:fp64"}


@pytest.fixture
def benchmarks(tmp_path: Path, machine: dict[str, str]) -> dict[str, str]:
    """The environment of a shell in a folder with the page's benchmarks."""
    text = block("python", "attention_benchmark")
    for before, after in (SIZES | PLANS).items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "test_attention.py").write_text(text)
    assert shell("python3 -m venv .venv-before", tmp_path, machine, "-e").returncode == 0
    return {**machine, "PATH": os.pathsep.join([machine["STAND_INS"], machine["PATH"]])}


def test_the_benchmarks_on_the_page_are_found(tmp_path: Path, benchmarks: dict[str, str]) -> None:
    command = block("sh", "--benchmark-only").strip()
    done = shell(f"{command} --collect-only -q", tmp_path, benchmarks, "-e")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(plan in done.stdout for plan in PLANS.values())


@pytest.mark.exhaustive
def test_the_benchmarks_on_the_page_run(tmp_path: Path, benchmarks: dict[str, str]) -> None:
    command = block("sh", "--benchmark-only").strip()
    lenient = "--attention-fail-on 900% --benchmark-json out.json"
    done = shell(f"{command} {lenient}", tmp_path, benchmarks, "-e")
    assert done.returncode == 0, done.stdout + done.stderr
    assert old_python_used(tmp_path, command)
    told = [each["extra_info"] for each in json.loads((tmp_path / "out.json").read_text())["benchmarks"]]
    assert [each["plan"] for each in told] == list(PLANS.values())
    assert [each["gate"]["verdict"] for each in told] == ["same", "same"]
