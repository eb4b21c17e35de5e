"""Tiny models of transformers and diffusers with random weights, and one training step of them."""

import copy

import torch

TOKENS = 300
DECODER = {
    "vocab_size": TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOWED = {**DECODER, "sliding_window": 16}
SOFTCAPPED = {**WINDOWED, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 4}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": TOKENS, "n_positions": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, **SPECIAL}
ENCODER = {
    "vocab_size": TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    **SPECIAL,
}
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}  # options of ``generate``
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Random weights attend to all keys almost equally; scaling these makes the mask matter.
_SCORING = ("q_proj.weight", "k_proj.weight", "c_attn.weight", "query.weight", "key.weight", "Wqkv.weight")


def decoders(kind, settings, theirs="sdpa", ours="attnbench", auto="AutoModelForCausalLM", gain=8):
    """Two transformers models with the same weights in eval mode: with transformers' attention and with ours."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, kind)(**settings)
    make = getattr(transformers, auto).from_config
    model = make(copy.deepcopy(config), attn_implementation=theirs)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(_SCORING):
                parameter *= gain
    other = make(copy.deepcopy(config), attn_implementation=ours)
    other.load_state_dict(model.state_dict())
    return model.eval(), other.eval()


def tokens(batch=2, length=40, seed=1):
    return torch.randint(3, TOKENS, (batch, length), generator=torch.Generator().manual_seed(seed))


def tensor(*shape, seed=0, grad=False):
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def flux():
    """A diffusers transformer whose layers use its attention dispatcher, and its inputs."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 8, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([1.0, 0.5]),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(8, 3),
    }


def step(model, *inputs, labels=None, **named):
    """The model's first output and its gradients, of the loss if there are labels."""
    model.zero_grad(set_to_none=True)
    if labels is not None:
        answer = model(*inputs, labels=labels, **named)
        out, loss = answer.logits, answer.loss
    else:
        out = model(*inputs, **named)[0]
        loss = out.float().square().mean()
    loss.backward()
    return out.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def error(found, wanted):
    """The relative L2 error of one tensor."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


def worst(found, wanted, least=1e-5):
    """The largest relative L2 error of the gradients; tiny ones are compared relative to the largest gradient."""
    assert found.keys() == wanted.keys()
    largest = max(float(each.double().norm()) for each in wanted.values())
    return max(
        float((found[name].double() - each.double()).norm()) / max(float(each.double().norm()), least * largest)
        for name, each in wanted.items()
    )
