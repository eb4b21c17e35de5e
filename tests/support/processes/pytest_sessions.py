"""pytest sessions in separate folders, for the tests of the plug-in that passes our times to pytest-benchmark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE
from places import SUPPORT


def environment_without_xdist() -> dict[str, str]:
    """The environment without xdist's variables, with which pytest-benchmark measures nothing."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}


def pytest_in(folder: Path, *arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest in the folder with these environment variables; a backend in the folder counts as installed."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=folder,
        env={**environment_without_xdist(), "PYTHONPATH": os.pathsep.join([str(folder), SUPPORT]), **environ},
        check=False,
    )


# A backend with one slow kernel and one that ends its process.
PLANTED = """
import os, time
from planted import FakeBackward, FakeForward
from attnbench.kernels.contract import Availability, Backend
slow = FakeForward('planted:bf16', lambda out: time.sleep(0.005) or out)
dies = FakeForward('planted:fp16', lambda out: os._exit(9))
kernels = (slow, dies, FakeForward('planted:fp8'), FakeBackward('planted:bf16'))
BACKEND = Backend('planted', 'for a test', lambda: Availability(version='1.0'), kernels)
"""


def install(folder: Path, program: str = PLANTED) -> None:
    """Install a program's backend ``planted`` for sessions in the folder."""
    (folder / "planted_plugin.py").write_text(program)
    info = folder / "planted_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted_plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[attnbench.backends]\nplanted = planted_plugin:BACKEND\n")


# The beginning of a test file that measures.
HEAD = """
from pathlib import Path
import pytest
from attnbench import AttentionSpec

SPEC = AttentionSpec.make(batch=1, heads=2, seqlen_q=32, head_dim=16)

def keep(row):
    with Path("rows.jsonl").open("a") as file:
        file.write(row.to_line() + "\\n")
"""
