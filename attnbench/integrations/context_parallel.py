"""Context parallelism: sequences shared by the ranks of a group, with ``attnbench.attention`` over all of them.

``context_parallel`` takes the arguments of ``torch.distributed.tensor.experimental.context_parallel`` and lays
sequences over ranks as that does, so that one import is changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnbench.api import attention
from attnbench.choosing.choice import Choice
from attnbench.dispatch import ring
from attnbench.dispatch.question import Question
from attnbench.dispatch.ring_exchange import Group
from attnbench.dispatch.ring_parts import places
from attnbench.errors import InputError

__all__ = ["context_parallel", "explain", "shard"]

_SIGNATURE = inspect.signature(attention)


@contextmanager
def context_parallel(
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[Group]:
    """Within the block, ``attnbench.attention`` attends over the sequences that the ranks of ``mesh`` share.

    Each rank holds its places of every sequence (``shard``).  ``mesh`` has one dimension, or is a process group.
    ``buffers`` (tokens, labels, positions) are sharded in place, each along its dimension in ``buffer_seq_dims``, and
    restored afterwards, all but ``no_restore_buffers``: as by torch's function of this name.

    ``attention`` takes q (B, H, S / N, D) and the like, no mask or ``is_causal``, any scale, softcap and grouping;
    windows, sinks, descales and unequal lengths raise InputError.  Forwards and backwards, with what they compute
    again, run inside the block; it counts for all threads of the process, and of nested blocks the innermost.  Inside
    torch.compile attention breaks the graph.  Ranks whose calls differ get a PeerError, at the latest after the timeout
    of the group.

    Yields the group: its ``rank``, its ``size``, and the calls by the type in which keys and values were ``sent``.
    Raises InputError for another kind of mesh, a rank outside of it, and buffers that cannot be sharded.

    >>> with context_parallel(mesh, buffers=[tokens, labels], buffer_seq_dims=[1, 1]):
    ...     loss = model(tokens, labels)
    ...     loss.backward()
    """
    group = _group_of(mesh)
    tensors, axes, lost = list(buffers or ()), list(buffer_seq_dims or ()), no_restore_buffers or set()
    if len(tensors) != len(axes):
        raise InputError(f"buffer_seq_dims must name a dimension for each of {len(tensors)} buffers, got {len(axes)}")
    if unknown := [each for each in lost if not any(each is other for other in tensors)]:
        raise InputError(f"no_restore_buffers must be some of the buffers, and {len(unknown)} of them are not")
    if any(each.requires_grad or not each.is_contiguous() for each in tensors):
        raise InputError("buffers are resized in place: they must be contiguous and require no gradient; use shard")
    shards = [_shard(group, each, axis) for each, axis in zip(tensors, axes, strict=True)]
    kept = [None if any(each is other for other in lost) else each.clone() for each in tensors]
    shared = ring.Shared(group.size, partial(_uncompiled(), group))
    try:
        for each, own in zip(tensors, shards, strict=True):
            _refill(each, own)
        ring.sharing.open(shared)
        yield group
    finally:
        ring.sharing.close(shared)
        for each, whole in zip(tensors, kept, strict=True):
            if whole is not None:
                _refill(each, whole)


def explain(q: Tensor, k: Tensor, v: Tensor, *, ranks: int | None = None, **arguments: Any) -> dict[str, Choice]:
    """The plan that ``attention`` would run for each part of the keys, and why; computes and sends nothing.

    q, k and v (B, H, S / N, D) and the ``arguments`` of ``attention`` are those of one of N = ``ranks`` ranks; None
    stands for those of the open ``context_parallel``.  Raises what ``attention`` would raise, InputError if none is
    open.
    """
    if ranks is None:
        shared = ring.sharing.active
        if shared is None:
            raise InputError("no context_parallel is open: pass ranks, the number of ranks that share the sequences")
        ranks = shared.ranks
    given = _SIGNATURE.bind(q, k, v, **arguments)
    given.apply_defaults()
    return ring.explain(ranks, Question(*given.arguments.values()))


def shard(mesh: DeviceMesh | dist.ProcessGroup, x: Tensor, dim: int) -> Tensor:
    """This rank's places of the sequences that lie along dimension ``dim`` of x: of 2 N pieces its head and its tail.

    Raises InputError if the dimension is no multiple of 2 N, or as ``context_parallel`` does.
    """
    return _shard(_group_of(mesh), x, dim)


@cache
def _uncompiled() -> Callable[..., Any]:
    """The ring's attention, at which compiled code breaks its graph.  Loads the compiler, which takes a second."""
    uncompiled: Callable[..., Any] = torch.compiler.disable(ring.attention)  # type: ignore[no-untyped-call]
    return uncompiled


def _shard(group: Group, x: Tensor, dim: int) -> Tensor:
    if not -x.ndim <= dim < x.ndim:
        raise InputError(f"a tensor of shape {tuple(x.shape)} has no dimension {dim}")
    return x.index_select(dim, places(x.shape[dim], group.size, group.rank, x.device))


@torch.no_grad()
def _refill(x: Tensor, content: Tensor) -> None:
    x.resize_(content.shape)
    x.copy_(content)


def _group_of(mesh: DeviceMesh | dist.ProcessGroup) -> Group:
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise InputError(f"a mesh of one dimension was expected, not of {mesh.ndim}; pass mesh[name]")
        return Group(mesh.get_group())
    if not isinstance(mesh, dist.ProcessGroup):
        raise InputError(f"a DeviceMesh or a ProcessGroup was expected, not {type(mesh).__name__}")
    return Group(mesh)
