"""The command as a process among others: its reader goes away, the disk is full, somebody interrupts it, it fails."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from command_line import SHAPE, attnbench, named, process
from patience import PATIENCE

# Text that typer writes, text beyond Python's buffer, and text that waits in it until the end.
HELP, LONG, WAITING = ("--help",), ("backends", "--format", "json"), ("explain", *SHAPE, "--device", "cpu")


@pytest.mark.parametrize("command", [HELP, pytest.param(LONG, marks=pytest.mark.exhaustive)])
def test_a_reader_that_goes_away_is_no_error(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    reading, writing = os.pipe()
    os.close(reading)
    run = process(*command, capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (run.returncode, run.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", [WAITING, pytest.param(LONG, marks=pytest.mark.exhaustive)])
def test_a_full_disk_under_standard_output_is_said_once(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with open("/dev/full", "w") as full:
        named(process(*command, capture_output=False, stdout=full, stderr=subprocess.PIPE), 1, "No space left")


def test_an_interrupt_exits_130_without_a_traceback(tmp_path: Path) -> None:
    """As soon as it says that it measures, with cases left for minutes."""
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
            _, said = sweep.communicate(timeout=PATIENCE)
        finally:
            sweep.kill()
    assert sweep.returncode == 130, said
    assert "Traceback" not in said


def test_an_unexpected_exception_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr("attnbench.kernels.registry.registry", broken)
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        attnbench("backends")
