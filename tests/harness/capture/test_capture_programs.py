"""Whatever a program is made of (compiled, checkpointed, forked, of transformers), recording it changes nothing."""

import sys

import pytest
import torch
import torch.utils.checkpoint
from programs import Layer, Model, attend, qkv

from attnbench.errors import AttnbenchError, MisuseError, OutputError
from attnbench.harness.capture.file import read_captured
from attnbench.harness.capture.recorder import capture


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
