"""What plans compute of views whose tokens, heads or batch entries lie far apart, in a process that may die."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from supervised_work import ItemDone, ItemStarted
from torch import Tensor

from attnbench import attention
from attnbench.errors import RefusedError
from attnbench.kernels.contract import Kernel
from attnbench.kernels.registry import Registry

__all__ = ["LAYOUTS", "Job", "compare_all", "jobs_of", "problem_of"]

BATCH, HEADS, TOKENS, HEAD_DIM = 2, 3, 256, 64
_FAR = 2**31
# Strides (batch, head, token) and where K and V begin behind Q: of one entry in rows of a wide projection, of heads of
# which the last begins behind what unsigned 32 bits count too, and of entries.
LAYOUTS = {
    "tokens": (TOKENS, HEAD_DIM, 2 * _FAR // TOKENS, HEADS * HEAD_DIM),
    "heads": (TOKENS * HEAD_DIM, _FAR + 64, HEAD_DIM, BATCH * TOKENS * HEAD_DIM),
    "entries": (_FAR + 64, TOKENS * HEAD_DIM, HEAD_DIM, HEADS * TOKENS * HEAD_DIM),
}


class Job(NamedTuple):
    """A plan on views of one layout."""

    plan: str
    layout: str


def jobs_of(known: Registry, family: str) -> list[Job]:
    """A backend's forwards for bf16 on a GPU, and its backwards behind their own forwards."""
    plans = [name for name, each in known.forwards.items() if _is_of(each, family)]
    for name, backward in known.backwards.items():
        if _is_of(backward, family):
            before = name if name in plans else next((x for x in backward.follows or () if x in plans), plans[0])
            plans.append(f"{before}>{name}")
    return [Job(plan, layout) for plan in plans for layout in LAYOUTS]


def _is_of(kernel: Kernel, family: str) -> bool:
    row = kernel.rows.get("cuda")
    return kernel.name.partition(":")[0] == family and row is not None and "bf16" in row.dtypes


def compare_all(jobs: list[Job], say: Callable[[Any], None]) -> None:
    """Sends of each job what was wrong, or None; a refusal is right.  What else is raised ends the process."""
    torch.zeros(1, device="cuda")
    for job in jobs:
        say(ItemStarted(job))
        say(ItemDone(job, problem_of(job)))


def problem_of(job: Job, device: str = "cuda", far: int = _FAR) -> str | None:
    """What of a plan's results differs between far views and the same numbers close together."""
    generator = torch.Generator(device).manual_seed(0)
    views = _views(job.layout, device, far)
    for view in views:
        view.copy_(torch.randn(view.shape, generator=generator, device=device))
    grad = torch.randn(views[0].shape, generator=generator, device=device).to(torch.bfloat16)
    try:
        wanted = _results(job.plan, [x.clone(memory_format=torch.contiguous_format) for x in views], grad)
        found = _results(job.plan, views, grad)
    except RefusedError:
        return None
    for name, mine, theirs in zip(("out", "dq", "dk", "dv"), found, wanted, strict=False):
        off = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
        if not off <= 0.01:  # sums in no fixed order differ in their last bits
            return f"{name} is off by {off:.3g}"
    return None


def _views(layout: str, device: str, far: int) -> list[Tensor]:
    *strides, behind = (each * far // _FAR if each > _FAR // TOKENS else each for each in LAYOUTS[layout])
    batch = 1 if layout == "tokens" else BATCH
    shape = batch, HEADS, TOKENS, HEAD_DIM
    reach = sum((size - 1) * stride for size, stride in zip(shape, (*strides, 1), strict=True))
    memory = torch.empty(reach + 2 * behind + 1, dtype=torch.bfloat16, device=device)
    return [memory.as_strided(shape, (*strides, 1), i * behind) for i in range(3)]


def _results(plan: str, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    dtype = "fp8" if "fp8" in plan else None
    leaves = [x.detach().requires_grad_(">" in plan) for x in inputs]
    out = attention(*leaves, is_causal=True, backend=plan, dtype=dtype)
    return [out.detach(), *(torch.autograd.grad(out, leaves, grad) if ">" in plan else ())]
