"""The command as a process: what it imports, its standard streams, and exits by a closed pipe, disk or interrupt."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree as ET

import pytest
from command_line import SHAPE, attnbench, fails_in_one_line, process
from patience import PATIENCE
from sweep_parts import ROWS, part

from attnbench import cli
from attnbench.cli import main

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


# --- closed streams, and encodings that lack characters ---

CPU = ("--device", "cpu")
COMMANDS = {
    "help": (("--help",), 0),
    "misuse": (("sweep", "--no-such"), 2),
    "json": (("explain", *SHAPE, *CPU, "--format", "json"), 0),
    "no results": (("report", "/proc/none"), 2),
    "table": (("table", "show", *CPU), 1),
}


def forked(arguments: tuple[str, ...], closed: tuple[int, ...], folder: Path) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a forked child with torch loaded and these streams closed."""
    outputs = [folder / "stdout", folder / "stderr"]
    child = os.fork()
    if child == 0:
        try:
            for number, path in enumerate(outputs, start=1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
            for number in closed:
                os.close(number)
            # What the interpreter makes of them when it starts.
            sys.stdin = None if 0 in closed else sys.stdin
            for number, name in ((1, "stdout"), (2, "stderr")):
                stream = None if number in closed else io.TextIOWrapper(io.FileIO(number, "w", closefd=False))
                setattr(sys, name, stream)
            sys.argv = ["attnbench", *arguments]
            try:
                main()
            except SystemExit as end:
                os._exit(end.code or 0)
        except BaseException:
            os._exit(99)
        os._exit(98)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), *(path.read_text() for path in outputs)


@pytest.fixture(scope="module")
def warm():
    """Caches backend availability, which every child would otherwise detect again."""
    attnbench(*COMMANDS["json"][0])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_stream_changes_neither_the_exit_code_nor_the_other_stream(tmp_path, warm, command):
    arguments, code = COMMANDS[command]
    expected = forked(arguments, (), tmp_path)
    assert expected[0] == code
    assert "Traceback" not in expected[2]
    for closed in ((1,), (2,), (0, 1, 2)):
        found = forked(arguments, closed, tmp_path)
        assert found == (code, "" if 1 in closed else expected[1], "" if 2 in closed else expected[2]), closed


def test_a_newly_opened_file_does_not_become_standard_output(tmp_path):
    """Its file descriptor is free, so a library's output would go to a file that attnbench opens."""
    folder = part(tmp_path / "results", ROWS)
    command = ("table", "build", str(folder), "-o", str(tmp_path / "table.json"))
    assert forked(command, (0, 1, 2), tmp_path)[0] == 0
    json.loads((tmp_path / "table.json").read_text())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("format", ["table", "markdown", "json", "junit"])
def test_an_unencodable_character_is_replaced(tmp_path, monkeypatch, encoding, format):
    rows = [each.model_copy(update={"case": f"{each.case} é→"}) for each in ROWS]
    new = [each.model_copy(update={"environment": replace(each.environment, commit="1234567")}) for each in rows]
    paths = [part(tmp_path / name, each) for name, each in (("before", rows), ("after", new[1:]))]
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding=encoding, errors="strict"))
    monkeypatch.setattr(sys, "argv", ["attnbench", "compare", *map(str, paths), "--format", format])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    text = printed.getvalue().decode(encoding)
    if format == "json":
        assert json.loads(text)["rows"][0]["case"] == rows[0].case
    elif format == "junit":
        assert ET.fromstring(text.encode(encoding))[0][0].get("classname") == rows[0].case
    else:
        assert ("case 0 ??" if encoding == "ascii" else "case 0 é?") in text


def test_a_full_disk_does_not_change_the_commands_result(monkeypatch):
    """The exit codes 1 and 3 of compare are kept although nothing could be printed."""
    monkeypatch.setattr(cli, "_run", lambda: print("x") or 3)
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 3
