"""A pre-training loop in the style of Megatron and Fast-LLM, with FP8 attention within an error budget.

Llama-style blocks (RMSNorm, rotary positions, grouped heads, SwiGLU), bf16 autocast over fp32 weights, activation
checkpointing, and FSDP2 with several processes.  Five places that use attnbench are marked with ATTENTION.

    python train.py                                                    # one process, a GPU or a CPU
    torchrun --nproc-per-node 8 train.py                               # eight GPUs
    python train.py --attention bf16                                   # the same in bf16, to compare the losses
    python train.py --choices run.choices.json                         # record which kernels ran
    python train.py --choices run.choices.json --missing raise         # a later run: the same kernels, or an error
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import attnbench


@dataclass(frozen=True)
class Config:
    vocab: int = 256
    layers: int = 2
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    seqlen: int = 128


def rotary(x: Tensor) -> Tensor:
    """Rotate the halves of x (B, S, H, D) by its positions."""
    _, length, _, size = x.shape
    rates = 10_000.0 ** -(torch.arange(0, size, 2, device=x.device) / size)
    angles = torch.arange(length, device=x.device)[:, None, None] * rates
    left, right = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        kv_width = config.kv_heads * self.head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.kv = nn.Linear(config.width, 2 * kv_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.gate_and_up = nn.Linear(config.width, 8 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q = self.q(normed).unflatten(-1, (-1, self.head_dim))
        k, v = self.kv(normed).unflatten(-1, (-1, self.head_dim)).chunk(2, dim=2)
        # ATTENTION 1: layout="bshd" takes the projections' layout without a copy, key heads are not repeated, and the
        # context around the training step decides the plan.
        attended = attnbench.attention(rotary(q), rotary(k), v, is_causal=True, layout="bshd")
        x = x + self.out(attended.flatten(2))
        gate, up = self.gate_and_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            # ATTENTION 2: the recomputed forward chooses a plan again; it gets the same one.
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def batch(config: Config, step: int, size: int, rank: int, world: int) -> Tensor:
    """This rank's tokens (B, S + 1) of a step: each sequence counts up in a stride that the model can learn."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(config.vocab, (size, 1), generator=draw)
    strides = torch.randint(1, 8, (size, 1), generator=draw)
    tokens = (starts + strides * torch.arange(config.seqlen + 1)) % config.vocab
    return tokens[rank * size // world : (rank + 1) * size // world]


def train(options: argparse.Namespace, device: torch.device, rank: int, world: int) -> None:
    config = Config()
    torch.manual_seed(0)
    model = Decoder(config).to(device)
    if world > 1:
        mesh = init_device_mesh(device.type, (world,))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

    # ATTENTION 3: opt into FP8, with a bound on the error of output and gradients.  For bf16 pass nothing.
    asked = {"dtype": "fp8", "max_error": options.max_error or None} if options.attention == "fp8" else {}
    # ATTENTION 4: all ranks use the plans that the first rank chose, in this run and in later runs.
    frozen = attnbench.freeze(options.choices, missing=options.missing) if options.choices else nullcontext()
    # ATTENTION 5: regularly compare some rows with exact attention, on the tensors of this run.
    guard = attnbench.guard(every=options.guard_every, on_breach="warn")
    with frozen, guard, attnbench.use_backend(options.backend, **asked):
        for step in range(options.steps):
            tokens = batch(config, step, options.batch, rank, world).to(device)
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()
            mean = loss.detach() / world
            if world > 1:
                dist.all_reduce(mean)
                norm = norm.full_tensor()
            if rank == 0 and step % options.log_every == 0:
                print(f"step {step} loss {mean.item():.4f} grad norm {norm.item():.3f}", flush=True)
    if rank == 0:
        print(f"attention was checked {guard.checks} times, with {len(guard.breaches)} breaches of its error bound")


def main() -> None:
    parser = argparse.ArgumentParser(description="A small pre-training loop with FP8 attention within a budget.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step, over all processes")
    parser.add_argument("--attention", default="fp8", choices=["fp8", "bf16"])
    parser.add_argument(
        "--max-error", type=float, default=0.12, help="largest relative L2 error of FP8 plans; 0: the default budget"
    )
    parser.add_argument("--backend", default="auto", help="a backend, kernel or plan; auto: the fastest allowed plan")
    parser.add_argument("--choices", help="file in which plans are recorded and from which they are repeated")
    parser.add_argument("--missing", default="record", choices=["record", "raise"])
    parser.add_argument("--guard-every", type=int, default=1000)
    parser.add_argument("--log-every", type=int, default=10)
    options = parser.parse_args()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(options, device, rank, world)
    finally:
        if world > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
