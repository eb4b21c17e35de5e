"""Context parallelism on two GPUs over NCCL: our FP8 and 16-bit rings against one GPU with all tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import PATIENCE
from places import RESULTS

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA GPUs")


def test_two_gpus_answer_as_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = "--lengths 2048 8192 --heads 8 --kv-heads 2 --repeat 1 --out ring.json"
    script = RESULTS / "nvidia-h200" / "ring.py"
    done = subprocess.run(
        [*command, script, *options.split()], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "ring.json").read_text())["rows"]
    rings = [row for row in rows if row["what"] in ("bf16, ring", "fp8, ring")]
    assert len(rings) == 4
    for row in rings:
        narrow = row["what"].startswith("fp8")
        assert row["status"] == "ok", row
        assert row["sent"] == ["e4m3" if narrow else "bf16"]
        assert max(row["error"].values()) < (0.1 if narrow else 0.01), row
