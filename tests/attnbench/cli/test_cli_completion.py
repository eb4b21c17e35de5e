"""Completion of the command line, by a bash that has sourced what the command installs."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="needs bash")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A home folder in which completion was installed, and an ``attnbench`` on the path."""
    home = tmp_path_factory.mktemp("home")
    command = home / "bin" / "attnbench"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m attnbench "$@"\n')
    command.chmod(0o755)
    done = shell(home, "attnbench --install-completion bash; exit $?")
    assert done.returncode == 0, done.stderr
    return home


def shell(home: Path, line: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HOME": str(home), "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(
        [str(BASH), "--norc", "-c", line],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=environment,
    )


def completed(home: Path, line: str) -> set[str]:
    """What bash offers where the cursor stands at the end of the line."""
    words = ["attnbench", *line.split(" ")[1:]]
    script = f"""
source ~/.bashrc
function=$(complete -p attnbench | sed -E 's/.*-F ([^ ]+).*/\\1/')
COMP_WORDS=({" ".join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}
COMP_LINE={shlex.quote(line)}; COMP_POINT={len(line)}
"$function" attnbench {shlex.quote(words[-1])} {shlex.quote(words[-2])}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = shell(home, script)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_bash_completes_commands_and_their_options(home: Path) -> None:
    assert {"sweep", "backends", "explain", "check", "doctor", "table", "train"} <= completed(home, "attnbench ")
    assert completed(home, "attnbench ex") == {"explain"}
    assert {"build", "show"} <= completed(home, "attnbench table ")
    assert "--max-error" in completed(home, "attnbench explain --ma")
    assert {"text", "markdown", "json"} == completed(home, "attnbench explain --format ")


def test_completing_imports_no_torch(home: Path) -> None:
    line = "_ATTNBENCH_COMPLETE=complete_bash COMP_WORDS='attnbench ex' COMP_CWORD=1"
    command = f"{line} PYTHONPROFILEIMPORTTIME=1 {shlex.quote(sys.executable)} -m attnbench"
    done = shell(home, command)
    assert done.stdout.split() == ["explain"], done.stderr
    imported = {row.rsplit("|", 1)[-1].strip() for row in done.stderr.splitlines() if row.startswith("import time:")}
    assert "attnbench.cli" in imported
    assert not {"torch", "numpy", "tabulate"} & imported
