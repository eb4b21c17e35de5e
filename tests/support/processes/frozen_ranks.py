"""One rank of a test of frozen choices: ranks have different tables and must still run the same plans."""

import json
import sys
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from attnbench import Plan, attention, explain, freeze
from attnbench.kernels.execution import Execution
from attnbench.kernels.registry import registry
from attnbench.problem.spec import AttentionSpec
from attnbench.state import forget
from attnbench.tables.environment import Environment
from attnbench.tables.table import Entry, Table
from attnbench.tables.user_table import update_user_table

FAVOURITES = ("sdpa-flash", "sdpa-math")
LENGTHS = (5, 6, 7, 9, 10, 11)


def tensors(length: int) -> list[torch.Tensor]:
    return [torch.randn(2, 2, length, 16) for _ in range(3)]


def prefer(favourite: str) -> None:
    """Writes a user table in which that backend is the fastest for every spec of this script."""
    entries = []
    for length, direction in [*((length, "forward") for length in LENGTHS), (8, "training")]:
        for mask in (ranks_mask(), {}):
            x = tensors(length)
            if direction == "training":
                x = [each.requires_grad_() for each in x]
            spec: AttentionSpec = explain(*x, **mask).spec
            for backend in FAVOURITES:
                kernel = f"{backend}:fp32"
                plan = Plan(kernel, kernel if spec.training else None)
                entries.append(Entry(spec, plan, "ok", 1.0 + (backend != favourite), 0.0, {"normal": 1e-6}))
    update_user_table(Table.from_entries(Environment.detect(torch.device("cpu"), registry()), entries))


def ranks_mask() -> dict[str, bool]:
    return {"is_causal": True}


def run(rank: int, folder: Path, missing: str, favourite: str, *kinds: str) -> None:
    """Writes the plan that ran for each spec, and the plans that the tables alone choose."""
    prefer(favourite)
    ran: dict[str, list[str]] = {}
    original = Execution.answer

    def watched(self, *args):
        ran.setdefault(str(self.spec), []).append(str(self.plan))
        return original(self, *args)

    Execution.answer = watched
    whole, Execution._whole = (
        Execution._whole,
        lambda self, device_type: None,
    )  # so that every call goes through ``answer``
    forget()
    alone = [str(explain(*tensors(length)).plan) for length in LENGTHS]
    dist.barrier()
    with freeze(folder / "run.choices.json", missing=missing):
        for length in LENGTHS if rank else reversed(LENGTHS):
            attention(*tensors(length))
        for kind in kinds:
            torch._dynamo.reset()
            net, x = ranks.distributed_model(kind), ranks.batches()[rank]
            net(x).square().mean().backward()
            checkpoint(net, x.clone().requires_grad_(), use_reentrant=False).square().mean().backward()
    found = {"alone": alone, "ran": {spec: sorted(set(plans)) for spec, plans in ran.items()}}
    (folder / f"{missing}-{rank}.json").write_text(json.dumps(found))
    Execution.answer, Execution._whole = original, whole


def main(rank: int, folder: Path, *kinds: str) -> None:
    """Records a file, and repeats it after each rank's table got the preference of the other's."""
    ranks.PLAN = "auto"  # read by the layers of ``ranks``
    ranks.join(rank, folder / "store")  # sets the number of threads that a table is bound to
    run(rank, folder, "record", FAVOURITES[rank], "ddp")
    dist.barrier()
    if rank == 0:
        (folder / "recorded.json").write_bytes((folder / "run.choices.json").read_bytes())
        (folder / "run.choices.json").chmod(0o444)
    dist.barrier()
    run(rank, folder, "raise", FAVOURITES[1 - rank], *kinds)
    ranks.leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
