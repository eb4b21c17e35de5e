"""The command line as a person meets it: real processes, exit codes, one clear line where something is wrong."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SHAPE = ("--heads", "4", "--seqlen", "64", "--head-dim", "32")


class Run(NamedTuple):
    """What a command printed and the code it ended with."""

    returncode: int | str | None
    stdout: str
    stderr: str


Attnbench = Callable[..., Run]


@pytest.fixture
def attnbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Attnbench:
    """Runs the command in this process, which has paid for importing torch, as the console script would."""

    def run(*arguments: object) -> Run:
        from attnbench import user_table
        from attnbench.cli import main

        user_table.forget()
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["attnbench", *map(str, arguments)])
        monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # main sets its own
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return Run(end.value.code, captured.out, captured.err)

    return run


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, for what only a process can show."""
    command = [sys.executable, "-m", "attnbench", *arguments]
    return subprocess.run(command, **{"capture_output": True, "text": True, "timeout": 120, "check": False, **options})


def fails(run: Run | subprocess.CompletedProcess[str], code: int, *said: str) -> None:
    """It ended with this exit code and said so on standard error, without a traceback."""
    assert run.returncode == code, run.stderr
    assert "Traceback" not in run.stderr
    for each in said:
        assert each in run.stderr


def named(run: Run | subprocess.CompletedProcess[str], code: int, *said: str) -> None:
    """The same for an error of ours: one line that begins with the program's name."""
    fails(run, code, *said)
    assert run.stderr.startswith("attnbench: ")
    assert run.stderr.count("\n") == 1, run.stderr


def seconds(*command: str) -> float:
    """The best of several runs, which noise on a shared machine only ever makes longer."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        best = min(best, time.perf_counter() - start)
    return best


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
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "heavy: []" in run.stderr
    assert "attnbench" in run.stdout


def test_help_costs_little_more_than_typer_itself() -> None:
    # 0.4 s where typer takes 0.1 s; a ratio holds on slower machines, too.
    assert seconds("-m", "attnbench", "--help") < 4 * seconds("-c", "import typer")


def test_import_loads_no_vendor_package() -> None:
    code = """
import sys, attnbench
attnbench.attention, attnbench.explain, attnbench.use_backend
vendors = {"flash_attn", "sgl_kernel", "transformer_engine", "cudnn", "vllm", "xformers", "triton"}
print(sorted(vendors & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_version_is_the_package_s(attnbench: Attnbench) -> None:
    from attnbench import __version__

    run = attnbench("--version")
    assert run.returncode == 0
    assert run.stdout == f"attnbench {__version__}\n"


def test_every_command_has_help_and_completion_is_offered(attnbench: Attnbench) -> None:
    top = attnbench("--help").stdout
    for command in ("sweep", "backends", "explain", "doctor", "table"):
        assert f"\n  {command} " in top
        assert "Usage: attnbench" in attnbench(command, "--help").stdout
    assert "--install-completion" in top


def test_backends_lists_every_backend_with_a_reason_or_kernels(attnbench: Attnbench) -> None:
    from attnbench.registry import registry

    run = attnbench("backends", "--device", "cpu", "--format", "json")
    assert run.returncode == 0, run.stderr
    listed = {each["name"]: each for each in json.loads(run.stdout)["backends"]}
    assert listed.keys() == registry().backends.keys()
    for name, each in listed.items():
        assert each["available"] == registry().availability(name).ok
        assert each["available"] or each["reason"]
    reference = listed["reference"]["kernels"]
    assert {(each["name"], each["pass"]) for each in reference} == {
        (name, each) for name in ("reference:fp32", "reference:fp64") for each in ("forward", "backward")
    }


@pytest.mark.parametrize("format", ["table", "markdown"])
def test_backends_prints_every_backend_with_its_kernels_or_why_not(attnbench: Attnbench, format: str) -> None:
    from attnbench.registry import registry

    lines = attnbench("backends", "--device", "cpu", "--format", format).stdout.splitlines()
    rows = [line.strip("| ") for line in lines]
    for name in registry().backends:
        own = [row for row in rows if row.split(maxsplit=1)[:1] == [name]]
        assert own
        assert registry().availability(name).ok == ("cannot be used" not in " ".join(own))
    (reference,) = (row for row in rows if row.startswith("reference"))
    assert "forward and backward" in reference
    assert "fp64 fp32: takes fp64/fp32/bf16" in reference
    if format == "markdown":
        assert all(line.startswith("|") and line.endswith("|") for line in lines)


def test_explain_agrees_with_the_api(attnbench: Attnbench) -> None:
    import torch

    import attnbench as library

    q = torch.randn(1, 4, 64, 32, dtype=torch.bfloat16)
    kv = torch.randn(1, 2, 96, 32, dtype=torch.bfloat16)
    expected = library.explain(q, kv, kv, is_causal=True, causal_alignment="bottom-right", dtype="fp8").to_dict()
    run = attnbench(
        "explain", *SHAPE, "--kv-heads", 2, "--seqlen-kv", 96, "--causal", "--causal-alignment", "bottom-right",
        "--dtype", "fp8", "--device", "cpu", "--format", "json",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == json.loads(json.dumps(expected))


def test_explain_takes_windows_softcap_and_training(attnbench: Attnbench) -> None:
    run = attnbench(
        "explain", *SHAPE, "--window", "16,inf", "--softcap", 30, "--training", "--device", "cpu", "--format", "json"
    )
    assert run.returncode == 0, run.stderr
    spec = json.loads(run.stdout)["spec"]
    assert (spec["mask"]["left"], spec["mask"]["right"]) == (16, None)
    assert (spec["softcap"], spec["direction"]) == (30.0, "training")


def test_explain_hears_the_variable_and_the_option_beats_it(
    attnbench: Attnbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(*more: str) -> Mapping[str, str]:
        run = attnbench("explain", *SHAPE, "--device", "cpu", "--format", "json", *more)
        assert run.returncode == 0, run.stderr
        answer: Mapping[str, str] = json.loads(run.stdout)
        return answer

    monkeypatch.setenv("ATTNBENCH_BACKEND", "reference")
    assert chosen()["plan"].startswith("reference:")
    assert chosen()["asked_by"] == "ATTNBENCH_BACKEND"
    assert chosen("--backend", "sdpa-math")["plan"].startswith("sdpa-math:")


@pytest.mark.parametrize("format", ["text", "markdown"])
def test_explain_prints_every_plan(attnbench: Attnbench, format: str) -> None:
    run = attnbench("explain", *SHAPE, "--device", "cpu", "--format", format)
    assert run.returncode == 0, run.stderr
    for name in ("reference:fp32", "sdpa-math:bf16", "flex:"):
        assert name in run.stdout


def test_doctor_tells_what_is_here_and_ends_with_a_verdict(attnbench: Attnbench) -> None:
    run = attnbench("doctor")
    assert run.returncode == 0, run.stderr
    for what in ("python", "torch", "triton", "NVIDIA driver", "C++ compiler", "reference", "table"):
        assert any(line.startswith(f"{what} ") for line in run.stdout.splitlines()), what
    verdict = run.stdout.splitlines()[-1]
    assert verdict.startswith("verdict: ready")
    assert "attnbench sweep" in verdict  # the tests' own cache folder holds no table


def test_doctor_in_json_names_the_command_that_adds_what_is_missing(attnbench: Attnbench) -> None:
    report = json.loads(attnbench("doctor", "--format", "json").stdout)
    table = next(each for each in report["findings"] if each["name"] == "table")
    assert (table["status"], table["install"]) == ("missing", "attnbench sweep")
    assert "reference" in report["usable"]


def test_doctor_without_a_working_torch_says_so_and_fails(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    run = process("doctor", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert run.returncode == 1
    assert "libcudart.so.13" in run.stdout
    assert run.stdout.splitlines()[-1].startswith("verdict: nothing can run here")
    assert "pip install torch" in run.stdout
    assert run.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("sweeep",), "No such command 'sweeep'"),
        (("backends", "--fromat", "json"), "No such option: --fromat"),
        (("explain", "--heads", "4"), "Missing option"),
        (("explain", *SHAPE, "--dtype", "int3"), "'int3' is not one of"),
        (("explain", *SHAPE, "--batch", "many"), "--batch"),
        (("table", "build", "nowhere"), "does not exist"),
        (("table", "show", "nowhere.json"), "does not exist"),
    ],
)
def test_misuse_of_options_exits_2(attnbench: Attnbench, arguments: tuple[str, ...], said: str) -> None:
    fails(attnbench(*arguments), 2, said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("explain", *SHAPE, "--backend", "sdpa-flesh"), "did you mean sdpa-flash"),
        (("explain", *SHAPE, "--backend", "referense:fp32"), "did you mean reference"),
        (("explain", *SHAPE, "--kv-heads", "3"), "must be a multiple of kv_heads (3)"),
        (("explain", *SHAPE, "--scale", "nan"), "scale must be a finite number"),
        (("explain", *SHAPE, "--window", "-1,0"), "must not be negative"),
        (("explain", *SHAPE, "--window", "16"), "a window is LEFT,RIGHT"),
        (("explain", *SHAPE, "--window", "1,2,3"), "a window is LEFT,RIGHT"),
        (("explain", *SHAPE, "--max-error", "0"), "max_error must be a positive"),
        (("explain", *SHAPE, "--device", "tpu:7"), "tpu:7"),
        (("backends", "--device", "abacus"), "not 'abacus'"),
        (("sweep", "--backends", "sdpa-flesh"), "did you mean sdpa-flash"),
        (("sweep", "--preset", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_misuse_of_values_exits_2_with_one_line(attnbench: Attnbench, arguments: tuple[str, ...], said: str) -> None:
    named(attnbench(*arguments), 2, said)


def test_a_named_backend_that_refuses_exits_1_with_reasons_and_alternatives(attnbench: Attnbench) -> None:
    named(attnbench("explain", *SHAPE, "--backend", "sdpa-cudnn", "--device", "cpu"), 1, "sdpa-cudnn", "Plans that can")


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"schema": "attnbench.measurement/1"}', '{"schema": "other/1"}', "\x00\xff", "[" * 100_000]
)
def test_a_malformed_results_file_is_named_with_its_line(attnbench: Attnbench, tmp_path: Path, line: str) -> None:
    results = tmp_path / "measurements.jsonl"
    results.write_text(line + "\n")
    for path in (results, tmp_path):
        named(attnbench("table", "build", path, "-o", tmp_path / "table.json"), 2, f"{results}:1: expected")
    assert not (tmp_path / "table.json").exists()


def test_results_without_a_measurement_are_misuse(attnbench: Attnbench, tmp_path: Path) -> None:
    (tmp_path / "measurements.jsonl").touch()
    named(attnbench("table", "build", tmp_path), 2, "holds no measurement")


def test_a_malformed_table_is_named(attnbench: Attnbench, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text('{\n"schema": }\n')
    named(attnbench("table", "show", tmp_path / "table.json"), 2, f"{tmp_path / 'table.json'}:2: expected JSON")


def test_no_table_yet_says_how_to_make_one(attnbench: Attnbench) -> None:
    named(attnbench("table", "show"), 1, "attnbench sweep")


def test_an_unwritable_output_folder_exits_1(attnbench: Attnbench, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    named(attnbench("sweep", "--device", "cpu", "--out", tmp_path / "file" / "results"), 1, "cannot be written")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of one tiny case."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "one.yaml").write_text("- {batch: 1, heads: 2, seqlen_q: 32, head_dim: 16}\n")
    run = process(
        "sweep", "--dtype", "fp32", "--preset", str(folder / "one.yaml"), "--backends", "reference,sdpa-math",
        "--device", "cpu", "--out", str(folder / "out"), env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return folder / "out"


def test_table_build_feeds_auto_and_show_prints_it(attnbench: Attnbench, results: Path, own_cache: Path) -> None:
    built = attnbench("table", "build", results)
    assert built.returncode == 0, built.stderr
    assert list(own_cache.rglob("*.json"))
    shown = attnbench("table", "show", "--device", "cpu")
    assert shown.returncode == 0, shown.stderr
    assert "reference:fp32" in shown.stdout
    choice = attnbench(
        "explain", "--heads", 2, "--seqlen", 32, "--head-dim", 16, "--dtype", "fp32", "--device", "cpu",
        "--format", "json",
    )  # fmt: skip
    assert json.loads(choice.stdout)["basis"] == "measured"


def test_table_build_from_the_file_equals_that_from_the_folder(
    attnbench: Attnbench, results: Path, tmp_path: Path
) -> None:
    for name, source in {"a": results, "b": results / "measurements.jsonl"}.items():
        assert attnbench("table", "build", source, "-o", tmp_path / name).returncode == 0
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    assert attnbench("table", "show", tmp_path / "a").stdout == attnbench("table", "show", tmp_path / "b").stdout


def test_measurements_of_two_environments_are_not_mixed(attnbench: Attnbench, results: Path, tmp_path: Path) -> None:
    row = json.loads((results / "measurements.jsonl").read_text().splitlines()[0])
    other = {**row, "environment": {**row["environment"], "torch": "9.9.9"}}
    (tmp_path / "measurements.jsonl").write_text("\n".join(map(json.dumps, (row, other))) + "\n")
    run = attnbench("table", "build", tmp_path, "-o", tmp_path / "table.json")
    named(run, 2, "must not be mixed", "is 9.9.9")


def test_a_table_that_cannot_be_written_exits_1(attnbench: Attnbench, results: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    named(attnbench("table", "build", results, "-o", tmp_path / "file" / "table.json"), 1, "cannot write the table")


def test_what_a_file_says_cannot_steer_the_terminal(attnbench: Attnbench, results: Path, tmp_path: Path) -> None:
    attnbench("table", "build", results, "-o", tmp_path / "table.json")
    text = (tmp_path / "table.json").read_text()
    assert '"normal"' in text
    (tmp_path / "table.json").write_text(text.replace('"normal"', '"nor\\u001b[2Jmal"'))
    shown = attnbench("table", "show", tmp_path / "table.json")
    assert shown.returncode == 0
    assert "nor [2Jmal" in shown.stdout
    assert "\x1b" not in shown.stdout


# Text that typer writes, text beyond Python's buffer, and text that waits in it until the end.
WRITERS = [("--help",), ("backends", "--format", "json"), ("explain", *SHAPE, "--device", "cpu")]


@pytest.mark.parametrize("command", WRITERS)
def test_a_reader_that_goes_away_is_no_error(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    reading, writing = os.pipe()
    os.close(reading)
    run = process(*command, capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (run.returncode, run.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", WRITERS)
def test_a_full_disk_under_standard_output_is_said_once(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with open("/dev/full", "w") as full:
        named(process(*command, capture_output=False, stdout=full, stderr=subprocess.PIPE), 1, "No space left")


def test_an_interrupt_exits_130_without_a_traceback(tmp_path: Path) -> None:
    sweep = subprocess.Popen(
        [sys.executable, "-m", "attnbench", "sweep", "--device", "cpu", "--out", str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    records = tmp_path / "out" / "measurements.jsonl"
    deadline = time.monotonic() + 100
    while not (records.exists() and records.stat().st_size) and sweep.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    sweep.send_signal(signal.SIGINT)
    _, said = sweep.communicate(timeout=60)
    assert sweep.returncode == 130, said
    assert "Traceback" not in said


def test_an_unexpected_exception_keeps_its_traceback() -> None:
    code = """
import attnbench.registry
def broken(): raise ZeroDivisionError("a fault of ours")
attnbench.registry.registry = broken
from attnbench.cli import main
import sys
sys.argv = ["attnbench", "backends"]
main()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "Traceback (most recent call last)" in run.stderr
    assert "ZeroDivisionError: a fault of ours" in run.stderr
    assert "│" not in run.stderr  # Python's own, not a drawing of it


@pytest.mark.parametrize(
    ("content", "said"), [(None, "nothing was measured"), ("{", "cannot be used"), ("whole", "entries measured on")]
)
def test_doctor_says_what_tables_there_are(
    attnbench: Attnbench, results: Path, own_cache: Path, content: str | None, said: str
) -> None:
    if content is not None:
        attnbench("table", "build", str(results))
        (table,) = own_cache.rglob("*.json")
        if content != "whole":
            table.write_text(content)
    report = json.loads(attnbench("doctor", "--format", "json").stdout)
    (found,) = [row for row in report["findings"] if row["name"] == "table"]
    assert said in found["detail"]
    assert found["status"] == ("ok" if content == "whole" else "missing")
