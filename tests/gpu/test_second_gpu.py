"""Two GPUs: every plan on the one that is not current gives the same answer, and both give one of shared sequences."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dense import dense_attention, dense_gradients, relative_l2
from patience import PATIENCE
from places import RESULTS

from attnbench import AttentionSpec, Mask, Plan, attention
from attnbench.choosing.budget import class_bound
from attnbench.kernels.devices import describe
from attnbench.kernels.registry import registry

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA GPUs")
SPEC = AttentionSpec.make(
    batch=2, heads=8, kv_heads=2, seqlen_q=384, head_dim=128, mask=Mask(None, 0), direction="training"
)


def plans() -> list[str]:
    if torch.cuda.device_count() < 2:
        return ["none"]
    second = describe(torch.device("cuda", 1))
    return [str(plan) for plan in registry().plans(SPEC) if registry().reasons(plan, SPEC, second)[0] == "ok"]


@pytest.mark.parametrize("plan", plans())
def test_results_do_not_depend_on_the_current_device(plan: str) -> None:
    second = torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    generator = torch.Generator(second).manual_seed(0)
    shapes = [(2, 8, 384, 128), (2, 2, 384, 128), (2, 2, 384, 128), (2, 8, 384, 128)]
    tensors = [torch.randn(shape, generator=generator, device=second).to(torch.bfloat16) for shape in shapes]
    leaves, grad_out = [x.requires_grad_() for x in tensors[:3]], tensors[3]
    before = torch.cuda.memory_allocated(0)
    out = attention(*leaves, is_causal=True, backend=plan)
    found = torch.autograd.grad(out, leaves, grad_out)
    torch.cuda.synchronize(second)
    assert {x.device for x in (out, *found)} == {second}
    assert torch.cuda.memory_allocated(0) == before
    bound = class_bound(Plan.parse(plan), SPEC)
    host = [x.detach().cpu() for x in (*leaves, grad_out)]
    assert relative_l2(out.detach().cpu(), dense_attention(*host[:3], SPEC)[0]) <= bound
    for each, truth in zip(found, dense_gradients(*host, SPEC), strict=True):
        assert relative_l2(each.cpu(), truth) <= bound


def test_two_gpus_that_share_sequences_agree_with_one_over_nccl(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = "--lengths 2048 8192 --heads 8 --kv-heads 2 --repeat 1 --out ring.json"
    script = RESULTS / "ring.py"
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
