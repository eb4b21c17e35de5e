"""Whatever a program is made of, and whether it or ``attnbench capture`` records it, recording changes nothing."""

import json
import subprocess
import sys

import command_line
import pytest
import torch
import torch.utils.checkpoint
from patience import PATIENCE
from programs import Layer, Model, attend, qkv

from attnbench.errors import AttnbenchError, MisuseError, OutputError
from attnbench.harness.capture.file import read_captured
from attnbench.harness.capture.recorder import capture
from attnbench.harness.cases.inputs import draw


@pytest.fixture
def file(tmp_path):
    return tmp_path / "acts.safetensors"


def test_compiled_code_runs_eagerly_and_is_seen_whole(file):
    model = Model().eval()
    x = torch.randn(2, 5, 16)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with capture(file) as recorder:
        found = compiled(x)
    assert torch.equal(found, expected)
    assert recorder.recorded == 2
    assert [call.name for call in read_captured(file).calls] == ["layers.0", "layers.1"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_layer_is_recorded_with_its_gradient(file, reentrant):
    layer, x = Layer(), torch.randn(1, 5, 16, requires_grad=True)
    with capture(file):
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    # Of the call and its recomputation, which torch may stop halfway, one gets the gradient.
    assert [call.spec.direction for call in read_captured(file).calls].count("training") == 1


def test_misuse_and_places_that_cannot_be_written(file, tmp_path):
    for options in ({"max_bytes": 0}, {"most": 0}, {"most": 5000}):
        with pytest.raises(MisuseError), capture(file, **options):
            pass
    with pytest.raises(MisuseError, match="safetensors"), capture(tmp_path / "acts.pt"):
        pass
    (tmp_path / "folder.safetensors").mkdir()
    for path in (tmp_path / "none" / "acts.safetensors", tmp_path / "folder.safetensors"):
        with pytest.raises(OutputError, match="cannot be written"), capture(path):
            pytest.fail("the program must not run for nothing")
    with capture(file):
        attend(*qkv())
        second = capture(file)
        with pytest.raises(MisuseError, match="one at a time"):
            second.__enter__()
    assert len(read_captured(file).calls) == 1


def test_a_fault_of_the_recording_is_a_reason_and_not_the_program_s(file, monkeypatch):
    def broken(*_):
        raise RuntimeError("no room\nat all")

    monkeypatch.setattr("attnbench.harness.capture.hooks._repeats", broken)
    with pytest.raises(AttnbenchError, match="RuntimeError: no room"), capture(file):
        assert attend(*qkv()).shape == (1, 2, 6, 8)


@pytest.fixture
def llama(request):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=request.param,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("llama", ["sdpa", "eager"], indirect=True)
def test_a_transformers_model_in_training_and_generation(llama, file):
    tokens = torch.randint(0, 32, (2, 7))
    expected = llama(tokens, labels=tokens)
    expected.loss.backward()
    gradients = [p.grad.clone() for p in llama.parameters()]
    llama.zero_grad()
    values = []
    for layer in llama.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda *args: values.append(args[2].detach().clone()))
    incoming = []
    for layer in llama.model.layers:
        layer.self_attn.o_proj.register_full_backward_hook(lambda *args: incoming.append(args[1][0].clone()))
    with capture(file) as recorder:
        llama(tokens, labels=tokens).loss.backward()
        llama.eval().generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, do_sample=False)
    assert all(torch.equal(p.grad, before) for p, before in zip(llama.parameters(), gradients, strict=True))
    assert recorder.left_out == []
    calls = read_captured(file)
    specs = [call.spec for call in calls.calls]
    assert [call.name for call in calls.calls] == ["model.layers.0.self_attn", "model.layers.1.self_attn"] * 4
    assert {(spec.heads, spec.kv_heads, spec.head_dim) for spec in specs} == {(4, 2, 8)}
    assert [spec.seqlen_q for spec in specs] == [7, 7, 7, 7, 1, 1, 1, 1]
    assert [spec.seqlen_kv for spec in specs] == [7, 7, 7, 7, 8, 8, 9, 9]
    assert [str(spec.mask) for spec in specs] == ["causal"] * 4 + ["none"] * 4
    assert [spec.direction for spec in specs] == ["training"] * 2 + ["forward"] * 6
    for number in range(2):
        tensors = calls.tensors(number)
        assert torch.equal(tensors["v"], values[number].unflatten(-1, (2, 8)).transpose(1, 2))
        assert torch.equal(tensors["grad_out"], incoming[1 - number].unflatten(-1, (4, 8)).transpose(1, 2))


def test_gpt2_and_an_eager_function_that_computes_more(file, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=1, n_head=2, attn_pdrop=0.0, attn_implementation="eager"
    )
    model = transformers.GPT2Model(config).eval()
    tokens = torch.randint(0, 32, (1, 6))
    with capture(file):
        model(tokens)
    (call,) = read_captured(file).calls
    assert (call.name, str(call.spec.mask), call.spec.head_dim) == ("h.0.attn", "causal", 8)

    home = sys.modules[type(model).__module__]
    plain = home.eager_attention_forward

    def with_a_sink(module, query, key, value, attention_mask, **kwargs):
        out, weights = plain(module, query, key, value, attention_mask, **kwargs)
        return out * 0.5, weights

    monkeypatch.setattr(home, "eager_attention_forward", with_a_sink)
    with pytest.raises(AttnbenchError, match="computes more"), capture(file):
        model(tokens)
    assert home.eager_attention_forward is with_a_sink


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
