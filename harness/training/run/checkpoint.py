"""A run's state on disk: tensors in safetensors and facts in JSON, complete or absent; nothing is unpickled.

A checkpoint is a folder ``step-N`` with a file for each rank: its parameters or its shards of them, its optimiser's
state, its random number generators, and the run's history.  It is written under another name, flushed to the disk and
renamed; only then is the previous one removed.  So a process may be killed at any moment.  TransformerEngine's scaling
history is not included (that library writes it as a pickle): the first steps after resuming scale as those of a new
run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from attnbench.errors import MalformedFileError, MisuseError, OutputError
from attnbench.files.untrusted import check_schema
from attnbench.text.printable import printable

from .history import History
from .optimisers import Optimising
from .parallel import Ranks

__all__ = ["load", "newest", "save", "state_of"]

SCHEMA = "attnbench.checkpoint/1"
_STEP = re.compile(r"step-([0-9]{1,9})")
_PARTIAL = "partial"
_CPU_RANDOM, _GPU_RANDOM = "random.cpu", "random.cuda"


def state_of(module: nn.Module, optimiser: Optimising) -> dict[str, Tensor]:
    """Every tensor of a run that training changes, by name, as stored on this rank.

    Sharded tensors appear as the local shard, subclasses (quantised optimiser states) as their parts.  The tensors are
    the live ones: writing to them restores a run.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found |= _plain(f"model.{name}", tensor.detach())
    for name, value in _leaves("optimiser", optimiser.state_dict()):
        if isinstance(value, Tensor):
            found |= _plain(name, value.detach())
    return found


def save(
    folder: Path, state: Mapping[str, Tensor], history: History, settings: Mapping[str, Any], ranks: Ranks
) -> None:
    """Write the checkpoint of the steps in the history, called by every rank.  Raises OutputError."""
    partial, final = folder / _PARTIAL, folder / f"step-{history.steps:09d}"
    tensors = {
        name: tensor.to("cpu", copy=True).contiguous() for name, tensor in {**state, **_random(ranks.device)}.items()
    }
    tensors |= {f"history.{name}": series for name, series in history.tensors().items()}
    facts = {
        "schema": SCHEMA,
        "settings": json.dumps(dict(settings), sort_keys=True),
        "world": str(ranks.world),
        "history": history.facts(),
    }
    try:
        if ranks.first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        ranks.wait()
        path = partial / _file(ranks.rank)
        save_file(tensors, path, metadata=facts)
        _flush(path)
        ranks.wait()
        if ranks.first:
            _flush(partial)
            os.replace(partial, final)
            _flush(folder)
            for old in _complete(folder):
                if old != final:
                    shutil.rmtree(old, ignore_errors=True)
        ranks.wait()
    except (OSError, SafetensorError) as error:
        with suppress(OSError):  # frees the disk space
            (partial / _file(ranks.rank)).unlink()
        raise OutputError(f"the checkpoint {final} cannot be written: {error}") from error


def newest(folder: Path) -> Path | None:
    """The last complete checkpoint in the folder of a run."""
    return max(_complete(folder), default=None)


def load(path: Path, state: Mapping[str, Tensor], settings: Mapping[str, Any], ranks: Ranks) -> History:
    """Copy the checkpoint into the live tensors and this process's generators, and return the history.

    ``state`` must hold every tensor of the checkpoint (an optimiser has its state only after a first step).  Raises
    MisuseError if it is another run's, MalformedFileError if it is not a complete checkpoint; nothing is changed then.
    """
    file = path / _file(ranks.rank)
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            facts = opened.metadata() or {}
            check_schema(file, facts.get("schema"), SCHEMA)
            if facts.get("world") != str(ranks.world):
                world = printable(str(facts.get("world")))[:20]
                raise MisuseError(f"{path} was written by {world} ranks and can be resumed by as many alone")
            if json.loads(facts.get("settings", "null")) != dict(settings):
                raise MisuseError(f"{path} is the checkpoint of another configuration, or of other data")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        history = History.of(
            {name.removeprefix("history."): each for name, each in tensors.items() if name.startswith("history.")},
            facts.get("history", ""),
        )
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        if isinstance(error, (MalformedFileError, MisuseError)):
            raise
        raise MalformedFileError(file, f"expected a checkpoint: {error}") from error
    for name, live in state.items():
        stored = tensors.get(name)
        if stored is None or stored.shape != live.shape or stored.dtype != live.dtype:
            found = "nothing" if stored is None else f"{stored.dtype} {tuple(stored.shape)}"
            raise MalformedFileError(file, f"expected {name} as {live.dtype} {tuple(live.shape)}, found {found}")
    expected = torch.get_rng_state()
    random = tensors.get(_CPU_RANDOM)
    if random is None or random.dtype != expected.dtype or random.shape != expected.shape:
        raise MalformedFileError(file, f"expected {_CPU_RANDOM}, the state of torch's random numbers")
    if unknown := [name for name in tensors if name.split(".")[0] in ("model", "optimiser") and name not in state]:
        raise MalformedFileError(file, f"expected no tensor {unknown[0]}")
    with torch.no_grad():
        for name, live in state.items():
            live.copy_(tensors[name])
    torch.set_rng_state(random)
    if ranks.device.type == "cuda" and _GPU_RANDOM in tensors:
        torch.cuda.set_rng_state(tensors[_GPU_RANDOM], ranks.device)
    return history


def _random(device: torch.device) -> dict[str, Tensor]:
    states = {_CPU_RANDOM: torch.get_rng_state()}
    if device.type == "cuda":
        states[_GPU_RANDOM] = torch.cuda.get_rng_state(device)
    return states


def _plain(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensor itself, or the plain tensors that a subclass consists of."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if hasattr(tensor, "__tensor_flatten__"):
        inner: dict[str, Tensor] = {}
        for part in tensor.__tensor_flatten__()[0]:
            inner |= _plain(f"{name}.{part}", getattr(tensor, part))
        return inner
    return {name: tensor}


def _leaves(name: str, tree: object) -> Iterator[tuple[str, object]]:
    if isinstance(tree, Mapping):
        for key, each in tree.items():
            yield from _leaves(f"{name}.{key}", each)
    elif isinstance(tree, (list, tuple)):
        for index, each in enumerate(tree):
            yield from _leaves(f"{name}.{index}", each)
    else:
        yield name, tree


def _complete(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(each for each in folder.iterdir() if _STEP.fullmatch(each.name) and each.is_dir())


def _file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
