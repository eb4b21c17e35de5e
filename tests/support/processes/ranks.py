"""One rank of a distributed test; imported by the processes that torch starts."""

import faulthandler
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from patience import PATIENCE
from places import SUPPORT
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from attnbench import attention

RANKS = 2
KINDS = ("ddp", "ddp compiled", "fsdp2", "fsdp2 compiled")
PLAN = "emulated:fp8>sdpa-flash:fp32"


def run_ranks(script: str, arguments: Sequence[Sequence[str]], caches: Path) -> None:
    """Runs a script for each rank with its arguments and its own cache folder; fails with the errors of all ranks.

    A rank that hangs, usually because the other one died, prints its stack.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, script, *own], stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": SUPPORT, "XDG_CACHE_HOME": str(caches / f"cache-{rank}")},
        )
        for rank, own in enumerate(arguments)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=2 * PATIENCE)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0] * len(arguments), "\n".join(f"rank {i}, {codes[i]}: {each}" for i, each in enumerate(errors))


def join(rank: int, store: Path) -> None:
    """Initialises a rank."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS)


def leave() -> None:
    """Ends a rank without destructors.

    The process group's destructor joins a gloo thread while it holds the GIL, and that thread may need the GIL to
    finish the last barrier: a deadlock that was seen with torch 2.13.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


class Layer(nn.Module):
    """Attention over rows (B, S, width), or over packed sequences with these start offsets."""

    def __init__(self, plan: str, starts: Sequence[int] = (), width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.plan = plan
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.register_buffer("starts", torch.tensor(starts, dtype=torch.int32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)) for each in self.qkv(x).chunk(3, dim=-1))
        if not len(self.starts):
            return x + self.out(attention(q, k, v, is_causal=True, layout="bshd", backend=self.plan).flatten(2))
        q, k, v = (each.flatten(0, 1) for each in (q, k, v))
        lengths = {"cu_seqlens_q": self.starts, "max_seqlen_q": len(q)}
        out = attention(q, k, v, is_causal=True, layout="thd", backend=self.plan, **lengths)
        return x + self.out(out.flatten(1)).view_as(x)


def model(plan: str = PLAN) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(plan), Layer(plan, () if plan != PLAN else (0, 5, 5, 16)))


def batches() -> Tensor:
    """(rank, B, S, width): the input of each rank."""
    return torch.randn(RANKS, 2, 8, 32, generator=torch.Generator().manual_seed(1))


def gradients(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    net(x).square().mean().backward()
    return {name.removeprefix("module."): each.grad for name, each in net.named_parameters()}


def distributed_model(kind: str) -> nn.Module:
    net = model()
    if kind.startswith("fsdp2"):
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in net:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    else:
        net = DistributedDataParallel(net)
    if kind.endswith("compiled"):
        net.compile(backend="aot_eager")
    return net


def main(rank: int, folder: Path) -> None:
    """Writes the full gradients of rank 0 for each kind."""
    join(rank, folder / "store")
    for kind in KINDS:
        torch._dynamo.reset()
        found = gradients(distributed_model(kind), batches()[rank])
        whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in found.items()}
        if rank == 0:
            torch.save(whole, folder / f"{kind}.pt")
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
