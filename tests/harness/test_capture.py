"""A capture holds what attention was really given, within its budget, and the program never notices."""

import importlib
import os
import sys
import threading
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from planted import FakeForward
from torch import nn

import attnbench
from attnbench.errors import AttnbenchError, MisuseError, OutputError
from attnbench.execution import Execution
from attnbench.harness import capture as capture_module
from attnbench.harness.capture import capture
from attnbench.harness.captured import read_captured
from attnbench.mask import Mask

ORIGINAL = F.scaled_dot_product_attention


def attend(*args, **kwargs):
    """SDPA by whatever its name means at the time of the call."""
    return F.scaled_dot_product_attention(*args, **kwargs)


def qkv(batch=1, heads=2, length=6, head_dim=8, kv_heads=None, dtype=torch.float32, **options):
    shapes = ((batch, heads, length, head_dim), *[(batch, kv_heads or heads, length, head_dim)] * 2)
    return tuple(torch.randn(shape, dtype=dtype, **options) for shape in shapes)


class Layer(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.qkv, self.heads = nn.Linear(width, 3 * width), heads
        self.given = []

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if out.requires_grad:
            out.retain_grad()
        self.given.append((q, k, v, out))
        return x + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(layer(x), 0.1, self.training)
        return x


@pytest.fixture
def file(tmp_path):
    return tmp_path / "acts.safetensors"


def step(model, seed=0):
    """One step of training from a seed: loss, gradients and the random state after it."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(torch.randn(2, 5, 16)).square().mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()], torch.get_rng_state()


def test_the_tensors_are_those_that_attention_was_given_and_the_gradient_is_autograd_s(file):
    model = Model()
    with capture(file) as recorder:
        step(model)
        with torch.no_grad():
            model(torch.randn(1, 3, 16))
    assert (recorder.seen, recorder.recorded, recorder.left_out) == (4, 4, [])
    calls = read_captured(file)
    given = [model.layers[0].given[0], model.layers[1].given[0], model.layers[0].given[1], model.layers[1].given[1]]
    for number, (call, (q, k, v, out)) in enumerate(zip(calls.calls, given, strict=True)):
        assert call.name == f"layers.{number % 2}"
        assert call.spec.mask == Mask(right=0)
        assert call.spec.direction == ("training" if number < 2 else "forward")
        tensors = calls.tensors(number)
        expected = {"q": q, "k": k, "v": v} | ({"grad_out": out.grad} if number < 2 else {})
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], x) for name, x in expected.items())


def test_the_program_computes_the_same_bit_by_bit(file):
    model = Model()
    loss, gradients, state = step(model)
    with capture(file):
        seen = step(model)
    assert torch.equal(seen[0], loss)
    assert all(torch.equal(one, other) for one, other in zip(seen[1], gradients, strict=True))
    assert torch.equal(seen[2], state)


def graph(out):
    """The names of the nodes behind a result."""
    names, nodes = [], [out.grad_fn]
    while nodes:
        node = nodes.pop()
        names.append(type(node).__name__)
        nodes += [each for each, _ in node.next_functions if each is not None]
    return names


def test_the_graph_is_the_program_s_and_nothing_outlives_it(file):
    q, k, v = qkv(requires_grad=True)
    plain = graph(attend(q, k, v))
    with capture(file) as recorder:
        out = attend(q, k, v)
        assert graph(out) == plain
        assert out._backward_hooks is None
        gone = weakref.ref(out)
        del out
        assert gone() is None
        late = attend(q, k, v)
    assert read_captured(file).calls[0].spec.direction == "forward"  # gradients were on, but no backward ran
    late.sum().backward()  # after its end
    assert recorder.tensor_bytes == 2 * 3 * q.nbytes
    assert F.scaled_dot_product_attention is ORIGINAL


def test_what_is_changed_after_the_call_was_recorded_before(file):
    q, k, v = qkv()
    before = q.clone()
    with capture(file):
        attend(q, k, v)
        q.zero_()
    assert torch.equal(read_captured(file).tensors(0)["q"], before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_types_are_kept_and_autocast_s_is_what_was_computed_in(file, dtype):
    given = qkv(dtype=dtype)
    cast = qkv()
    with capture(file):
        attend(*given)
        with torch.autocast("cpu", torch.bfloat16):
            attend(*cast)
    calls = read_captured(file)
    assert torch.equal(calls.tensors(0)["v"], given[2])
    assert torch.equal(calls.tensors(1)["v"], cast[2].bfloat16())


def test_other_ranks_get_their_axes(file):
    with capture(file):
        attend(*(torch.randn(5, 8) for _ in range(3)))
        attend(*(torch.randn(3, 5, 8) for _ in range(3)))
        x = torch.randn(2, 3, 4, 5, 8, requires_grad=True)
        attend(x, x, x).sum().backward()
    calls = read_captured(file)
    sizes = [(call.spec.batch, call.spec.heads, call.spec.seqlen_q) for call in calls.calls]
    assert sizes == [(1, 1, 5), (3, 1, 5), (6, 4, 5)]
    assert torch.equal(calls.tensors(2)["q"], x.detach().flatten(0, 1))
    assert torch.equal(calls.tensors(2)["grad_out"], torch.ones(6, 4, 5, 8))


def test_grouped_heads_are_stored_once_also_where_the_program_repeats_them(file):
    q, k, v = qkv(heads=6, kv_heads=2)
    repeated = [x.repeat_interleave(3, dim=1) for x in (k, v)]
    almost = [repeated[0], repeated[1].clone()]
    almost[1][0, 1, 5, 7] += 1
    with capture(file):
        attend(q, k, v, enable_gqa=True)
        attend(q, *repeated)
        attend(q, *almost)
        attend(q, k[:, :1].expand_as(q), v[:, :1].expand_as(q))
    calls = read_captured(file)
    assert [call.spec.kv_heads for call in calls.calls] == [2, 2, 6, 1]
    assert torch.equal(calls.tensors(0)["k"], k)
    assert torch.equal(calls.tensors(1)["v"], v)
    assert torch.equal(calls.tensors(2)["v"], almost[1])


def test_masks_are_recognised_and_what_is_none_is_counted_with_its_reason(file):
    q, k, v = qkv()
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    padding = torch.tensor([True] * 5 + [False]) & (torch.rand(6, 6) < 0.5).fill_diagonal_(True)
    learned = torch.zeros(6, 6, requires_grad=True)
    with capture(file) as recorder:
        attend(q, k, v, attn_mask=causal)
        causal = causal.triu(-2)
        attend(q, k, v, attn_mask=causal, scale=0.5)
        causal.fill_(True)  # the same tensor, another mask
        attend(q, k, v, attn_mask=causal)
        attend(q[:, :, :2], k, v, is_causal=True)
        attend(q, k, v, attn_mask=padding)
        attend(q, k, v, attn_mask=learned)
        attend(q, k, v, dropout_p=0.5)
        attend(q * torch.nan, k, v)
        attend(q, k[:, :, :0], v[:, :, :0])
        attend(*(x.to("meta") for x in (q, k, v)))
        torch.vmap(attend)(*(torch.randn(3, 1, 2, 6, 8) for _ in range(3)))
    masks = [call.spec.mask for call in read_captured(file).calls]
    assert masks == [Mask(right=0), Mask(2, 0), Mask(), Mask(right=0)]
    assert read_captured(file).calls[1].spec.scale == 0.5
    assert recorder.seen == 11
    reasons = recorder.unrecorded
    assert reasons.total() == 7
    for said in ("neither causal nor a window", "learned", "dropout", "not finite", "seqlen_kv", "meta", "storage"):
        assert sum(count for reason, count in reasons.items() if said in reason) == 1, (said, reasons)


def test_a_gradient_that_is_not_finite_leaves_a_forward_call(file):
    q, k, v = qkv(requires_grad=True)
    with capture(file) as recorder:
        attend(q, k, v).backward(torch.full((1, 2, 6, 8), torch.inf))
    assert recorder.left_out == ["1 without its gradient: values that are not finite"]
    assert read_captured(file).calls[0].spec.direction == "forward"


def test_our_own_attention_is_recorded_once_with_all_that_was_asked(file):
    q, k, v = qkv(heads=4, kv_heads=2, length=7, requires_grad=True)
    rows = [x.detach().transpose(1, 2) for x in (q, k, v)]
    with capture(file) as recorder:
        out = attnbench.attention(q, k, v, window=(3, 0), causal_alignment="bottom-right", softcap=5.0, scale=0.2)
        out.retain_grad()
        out.square().sum().backward()
        attnbench.attention(*rows, is_causal=True, layout="bshd", return_lse=True, backend="sdpa-flash")
    assert (recorder.seen, recorder.recorded) == (2, 2)
    calls = read_captured(file)
    first, second = (call.spec for call in calls.calls)
    assert (first.mask, first.softcap, first.scale, first.kv_heads) == (Mask(3, 0), 5.0, 0.2, 2)
    assert torch.equal(calls.tensors(0)["grad_out"], out.grad)
    assert (second.mask, second.return_lse) == (Mask(right=0), False)
    assert torch.equal(calls.tensors(1)["k"], k)


def test_kernels_of_ours_that_use_sdpa_or_compile_run_as_ever(file):
    spec = attnbench.AttentionSpec.make(batch=1, heads=2, seqlen_q=6, head_dim=8, dtype="fp32")
    compiled = torch.compile(lambda x: x + torch.compiler.is_compiling(), backend="eager")
    q, k, v = qkv()
    kernel = FakeForward("fake:fp32", change=lambda out: attend(q, k, v) + compiled(torch.zeros(1)))
    with capture(file) as recorder:
        out, _ = Execution(spec, kernel)(q, k, v)
    assert torch.equal(out, attend(q, k, v) + 1)
    assert recorder.seen == 1


LENGTH = 64
EACH = 4 * 2 * LENGTH * 8 * 4  # bytes of q, k, v and grad_out, 2 heads, fp32


def test_the_budget_holds_in_the_file_and_meanwhile(file, monkeypatch):
    held, copies, copy = [], [], capture_module._Part.copy

    def watched(part, x):
        copied = copy(part, x)
        copies.append(weakref.ref(copied))
        return copied

    monkeypatch.setattr(capture_module._Part, "copy", watched)
    with capture(file, max_bytes=5 * EACH) as recorder:
        pending = []
        for number in range(40):
            q, k, v = qkv(length=LENGTH, requires_grad=True)
            pending.append((q, attend(q, k, v)))
            if number % 3 == 0:
                pending.pop()[1].sum().backward()
            held.append(sum(x.nbytes for each in copies if (x := each()) is not None))
            assert recorder.tensor_bytes == held[-1]
    assert max(held) <= 5 * EACH
    calls = read_captured(file)
    assert len(calls.calls) == 5
    assert max(call.number for call in calls.calls) > 5  # not the first ones
    assert sum(x.nbytes for number in range(5) for x in calls.tensors(number).values()) <= 5 * EACH
    assert "35 gave way to others" in recorder.left_out[0]


def test_what_is_kept_is_spread_over_layers_and_kinds(file):
    model = Model(layers=4).eval()
    with capture(file, most=8), torch.no_grad():
        model(torch.randn(1, 64, 16))
        for _ in range(30):
            model(torch.randn(1, 3, 16))
    kept = [(call.name, call.spec.seqlen_q) for call in read_captured(file).calls]
    assert {name for name, length in kept if length == 64} == {f"layers.{number}" for number in range(4)}
    assert {name for name, length in kept if length == 3} == {f"layers.{number}" for number in range(4)}


def test_of_a_call_larger_than_the_budget_whole_groups_of_heads_are_kept(file):
    q, k, v = qkv(batch=2, heads=8, kv_heads=4, length=16, requires_grad=True)
    unit = (2 * 2 + 2) * 16 * 8 * 4  # a key head with its two query heads: q, grad_out, k, v
    with capture(file, max_bytes=7 * unit) as recorder:
        out = attend(q, k, v, enable_gqa=True)
        out.retain_grad()
        out.square().sum().backward()
    assert recorder.recorded == 1
    calls = read_captured(file)
    (call,) = calls.calls
    assert (call.spec.batch, call.spec.heads, call.spec.kv_heads) == (1, 2, 1)
    assert (call.whole.batch, call.whole.heads, call.whole.direction) == (2, 8, "training")
    (head,) = call.kv_heads
    expected = {
        "q": q[:1, 2 * head : 2 * head + 2],
        "k": k[:1, head : head + 1],
        "v": v[:1, head : head + 1],
        "grad_out": out.grad[:1, 2 * head : 2 * head + 2],
    }
    assert all(torch.equal(calls.tensors(0)[name], x) for name, x in expected.items())
    with pytest.raises(AttnbenchError, match="one key head"), capture(file, max_bytes=unit - 1):
        attend(q, k, v, enable_gqa=True)


@pytest.mark.parametrize(
    ("units", "sizes", "heads"),
    [
        (4 * 9, (2, 4), [0, 1, 2, 3]),
        (4 * 4, (1, 4), [0, 1, 2, 3]),
        (4 * 3, (1, 3), [0, 1, 2]),
        (4 * 2, (1, 2), [0, 2]),
        (100, (3, 4), None),
    ],
)
def test_batch_entries_go_before_heads(file, units, sizes, heads):
    q, k, v = (x.transpose(1, 2) for x in qkv(batch=3, heads=16, length=4))  # (3, 4, 16, 8), not contiguous
    unit = 3 * 16 * 8 * 4
    batch = 3 if units == 100 else 30
    q, k, v = (x.repeat(batch // 3, 1, 1, 1) for x in (q, k, v))
    with capture(file, max_bytes=units * unit):
        attend(q, k, v)
    (call,) = read_captured(file).calls
    assert (call.spec.batch, call.spec.kv_heads) == sizes
    assert (call.whole is None) == (units == 100)
    assert call.kv_heads == heads
    assert torch.equal(read_captured(file).tensors(0)["v"], v[: sizes[0], heads or slice(None)])


def test_torch_s_fused_encoder_stays_fused_and_is_counted(file):
    encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    with torch.inference_mode():
        expected = encoder(x)
        with capture(file) as recorder:
            found = encoder(x)
            attend(*qkv())
    assert recorder.left_out == ["1 not recorded: torch's fused transformer_encoder_layer_fwd"]
    assert torch.equal(found, expected)
    with capture(file):
        encoder.train()(x).sum().backward()
    assert read_captured(file).calls[0].name == "self_attn"


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


def test_a_name_imported_before_and_another_thread_are_seen_and_all_is_put_back(file, monkeypatch):
    early = types.ModuleType("early")
    early.sdpa = ORIGINAL
    monkeypatch.setitem(sys.modules, "early", early)
    call = Execution.__call__
    with capture(file) as recorder:
        early.sdpa(*qkv())
        thread = threading.Thread(target=lambda: attend(*qkv()))
        thread.start()
        thread.join()
    assert recorder.recorded == 2
    assert early.sdpa is F.scaled_dot_product_attention is ORIGINAL
    assert Execution.__call__ is call
    assert attend(*qkv()).shape == (1, 2, 6, 8)
    assert recorder.seen == 2


def test_scripts_compile_as_ever(file, tmp_path, monkeypatch):
    (tmp_path / "scripted.py").write_text(
        "import torch\ndef f(q: torch.Tensor):\n    return torch.nn.functional.scaled_dot_product_attention(q, q, q)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    q = torch.randn(1, 1, 3, 4)
    with capture(file):
        scripted = torch.jit.script(importlib.import_module("scripted").f)
        assert torch.equal(scripted(q), attend(q, q, q))


def test_a_block_that_raises_keeps_what_was_recorded(file):
    def program():
        with capture(file):
            attend(*qkv())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    assert len(read_captured(file).calls) == 1
    with pytest.raises(ZeroDivisionError), capture(file.with_name("none.safetensors")):
        raise ZeroDivisionError
    assert [path.name for path in file.parent.iterdir()] == ["acts.safetensors"]


def test_nothing_seen_is_an_error_and_leaves_the_old_file(file):
    with capture(file):
        attend(*qkv())
    before = file.read_bytes()
    with pytest.raises(AttnbenchError, match="no attention call was seen"), capture(file):
        pass
    with pytest.raises(AttnbenchError, match="dropout"), capture(file):
        attend(*qkv(), dropout_p=0.1)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["acts.safetensors"]


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


def test_a_fork_of_the_program_records_and_writes_nothing(file):
    with capture(file) as recorder:
        attend(*qkv())
        child = os.fork()
        if child == 0:
            attend(*qkv())
            os._exit(recorder.seen)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert len(read_captured(file).calls) == 1


def test_a_fork_that_leaves_through_the_block_writes_nothing(file):
    opened = capture(file)
    with opened:
        attend(*qkv())
        child = os.fork()
        if child == 0:
            try:
                opened.__exit__(SystemExit, SystemExit(), None)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert not file.exists()
        assert len(list(file.parent.iterdir())) == 1  # what the file will be written to
    assert len(read_captured(file).calls) == 1


def test_a_fault_of_the_recording_is_a_reason_and_not_the_program_s(file, monkeypatch):
    def broken(*_):
        raise RuntimeError("no room\nat all")

    monkeypatch.setattr("attnbench.harness.capture_hooks._repeats", broken)
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


def test_other_attention_of_transformers_is_counted_unless_it_calls_sdpa(file):
    modeling = pytest.importorskip("transformers.modeling_utils", reason="transformers is not installed")
    transformers = importlib.import_module("transformers")

    def unseen(module, query, key, value, attention_mask, **kwargs):
        return query.transpose(1, 2).contiguous(), None

    def through_sdpa(module, query, key, value, attention_mask, **kwargs):
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).contiguous(), None

    for name, function in (("unseen", unseen), ("through_sdpa", through_sdpa)):
        modeling.AttentionInterface.register(name, function)
    config = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    tokens = torch.randint(0, 32, (1, 6))
    models = {
        name: transformers.GPT2Model(transformers.GPT2Config(**config, attn_implementation=name)).eval()
        for name in ("unseen", "through_sdpa")
    }
    with capture(file) as recorder:
        for model in models.values():
            model(tokens)
    assert recorder.seen == 2
    assert recorder.recorded == 1
    assert "transformers' unseen" in recorder.left_out[0]
    assert modeling.ALL_ATTENTION_FUNCTIONS["unseen"] is unseen
