"""Programs that call attention, for what records it."""

import torch
import torch.nn.functional as F
from torch import nn

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


def step(model, seed=0):
    """One step of training from a seed: loss, gradients and the random state after it."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(torch.randn(2, 5, 16)).square().mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()], torch.get_rng_state()
