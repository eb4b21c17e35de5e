"""One process or many: this process's rank, and the model spread over all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from attnbench.errors import MisuseError
from attnbench.integrations.context_parallel import context_parallel
from attnbench.kernels.devices import find

from ..config import SDPA, TrainConfig
from .policy import sharding_policy

if TYPE_CHECKING:
    from .trainable import Trainable

__all__ = ["Ranks", "join_ranks", "shared_attention", "spread"]

_PATIENCE = timedelta(minutes=30)  # for compiling and the first step of a large model on one rank while the others wait


@dataclass(frozen=True)
class Ranks:
    """Rank ``rank`` of ``world``, which computes on ``device``."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and messages."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait for every rank."""
        if self.world > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a tensor over all ranks, without waiting for the device."""
        if self.world == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total / self.world

    def agreed(self, number: int) -> int:
        """The first rank's number."""
        if self.world == 1:
            return number
        shared = torch.tensor(number, device=self.device)
        dist.broadcast(shared, 0)
        return int(shared)


@contextmanager
def join_ranks(device: str, environ: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """This process's place among those that ``torchrun`` started; alone without torchrun.

    ``device`` is ``auto``, ``cpu``, ``cuda``, or without torchrun ``cuda:N``; under torchrun each process of a node
    takes the GPU of its local rank.  NCCL connects GPUs, gloo CPUs.  Raises MisuseError if torchrun's variables are
    incomplete or not numbers, or if one GPU is named for all ranks.
    """
    names, meeting = ("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("MASTER_ADDR", "MASTER_PORT")
    if not all(name in environ for name in names):
        yield Ranks(_current(find(device)))
        return
    try:
        rank, world, local = (int(environ[name]) for name in names)
    except ValueError:
        raise MisuseError(f"{', '.join(names)} of torchrun are numbers") from None
    if ":" in device:
        raise MisuseError(f"under torchrun each process takes its own GPU; say --device cuda, not {device}")
    if missing := [name for name in meeting if not environ.get(name)]:
        raise MisuseError(f"{', '.join(names)} are set and {', '.join(missing)} not: torchrun sets all of them")
    found = find(device)
    if found.type == "cuda":
        found = _current(find(f"cuda:{local}"))
    dist.init_process_group("nccl" if found.type == "cuda" else "gloo", timeout=_PATIENCE)
    try:
        yield Ranks(found, rank, world)
    finally:
        dist.destroy_process_group()


def _current(device: torch.device) -> torch.device:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def spread(trainable: Trainable, ranks: Ranks) -> DeviceMesh | None:
    """Spread the model as its configuration says: DDP, or FSDP2 with every block as a shard group.

    Returns the consecutive ranks that share samples with this one, None if it has its own.  Gradients are the mean over
    all ranks, which have as many tokens each.  Raises MisuseError if the number of ranks and the configuration do not
    agree.
    """
    kind, sharing = trainable.config.parallel, trainable.config.context_parallel
    if kind == "none":
        if ranks.world > 1:
            raise MisuseError(f"{ranks.world} processes were started; say --parallel ddp or fsdp2")
        return None
    if not dist.is_initialized():
        raise MisuseError(
            f"--parallel {kind} is started by torchrun: torchrun --nproc-per-node N -m attnbench train ..."
        )
    if ranks.world % sharing:
        raise MisuseError(f"--context-parallel {sharing} needs a multiple of as many processes, not {ranks.world}")
    if kind == "ddp":
        trainable.module = DistributedDataParallel(
            trainable.module, device_ids=[ranks.device] if ranks.device.type == "cuda" else None
        )
    else:
        mesh = init_device_mesh(ranks.device.type, (ranks.world,))
        policy = sharding_policy(trainable.config)
        for each in (*trainable.blocks, trainable.module):
            fully_shard(each, mesh=mesh, mp_policy=policy)
    if sharing == 1:
        return None
    grid = init_device_mesh(ranks.device.type, (ranks.world // sharing, sharing), mesh_dim_names=("sample", "context"))
    return grid["context"]


def shared_attention(config: TrainConfig, mesh: DeviceMesh | None) -> AbstractContextManager[Any]:
    """The context of passes in which the config's attention is that of samples that the ranks of the mesh share."""
    if mesh is None:
        return nullcontext()
    if config.attention != SDPA:
        return context_parallel(mesh)
    return _torchs_ring(mesh)


@contextmanager
def _torchs_ring(mesh: DeviceMesh) -> Iterator[None]:
    """torch's own context parallelism, with kernels in the order in which torchtitan asks for them."""
    from torch.distributed.tensor.experimental import context_parallel as torchs

    unused = torch.zeros(2 * mesh.size(), device=mesh.device_type)  # it wants something to shard
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with (
        sdpa_kernel(kernels, set_priority=True),
        torchs(mesh, buffers=[unused], buffer_seq_dims=[0], no_restore_buffers={unused}),
    ):
        yield
