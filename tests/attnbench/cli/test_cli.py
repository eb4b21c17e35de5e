"""Output of the commands: available backends, explanations, tables, and the doctor's findings and advice."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from command_line import SHAPE, expect, process
from fakes import FakeForward
from sweep_parts import part, row

from attnbench import AttentionSpec, Plan, explain
from attnbench.cli.backends import describe_backend
from attnbench.cli.explain import _sizes as sizes_of
from attnbench.cli.usable import command_for, obstacle
from attnbench.errors import InputError
from attnbench.kernels.capabilities import Capabilities, Device
from attnbench.kernels.contract import Availability, Backend
from attnbench.kernels.registry import Registry, registry
from attnbench.tables.environment import Environment


def test_backends_lists_every_backend_with_a_reason_or_kernels() -> None:
    run = expect("backends", "--device", "cpu", "--format", "json")
    listed = {each["name"]: each for each in json.loads(run.stdout)["backends"]}
    assert listed.keys() == registry().backends.keys()
    for name, each in listed.items():
        assert each["available"] == registry().availability(name).ok
        assert each["available"] or each["reason"]
    reference = listed["reference"]["kernels"]
    assert {(each["name"], each["pass"]) for each in reference} == {
        (name, each) for name in ("reference:fp32", "reference:fp64") for each in ("forward", "backward")
    }


def test_explain_agrees_with_the_api() -> None:
    q = torch.randn(1, 4, 64, 32, dtype=torch.bfloat16)
    kv = torch.randn(1, 2, 96, 32, dtype=torch.bfloat16)
    q.requires_grad_()
    expected = explain(q, kv, kv, window=(16, None), causal_alignment="bottom-right", softcap=30.0, dtype="fp8")
    run = expect(
        "explain", *SHAPE, "--kv-heads", 2, "--seqlen-kv", 96, "--window", "16,inf", "--causal-alignment",
        "bottom-right", "--softcap", 30, "--training", "--dtype", "fp8", "--device", "cpu", "--format", "json",
    )  # fmt: skip
    assert json.loads(run.stdout) == json.loads(json.dumps(expected.to_dict()))


def test_explain_describes_packed_and_padded_sequences_as_the_api_does() -> None:
    x, starts = torch.randn(64, 4, 32, dtype=torch.bfloat16), torch.tensor([0, 40, 64], dtype=torch.int32)
    rows, used = torch.randn(2, 4, 40, 32, dtype=torch.bfloat16), torch.tensor([40, 24], dtype=torch.int32)
    packed = explain(x, x, x, layout="thd", cu_seqlens_q=starts, is_causal=True).spec
    padded = explain(rows, rows, rows, q_lengths=used, kv_lengths=used, padding_side="left").spec
    for expected, sizes in ((packed, sizes_of(2, 40, None, 64, None)), (padded, sizes_of(2, 40, 40, None, "left"))):
        assert AttentionSpec.make(**sizes, heads=4, head_dim=32, mask=expected.mask) == expected
    for wrong in ((2, 40, None, 81, None), (2, 40, None, 64, "left"), (2, 40, 41, 64, None)):
        with pytest.raises(InputError, match="--packed"):
            sizes_of(*wrong)


@pytest.mark.parametrize("format", ["text", "markdown"])
def test_explain_prints_the_plans_that_could_run_and_counts_the_others(format: str) -> None:
    ask = ("explain", *SHAPE, "--device", "cpu", "--format")
    run, every, data = (expect(*ask, *each) for each in ([format], [format, "--all"], ["json"]))
    found = {each["plan"]: each["verdict"] for each in json.loads(data.stdout)["candidates"]}
    assert {"reference:fp32", "sdpa-math:bf16", "sdpa-math:fp32", "sdpa-cudnn:bf16"} <= {*found}

    def visible_words(text: str) -> set[str]:
        return {plan for plan in found if re.search(rf"^(\| )?{re.escape(plan)} ", text, re.MULTILINE)}

    cannot = {plan for plan, verdict in found.items() if verdict in ("refused", "unavailable")}
    assert visible_words(run.stdout) == {*found} - cannot
    assert visible_words(every.stdout) == {*found}
    counts = [list(found.values()).count(verdict) for verdict in ("refused", "unavailable")]
    assert f"not shown: {counts[0]} refused and {counts[1]} unavailable plans; `attnbench explain --all`" in run.stdout
    assert "not shown" not in every.stdout


def doctor() -> dict:
    return json.loads(expect("doctor", "--format", "json").stdout)


def test_doctor_lists_the_environment_and_ends_with_a_verdict() -> None:
    run = expect("doctor")
    for what in ("python", "torch", "triton", "NVIDIA driver", "C++ compiler", "reference", "table"):
        assert any(line.startswith(f"{what} ") for line in run.stdout.splitlines()), what
    verdict = run.stdout.splitlines()[-1]
    assert verdict.startswith("verdict: ready")
    assert "attnbench sweep" in verdict  # the tests' own cache folder holds no table


def test_doctor_reports_a_broken_torch_and_fails(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    run = process("doctor", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert run.returncode == 1
    assert "libcudart.so.13" in run.stdout
    assert run.stdout.splitlines()[-1].startswith("verdict: nothing can run here")
    assert "pip install torch" in run.stdout
    assert run.stderr == ""


# --- tables ---


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """The results of a sweep of one tiny case."""
    here = Environment.detect(torch.device("cpu"), registry())
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=32, head_dim=16, dtype="fp32")
    facts = {"spec": spec, "environment": here, "error": {"normal": {"out": 1e-6, "lse": 0.0}}}
    plans = [Plan(f"{backend}:fp32") for backend in ("reference", "sdpa-math")]
    return part(tmp_path / "out", [row(0, plan, **facts) for plan in plans])


def test_table_build_feeds_auto_and_show_prints_it(results: Path, own_cache: Path) -> None:
    expect("table", "build", results)
    assert list(own_cache.rglob("*.json"))
    shown = expect("table", "show", "--device", "cpu")
    assert "reference:fp32" in shown.stdout
    assert re.search(r"normal \d", shown.stdout)
    sizes = ("--heads", 2, "--seqlen", 32, "--head-dim", 16, "--dtype", "fp32")
    choice = expect("explain", *sizes, "--device", "cpu", "--format", "json")
    assert json.loads(choice.stdout)["basis"] == "measured"


@pytest.mark.parametrize(
    ("content", "detail"), [(None, "nothing was measured"), ("{", "cannot be used"), ("whole", "entries measured on")]
)
def test_doctor_lists_the_available_tables(results: Path, own_cache: Path, content: str | None, detail: str) -> None:
    if content is not None:
        expect("table", "build", str(results))
        (table,) = own_cache.rglob("*.json")
        if content != "whole":
            table.write_text(content)
    report = doctor()
    (found,) = [row for row in report["findings"] if row["name"] == "table"]
    assert detail in found["detail"]
    assert found["status"] == ("ok" if content == "whole" else "missing")


CPU = Device("cpu", "CPU")
OLD, NEW = Device("cuda", "an old GPU", (7, 0)), Device("cuda", "a new GPU", (9, 0))
WITHOUT_CUDA = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")


def hopper(further=()) -> FakeForward:
    """A kernel for new GPUs with further refusals beyond its capability row."""
    kernel = FakeForward("vendor:fp8")
    kernel.rows = {"cuda": Capabilities(dtypes=("bf16", "e4m3"), capability=(9, 0))}
    kernel.further_refusals = lambda spec, device: list(further)
    return kernel


def vendor(*kernels, **answer):
    return Registry([Backend("vendor", "", lambda: Availability(**answer), kernels)])


def obstacle_and_command(known, here):
    backend = known.backends["vendor"]
    return obstacle(known, backend, here), command_for(known, backend, here)


def test_an_install_command_is_advised_only_where_it_would_help():
    missing = {"reason": "vendor is not installed", "install": "pip install vendor"}
    known = vendor(hopper(["the package would have to be there to know"]), **missing)
    assert obstacle_and_command(known, NEW) == (None, "pip install vendor")
    reason, command = obstacle_and_command(known, OLD)
    assert "compute capability 9.0" in reason
    assert command is None
    limits = {here: describe_backend(known, "vendor", here)["kernels"][0]["here"][0] for here in (OLD, NEW)}
    assert limits == {OLD: "not on compute capability 7.0", NEW: "takes bf16/e4m3"}
    assert obstacle_and_command(known, CPU) == ("has no kernel for cpu", None)
    # A plug-in that could not be loaded.
    assert obstacle_and_command(vendor(**missing), CPU) == (None, "pip install vendor")


@WITHOUT_CUDA
def test_doctor_without_a_gpu_advises_no_command_that_cannot_help():
    report = doctor()
    assert [each["install"] for each in report["findings"] if each["install"]] == ["attnbench sweep"]
    assert "pip install" not in report["verdict"]
    (others,) = (each for each in report["findings"] if each["name"] == "other backends")
    assert {"fa3", "te", "sdpa-cudnn"} <= set(others["detail"].partition(":")[0].split(", "))
    assert "NVIDIA GPU" in others["detail"]


@pytest.mark.skipif(registry().availability("flex").reason is not None, reason="FlexAttention is not here")
def test_doctor_reports_a_backend_that_refuses_everything_as_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("attnbench.backends.flex.backend.compiler_reason", lambda device_type: "no compiler")
    report = doctor()
    (found,) = (each for each in report["findings"] if each["name"] == "flex")
    assert (found["status"], found["detail"]) == ("missing", "cannot run here: no compiler")
    assert "flex" not in report["usable"]
    assert "flex" not in report["verdict"]
