"""What ranks of a ring send one another: keys and values, the gradients of them, and what each is about to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError, PeerError
from ..problem.fp8 import Quantised
from ..problem.spec import Granularity

__all__ = ["Group", "Message", "Pending"]

_ALIGNED = 256  # bytes: where a tensor within a message begins
_KEYS, _GRADIENTS = 0, 1  # tags
_LONGEST_PLAN = 2048  # bytes of what a rank says that it will do
Operand = Tensor | Quantised


class Pending:
    """Tensors under way: sent and to be received."""

    def __init__(self, group: Group, works: list[dist.Work], sent: Tensor, received: Tensor) -> None:
        self._group, self._works, self._sent, self._received = group, works, sent, received

    def arrived(self) -> Tensor:
        """What was received; on a GPU the current stream waits for it.  Raises PeerError if the other rank is gone."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:  # a connection that closed, or the group's timeout
            raise self._group.lost(error) from error
        return self._received


class Group:
    """The ranks that share sequences: this one is ``rank`` of ``size``.  Raises InputError if it is none of them.

    ``sent`` counts the calls by the type in which keys and values were sent; ``name`` tells torch's groups apart.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.sent: Counter[str] = Counter()
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise InputError("this process is no rank of the group that shares the sequences")
        self.name = group.group_name

    def pass_on(self, message: Tensor) -> Pending:
        """Send to the next rank what it needs of the keys, and receive the previous rank's, of as many bytes."""
        return self._exchange(message, torch.empty_like(message), self.rank + 1, self.rank - 1, _KEYS)

    def send_home(self, step: int, gradients: Tensor, size: int) -> Pending:
        """Send the gradients of a step's keys to the rank that holds them, and receive ``size`` numbers of our own."""
        received = gradients.new_empty(size)
        return self._exchange(gradients, received, self.rank - step, self.rank + step, _GRADIENTS)

    def _exchange(self, sent: Tensor, received: Tensor, to: int, of: int, tag: int) -> Pending:
        operations = [
            dist.P2POp(dist.isend, sent, self._peer(to), self._group, tag),
            dist.P2POp(dist.irecv, received, self._peer(of), self._group, tag),
        ]
        try:
            return Pending(self, dist.batch_isend_irecv(operations), sent, received)
        except RuntimeError as error:
            raise self.lost(error) from error

    def _peer(self, rank: int) -> int:
        """What torch calls a rank of the group, which wraps around."""
        return dist.get_global_rank(self._group, rank % self.size)

    def agree(self, plan: str, device: torch.device) -> None:
        """Raise PeerError unless every rank is about to do the same, by what they say that it is."""
        if self.size == 1:
            return
        text = plan.encode()[:_LONGEST_PLAN]
        own = torch.zeros(_LONGEST_PLAN, dtype=torch.uint8)
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        found = [torch.empty(_LONGEST_PLAN, dtype=torch.uint8, device=device) for _ in range(self.size)]
        try:
            dist.all_gather(found, own.to(device), group=self._group)
        except RuntimeError as error:
            raise self.lost(error) from error
        plans = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in found]
        for other, theirs in enumerate(plans):
            if theirs != plans[self.rank]:
                raise PeerError(
                    f"ranks that share sequences must ask the same of attention; rank {self.rank}: {plan}; "
                    f"rank {other}: {theirs}"
                )

    def lost(self, error: RuntimeError) -> PeerError:
        """What to raise if another rank does not answer."""
        first = str(error).partition("\n")[0]
        return PeerError(
            f"rank {self.rank} of {self.size} had no answer from another rank that shares its sequences, which has "
            f"failed, is late, or sends something else; see what the other ranks say ({first})"
        )


class _Piece(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    start: int
    stop: int


class Message:
    """How keys and values, in 16 bits or FP8 with their scales, lie in the one tensor of bytes that is sent."""

    def __init__(self, k: Operand, v: Operand) -> None:
        """For tensors of these shapes and types."""
        self._granularity: list[Granularity | None] = []
        self._rotated: list[bool] = []
        self._pieces: list[_Piece] = []
        self.size = 0
        for x in (k, v):
            self._granularity.append(x.granularity if isinstance(x, Quantised) else None)
            self._rotated.append(isinstance(x, Quantised) and x.rotated)
            for tensor in _tensors(x):
                stop = self.size + tensor.numel() * tensor.element_size()
                self._pieces.append(_Piece(tensor.shape, tensor.dtype, self.size, stop))
                self.size = -(-stop // _ALIGNED) * _ALIGNED

    def pack(self, k: Operand, v: Operand) -> Tensor:
        """The bytes (size,) of both."""
        tensors = [*_tensors(k), *_tensors(v)]
        packed = torch.empty(self.size, dtype=torch.uint8, device=tensors[0].device)
        for tensor, view in zip(tensors, self._views(packed), strict=True):
            view.copy_(tensor)
        return packed

    def unpack(self, packed: Tensor) -> tuple[Operand, Operand]:
        """K and V as views of the bytes."""
        views = iter(self._views(packed))
        k, v = (
            next(views) if granularity is None else Quantised(next(views), next(views), granularity, rotated)
            for granularity, rotated in zip(self._granularity, self._rotated, strict=True)
        )
        return k, v

    def _views(self, packed: Tensor) -> list[Tensor]:
        return [packed[each.start : each.stop].view(each.dtype).view(each.shape) for each in self._pieces]


def _tensors(x: Operand) -> Sequence[Tensor]:
    return (x.data, x.descale) if isinstance(x, Quantised) else (x,)
