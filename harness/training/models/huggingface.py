"""Any causal language model of transformers, by its config and with random weights, around our attention.

Its attention layers call a function that transformers looks up by the name ``attnbench``,
which this module registers; nothing else of transformers is touched.  Samples are whole, so
no mask tensor is ever made: what a mask would have shown is asked of transformers once, on
building, and compared with what the layers tell their attention.  Dropout is 0, as in
pre-training today: both runs of a pair compute the same function.  The loss is the next
token's alone, without what routers of experts may add.
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
from attnbench.problem.mask import Mask

from ..data.corpus import BYTE_TOKENS
from .attention import Attend, AttentionCore
from .flops import attention_flops, matrix_flops
from .loss import token_loss

__all__ = ["HfModel", "make_hf"]

_INSTALL = "pip install 'transformers>=4.53'"
_NAME = "attnbench-train"
_CORE = "attnbench_core"

_Visible = Callable[..., Any]  # (batch, head, query, keys) to which keys are visible: transformers' mask functions
_asked: ContextVar[list[_Visible | None] | None] = ContextVar("attnbench_hf_asked", default=None)
# What models hand to attention beyond q, k, v and masks: sinks, biases of positions, key caches, sparse choices.
_UNKNOWN = ("s_aux", "position_bias", "cache", "indexer")


class HfModel(nn.Module):
    """Tokens and targets (B, S) to their loss."""

    def __init__(
        self, model: nn.Module, blocks: list[nn.Module], cores: list[AttentionCore], sample_flops: float
    ) -> None:
        super().__init__()
        self.model: Any = model
        self._lists = (blocks, cores)  # in a tuple, so that no module is registered under two names
        self.sample_flops = sample_flops

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of predicting ``targets``, an fp32 scalar."""
        return token_loss(self.model(input_ids=tokens, use_cache=False).logits, targets)

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder's layers, in order."""
        return self._lists[0]

    @property
    def cores(self) -> list[AttentionCore]:
        """Where each layer's attention passes through."""
        return self._lists[1]


def make_hf(name: str, seqlen: int, device: torch.device, seed: int, core: Callable[[], AttentionCore]) -> HfModel:
    """The model of a config (a folder, a config.json or a name), its fp32 weights drawn by transformers from the seed.

    Raises InputError where transformers or the config is missing, the config is no causal
    language model's, holds too few tokens or positions, or has an attention that cannot be served.
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
    return _served(model, name, seqlen, core)


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
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q (B, H, S, D) and k, v (B, Hkv, S, D) to (B, S, H, D)."""
    core = getattr(module, _CORE, None)
    if core is None:
        raise InputError(f"{type(module).__name__} calls attention, and is not named as an attention layer")
    for name in _UNKNOWN:
        if others.get(name) is not None:
            raise InputError(f"its {type(module).__name__} wants {name}, which no kernel here knows")
    if dropout:
        raise InputError(f"its {type(module).__name__} wants dropout")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {}
    if scaling is not None:
        options["scale"] = float(scaling)
    if softcap:
        options["softcap"] = float(softcap)
    if sliding_window is not None and sliding_window < query.shape[2]:
        options["window"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
    if isinstance(core.attend, _Noting):
        options["marker"] = attention_mask
    elif attention_mask is not None:
        raise InputError(f"its {type(module).__name__} has a mask tensor")
    if torch.is_autocast_enabled(query.device.type):  # as torch's own attention is cast; rotation has left fp32
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    return core(query, key, value, bool(causal), **options).transpose(1, 2), None


def _mask(*_: Any, mask_function: _Visible | None = None, **others: Any) -> Tensor | None:
    """transformers' mask function: no tensor, since attention is told what to hide.

    While a new model is asked what it hides, a number in the shape of a mask, which leads
    from the layer that it is handed to back to the function.
    """
    asked = _asked.get()
    if asked is None:
        return None
    asked.append(mask_function)
    return torch.full((1, 1, 1, 1), float(len(asked) - 1))


class _Call(NamedTuple):
    heads: int
    head_dim: int
    head_dim_v: int
    mask: Mask
    options: dict[str, Any]


class _Noting:
    """Attention that computes nothing, and notes what it is asked for and whether that is all that is hidden."""

    def __init__(self, layer: nn.Module, calls: list[tuple[nn.Module, _Call]], meant: list[_Visible | None]) -> None:
        self._layer, self._calls, self._meant = layer, calls, meant

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, *, marker: Tensor | None, **options: Any
    ) -> Tensor:
        name, seqlen = type(self._layer).__name__, q.shape[2]
        if seqlen != k.shape[2]:
            raise InputError(f"its {name} has {seqlen} queries and {k.shape[2]} keys")
        left, right = options.get("window", (None, 0 if is_causal else None))
        mask = Mask(left, right).canonical(seqlen, seqlen)
        visible = None if marker is None or marker.numel() != 1 else self._meant[int(marker.item())]
        if visible is None:
            raise InputError(f"its {name} has a mask that was not made by transformers' mask functions")
        if not _is_meant(mask, visible, seqlen, q.device):
            raise InputError(f"its {name} asks for the mask {mask}, and its mask tensor would have hidden other keys")
        self._calls.append((self._layer, _Call(q.shape[1], q.shape[3], v.shape[3], mask, options)))
        return q.new_zeros(*q.shape[:3], v.shape[3])


def _is_meant(mask: Mask, visible: _Visible, seqlen: int, device: torch.device) -> bool:
    """Whether a mask function of transformers shows the same keys, at a few queries."""
    keys = torch.arange(seqlen, device=device)
    for row in sorted({0, seqlen // 3, seqlen // 2, seqlen - 1}):
        start, stop = mask.span(row, seqlen, seqlen)
        shown = torch.as_tensor(visible(0, 0, keys[row], keys), device=device).expand(seqlen)
        if not torch.equal(shown, (keys >= start) & (keys < stop)):
            return False
    return True


def _served(model: Any, name: str, seqlen: int, core: Callable[[], AttentionCore]) -> HfModel:
    """The model with a core in every attention layer, after one forward pass that tells what those are asked for."""
    calls: list[tuple[nn.Module, _Call]] = []
    meant: list[_Visible | None] = []
    for module in list(model.modules()):
        if "Attention" in type(module).__name__:
            setattr(module, _CORE, AttentionCore(_Noting(module, calls, meant)))
    token = _asked.set(meant)
    try:
        with torch.no_grad(), _counted_experts(model), FlopCounterMode(display=False) as counter:
            model.base_model(input_ids=torch.zeros(1, seqlen, dtype=torch.long, device=model.device), use_cache=False)
    except InputError as error:
        raise InputError(f"{name} cannot be served: {error}") from None
    finally:
        _asked.reset(token)
    if not calls:
        raise InputError(f"{name} cannot be served: {type(model).__name__} computes its attention itself")
    layers = {id(layer): layer for layer, _ in calls}
    for module in list(model.modules()):
        if hasattr(module, _CORE) and id(module) not in layers:
            delattr(module, _CORE)
    cores = [core() for _ in layers]
    if isinstance(attend := cores[0].attend, Attend):
        for _, call in calls:
            try:
                attend.check(**call.options)
            except InputError as error:
                raise InputError(f"{name} cannot be served: {error}") from None
    for layer, own in zip(layers.values(), cores, strict=True):
        setattr(layer, _CORE, own)
    flops = 3.0 * counter.get_total_flops() + matrix_flops(model.get_output_embeddings().weight.numel(), seqlen)
    flops += sum(attention_flops(1, call.heads, seqlen, call.head_dim, call.head_dim_v, call.mask) for _, call in calls)
    return HfModel(model, _blocks(model, name, list(layers.values())), cores, flops)


@contextmanager
def _counted_experts(model: Any) -> Iterator[None]:
    """Experts one by one, as plain matrix products: torch counts no operations of grouped ones."""
    if not hasattr(model, "set_experts_implementation"):
        yield
        return
    before = model.get_experts_implementation()
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _blocks(model: nn.Module, name: str, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The list of modules that holds all attention layers between its members."""
    for candidates in model.modules():
        if isinstance(candidates, nn.ModuleList):
            inside = {id(part) for part in candidates.modules()}
            if all(id(layer) in inside for layer in layers):
                return list(candidates)
    raise InputError(f"{name} cannot be served: its attention layers stand in no common list of blocks")
