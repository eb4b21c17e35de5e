"""A model that trains hundreds of steps in a second, and attention functions with injected errors."""

from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from fakes import an_environment
from torch import Tensor, nn

from attnbench.harness.training.config import TrainConfig
from attnbench.harness.training.models.attention import AttentionCore
from attnbench.harness.training.rows import TrainingRun, WarningSign
from attnbench.harness.training.run.parallel import Ranks
from attnbench.harness.training.run.session import Session
from attnbench.harness.training.run.trainable import Trainable

VOCAB, WIDTH, HEADS, LENGTH = 16, 16, 2, 12


def small(**settings) -> TrainConfig:
    """The configuration of the small model; the model name has no effect."""
    return TrainConfig.make(
        "gpt",
        **{"seqlen": LENGTH, "batch": 4, "steps": 20, "policy": "fp32", "attention": "sdpa", "lr": 0.01} | settings,
    )


def exact(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def rounded(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Attention in fp64: results differ from ``exact`` only by rounding."""
    return exact(q.double(), k.double(), v.double(), is_causal).float()


def gradient_times(factor: float):
    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return exact(*_Scaled.apply(factor, q, k, v), is_causal)

    return attend


def not_a_number_after(calls: int):
    """Exact for this number of calls, then NaN."""
    left = [calls]

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        left[0] -= 1
        return exact(q, k, v, is_causal) * (1.0 if left[0] >= 0 else float("nan"))

    return attend


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, factor, *tensors):
        ctx.factor = factor
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx, *grads):
        return (None, *(each * ctx.factor for each in grads))


class _Layer(nn.Module):
    def __init__(self, attend) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.core = AttentionCore(attend)
        self.dropout = nn.Dropout(0.05)  # so that a generator's state matters

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        out = self.core(q, k, v, True).transpose(1, 2).flatten(2)
        return x + self.dropout(self.out(out)) if self.training else x + self.out(out)


class _Net(nn.Module):
    def __init__(self, attend) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([_Layer(attend), _Layer(attend)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class SmallTrainable(Trainable):
    def batch(self, step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        first = (step * world + rank) * self.config.batch
        tokens = torch.stack([_sample(self.config.seed, first + each) for each in range(self.config.batch)])
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@cache
def _sample(seed: int, number: int) -> Tensor:
    """Each token is the one three positions before plus one, or sometimes random: predicting it needs attention."""
    generator = torch.Generator().manual_seed(seed * 10**6 + number)
    row = torch.randint(VOCAB, (LENGTH + 1,), generator=generator).tolist()
    kept = torch.rand(LENGTH + 1, generator=generator).tolist()
    for place in range(3, LENGTH + 1):
        if kept[place] < 0.8:
            row[place] = (row[place - 3] + 1) % VOCAB
    return torch.tensor(row)


def build_small(config: TrainConfig, device: torch.device, attend=exact, *, dropout: bool = False) -> Trainable:
    torch.manual_seed(config.seed)
    net = _Net(attend).train(dropout)
    cores = [block.core for block in net.blocks]
    units = config.batch * LENGTH
    return SmallTrainable(config, device, net, list(net.blocks), cores, 1e6, "tokens", units, 0, None)


def builder(planted):
    """Builds the candidate's model (attention is not ``sdpa``) with a planted attention, the baseline's without."""
    return lambda config, device: build_small(config, device, exact if config.attention == "sdpa" else planted)


def session_of(folder: Path, **options) -> Session:
    return Session(folder, Ranks(torch.device("cpu")), **{"checkpoint_every": 0} | options)


def run_all(folder: Path, plan, build=build_small, **options) -> list[TrainingRun]:
    """The rows of a session that runs the plan in the folder."""
    with session_of(folder, **options) as session:
        return session.run(plan, build, lambda row: None)


HERE = an_environment(device_name="a CPU", torch="2.13.0", backends={})


def run_of(losses, role="candidate", seed=0, gradient=1.0, **more) -> TrainingRun:
    steps = len(losses)
    settings = {"attention": role, "seed": seed, "steps": steps}
    sign = WarningSign(step=0, kurtosis_q=3.0, kurtosis_k=3.0, ds_underflow={}, gradient_norm=gradient)
    return TrainingRun(
        **{
            "settings": settings,
            "role": role,
            "status": "ok",
            "loss": [float(each) for each in losses],
            "grad_norm": [1.0] * steps,
            "step_ms": [1.0] * steps,
            "timed_from": 0,
            "units": "tokens",
            "units_per_step": 1,
            "flops_per_step": 1.0,
            "flops_model": "none",
            "signs": [sign],
            "started": datetime.now(timezone.utc),
            "environment": HERE,
        }
        | more
    )


def gradients(trainable: Trainable) -> dict[str, Tensor]:
    """The gradient of the first batch's loss, by parameter."""
    trainable.module.zero_grad()
    trainable.loss(trainable.batch(0)).backward()
    return {name: each.grad.clone() for name, each in trainable.module.named_parameters() if each.grad is not None}
