"""The command as a process: modules imported at the start, and exits by a closed pipe, full disk or interrupt."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from command_line import SHAPE, attnbench, fails_in_one_line, process
from patience import PATIENCE

# Text that typer writes, text beyond Python's buffer, and text that waits in it until the end.
HELP, LONG, WAITING = ("--help",), ("backends", "--format", "json"), ("explain", *SHAPE, "--device", "cpu")


@pytest.mark.parametrize("command", [HELP, pytest.param(LONG, marks=pytest.mark.exhaustive)])
def test_a_closed_pipe_is_not_an_error(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    reading, writing = os.pipe()
    os.close(reading)
    run = process(*command, capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (run.returncode, run.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", [WAITING, pytest.param(LONG, marks=pytest.mark.exhaustive)])
def test_a_full_disk_under_standard_output_is_reported_once(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with open("/dev/full", "w") as full:
        fails_in_one_line(
            process(*command, capture_output=False, stdout=full, stderr=subprocess.PIPE), 1, "No space left"
        )


def test_an_interrupt_exits_130_without_a_traceback(tmp_path: Path) -> None:
    """Interrupts it as soon as it prints that it measures, with minutes of cases left."""
    case = "- {{batch: 1, heads: 1, seqlen_q: {}, head_dim: 16}}\n"
    (tmp_path / "cases.yaml").write_text("".join(case.format(length) for length in range(1, 500)))
    options = {"--preset": tmp_path / "cases.yaml", "--backends": "reference", "--dtype": "fp32", "--device": "cpu"}
    words = [str(word) for option in {**options, "--out": tmp_path / "out"}.items() for word in option]
    command = [sys.executable, "-m", "attnbench", "sweep", *words]
    # What starts the tests in the background may have it ignored, and a child inherits that.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, preexec_fn=heed
    ) as sweep:
        try:
            assert sweep.stderr is not None
            assert any("plans measured" in line for line in iter(sweep.stderr.readline, "")), "nothing was measured"
            sweep.send_signal(signal.SIGINT)
            _, stderr = sweep.communicate(timeout=PATIENCE)
        finally:
            sweep.kill()
    assert sweep.returncode == 130, stderr
    assert "Traceback" not in stderr


def test_an_unexpected_exception_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnbench.kernels.registry.registry", Mock(side_effect=ZeroDivisionError("a fault of ours")))
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        attnbench("backends")


VENDORS = {
    "cudnn", "diffusers", "flash_attn", "flashinfer", "sageattention", "sgl_kernel", "transformer_engine",
    "transformers", "triton", "vllm", "xformers",
}  # fmt: skip


def python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, *arguments], {**os.environ, **environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=env)


COMPLETING = {"_ATTNBENCH_COMPLETE": "complete_bash", "COMP_WORDS": "attnbench ex", "COMP_CWORD": "1"}


@pytest.mark.parametrize(
    ("arguments", "environ", "output"),
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
def test_help_and_completion_import_no_torch(arguments: tuple[str, ...], environ: dict[str, str], output: str) -> None:
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
    assert output in run.stdout


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


def test_a_choice_does_not_import_torchs_compiler() -> None:
    code = """
import sys, torch
from attnbench import explain
x = torch.randn(1, 2, 16, 16, dtype=torch.bfloat16)
print("flex:bf16" in str(explain(x, x, x)), sorted({"torch._dynamo", "torch._inductor"} & set(sys.modules)))
"""
    run = python("-c", code)
    assert run.stdout.strip() == "True []", run.stdout + run.stderr
