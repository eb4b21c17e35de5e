"""Tiny models of diffusers by both ways in: its backends, and the block in which torch's SDPA is replaced."""

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from tiny_models import flux

from attnbench.integrations.diffusers import register
from attnbench.integrations.sdpa import replaced

LIBRARY = "diffusers"


def latents(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def sd3():
    sizes = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    heads = {"attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 16}
    model = diffusers.SD3Transformer2DModel(
        **sizes, **heads, caption_projection_dim=16, pooled_projection_dim=16
    )  # fmt: skip
    return model, {
        "hidden_states": latents(1, 4, 8, 8), "encoder_hidden_states": latents(1, 5, 16),
        "pooled_projections": latents(1, 16), "timestep": torch.tensor([1]),
    }  # fmt: skip


def pixart():
    model = diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=1, patch_size=2, attention_head_dim=8, num_attention_heads=2, in_channels=4,
        cross_attention_dim=16, out_channels=8, caption_channels=16, use_additional_conditions=False,
    )  # fmt: skip
    return model, {
        "hidden_states": latents(1, 4, 8, 8), "encoder_hidden_states": latents(1, 5, 16),
        "timestep": torch.tensor([1]), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip


def cogvideox():
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=2,
        text_embed_dim=8, num_layers=1, sample_width=8, sample_height=8, sample_frames=8, patch_size=2,
        max_text_seq_length=8,
    )  # fmt: skip
    return model, {
        "hidden_states": latents(1, 2, 4, 8, 8), "encoder_hidden_states": latents(1, 8, 8),
        "timestep": torch.tensor([1]),
    }  # fmt: skip


def dit():
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=1, sample_size=8,
        patch_size=2, num_embeds_ada_norm=8,
    )  # fmt: skip
    return model, {
        "hidden_states": latents(1, 4, 8, 8), "timestep": torch.tensor([1]), "class_labels": torch.tensor([1]),
    }  # fmt: skip


def unet():
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16, attention_head_dim=8, norm_num_groups=4,
    )  # fmt: skip
    return model, {"sample": latents(1, 4, 8, 8), "timestep": 1, "encoder_hidden_states": latents(1, 5, 16)}


def wan():
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": latents(1, 4, 2, 8, 8), "timestep": torch.tensor([1]),
        "encoder_hidden_states": latents(1, 5, 16),
    }  # fmt: skip


def autoencoder():
    model = diffusers.AutoencoderKL(
        block_out_channels=(8, 16), in_channels=3, out_channels=3, latent_channels=4, norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return model, {"sample": latents(1, 3, 16, 16)}


@pytest.mark.parametrize("make", [flux, sd3, pixart, cogvideox, dit, unet, wan, autoencoder])
def test_outputs_are_those_of_the_native_backend(make, verdicts):
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()

    def compute():
        with torch.no_grad():
            return model(**inputs, return_dict=False)[0]

    wanted = compute()

    def by_backend(otherwise):
        calls = register(backend="reference", otherwise=otherwise)
        try:
            model.set_attention_backend("attnbench")
            return compute(), calls
        finally:
            model.reset_attention_backend()
            _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)

    def by_block(otherwise):
        with replaced("reference", otherwise=otherwise) as calls:
            return compute(), calls

    verdicts.judge(f"{make.__name__}, backend", wanted, lambda: by_backend("raise"))
    verdicts.judge(
        f"{make.__name__}, replaced", wanted, lambda: by_block("raise"), handing_on=lambda: by_block("torch")
    )
