"""Describe transformers' masks as a ``Mask``, without making or reading a mask tensor in a layer.

transformers calls the registered mask function once for each forward and kind of layer, and passes the result to every
layer.  The arguments say whether the mask is plain (``allow_is_*_skip``), how far layers see (``local_size``), where
queries and keys are, and which tokens are padding; its caller knows the positions.  Values are read here and not in the
layers: which tokens are padding, where sequences begin, whether ``local_size`` is a window or a chunk, and what is
combined with the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._pytree import tree_map

from attnbench.problem.mask import Mask

from .mask_tensors import dense
from .transformers_sequences import Sequences

__all__ = ["Caller", "LayerMask", "MaskRequest", "UnservableError", "layer_mask"]

_BESIDE_CACHE = "packed sequences beside a cache, which transformers takes for one (use_cache=False tells them apart)"
_Visible = Callable[..., Tensor]  # (batch, head, query, key) indices that broadcast, to whether the key is seen


class UnservableError(Exception):
    """The mask cannot be expressed as a ``Mask``; the message is the reason."""


@dataclass(frozen=True)
class LayerMask(Mask):
    """A mask that is passed to layers; as a tensor it is the one that transformers' SDPA would receive.

    Some models combine or cut it, and ``generate`` makes it contiguous: functions of torch, indexing and attributes of
    tensors see the tensor (B, 1, Sq, Skv).  ``sequences`` are those of a padded or packed batch, each with this mask.
    """

    batch: int = 1
    seqlen_q: int = 0
    seqlen_kv: int = 0
    device: Any = None
    sequences: Sequences | None = field(default=None, compare=False)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """B, Sq and Skv."""
        return self.batch, self.seqlen_q, self.seqlen_kv

    def tensor(self) -> Tensor:
        """(B, 1, Sq, Skv), true where a key is seen."""
        if self.sequences is not None:
            return self._of_sequences
        return dense(self, self.seqlen_q, self.seqlen_kv, self.device).expand(self.batch, 1, -1, -1)

    @cached_property
    def _of_sequences(self) -> Tensor:
        """Made once: every layer that is handed on keeps it for its backward."""
        assert self.sequences is not None, "asked by tensor alone"
        return self.sequences.visible_keys(*self.sizes) & dense(self, *self.sizes[1:], self.device)

    def contiguous(self) -> LayerMask:
        """Returns itself, which has no layout; ``generate`` passes the result to the model."""
        return self

    def to(self, *place: Any, **named: Any) -> LayerMask | Tensor:
        """The mask on another device, as accelerate asks for layers there; in another type, the tensor."""
        device, dtype, *_ = torch._C._nn._parse_to(*place, **named)
        if dtype is not None:
            return self.tensor().to(*place, **named)
        return replace(self, device=device, sequences=None if self.sequences is None else self.sequences.to(device))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __getitem__(self, place: Any) -> Tensor:
        return self.tensor()[place]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.tensor() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


class MaskRequest(NamedTuple):
    """The arguments that transformers passes to a mask function."""

    batch: int
    seqlen_q: int
    seqlen_kv: int
    first_query: int | Tensor
    first_key: int
    visible: _Visible
    padding: Tensor | None  # (B, at most first_key + Skv), true where a token is not padding
    local_size: int | None
    causal: bool
    plain: bool  # nothing is combined with the causal or bidirectional mask
    indexed: bool  # the mask function takes tensors of indices
    device: Any

    @classmethod
    def of(
        cls,
        batch_size: int,
        kv_length: int,
        kv_offset: int = 0,
        q_length: int | None = None,
        q_offset: int | Tensor = 0,
        cache_position: Tensor | None = None,
        mask_function: Any = None,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        use_vmap: bool = False,
        device: Any = "cpu",
        **_: Any,
    ) -> MaskRequest:
        """From the keyword arguments of transformers 5, or of 4, which counts queries differently."""
        if cache_position is not None:
            q_length = cache_position.shape[0]
            q_offset = 0 if q_length == kv_length else cache_position[0]
            if not is_compiling() and isinstance(q_offset, Tensor):
                q_offset = int(q_offset)
        assert q_length is not None, "transformers names one of the two"
        return cls(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
            causal=allow_is_causal_skip or not allow_is_bidirectional_skip,
            plain=allow_is_causal_skip or allow_is_bidirectional_skip, indexed=not use_vmap, device=device,
        )  # fmt: skip


class Caller(NamedTuple):
    """What the function of transformers that asks for a mask was given itself; nothing is known of other callers."""

    positions: Tensor | None = None  # (B or 1, Sq > 1), if nothing but positions can divide rows into sequences
    has_cache: bool = False
    attends_itself: bool = False  # keys and queries are of the same tokens

    @classmethod
    def of(cls, frame: FrameType) -> Caller:
        """From the parameters of transformers' public functions that make masks."""
        if frame.f_globals.get("__name__") != "transformers.masking_utils":
            return cls()
        given = frame.f_locals
        positions, has_cache = given.get("position_ids"), given.get("past_key_values") is not None
        others = ("attention_mask", "or_mask_function", "and_mask_function", "block_sequence_ids")
        if (
            not isinstance(positions, Tensor)
            or any(given.get(name) is not None for name in others)
            or positions.ndim != 2
            or positions.shape[1] < 2
        ):
            positions = None
        return cls(positions, has_cache, given.get("encoder_hidden_states") is None)


_UNKNOWN_CALLER = Caller()


def layer_mask(
    asked: MaskRequest, right_padding: bool, hands_on: bool, caller: Caller = _UNKNOWN_CALLER
) -> LayerMask | None:
    """The mask, or None where SDPA would get none either.  Raises UnservableError.

    With ``right_padding``, causal batches padded at the right only count as causal.  Compiled code cannot read values:
    an assertion in the graph does, or calls that perhaps cannot be served are handed on.
    """
    mask = _pattern(asked)
    sequences = None
    if asked.padding is not None:
        if hands_on and is_compiling():
            raise UnservableError("a padding mask in compiled code")
        sequences = _unpadded(asked, caller, mask, right_padding)
    elif caller.positions is not None and (caller.has_cache or not asked.plain):
        sequences = _beside_cache(asked, caller.positions) if caller.has_cache else _packed(asked, caller.positions)
    if not asked.plain:
        if sequences is None or asked.padding is not None or caller.has_cache:
            _check_overlays(asked, mask, hands_on)
    elif mask.kind == "window" and not _is_window(asked, mask):
        raise UnservableError("attention in chunks")
    implied = mask.kind == "none" or (mask.kind == "causal" and asked.seqlen_q in (1, asked.seqlen_kv))
    if implied and asked.plain and sequences is None:
        return None
    return LayerMask(
        mask.left, mask.right, mask.alignment, asked.batch, asked.seqlen_q, asked.seqlen_kv, asked.device, sequences
    )  # fmt: skip


def _pattern(asked: MaskRequest) -> Mask:
    local = asked.local_size if asked.local_size is not None and asked.seqlen_kv >= asked.local_size else None
    if not asked.causal and local is None:
        return Mask()
    if isinstance(asked.first_query, Tensor):
        raise UnservableError("a static cache, whose keys reach beyond the queries")
    past = asked.first_query - asked.first_key
    if past + asked.seqlen_q != asked.seqlen_kv:
        raise UnservableError("keys that reach beyond the queries, as those of a static cache do")
    if asked.causal:
        return Mask(None if local is None else local - 1, 0, "bottom-right")
    return Mask(local, local, "bottom-right")


def _unpadded(asked: MaskRequest, caller: Caller, mask: Mask, right_padding: bool) -> Sequences | None:
    """The sequences without their padding, None if nothing is padded; reads the tensor, as transformers' SDPA does."""
    assert asked.padding is not None, "layer_mask asks only where there is some"
    if asked.padding.ndim != 2 or asked.padding.shape[1] < asked.first_key + asked.seqlen_kv:
        raise UnservableError("a padding mask that is shorter than the keys, as with a static cache")
    if asked.padding.shape[0] != asked.batch:
        raise UnservableError("a padding mask of another batch")
    real = asked.padding[:, asked.first_key : asked.first_key + asked.seqlen_kv].to(torch.bool)
    as_causal = right_padding and asked.causal and asked.seqlen_q == asked.seqlen_kv
    if is_compiling():
        fine = (real[:, 1:] <= real[:, :-1]).all() if as_causal else real.all()
        _assert(fine, "the batch has padding, which attnbench cannot serve in compiled code")
        return None
    real = real.cpu()  # the one wait for the device
    if bool(real.all()) or (as_causal and bool((real[:, 1:] <= real[:, :-1]).all())):
        return None
    if mask.kind == "window":
        if not (asked.causal or caller.attends_itself):
            raise UnservableError("padding beside a window of other tokens")
        begins = real & ~torch.nn.functional.pad(real, (1, 0))[:, :-1]
        if bool((begins.sum(1) > 1).any()):  # a window counts the padding, too
            raise UnservableError("padding between the tokens of a row, beside a window")
    # Without a mask the queries may be those of a decoder, beside the padding of its encoder.
    every_query = not asked.causal and mask.kind != "window"
    return Sequences.of_padded(real, asked.seqlen_q, every_query, asked.device)


def _packed(asked: MaskRequest, positions: Tensor) -> Sequences | None:
    """The sequences of rows whose positions do not always ascend by one, as transformers finds them without a cache.

    None if the mask function does not agree that each token sees the one before it in its sequence, and no other's: it
    is of chunks, or more is combined with it.
    """
    sizes = asked.batch, asked.seqlen_q
    if not asked.indexed or asked.seqlen_q != asked.seqlen_kv or positions.expand(asked.batch, -1).shape != sizes:
        return None
    tokens, rows = _range(asked.seqlen_q, asked), _range(asked.batch, asked)[:, None]
    follows = asked.visible(rows, torch.zeros_like(rows), tokens[1:], tokens[:-1]).expand(asked.batch, -1)
    starts = (positions.diff(dim=-1) != 1).expand(asked.batch, -1)
    starts, unlike = torch.stack([starts, starts == follows]).cpu()  # the one wait for the device
    return None if bool(unlike.any()) else Sequences.of_packed(starts, asked.device)


def _beside_cache(asked: MaskRequest, positions: Tensor) -> Sequences | None:
    """The sequences of rows whose positions start anew; None if each row is one.

    Beside a cache transformers itself takes a row for one sequence.  Raises UnservableError if something was cached
    before, or if positions are left out, which may be one sequence.
    """
    steps = positions.diff(dim=-1).expand(asked.batch, -1)
    starts, leaps = torch.stack([steps < 1, steps > 1]).cpu()  # the one wait for the device
    if not bool((starts | leaps).any()):
        return None
    if bool(leaps.any()) or asked.seqlen_q != asked.seqlen_kv:
        raise UnservableError(_BESIDE_CACHE)
    return Sequences.of_packed(starts, asked.device)


def _check_overlays(asked: MaskRequest, mask: Mask, hands_on: bool) -> None:
    """Raise UnservableError if something combined with the mask changes it; compares the whole mask, as SDPA does."""
    if asked.indexed and is_compiling() and not hands_on:
        _assert(_agrees(asked, mask), "transformers' mask is not plain: packed sequences, blocks or overlays")
    elif not asked.indexed or is_compiling() or not _agrees(asked, mask):
        raise UnservableError("sequences packed into one, blocks or overlays that transformers puts over the mask")


def _agrees(asked: MaskRequest, mask: Mask) -> Tensor:
    """Whether the mask function equals ``mask`` for every query, ignoring padding."""
    shown = _visibility(asked.visible, asked.batch, _range(asked.seqlen_q, asked), _range(asked.seqlen_kv, asked))
    return (shown == dense(mask, asked.seqlen_q, asked.seqlen_kv, asked.device)).all()


def _range(count: int, asked: MaskRequest) -> Tensor:
    return torch.arange(count, device=asked.device)


def _is_window(asked: MaskRequest, mask: Mask) -> bool:
    """Whether the mask function sees exactly to the window's edges, at a query far from the start."""
    assert asked.local_size is not None, "else the mask is no window"
    size = asked.local_size
    query = 3 * size  # where a chunk of this size begins
    edges = [query - size - 1, query - size, query - size + 1, query - 1, query, query + 1, query + size - 1]
    keys = torch.tensor([*edges, query + size, query + size + 1], device="cpu")
    try:
        shown = _visibility(asked.visible, 1, torch.tensor([query], device="cpu"), keys).flatten()
    except (RuntimeError, IndexError):  # it looks at tensors of the model's device or of the batch's length
        return False
    unseen = mask.hidden(torch.tensor([query], device="cpu"), keys, 1, 1)
    assert unseen is not None, "a window hides something"
    if is_compiling():
        _assert((shown != unseen[0]).all(), "the layers attend in chunks")
        return True
    return torch.equal(shown, ~unseen[0])


def _visibility(visible: _Visible, batch: int, queries: Tensor, keys: Tensor) -> Tensor:
    """Which keys the mask function makes visible, (B, 1, queries, keys)."""
    device = queries.device
    batches, heads = torch.arange(batch, device=device), torch.zeros(1, dtype=torch.long, device=device)
    shown = visible(
        batches[:, None, None, None], heads[None, :, None, None], queries[None, None, :, None], keys[None, None, None]
    )
    return shown.expand(batch, 1, len(queries), len(keys))


def _assert(fine: Tensor, otherwise: str) -> None:
    torch._assert_async(fine, otherwise)
