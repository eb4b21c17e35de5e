"""docs/ci.md: its workflows are ones that GitHub and GitLab take, and every step of them runs, here on any device.

Stand-ins: for the actions (``uses:``), which copy files as the real ones do; for the server of GitLab's packages; and
for ``python3 -m venv`` with its ``pip``, whose environment is the one of these tests.  All else that a shell
is given is run as it stands.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from patience import PATIENCE

from attnbench.harness.casefile import read_cases
from attnbench.harness.records import read_measurements

PAGE = (Path(__file__).parents[1] / "docs" / "ci.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TINY = "- {batch: 1, heads: 1, seqlen_q: 32, head_dim: 16}\n"
SMALL = {"BACKENDS": "sdpa-math"}  # in the place of the page's, which need a GPU
TOKEN = "a token of the job"

# `python3 -m venv FOLDER`, and a pip that asks for the file with the requirements.
VENV = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" && cp {stand_ins}/* "$3/bin/"; else exec {python} "$@"; fi
"""
STAND_INS = {
    "python": 'exec {python} "$@"',
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


def settle(base: Path, new: Path, *, worse: bool = False, elsewhere: bool = False) -> None:
    """Give what was measured the names and steady times of a machine that nothing disturbs, and two plans.

    ``worse``: one plan of NEW is less accurate.  ``elsewhere``: NEW is another machine, twice as fast.
    """
    measured = next(row for row in map(json.loads, base.read_text().splitlines()) if row["status"] == "ok")
    for path, changed in ((base, False), (new, True)):
        rows = []
        for plan in ("sdpa-cudnn:bf16", "fa3:fp8"):
            row = json.loads(json.dumps({**measured, "plan": plan}))
            half = 0.5 if changed and elsewhere else 1.0
            row["time_ms"] = {cost: [half + 1e-3 * (7 * i % 5) for i in range(200)] for cost in row["time_ms"]}
            if changed and elsewhere:
                row["environment"]["device_name"] = "another"
            if changed and worse and plan == "fa3:fp8":
                row["error"]["normal"]["out"] *= 3
            rows.append(json.dumps(row) + "\n")
        path.write_text("".join(rows))


def before_in(folder: Path, commands: str) -> bool:
    """Whether the Python with which --rerun would measure the base is there."""
    (python,) = re.findall(r"--rerun --base-python (\S+)", commands)
    return (folder / python).is_file()


def test_the_cases_on_the_page_are_cases(tmp_path: Path) -> None:
    path = tmp_path / "attention.yaml"
    path.write_text(block("yaml", "# ci/attention.yaml"))
    assert len(read_cases(path, "fp8")) == 4


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
        assert by_a_pull_request == (name == "compare")
    assert "head.repo.full_name == github.repository" in GITHUB["jobs"]["compare"]["if"]


class GitHub:
    """One run of one job after the other, as a runner makes them."""

    def __init__(self, folder: Path, repository: Path, env: Mapping[str, str]) -> None:
        self.folder, self.repository, self.cache = folder, repository, folder / "cache"
        self.files = {name: folder / name for name in ("GITHUB_PATH", "GITHUB_ENV", "GITHUB_STEP_SUMMARY")}
        self.env = {**env, **GITHUB["env"], **SMALL, **{name: str(path) for name, path in self.files.items()}}
        self.facts = {"runner.name": "one", "github.base_ref": "main", "github.run_id": "1", "github.run_attempt": "1"}

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
def compared(tmp_path_factory: pytest.TempPathFactory, repository: Path, machine: dict[str, str]) -> GitHub:
    """A runner that has run both jobs, the base first."""
    runner = GitHub(tmp_path_factory.mktemp("github"), repository, machine)
    for step, good in runner.start("base"):
        assert good, (step, runner.said)
    names = []
    for step, good in runner.start("compare"):
        assert good, (step, runner.said)
        names.append(step.get("name"))
        if step.get("name") == "measure":
            base, new = (runner.workspace / name / "measurements.jsonl" for name in ("base", "new"))
            assert [row.key for row in read_measurements(base)] == [row.key for row in read_measurements(new)]
            settle(base, new)
    assert names[-4:] == ["install", "measure", "compare", None]
    return runner


def test_the_steps_of_the_workflow_run(compared: GitHub) -> None:
    assert "clean: nothing became slower" in compared.files["GITHUB_STEP_SUMMARY"].read_text()
    assert (compared.workspace / ".cache").is_dir()
    assert before_in(compared.workspace, compared.steps("compare"))
    upload = GITHUB["jobs"]["compare"]["steps"][-1]
    assert all((compared.workspace / path).is_dir() for path in upload["with"]["path"].split())


def test_without_a_base_the_job_fails(tmp_path: Path, repository: Path, machine: dict[str, str]) -> None:
    ran = list(GitHub(tmp_path, repository, machine).start("compare"))
    assert [good for _, good in ran] == [True, True, False, True]
    assert "upload" in ran[-1][0]["uses"]


GITLAB = yaml.safe_load(block("yaml", "# .gitlab-ci.yml"))
JOB = {"extends", "tags", "resource_group", "timeout", "variables", "before_script", "rules", "script", "artifacts"}


def test_the_pipeline_has_the_form_of_one() -> None:
    assert GITLAB.keys() == {".attention", "attention-base", "attention-compare"}
    for job in GITLAB.values():
        assert job.keys() <= JOB
        for line in (*job.get("before_script", ()), *job.get("script", ())):
            assert isinstance(line, str), "a colon makes a mapping of a line that is not in quotes"
    assert GITLAB[".attention"]["resource_group"]
    for name in ("attention-base", "attention-compare"):
        assert GITLAB[name]["extends"] == ".attention"
    assert GITLAB["attention-compare"]["artifacts"]["when"] == "always"


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


def gitlab(
    name: str, repository: Path, folder: Path, env: Mapping[str, str], settled: Callable[[], object] = lambda: None
) -> int:
    """The exit code of a job: every line in one shell, up to the first that fails.

    Before the comparison the shell is left and entered again, so that what was measured can be settled.
    """
    subprocess.run(["git", "clone", "-q", str(repository), str(folder)], check=True)
    job = {**GITLAB[".attention"], **GITLAB[name]}
    variables = {**job["variables"], **SMALL}.items()
    lines = ["set -eo pipefail", *(f'export {key}="{value}"' for key, value in variables), *job["before_script"]]
    for line in job["script"]:
        if line.startswith("attnbench compare"):
            done = shell("\n".join([*lines, "export -p > ../state"]), folder, env, "-e")
            assert done.returncode == 0, done.stderr
            settled()
            lines = ["set -eo pipefail", ". ../state"]
        lines.append(line)
    done = shell("\n".join(lines), folder, env, "-e")
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
    (uploaded,) = kept.values()
    assert uploaded == (tmp_path / "base" / "base" / "measurements.jsonl").read_bytes()
    place = tmp_path / "compare"
    base, new = place / "base.jsonl", place / "new" / "measurements.jsonl"
    code = gitlab("attention-compare", repository, place, env, lambda: settle(base, new, worse=True))
    assert code == 1, "one plan is less accurate"
    assert before_in(place, "\n".join(GITLAB["attention-compare"]["script"]))
    report = ElementTree.parse(place / GITLAB["attention-compare"]["artifacts"]["reports"]["junit"]).getroot()
    assert [each.get("name") for each in report.iter("testcase")] == ["sdpa-cudnn:bf16", "fa3:fp8"]
    assert [each.get("type") for each in report.iter("failure")] == ["inaccurate"]


def test_unlike_runners_are_compared_by_a_plan(compared: GitHub) -> None:
    base, new = (compared.workspace / name / "measurements.jsonl" for name in ("base", "new"))
    settle(base, new, elsewhere=True)
    command = block("sh", "--relative-to").strip()
    done = shell(command, compared.workspace, compared.step_env, "-e")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rows: 1 same, 1 baseline" in done.stdout


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
    return {**machine, "PATH": os.pathsep.join([machine["STAND_INS"], machine["PATH"]])}


def test_the_benchmarks_on_the_page_are_found(tmp_path: Path, benchmarks: dict[str, str]) -> None:
    on_main, _ = block("sh", "--benchmark-only").splitlines()
    done = shell(f"{on_main} --collect-only -q", tmp_path, benchmarks, "-e")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(plan in done.stdout for plan in PLANS.values())


@pytest.mark.exhaustive
def test_the_benchmarks_on_the_page_run(tmp_path: Path, benchmarks: dict[str, str]) -> None:
    on_main, on_a_change = block("sh", "--benchmark-only").splitlines()
    done = shell(on_main, tmp_path, benchmarks, "-e")
    assert done.returncode == 0, done.stdout + done.stderr
    (saved,) = (tmp_path / ".benchmarks").rglob("*_base.json")
    data = json.loads(saved.read_text())
    assert [each["extra_info"]["plan"] for each in data["benchmarks"]] == list(PLANS.values())
    # It finds what to compare with; that it compares is held by the plug-in's own tests.
    done = shell(f"{on_a_change.partition('#')[0]} --collect-only -p no:attnbench", tmp_path, benchmarks, "-e")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0001_base.json" in done.stderr
