"""Models of transformers and diffusers on a GPU: SDPA's results in bf16, and FP8 within a budget."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny_models import DECODER, decoders, error, flux, step, tokens, worst
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnbench
from attnbench import attention
from attnbench.integrations.sdpa import replaced

# Heads of 128 and lengths of 1024, so that every backend of this GPU has a say.
LARGER = {
    **DECODER,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1024,
}
WINDOWED = {**LARGER, "sliding_window": 256}
BF16 = 0.02  # two bf16 kernels apart, through two layers and their gradients


def rows(seed=0, heads=4, length=1024):
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(2, heads, length, 128, device="cuda", dtype=torch.bfloat16, generator=draw).requires_grad_()


@pytest.fixture
def register():
    pytest.importorskip("transformers")
    from attnbench.integrations.transformers import register

    return register


def pair(kind, settings):
    # Scores far apart would turn the rounding of bf16 activations into other answers, with any attention.
    model, ours = decoders(kind, settings, gain=1)
    return model.cuda().bfloat16(), ours.cuda().bfloat16(), tokens(length=1024).cuda()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LlamaConfig", LARGER),
        ("Qwen3Config", LARGER),
        ("Gemma3TextConfig", {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}),
        ("MistralConfig", WINDOWED),
    ],
)
@pytest.mark.parametrize("batch", ["whole", "left", "right", "positions"])
def test_transformers_agrees_on_sequences_of_equal_and_unequal_length(register, kind, settings, batch):
    calls = register()
    model, ours, x = pair(kind, settings)
    real, named = torch.ones_like(x), {"use_cache": False}
    if batch == "positions":
        named["position_ids"] = torch.arange(512, device="cuda").repeat(2, 2)
    elif batch != "whole":
        real[0, slice(0, 300) if batch == "left" else slice(724, None)] = 0
        named["attention_mask"] = real
    labels = x.masked_fill(real == 0, -100)
    labels[:, 512 if batch == "positions" else 300] = -100
    wanted, found = (step(each, x, labels=labels, **named) for each in (model, ours))
    assert calls.served == 2
    assert error(found[0][real > 0], wanted[0][real > 0]) < BF16
    assert worst(found[1], wanted[1], least=1e-2) < BF16


@pytest.mark.parametrize("asked", [{"max_error": 0.12}, {"backend": "triton", "dtype": "fp8"}])
def test_transformers_in_fp8_is_within_the_budget(register, asked):
    calls = register("attnbench", **asked)
    model, ours, x = pair("LlamaConfig", LARGER)
    wanted, found = step(model, x, use_cache=False), step(ours, x, use_cache=False)
    assert calls.served == 2
    assert error(found[0], wanted[0]) < 0.12
    assert worst(found[1], wanted[1], least=1e-2) < 0.12
    if "dtype" in asked:  # by name FP8 ran, and shows
        assert error(found[0], wanted[0]) > 1e-3


def test_transformers_decodes_as_sdpa_does(register):
    register()
    model, ours, x = pair("LlamaConfig", LARGER)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    generated = ours.generate(x[:, :64], **options)
    with torch.no_grad():  # near-ties may fall either way in bf16; what was generated must be near the best
        scores = model(generated).logits[:, 63:-1].float()
    chosen = scores.gather(-1, generated[:, 64:, None])[..., 0]
    assert (scores.max(-1).values - chosen).max() < 0.05 * scores.std()


def test_a_compiled_model_of_transformers_is_one_graph(register):
    register()
    model, ours, x = pair("LlamaConfig", LARGER)
    wanted = step(model, x, use_cache=False)
    torch._dynamo.reset()
    found = step(torch.compile(ours, fullgraph=True), x, use_cache=False)
    assert error(found[0], wanted[0]) < BF16
    gradients = {name: each.grad for name, each in ours.named_parameters()}
    assert worst(gradients, wanted[1], least=1e-2) < BF16


def test_masks_synchronise_once_when_made_and_not_in_the_layers(register):
    """With no padding mask nothing waits at all; with one, a forward waits once, however many layers there are."""
    register()
    waits = []
    for layers in (1, 3):
        _, ours, x = pair("LlamaConfig", {**LARGER, "num_hidden_layers": layers})
        ragged = torch.ones_like(x)
        ragged[0, :100] = 0
        anew = torch.arange(512, device="cuda").repeat(2, 2)
        for named in (
            {},
            {"attention_mask": torch.ones_like(x)},
            {"attention_mask": ragged},
            {"position_ids": anew, "use_cache": False},
        ):
            with torch.no_grad():
                ours(x, **named)  # chooses
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                    ours(x, **named)
            waits.append(sum(each.count for each in profile.key_averages() if each.key == "aten::_local_scalar_dense"))
    assert waits[:4] == waits[4:]


@pytest.mark.parametrize("asked", [{}, {"max_error": 0.12}])
def test_diffusers_is_within_the_budget(asked):
    pytest.importorskip("diffusers")
    from attnbench.integrations.diffusers import register

    calls = register(**asked)
    model, inputs = flux()
    model = model.cuda().bfloat16()
    inputs = {name: each.cuda().bfloat16() for name, each in inputs.items()}
    ours = copy.deepcopy(model)
    # Torch's choice here is cuDNN, whose graphs are kept for one layout of a gradient and wrong for the others.
    with sdpa_kernel(SDPBackend.MATH):
        wanted = step(model, **inputs, return_dict=False)
    ours.set_attention_backend("attnbench")
    try:
        found = step(ours, **inputs, return_dict=False)
    finally:
        ours.set_attention_backend("native")
    bound = asked.get("max_error", BF16)
    assert calls.served == 2
    assert error(found[0], wanted[0]) < bound
    assert worst(found[1], wanted[1], least=1e-2) < 2 * bound


@pytest.mark.parametrize("asked", [{}, {"max_error": 0.12}, {"backend": "triton", "dtype": "fp8"}])
def test_the_sdpa_replacement_agrees_with_sdpa(asked):
    q, k, v = rows(), rows(1, heads=2), rows(2, heads=2)
    named = {"is_causal": True, "enable_gqa": True}
    wanted = F.scaled_dot_product_attention(q, k, v, **named)
    gradients = torch.autograd.grad(wanted, (q, k, v), torch.ones_like(wanted))
    with replaced(**asked) as calls:
        out = F.scaled_dot_product_attention(q, k, v, **named)
        found = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert calls.served == 1
    assert torch.equal(out, attention(q, k, v, is_causal=True, **asked))
    bound = 0.12 if asked else BF16
    assert error(out, wanted) < bound
    for mine, theirs in zip(found, gradients, strict=True):
        assert error(mine, theirs) < bound


def test_gradients_in_autograds_thread_are_not_counted_as_calls_of_the_block():
    """Kernels' backwards run in a thread that inherits the block's mode; what they ask of torch stays torch's."""
    q = rows()
    with replaced("sdpa-flash") as calls, attnbench.use_backend("sdpa-flash"):
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    assert calls.served == 1
    assert bool(q.grad.isfinite().all())
