"""Programs that torchrun starts as two ranks, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE


def torchrun_output(*command: object, folder: Path | None = None) -> str:
    """The output of both ranks; asserts that they end well."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [sys.executable, *launcher, *map(str, command)], capture_output=True, text=True, timeout=PATIENCE, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
