"""``attnbench capture``: the program runs as under python, and its attention lies in the file."""

import json
import subprocess
import sys

import command_line
import pytest
import torch
from patience import PATIENCE

from attnbench.harness.capture.file import read_captured
from attnbench.harness.cases.inputs import draw

PROGRAM = """
import sys
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

torch.manual_seed(int(sys.argv[1]))
q, k, v = (torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3))
out = sdpa(q, k, v, is_causal=True)
out.retain_grad()
out.square().sum().backward()
torch.save([q.detach(), k.detach(), v.detach(), out.grad], "given.pt")
print(__name__, sys.argv[1:], sys.path[0], torch.rand(1).item(), q.grad.sum().item())
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def process(*command, folder):
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.fixture
def here(monkeypatch, tmp_path):
    """The command in this process, which has loaded torch already, in the folder of the program."""

    def call(*arguments, code=0):
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setattr(sys, "path", [*sys.path])  # whose first entry becomes the program's
            done = command_line.attnbench(*arguments)
        assert done.returncode == code, done.stderr
        return done

    return call


def test_a_script_runs_as_under_python_and_its_tensors_are_kept(here, program, tmp_path):
    arguments = ("7", "--out", "mine", "-m", "--", "-h")
    plain = process("program.py", *arguments, folder=tmp_path)
    command = ("-m", "attnbench", "capture", "--out", "acts.safetensors", "program.py")
    done = process(*command, *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert "1 of 1 attention calls (0.0 MiB) are in acts.safetensors" in done.stderr
    file = read_captured(tmp_path / "acts.safetensors")
    (call,) = file.calls
    inputs = draw(call.spec, file.family(0), torch.device("cpu"))
    given = torch.load(tmp_path / "given.pt", weights_only=True)
    for found, expected in zip((inputs.q, inputs.k, inputs.v, inputs.grad_out), given, strict=True):
        assert torch.equal(found, expected)
    package = tmp_path / "package"
    package.mkdir()
    program.rename(package / "__main__.py")
    done = here("capture", "--out", "module.safetensors", "-m", "package", *arguments)
    assert done.stdout == plain.stdout  # python -m, too, puts the folder first on sys.path
    assert len(read_captured(tmp_path / "module.safetensors").calls) == 1


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("sys.exit(3)", 3, ""),
        ("from attnbench import Mask; Mask(-1)", 1, "InputError"),  # exit code 2 were this ours
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_however_the_program_ends_its_code_is_kept_and_so_is_what_was_recorded(
    here, program, tmp_path, end, code, message
):
    program.write_text(PROGRAM + end + "\n")
    done = here("capture", "--out", "acts.safetensors", "program.py", "7", code=code)
    assert message in done.stderr
    assert len(read_captured(tmp_path / "acts.safetensors").calls) == 1
    assert list(tmp_path.glob(".acts*")) == []
    if "Traceback" in done.stderr:
        first = done.stderr.index("File ")
        assert done.stderr[first:].startswith('File "program.py"')


def test_what_is_not_kept_is_reported(here, program, tmp_path):
    program.write_text(PROGRAM + "for _ in range(9): sdpa(q, k, v); sdpa(q, k, v, dropout_p=0.5)\n")
    options = ("--out", "acts.safetensors", "--max-bytes", "6KiB", "--most", "3")
    done = here("capture", *options, "program.py", "7")
    assert "3 of 19 attention calls" in done.stderr
    assert "7 gave way to others" in done.stderr
    assert "9 not recorded: dropout" in done.stderr
    tensors = [x for number in range(3) for x in read_captured(tmp_path / "acts.safetensors").tensors(number).values()]
    assert sum(x.nbytes for x in tensors) <= 6 * 1024


def test_nothing_to_record_is_a_failure_unless_the_program_failed(here, program, tmp_path):
    program.write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    done = here("capture", "--out", "acts.safetensors", "program.py", "0", code=1)
    assert "nothing was recorded" in done.stderr
    done = here("capture", "--out", "acts.safetensors", "program.py", "5", code=5)
    assert "nothing was recorded" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--out", "acts.pt", "program.py"), 2, ".safetensors"),
        (("--out", "acts.safetensors", "none.py"), 2, "no such script: 'none.py'"),
        (("--out", "acts.safetensors"), 2, "SCRIPT.py"),
        (("program.py",), 2, "--out"),
        (("--out", "acts.safetensors", "--max-bytes", "much", "program.py"), 2, "--max-bytes"),
        (("--out", "acts.safetensors", "--most", "0", "program.py"), 2, "calls"),
        (("--out", "none/acts.safetensors", "program.py"), 1, "cannot be written"),
    ],
)
def test_misuse_runs_nothing(here, program, tmp_path, arguments, code, message):
    done = here("capture", *arguments, code=code)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


def test_a_sweep_measures_what_a_yaml_file_takes_from_it(here, program, tmp_path):
    here("capture", "--out", "acts.safetensors", "program.py", "7")
    entry = {"batch": 1, "heads": 2, "seqlen_q": 6, "head_dim": 8, "mask": "causal", "direction": "training"}
    (tmp_path / "cases.yaml").write_text(json.dumps([entry | {"families": ["captured:acts.safetensors", "normal"]}]))
    options = ("--preset", "cases.yaml", "--dtype", "fp32", "--backends", "reference", "--format", "json")
    done = here("sweep", *options)
    rows = [row for row in json.loads(done.stdout) if row["status"] == "ok"]
    family = f"captured:acts.safetensors@{read_captured(tmp_path / 'acts.safetensors').digest[:8]}#0"
    assert rows
    assert all(set(row["correctness"]["error"]) == {family, "normal"} for row in rows)
    assert str(tmp_path) not in done.stdout
