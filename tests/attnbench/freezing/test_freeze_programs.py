"""Frozen choices in programs: explained, compiled, checkpointed, exported and guarded according to the file."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from problems import tensors
from watched_passes import watch_passes

from attnbench import attention, explain, freeze
from attnbench.cli import app
from attnbench.errors import FrozenError, InputError, RefusedError
from attnbench.freezing.file import Frozen
from attnbench.kernels.execution import Execution


@pytest.fixture
def passes_run(monkeypatch) -> list[Execution]:
    return watch_passes(monkeypatch)


def freeze_other(path: Path, *asked: dict, x=None) -> str:
    """Writes a file with a plan that would not be chosen otherwise, for each of these calls."""
    with freeze(path):
        for each in asked:
            chosen = explain(*(x or tensors()), **each).plan
            assert chosen.forward == "sdpa-flash:bf16"
    path.write_text(path.read_text().replace("sdpa-flash", "sdpa-math"))
    return str(chosen).replace("sdpa-flash", "sdpa-math")


def test_explain_names_the_file(path):
    x = tensors()
    for missing in ("record", "raise"):
        with freeze(path, missing=missing):
            choice = explain(*x)
        assert (choice.basis, choice.frozen_in) == ("frozen", str(path))
        assert json.loads(json.dumps(choice.to_dict()))["frozen_in"] == str(path)
        assert str(path) in choice.to_text()
        assert str(path) in choice.to_markdown()
    assert explain(*x).to_dict()["frozen_in"] is None


def test_the_command_line_explains_a_frozen_file(path, capsys):
    x = torch.zeros(1, 4, 64, 32, dtype=torch.bfloat16)
    with freeze(path):
        explain(x, x, x, backend="sdpa-math")
    options = ["--heads", "4", "--head-dim", "32", "--device", "cpu", "--backend", "sdpa-math", "--format", "json"]
    asked = ["explain", *options, "--frozen", str(path), "--seqlen"]
    app([*asked, "64"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["frozen_in"] == str(path)
    with pytest.raises(FrozenError, match="s65"):
        app([*asked, "65"], standalone_mode=False)


def test_compiled_programs_follow_the_file(path, passes_run):
    torch._dynamo.reset()
    x = tensors(grad=True)
    function = torch.compile(lambda *x: attention(*x, is_causal=True), fullgraph=True, backend="aot_eager")
    other = freeze_other(path, {"is_causal": True}, x=x)
    expected = function(*x)
    usual = passes_run.pop().plan
    with freeze(path, missing="raise"):
        found = function(*x)
        grads = torch.autograd.grad(found.sum(), x)
        eager = attention(*x, is_causal=True)
        assert torch.equal(found, eager)
        assert all(map(torch.equal, grads, torch.autograd.grad(eager.sum(), x)))
        late = function(*x)
        (grad,) = torch.autograd.grad(function(*x).sum(), x[:1])
    assert {str(ran.plan) for ran in passes_run} == {other}
    assert torch.equal(torch.autograd.grad(late.sum(), x)[0], grad)  # a backward follows its forward
    passes_run.clear()
    assert torch.equal(function(*x), expected)
    assert [ran.plan for ran in passes_run] == [usual]
    torch._dynamo.reset()


def test_an_export_of_dynamic_shapes_uses_the_open_file(path, passes_run):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v)

    q, k, v = tensors()
    shapes = ({2: torch.export.Dim("length", min=2, max=64)}, None, None)
    program = torch.export.export(Module(), (q, k, v), dynamic_shapes=shapes).module()
    other = freeze_other(path, {})
    for expected, context in (("sdpa-flash:bf16", contextlib.nullcontext()), (other, freeze(path)),
                              ("sdpa-flash:bf16", contextlib.nullcontext())):  # fmt: skip
        passes_run.clear()
        with context:
            program(q, k, v)
            program(q, k, v)
        assert [str(ran.plan) for ran in passes_run] == [expected] * 2


def test_only_one_freeze_is_open_and_it_ends_with_its_block(path, tmp_path, monkeypatch):
    first, second = freeze(path), freeze(tmp_path / "other.json")
    with first:
        for each in (first, second):
            with pytest.raises(InputError, match=r"frozen already, by .*run\.choices\.json"):
                each.start()
        second.stop()  # it is not the open one
        explain(*tensors())
    first.stop()
    with first, pytest.raises(RefusedError):
        explain(*tensors(), backend="sdpa-cudnn")
    with contextlib.suppress(ZeroDivisionError), first:
        assert explain(*tensors()).basis == "frozen"
        raise ZeroDivisionError
    assert explain(*tensors()).frozen_in is None


@pytest.mark.parametrize("name", ["run.lock", "run[1].json", "*", "env"])
def test_other_files_in_the_folder_are_kept(tmp_path, name):
    others = [".env.local", ".run.choices.json.swp", f".{name}.swp", f".{name}.database", "run.json", "notes"]
    for other in others:
        (tmp_path / other).write_text(other)
    with freeze(tmp_path / name):
        explain(*tensors())
    assert len(Frozen.load(tmp_path / name).plans) == 1
    assert {each.name for each in tmp_path.iterdir()} == {*others, name, f"{name}.lock"}
    assert all((tmp_path / other).read_text() == other for other in others)


@pytest.mark.parametrize("bad", [None, 3.5, b"run.json", "a\0b", "/"])
def test_invalid_paths_are_refused(bad):
    with pytest.raises(InputError):
        freeze(bad)


def test_an_unknown_missing_mode_is_refused(path):
    with pytest.raises(InputError, match="record, raise, choose"):
        freeze(path, missing="ignore")
