"""Any causal language model of transformers, by its config and with random weights, around our attention.

Its attention layers call a function that transformers finds by the name ``attnbench-train``, registered here; nothing
else of transformers is changed.  No mask tensor is ever made: each layer's mask is determined once, when the model is
built.  Samples are unpadded, or padded behind their tokens, where causal layers see nothing of it; packed documents are
told apart by ``cu_seq_lens_q``.  Dropout is 0, as in pre-training today, so that both runs of a pair compute the same
function.  The loss is the next token's alone, without what routers of experts may add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from attnbench.errors import InputError
from attnbench.integrations.transformers_layer import asked_mask
from attnbench.integrations.transformers_mask import LayerMask, MaskRequest, UnservableError, layer_mask
from attnbench.problem.mask import Mask

from ..config import Packing
from ..data.corpus import BYTE_TOKENS
from .attention import Attend, AttentionCore
from .flops import attention_flops, matrix_flops
from .loss import token_loss

__all__ = ["HfModel", "make_hf"]

_INSTALL = "pip install 'transformers>=4.53'"
_NAME = "attnbench-train"
_CORE, _MASK, _PACKS = "attnbench_core", "attnbench_mask", "attnbench_packs"


class _Call(NamedTuple):
    layer: nn.Module
    heads: int
    head_dim: int
    head_dim_v: int
    mask: Mask
    options: dict[str, Any]
    packs: bool  # it is told where documents begin


_calls: ContextVar[list[_Call] | None] = ContextVar("attnbench_hf_calls", default=None)


class HfModel(nn.Module):
    """Tokens and targets (B, S) to their loss; of packed documents, (1, T), with ``positions`` and ``starts``.

    ``linear_flops`` are the operations of a training step of a sample without attention, ``attention_flops`` those of
    the attention of so many tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[nn.Module],
        cores: list[AttentionCore],
        linear_flops: float,
        attention_flops: Callable[[int], float],
    ) -> None:
        super().__init__()
        self.model: Any = model
        self._lists = (blocks, cores)  # in a tuple, so that no module is registered under two names
        self.linear_flops, self.attention_flops = linear_flops, attention_flops

    def forward(
        self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """The mean loss of predicting ``targets``, an fp32 scalar."""
        packed = {} if starts is None else {"position_ids": positions, **_packed(starts)}
        return token_loss(self.model(input_ids=tokens, use_cache=False, **packed).logits, targets)

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder's layers, in order."""
        return self._lists[0]

    @property
    def cores(self) -> list[AttentionCore]:
        """Each layer's attention module."""
        return self._lists[1]


def make_hf(
    name: str, seqlen: int, device: torch.device, seed: int, core: Callable[[], AttentionCore], packing: Packing
) -> HfModel:
    """The model of a config (a folder, a config.json or a name), its fp32 weights drawn by transformers from the seed.

    Raises InputError if transformers or the config is missing, or if the config is not a causal language model's, has
    too few tokens or positions, or an attention that cannot be served, or not with this packing.
    """
    transformers = _transformers()
    config = _config(transformers, name)
    vocab = getattr(config.get_text_config(), "vocab_size", 0)
    if vocab < BYTE_TOKENS:
        raise InputError(f"{name} has a vocabulary of {vocab}, and bytes need {BYTE_TOKENS}")
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and seqlen > longest:
        raise InputError(f"{name} has positions for {longest} tokens, not {seqlen}")
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        try:
            model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=_NAME, dtype=torch.float32
            )
        except (ValueError, ImportError) as error:
            raise InputError(f"{name} makes no causal language model: {_first_line(error)}") from None
        except KeyError as error:  # a table of the model's own attentions, in which there is no other
            if error.args != (_NAME,):
                raise
            raise InputError(f"{name} cannot be served: it knows no attention but its own") from None
    model.train()
    try:
        return _served(model, seqlen, core, packing)
    except InputError as error:
        raise InputError(f"{name} cannot be served: {error}") from None


def _transformers() -> Any:
    try:
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise InputError(f"hf: needs transformers 4.53 or later ({error}): {_INSTALL}") from None
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, _mask)
    return transformers


def _config(transformers: Any, name: str) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: transformers finds no config there: {_first_line(error)}") from None
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        for key, value in part.to_dict().items():
            if key.endswith(("dropout", "pdrop", "dropout_prob", "drop_rate")) and isinstance(value, float):
                setattr(part, key, 0.0)
    return config


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q (B, H, S, D) and k, v (B, H or fewer, S, D) to (B, S, H, D)."""
    name, seqlen = type(module).__name__, query.shape[2]
    mask = getattr(module, _MASK, None) if attention_mask is None else attention_mask
    try:
        mask = asked_mask(module, seqlen, key.shape[2], mask, lambda *_: None, **asked)
    except UnservableError as reason:
        raise InputError(f"its {name} asks for {reason}") from None
    options: dict[str, Any] = {}
    if scaling is not None:
        options["scale"] = float(scaling)
    if softcap:
        options["softcap"] = float(softcap)
    core = getattr(module, _CORE, None)
    if core is None:
        if key.shape[2] != seqlen:
            raise InputError(f"its {name} has {seqlen} queries and {key.shape[2]} keys")
        mask = mask.canonical(seqlen, seqlen)
    if mask.kind == "window":
        options["window"] = (mask.left, mask.right)
    if core is None:
        packs = cu_seq_lens_q is not None
        return _noted(_Call(module, query.shape[1], query.shape[3], value.shape[3], mask, options, packs), query), None
    if torch.is_autocast_enabled(query.device.type):  # as torch's own attention is cast; rotation has left fp32
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    if cu_seq_lens_q is not None:
        if not getattr(module, _PACKS):
            raise InputError(f"its {name} wants cu_seq_lens_q, and no documents are packed")
        options["starts"] = cu_seq_lens_q
    return core(query, key, value, mask.right == 0, **options).transpose(1, 2), None


def _noted(call: _Call, query: Tensor) -> Tensor:
    """Record a layer's call while a new model is built, and return zeros instead of attention."""
    name, calls = type(call.layer).__name__, _calls.get()
    if calls is None:
        raise InputError(f"its {name} calls attention, and did not when the model was built")
    if any(each.layer is call.layer and each.mask != call.mask for each in calls):
        raise InputError(f"its {name} asks for several masks")
    calls.append(call)
    return query.new_zeros(query.shape[0], query.shape[2], call.heads, call.head_dim_v)


def _mask(*positions: Any, **named: Any) -> LayerMask | None:
    """transformers' mask function: a new model's mask; later None, since each layer keeps its mask."""
    if _calls.get() is None or named.get("local_size") == 0:  # a window of layers that the model does not have
        return None
    try:
        return layer_mask(MaskRequest.of(*positions, **named), right_padding=False, hands_on=False)
    except UnservableError as reason:
        raise InputError(f"it asks for {reason}") from None


def _served(model: Any, seqlen: int, core: Callable[[], AttentionCore], packing: Packing) -> HfModel:
    """The model with a core and the mask in every attention layer."""
    calls, flops = _trace_calls(model, seqlen, packing == "packed")
    for call in calls:
        kind = type(call.layer).__name__
        if packing == "packed" and not call.packs:
            raise InputError(f"its {kind} is not told where packed documents begin; choose packing=padded")
        if packing != "packed" and call.packs:
            raise InputError(f"its {kind} wants cu_seq_lens_q, and no documents are packed")
        if packing == "padded" and call.mask.right != 0:
            raise InputError(f"its {kind} is not causal, so that it would see padding")
    if packing == "packed" and _mixes(model):
        raise InputError("tokens of one document reach the next outside of attention; choose packing=padded")
    layers = {id(call.layer): call for call in calls}
    cores = [core() for _ in layers]
    for call, own in zip(layers.values(), cores, strict=True):
        if isinstance(own.attend, Attend):
            own.attend.check(**call.options)
        setattr(call.layer, _CORE, own)
        setattr(call.layer, _MASK, call.mask)
        setattr(call.layer, _PACKS, call.packs)
    flops += matrix_flops(model.get_output_embeddings().weight.numel(), seqlen)

    def attention(length: int) -> float:
        return sum(attention_flops(1, call.heads, length, call.head_dim, call.head_dim_v, call.mask) for call in calls)

    return HfModel(model, _blocks(model, [call.layer for call in layers.values()]), cores, flops, attention)


def _packed(starts: Tensor) -> dict[str, Tensor]:
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}


def _trace_calls(model: Any, seqlen: int, packed: bool) -> tuple[list[_Call], float]:
    """Its layers' attention calls in one forward pass, and the other operations of a training step of a sample."""
    tokens = torch.zeros(1, seqlen, dtype=torch.long, device=model.device)
    one = _packed(torch.tensor([0, seqlen], dtype=torch.int32, device=model.device)) if packed else {}
    with _noting() as calls, _counted_experts(model), FlopCounterMode(display=False) as counter:
        model.base_model(input_ids=tokens, use_cache=False, **one)
    if not calls:
        raise InputError(f"{type(model).__name__} computes its attention itself")
    return calls, 3.0 * counter.get_total_flops()


def _mixes(model: Any) -> bool:
    """Whether a document changes what is computed of the next one without attention, as in a convolution."""
    tokens = torch.zeros(2, 1, 16, dtype=torch.long, device=model.device)
    tokens[1, :, :8] = 1
    starts = torch.tensor([0, 8, 16], dtype=torch.int32, device=model.device)
    with _noting():
        one, other = (model.base_model(input_ids=each, use_cache=False, **_packed(starts))[0][:, 8:] for each in tokens)
    return not torch.allclose(one, other, rtol=1e-3, atol=1e-5)


@contextmanager
def _noting() -> Iterator[list[_Call]]:
    """Note the attention calls of a new model, which give zeros."""
    calls: list[_Call] = []
    token = _calls.set(calls)
    try:
        with torch.no_grad():
            yield calls
    finally:
        _calls.reset(token)


@contextmanager
def _counted_experts(model: Any) -> Iterator[None]:
    """Run experts one by one as plain matrix products: torch counts no operations of grouped ones."""
    if not hasattr(model, "set_experts_implementation"):
        yield
        return
    before = model.get_experts_implementation()
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _blocks(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The list of modules that contains all attention layers."""
    for candidates in model.modules():
        if isinstance(candidates, nn.ModuleList):
            inside = {id(part) for part in candidates.modules()}
            if all(id(layer) in inside for layer in layers):
                return list(candidates)
    raise InputError("its attention layers stand in no common list of blocks")
