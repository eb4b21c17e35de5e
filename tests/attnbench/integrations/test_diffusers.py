"""diffusers models with our attention: the same results as its native backend, or a clear error."""

import copy
import sys

import pytest
import torch
from tiny_models import error, flux, step, tensor, worst

from attnbench.errors import AttnbenchWarning, InputError, UnknownBackendError
from attnbench.integrations.diffusers import register
from attnbench.integrations.sdpa import replaced

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
dispatch = pytest.importorskip("diffusers.models.attention_dispatch")


@pytest.fixture(autouse=True)
def active():
    """set_attention_backend sets the backend of all models."""
    before = dispatch._AttentionBackendRegistry._active_backend
    yield
    dispatch._AttentionBackendRegistry.set_active_backend(before)


def attend(*args, **named):
    return dispatch.dispatch_attention_fn(*args, backend="attnbench", **named)


def call_native(*args, **named):
    return dispatch.dispatch_attention_fn(*args, backend="native", **named)


def test_outputs_and_gradients_agree_with_the_native_backend():
    calls = register(backend="reference")
    model, inputs = flux()
    ours = copy.deepcopy(model)
    wanted = step(model, **inputs, return_dict=False)
    ours.set_attention_backend("attnbench")
    found = step(ours, **inputs, return_dict=False)
    assert calls.served == 2
    assert error(found[0], wanted[0]) < 1e-5
    assert worst(found[1], wanted[1]) < 1e-4
    assert torch.equal(step(copy.deepcopy(ours), **inputs, return_dict=False)[0], found[0])
    ours.reset_attention_backend()
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)
    assert torch.equal(step(ours, **inputs, return_dict=False)[0], wanted[0])
    with diffusers.attention_backend("attnbench"):
        assert torch.equal(step(ours, **inputs, return_dict=False)[0], found[0])


def test_a_compiled_model_has_one_graph():
    register(backend="emulated", dtype="fp8")
    model, inputs = flux()
    model.set_attention_backend("attnbench")
    wanted = model(**inputs).sample
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert error(compiled(**inputs).sample, wanted) < 1e-5


def test_layers_that_bypass_the_dispatcher_are_named_and_use_sdpa():
    register(backend="emulated", dtype="fp8")
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16, attention_head_dim=8, norm_num_groups=4,
    )  # fmt: skip
    inputs = (tensor(1, 4, 8, 8), 1, tensor(1, 5, 16))
    wanted = step(model, *inputs, return_dict=False)
    message = r"UNet2DConditionModel: no backend .* reaches 8 of 8 attention layers \(AttnProcessor2_0\); .*replaced"
    with pytest.raises(InputError, match=message):
        model.set_attention_backend("attnbench")
    calls = register(backend="emulated", dtype="fp8", otherwise="native")
    with pytest.warns(AttnbenchWarning, match=message):
        model.set_attention_backend("attnbench")
    assert torch.equal(step(model, *inputs, return_dict=False)[0], wanted[0])
    assert calls.served == 0
    model.set_attention_backend("native")
    with replaced("emulated", dtype="fp8") as seen:
        found = step(model, *inputs, return_dict=False)
    assert seen.served > 0
    assert 1e-4 < error(found[0], wanted[0]) < 0.12


def test_unsupported_calls_are_refused_unless_a_fallback_was_requested():
    q = tensor(2, 6, 2, 8)
    padding = torch.randn(2, 6, 6)[:, None]  # a bias
    calls = register()
    for message, named in {
        "biases or blocks": {"attn_mask": padding},
        "dropout": {"dropout_p": 0.1},
        "context parallelism and return_lse are not served": {"attention_kwargs": {"return_lse": True}},
    }.items():
        with pytest.raises(InputError, match=message):
            attend(q, q, q, **named)
    assert calls.served == 0
    calls = register(backend="emulated", dtype="fp8", otherwise="native")
    with pytest.warns(AttnbenchWarning, match="blocks; such calls are handed on to native"):
        assert torch.equal(attend(q, q, q, padding), call_native(q, q, q, padding))
    assert not torch.equal(attend(q, q, q), call_native(q, q, q))
    assert (calls.served, calls.handed_on.total()) == (1, 1)
    with pytest.raises(InputError, match="context parallelism"):
        attend(q, q, q, parallel_config=object())


def masks_of_padding():
    """(B, Skv), (B, 1, 1, Skv), (B, H, Sq, Skv) and with padded queries; in numbers, too."""
    real = torch.arange(7).expand(2, 7) < torch.tensor([[7], [4]])
    keys, empty = real[:, None, None], torch.zeros(1, 7, dtype=torch.bool)
    return {
        "text": real,
        "keys": keys,
        "holes": keys & (torch.arange(7) != 2),
        "heads": keys.expand(2, 4, 7, 7).contiguous(),
        "both": real[:, None, None] & real[:, None, :, None],
        "row without a key": torch.cat([real[:1], empty])[:, None, None],
        "numbers": torch.zeros(2, 1, 1, 7).masked_fill(~keys, -torch.inf),
        "least numbers": torch.zeros(2, 1, 1, 7).masked_fill(~keys, torch.finfo(torch.float32).min),
    }


@pytest.mark.parametrize("name", masks_of_padding())
def test_padding_masks_become_packed_calls(name):
    mask = masks_of_padding()[name]
    calls = register(backend="reference")
    x = [tensor(2, 7, heads, 8, seed=heads).requires_grad_() for heads in (4, 2, 2)]
    found, wanted = [], []
    for answers, function in ((found, attend), (wanted, call_native)):
        out = function(*x, mask, enable_gqa=True)
        answers += [out, *torch.autograd.grad(out.square().sum(), x)]
    assert calls.served == 1
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert torch.equal(attend(*x, mask.clone(), enable_gqa=True), found[0])


def test_invalid_registrations_are_refused(monkeypatch):
    own = dispatch._AttentionBackendRegistry._backends[dispatch.AttentionBackendName.NATIVE]
    with pytest.raises(InputError, match="'native' is a backend of diffusers"):
        register("native")
    assert dispatch._AttentionBackendRegistry._backends[dispatch.AttentionBackendName.NATIVE] is own
    with pytest.raises(InputError, match="lower case"):
        register("Attnbench")
    with pytest.raises(UnknownBackendError, match="sdpa-flash"):
        register(backend="sdpa-flesh")
    with pytest.raises(InputError, match="otherwise must be 'raise' or 'native'"):
        register(otherwise="sdpa")
    monkeypatch.setattr(dispatch, "AttentionBackendName", ("native",))
    with pytest.raises(InputError, match="in another way"):
        register("attnbench-other")
    monkeypatch.setitem(sys.modules, "diffusers.models.attention_dispatch", None)
    with pytest.raises(InputError, match=r"pip install 'diffusers>=0.35'"):
        register()
