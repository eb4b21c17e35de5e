"""What starting the command or importing the package loads, and what that costs."""

import os
import subprocess
import sys

import pytest
from patience import PATIENCE

VENDORS = {
    "cudnn", "diffusers", "flash_attn", "flashinfer", "sageattention", "sgl_kernel", "transformer_engine",
    "transformers", "triton", "vllm", "xformers",
}  # fmt: skip


def python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, *arguments], {**os.environ, **environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=env)


COMPLETING = {"_ATTNBENCH_COMPLETE": "complete_bash", "COMP_WORDS": "attnbench ex", "COMP_CWORD": "1"}


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (("--help",), {}, "Usage: attnbench"),
        (("--version",), {}, "attnbench"),
        (("sweep", "--help"), {}, "--preset"),
        (("capture", "--help"), {}, "SCRIPT.py"),
        (("table", "build", "--help"), {}, "table build"),
        ((), COMPLETING, "explain\n"),
    ],
    ids=["help", "version", "sweep", "capture", "table", "completion"],
)
def test_help_and_completion_import_no_torch(arguments: tuple[str, ...], environ: dict[str, str], said: str) -> None:
    code = f"""
import sys
sys.argv = ["attnbench", *{arguments!r}]
from attnbench.cli import main
try:
    main()
finally:
    heavy = sorted({{"torch", "numpy", "tabulate", "safetensors"}} & set(sys.modules))
    print("heavy:", heavy, file=sys.stderr)
"""
    run = python("-c", code, **environ)
    assert run.returncode == 0, run.stderr
    assert "heavy: []" in run.stderr
    assert said in run.stdout


def test_import_loads_no_vendor_package() -> None:
    """Nor looks for one, which a machine that has none would not show otherwise."""
    code = f"""
import sys, torch
sought = set()
class Noting:
    def find_spec(name, path=None, target=None):
        sought.add(name)
sys.meta_path.insert(0, Noting)
import attnbench
attnbench.attention, attnbench.explain, attnbench.use_backend
print(sorted({VENDORS!r} & (sought | set(sys.modules))), "attnbench.api" in sought)
"""
    run = python("-c", code)
    assert run.stdout.strip() == "[] True", run.stdout + run.stderr


def test_a_choice_does_not_wait_for_torchs_compiler_to_be_imported() -> None:
    code = """
import sys, torch
from attnbench import explain
x = torch.randn(1, 2, 16, 16, dtype=torch.bfloat16)
print("flex:bf16" in str(explain(x, x, x)), sorted({"torch._dynamo", "torch._inductor"} & set(sys.modules)))
"""
    run = python("-c", code)
    assert run.stdout.strip() == "True []", run.stdout + run.stderr
