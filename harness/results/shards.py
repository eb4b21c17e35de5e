"""Which cases of a sweep this process measures if many processes run the same command: torchrun, srun, a Slurm array.

The processes do not communicate: each finds its index in the variables of its launcher, and all compute the same split.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from attnbench.errors import InputError, MisuseError

__all__ = ["Shard"]

Item = TypeVar("Item")
_NUMBER = re.compile(r"[0-9]{1,9}")
_PART = re.compile(r"part-([0-9]{1,9})-of-([0-9]{1,9})")


@dataclass(frozen=True)
class Shard:
    """Part ``index`` (from 0) of ``count``; one of one is everything.

    ``local`` is the rank on this node, None if the launcher does not give it.  ``bound``: the launcher gave the process
    GPUs that its neighbours do not see.  Raises MisuseError if there is no such part.
    """

    index: int = 0
    count: int = 1
    local: int | None = None
    bound: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise MisuseError(f"there is no part {self.index} of {self.count}; they count from 0")

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> Shard:
        """The shard that the launcher's variables describe; one of one without a launcher.

        torchrun is checked first, then srun; the tasks of a Slurm array multiply either.  Inside ``sbatch`` and
        ``salloc`` without ``srun`` there is one process, whatever SLURM_NTASKS says of the allocation: only a job step
        counts (SLURM_STEP_NUM_TASKS; Slurm's ``src/common/env.c``, ``env_array_for_step``).  torchrun's variables are
        those of torch's ``elastic/agent/server/local_elastic_agent.py``.

        Raises MisuseError if a variable is missing or not a number, or if two contradict each other.
        """
        step = _step(environ)
        tasks = _torchrun(environ, step) or step or cls()
        array = _array(environ) or cls()
        return cls(array.index * tasks.count + tasks.index, array.count * tasks.count, tasks.local, tasks.bound)

    @classmethod
    def named(cls, name: str) -> Shard | None:
        """The shard of a folder with this name, or None; MisuseError if the name says part 8 of 8."""
        match = _PART.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2]))

    @property
    def name(self) -> str:
        """The name of its folder: ``part-0003-of-0008`` is the fourth."""
        return f"part-{self.index:04d}-of-{self.count:04d}"

    def of(self, items: Sequence[Item], weight: Callable[[Item], float] | None = None) -> list[Item]:
        """This shard's items in their order; the shards together have each item once.

        The heaviest item goes first, each to the shard with the least weight so far (Graham's longest processing time
        rule: at most 4/3 of the best split's longest part).  With more shards than items some stay empty.  Raises
        InputError on a weight that is negative or not finite.
        """
        weights = [1.0 if weight is None else weight(item) for item in items]
        if wrong := [each for each in weights if not 0 <= each < math.inf]:
            raise InputError(f"a weight must be finite and not negative, not {wrong[0]}")
        mine = []
        # Of shards with equal weight the one with fewer items is next, so that items of weight 0 spread as well.
        loads = [(0.0, 0, shard) for shard in range(min(self.count, len(items)))]
        for position in sorted(range(len(items)), key=lambda position: -weights[position]):
            load, held, shard = loads[0]
            heapq.heapreplace(loads, (load + weights[position], held + 1, shard))
            if shard == self.index:
                mine.append(position)
        return [items[position] for position in sorted(mine)]

    def folder(self, out: Path) -> Path:
        """Where it writes: its own folder in ``out``, or ``out`` itself for a single shard."""
        return out if self.count == 1 else out / self.name

    def device(self, name: str, visible: int) -> str:
        """The device to measure on if ``visible`` GPUs are visible to this process.

        ``auto`` and ``cuda``, which name no GPU, become the process's own one; other names are unchanged.  Raises
        MisuseError if processes of this node would share a GPU, and so measure each other.
        """
        if name not in ("auto", "cuda") or self.local is None or not visible:
            return name
        if self.bound:
            return f"cuda:{self.local % visible}"
        if self.local >= visible:
            raise MisuseError(
                f"local rank {self.local} has no GPU of its own, this node shows {visible}, and two ranks on one "
                "would measure each other; start as many ranks on a node as it has GPUs, or name one with --device"
            )
        return f"cuda:{self.local}"


def _torchrun(environ: Mapping[str, str], step: Shard | None) -> Shard | None:
    """RANK of WORLD_SIZE.  ``step`` is the srun that started torchrun, once on each node, if one did."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & environ.keys():
        return None
    shard = _ranked(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK")
    if step is None or step.count == 1:
        return shard
    if "GROUP_WORLD_SIZE" in environ:
        joined = _number(environ, "GROUP_WORLD_SIZE")
        if joined != step.count:
            raise MisuseError(
                f"srun started {step.count} tasks, but this torchrun joined {joined} (GROUP_WORLD_SIZE), so that each "
                "group would measure the same; give torchrun --nnodes and --rdzv-endpoint"
            )
    elif (shard.index, shard.count) != (step.index, step.count):
        raise MisuseError(
            f"RANK and WORLD_SIZE say part {shard.index} of {shard.count}, "
            f"SLURM_PROCID and SLURM_STEP_NUM_TASKS say {step.index} of {step.count}; unset the wrong ones"
        )
    return step if shard.local is None else shard


def _step(environ: Mapping[str, str]) -> Shard | None:
    """SLURM_PROCID of SLURM_STEP_NUM_TASKS, which srun sets and sbatch and salloc do not."""
    if "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    bound = "SLURM_GPUS_PER_TASK" in environ
    return _ranked(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", bound)


def _ranked(environ: Mapping[str, str], rank: str, size: str, local_rank: str, bound: bool = False) -> Shard:
    index, count = _number(environ, rank), _number(environ, size)
    if index >= count:
        raise MisuseError(f"{rank} is {index}, but {size} is {count}: ranks count from 0 to {size} - 1")
    local = _number(environ, local_rank) if local_rank in environ else None
    if local is not None and local >= count:
        raise MisuseError(f"{local_rank} is {local}, but {size} is {count}: a node cannot hold more ranks than all do")
    # torchrun and srun show all GPUs to each process unless told to show each its own.
    one = re.fullmatch(r"[^,]+", environ.get("CUDA_VISIBLE_DEVICES", "")) is not None
    return Shard(index, count, local, bound=bound or one)


def _array(environ: Mapping[str, str]) -> Shard | None:
    """The task's position among the indices of its Slurm array, which must be evenly spaced.

    Slurm gives their number and bounds, but its step is only what follows the first colon of --array
    (``src/slurmctld/job_mgr.c``, ``_create_job_array``): 0,4,8 has the step 1 there.
    """
    if "SLURM_ARRAY_TASK_ID" not in environ:
        return None
    task, count, first, last, step = (
        _number(environ, f"SLURM_ARRAY_TASK_{name}") for name in ("ID", "COUNT", "MIN", "MAX", "STEP")
    )
    if not count or not step or last - first != (count - 1) * step:
        raise MisuseError(
            f"the {count} indices of the Slurm array from {first} to {last} are not {step} apart, "
            "so that no task can tell which of them it is; submit it with --array=0-N"
        )
    index, beside = divmod(task - first, step)
    if beside or not 0 <= index < count:
        raise MisuseError(f"SLURM_ARRAY_TASK_ID is {task}, which is none of the {count} indices from {first} to {last}")
    return Shard(index, count)


def _number(environ: Mapping[str, str], name: str) -> int:
    if name not in environ:
        raise MisuseError(f"the launcher's variables are incomplete: {name} is not set")
    if not _NUMBER.fullmatch(environ[name]):
        raise MisuseError(f"{name} must be a whole number, not {environ[name]!r:.60}")
    return int(environ[name])
