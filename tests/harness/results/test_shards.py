"""Every rank finds its own cases alone, and together they are all of them, each once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE

from attnbench.errors import InputError, MisuseError
from attnbench.harness.results.shards import Shard

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "4"}
STEP = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "SLURM_PROCID": "6", "SLURM_LOCALID": "2"}
BATCH = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
ARRAY = {f"SLURM_ARRAY_TASK_{name}": value for name, value in zip(
    ("ID", "COUNT", "MIN", "MAX", "STEP"), ("7", "4", "1", "10", "3"), strict=True)}  # fmt: skip
ARRAY_OF_ONE = {**ARRAY, "SLURM_ARRAY_TASK_COUNT": "1", "SLURM_ARRAY_TASK_MIN": "7", "SLURM_ARRAY_TASK_MAX": "7"}
ONE_TASK = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Shard()),
        (BATCH, Shard()),  # a batch script runs once, whatever was allocated
        ({**BATCH, **ONE_TASK, "SLURM_NTASKS": "8"}, Shard(0, 1, 0)),  # salloc with an interactive step
        (TORCHRUN, Shard(5, 16, 1)),
        (STEP, Shard(6, 8, 2)),
        ({**STEP, "SLURM_NTASKS": "64"}, Shard(6, 8, 2)),  # srun --preserve-env leaves the allocation's
        (ARRAY, Shard(2, 4)),
        (ARRAY_OF_ONE, Shard()),
        ({**TORCHRUN, **ARRAY}, Shard(2 * 16 + 5, 64, 1)),
        ({**TORCHRUN, **STEP, "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, Shard(5, 16, 1)),
        ({"RANK": "6", "WORLD_SIZE": "8", **STEP}, Shard(6, 8, 2)),  # a script that translates srun's variables
        ({**STEP, "CUDA_VISIBLE_DEVICES": "3"}, Shard(6, 8, 2, bound=True)),
        ({**STEP, "SLURM_GPUS_PER_TASK": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, Shard(6, 8, 2, bound=True)),
        ({**TORCHRUN, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, Shard(5, 16, 1)),
        ({**TORCHRUN, **ONE_TASK, "SLURM_GPUS_PER_TASK": "2"}, Shard(5, 16, 1)),  # which torchrun's ranks share
    ],
)
def test_the_launchers_variables_give_the_shard(environ, expected):
    assert Shard.detect(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"LOCAL_RANK": "0"}, "RANK is not set"),
        ({**TORCHRUN, "RANK": "١"}, "RANK must be a whole number, not '١'"),
        ({**TORCHRUN, "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE must"),
        ({**TORCHRUN, "RANK": "16"}, "RANK is 16, but WORLD_SIZE is 16"),
        ({**TORCHRUN, "LOCAL_RANK": "16"}, "LOCAL_RANK is 16, but WORLD_SIZE is 16"),
        ({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({**STEP, "SLURM_PROCID": "8"}, "SLURM_PROCID is 8, but SLURM_STEP_NUM_TASKS is 8"),
        ({**TORCHRUN, **STEP, "GROUP_WORLD_SIZE": "1"}, "srun started 8 tasks.*joined 1.*--nnodes"),
        ({"RANK": "0", "WORLD_SIZE": "8", **STEP}, "RANK and WORLD_SIZE say part 0 of 8.*say 6 of 8"),
        ({"SLURM_ARRAY_TASK_ID": "3"}, "SLURM_ARRAY_TASK_COUNT is not set"),
        ({**ARRAY_OF_ONE, "SLURM_ARRAY_TASK_STEP": "0"}, "not 0 apart"),
        ({**ARRAY, "SLURM_ARRAY_TASK_MAX": "11"}, "from 1 to 11 are not 3 apart.*--array=0-N"),
        ({**ARRAY, "SLURM_ARRAY_TASK_ID": "6"}, "none of the 4 indices"),
        ({**ARRAY, "SLURM_ARRAY_TASK_ID": "13"}, "none of the 4 indices"),
    ],
)
def test_what_contradicts_itself_is_reported(environ, message):
    with pytest.raises(MisuseError, match=f"(?s){message}"):
        Shard.detect(environ)


@given(st.integers(1, 5), st.integers(0, 40), st.integers(1, 7), st.integers(1, 4))
def test_the_tasks_of_an_array_and_of_its_steps_are_every_part_once(count, first, step, tasks):
    last = first + (count - 1) * step
    found = [
        Shard.detect({
            "SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": str(count), "SLURM_ARRAY_TASK_MIN": str(first),
            "SLURM_ARRAY_TASK_MAX": str(last), "SLURM_ARRAY_TASK_STEP": str(step),
            "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
        })
        for task in range(first, last + 1, step) for rank in range(tasks)
    ]  # fmt: skip
    assert [shard.index for shard in found] == list(range(count * tasks))
    assert {shard.count for shard in found} == {count * tasks}


weights = st.integers(0, 20) | st.integers(0, 10**6)


@given(st.lists(weights, max_size=40), st.integers(1, 12))
def test_the_parts_are_everything_once_in_order_and_balanced(items, count):
    numbered = list(enumerate(items))
    parts = [Shard(index, count).of(numbered, weight=lambda item: float(item[1])) for index in range(count)]
    assert parts == [Shard(index, count).of(numbered, weight=lambda item: float(item[1])) for index in range(count)]
    assert sorted(item for part in parts for item in part) == numbered
    assert all(part == sorted(part) for part in parts)
    assert Shard().of(numbered) == numbered
    loads = [sum(weight for _, weight in part) for part in parts]
    # Nobody waits long: the last item of the fullest part went where the least was, at most the mean.
    assert max(loads) <= sum(items) / count + max(items, default=0) * (1 - 1 / count) + 1e-6


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none(weight):
    with pytest.raises(InputError, match="finite and not negative"):
        Shard().of([1], lambda _: weight)


def test_each_rank_writes_a_folder_of_its_own(tmp_path):
    assert Shard().folder(tmp_path) == tmp_path
    assert Shard(3, 8).folder(tmp_path) == tmp_path / "part-0003-of-0008"
    with pytest.raises(MisuseError, match="no part 8 of 8"):
        Shard.named("part-0008-of-0008")
    for name in ("part-3-of", "xpart-0003-of-0008", "part-0003-of-0008.bak", "part-a-of-b", "table.json", ""):
        assert Shard.named(name) is None


@pytest.mark.parametrize(
    ("shard", "name", "visible", "expected"),
    [
        (Shard(), "auto", 8, "auto"),
        (Shard(2, 4), "auto", 8, "auto"),  # the tasks of an array are on nodes, or in jobs, of their own
        (Shard(5, 16, 1), "auto", 0, "auto"),
        (Shard(5, 16, 1), "auto", 4, "cuda:1"),
        (Shard(5, 16, 1), "cuda:0,cuda:1", 4, "cuda:0,cuda:1"),
        (Shard(5, 16, 1), "cpu", 4, "cpu"),
        (Shard(5, 16, 3, bound=True), "auto", 1, "cuda:0"),
        (Shard(5, 16, 3, bound=True), "auto", 2, "cuda:1"),
    ],
)
def test_each_rank_takes_a_gpu_of_its_own(shard, name, visible, expected):
    assert shard.device(name, visible) == expected


def test_two_ranks_do_not_share_a_gpu():
    with pytest.raises(MisuseError, match="local rank 4 has no GPU of its own, this node shows 4"):
        Shard(4, 8, 4).device("auto", 4)


def test_torchrun_itself(tmp_path):
    """What torchrun sets, not what we believe it sets."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys, pathlib\n"
        "from attnbench.harness.results.shards import Shard\n"
        "assert 'torch' not in sys.modules, 'a rank is found without torch'\n"
        "shard = Shard.detect(os.environ)\n"
        "pathlib.Path(sys.argv[1], shard.name).write_text(f'{shard.of(range(5))} {shard.device(\"auto\", 2)}')\n"
    )
    out = tmp_path / "out"
    out.mkdir()
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, out],
        check=True, timeout=PATIENCE, capture_output=True, env=environ,
    )  # fmt: skip
    assert {file.name: file.read_text() for file in Path(out).iterdir()} == {
        "part-0000-of-0002": "[0, 2, 4] cuda:0",
        "part-0001-of-0002": "[1, 3] cuda:1",
    }
