"""What starting the command or importing the package loads, and what that costs."""

import subprocess
import sys

import pytest
from patience import PATIENCE

VENDORS = {
    "cudnn", "diffusers", "flash_attn", "flashinfer", "sageattention", "sgl_kernel", "transformer_engine",
    "transformers", "triton", "vllm", "xformers",
}  # fmt: skip


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False)


def modules(code: str) -> int:
    """How many are loaded once the code has run."""
    done = python("-c", f"import sys\ntry:\n    {code}\nfinally:\n    print(len(sys.modules), file=sys.stderr)")
    return int(done.stderr.split()[-1])


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("sweep", "--help"), ("table", "build", "--help")])
def test_help_imports_no_torch(arguments: tuple[str, ...]) -> None:
    code = f"""
import sys
sys.argv = ["attnbench", *{arguments!r}]
from attnbench.cli import main
try:
    main()
finally:
    heavy = sorted({{"torch", "numpy", "tabulate"}} & set(sys.modules))
    print("heavy:", heavy, file=sys.stderr)
"""
    run = python("-c", code)
    assert run.returncode == 0, run.stderr
    assert "heavy: []" in run.stderr
    assert "attnbench" in run.stdout


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
