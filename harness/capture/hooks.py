"""Intercept a running program's attention calls: functions are replaced while it runs and restored afterwards.

Recorded are torch's scaled_dot_product_attention, ``attnbench.attention``, and the ``eager_attention_forward`` of
transformers' models.  Transformers' other attention functions and torch's fused encoder layers are only counted.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from attnbench.errors import InputError
from attnbench.kernels.contract import Inputs
from attnbench.kernels.execution import Execution
from attnbench.problem.dtypes import FROM_TORCH
from attnbench.problem.exact import exact_out
from attnbench.problem.mask import Mask
from attnbench.problem.mask_of_tensor import mask_of_tensor
from attnbench.problem.spec import AttentionSpec

from ..sequence_lengths import SequenceLengths

__all__ = ["Call", "UnrecordableError", "watch_calls"]

_jit: Any = torch.jit  # which tells no types
_FUSED = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")
_EAGER = "eager_attention_forward"
_INTERFACE = "transformers.modeling_utils"
# A model's own rounding error is far below this; an unknown sink, bias or cap causes an error far above it.
_EAGER_ERROR = 0.1


class UnrecordableError(Exception):
    """A call that no AttentionSpec can express; the message is the reason, equal for all such calls."""


@dataclass(frozen=True)
class Call:
    """One attention call after it ran: q (B, H, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv) and its spec.

    ``out`` is the program's result, perhaps with other axes; ``arranged`` brings it or its gradient to (B, H, Sq, Dv).
    ``lengths`` are those of packed sequences, whose B is 1, or of padded ones.
    ``module`` is the path of the module that made the call, empty outside of modules.
    """

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    arranged: Callable[[Tensor], Tensor]
    module: str
    lengths: SequenceLengths | None = None


@contextmanager
def watch_calls(seen: Callable[[Callable[[], Call]], None]) -> Iterator[None]:
    """While it is open, call ``seen`` after every attention call with a function that describes it.

    That function raises UnrecordableError for calls that cannot be recorded.  Code under torch.compile runs eagerly
    meanwhile, because compiled code cannot be intercepted.
    """
    watch = _Watch(seen)
    with ExitStack() as stack:
        stack.callback(watch.restore)
        watch.replace_everywhere(F.scaled_dot_product_attention, _recording_sdpa(watch))
        for name in _FUSED:
            watch.replace(torch, name, _counting(watch, getattr(torch, name), f"torch's fused {name.strip('_')}"))
        watch.replace(Execution, "__call__", _recording_execution(watch))
        for handle in (
            register_module_forward_pre_hook(watch.enter),
            register_module_forward_hook(watch.leave, always_call=True),
        ):
            stack.callback(handle.remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


class _State(threading.local):
    """The modules and calls that each thread of the program is inside of."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.inside = False
        self.calls = 0


class _Watch:
    def __init__(self, seen: Callable[[Callable[[], Call]], None]) -> None:
        self._seen = seen
        self.state = _State()
        self._process = os.getpid()
        self._replaced: list[tuple[Callable[[str, Any], None], str, Any, Any]] = []
        self._homes: set[str] = set()
        self._paths: weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[nn.Module, str]]
        self._paths = weakref.WeakKeyDictionary()
        self._mask: tuple[weakref.ref[Tensor], tuple[object, ...], Mask | None] | None = None

    @property
    def off(self) -> bool:
        """Whether to ignore this call: it is inside another one, in a fork of the program, or only traced."""
        return torch.compiler.is_compiling() or self.state.inside or os.getpid() != self._process

    def note(self, make: Callable[[], Call]) -> None:
        """Report a call."""
        self.state.calls += 1
        with self.within():
            self._seen(make)

    @contextmanager
    def within(self) -> Iterator[None]:
        """A block whose attention belongs to a call that is reported itself."""
        self.state.inside = True
        try:
            yield
        finally:
            self.state.inside = False

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Replace an attribute until ``restore``."""
        self._replace(functools.partial(setattr, owner), name, owner.__dict__[name], new)

    def replace_everywhere(self, old: Any, new: Any) -> None:
        """Replace a function in every module that imported it by name."""
        for place, module in list(sys.modules.items()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is old and place != "torch._C._nn":  # where torch itself looks the operator up
                    self.replace(module, name, new)

    def _replace(self, put: Callable[[str, Any], None], name: str, old: Any, new: Any) -> None:
        # Without this torch.jit.script would compile our Python function.
        if builtin := _jit._builtins._find_builtin(old):
            _jit._builtins._register_builtin(new, builtin)
        put(name, new)
        self._replaced.append((put, name, old, new))

    def restore(self) -> None:
        """Put back everything that was replaced."""
        while self._replaced:
            put, name, old, new = self._replaced.pop()
            put(name, old)
            _jit._builtins._get_builtin_table().pop(id(new), None)

    def enter(self, module: nn.Module, _: Any) -> None:
        """Pre-hook of all modules: a module is called."""
        self.state.modules.append(module)
        home = type(module).__module__
        if home not in self._homes:
            self._homes.add(home)
            namespace = sys.modules.get(home)
            if callable(eager := getattr(namespace, _EAGER, None)):
                self.replace(namespace, _EAGER, _recording_eager(self, eager))
            if _INTERFACE in sys.modules and _INTERFACE not in self._homes:
                self._homes.add(_INTERFACE)
                interface = sys.modules[_INTERFACE].AttentionInterface
                for name, function in dict(interface()).items():
                    if name != "sdpa":
                        new = _counting(self, function, f"transformers' {name} (its sdpa and eager can be recorded)")
                        self._replace(interface.register, name, function, new)

    def leave(self, module: nn.Module, *_: Any) -> None:
        """Hook of all modules: a module returned or raised."""
        modules = self.state.modules
        if any(each is module for each in modules):
            while modules.pop() is not module:
                pass

    @property
    def path(self) -> str:
        """The path of the innermost module from the outermost one that is being called."""
        modules = self.state.modules
        if not modules:
            return ""
        root, own = modules[0], modules[-1]
        paths = self._paths.get(root)
        if paths is None or own not in paths:
            paths = self._paths[root] = weakref.WeakKeyDictionary({each: name for name, each in root.named_modules()})
        return paths.get(own, "").replace("_orig_mod.", "") or type(own).__name__  # torch.compile adds that part

    def mask(self, tensor: Tensor, seqlen_q: int, seqlen_kv: int) -> Mask:
        """The mask of a tensor, cached from layer to layer.  Raises UnrecordableError if no Mask equals it."""
        key = (None if tensor.is_inference() else tensor._version, seqlen_q, seqlen_kv)
        if self._mask is None or self._mask[0]() is not tensor or self._mask[1] != key or key[0] is None:
            self._mask = (weakref.ref(tensor), key, mask_of_tensor(tensor.detach(), seqlen_q, seqlen_kv))
        if (mask := self._mask[2]) is None:
            raise UnrecordableError("a mask that is neither causal nor a window (padding, a bias, blocks)")
        return mask


def _counting(watch: _Watch, original: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Wrap a function to count its calls as unrecorded, unless attention inside was recorded."""

    def unrecordable() -> Call:
        raise UnrecordableError(reason)

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if watch.off:
            return original(*args, **kwargs)
        before = watch.state.calls
        with torch.compiler.set_stance("default"):  # uncompiled FlexAttention would hold all scores at once
            result = original(*args, **kwargs)
        if watch.state.calls == before:
            watch.note(unrecordable)
        return result

    return counted


def _recording_sdpa(watch: _Watch) -> Callable[..., Tensor]:
    original = F.scaled_dot_product_attention

    @functools.wraps(original)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        out = original(*args, **kwargs)
        if not watch.off:
            watch.note(lambda: _sdpa_call(watch, out, *args, **kwargs))
        return out

    return scaled_dot_product_attention


def _sdpa_call(
    watch: _Watch,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    _check(query, key, value, dropout_p)
    q, k, v = _four(query), _four(key), _four(value)
    mask = Mask(right=0) if is_causal else Mask()
    if attn_mask is not None:
        if attn_mask.requires_grad:
            raise UnrecordableError("a bias that is learned")
        mask = watch.mask(attn_mask, q.shape[2], k.shape[2])
    if (group := _repeats(q, k, v)) > 1:
        k, v = k[:, ::group], v[:, ::group]
    return Call(_spec(q, k, v, out, mask, scale), q, k, v, out, _four, watch.path)


def _recording_execution(watch: _Watch) -> Callable[..., tuple[Tensor, Tensor | None]]:
    original = Execution.__call__
    counted: Callable[..., tuple[Tensor, Tensor | None]] = _counting(watch, original, "FP8 tensors")

    @functools.wraps(original)
    def execute(self: Execution, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        if watch.off:
            return original(self, inputs)
        if inputs.quantised() is not None:
            return counted(self, inputs)
        # Compiled kernels stay compiled: some cannot run otherwise.
        with watch.within(), torch.compiler.set_stance("default"):
            out, lse = original(self, inputs)
        watch.note(lambda: _execution_call(watch, self.spec, inputs, out))
        return out, lse

    return execute


def _execution_call(watch: _Watch, spec: AttentionSpec, inputs: Inputs, out: Tensor) -> Call:
    q, k, v = inputs.unquantised()
    lengths = None
    if inputs.lengths is not None:
        try:
            lengths = SequenceLengths.read(inputs.lengths, spec)
        except ValidationError as error:
            raise UnrecordableError("sequences that are too many, or of which none has a query and a key") from error
    return Call(spec.replace(return_lse=False), q, k, v, out, lambda x: x, watch.path, lengths)


def _recording_eager(watch: _Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(original)

    @functools.wraps(original)
    def eager_attention_forward(*args: Any, **kwargs: Any) -> Any:
        if watch.off:
            return original(*args, **kwargs)
        with watch.within():
            result = original(*args, **kwargs)
        watch.note(lambda: _eager_call(watch, result, parameters.bind(*args, **kwargs).arguments))
        return result

    return eager_attention_forward


def _eager_call(watch: _Watch, result: Any, arguments: dict[str, Any]) -> Call:
    given: Any = {**arguments.pop("kwargs", {}), **arguments}
    q, k, v, tensor = (given.get(name) for name in ("query", "key", "value", "attention_mask"))
    out = result[0] if isinstance(result, tuple) else result
    dropout = given.get("dropout") if getattr(given.get("module"), "training", False) else 0.0
    _check(q, k, v, dropout or 0.0)
    if tensor is not None and tensor.shape[-1] > k.shape[2]:
        tensor = tensor[..., : k.shape[2]]  # as many of these functions do themselves
    mask = Mask() if tensor is None else watch.mask(tensor, q.shape[2], k.shape[2])
    spec = _spec(q, k, v, out, mask, given.get("scaling"), given.get("softcap") or 0.0)
    call = Call(spec, q, k, v, out, lambda x: x.transpose(1, 2), watch.path)
    if (
        tuple(call.arranged(out).shape) != (spec.batch, spec.heads, spec.seqlen_q, spec.head_dim_v)
        or not _eager_error(call) <= _EAGER_ERROR
    ):
        raise UnrecordableError("an eager function that computes more than attention of its q, k, v and mask")
    return call


@torch.no_grad()
def _eager_error(call: Call) -> float:
    """The relative L2 error of an output's first and last row: a model's function may compute anything."""
    spec, rows = call.spec, torch.tensor([0, call.spec.seqlen_q - 1], device=call.q.device)
    with torch.autocast(call.q.device.type, enabled=False):
        k, v = (x.float().flatten(0, 1) for x in (call.k, call.v))
        q = call.q[:, :, rows].float().reshape(len(k), -1, spec.head_dim)  # heads that share their keys together
        keys = torch.arange(spec.seqlen_kv, device=q.device)
        hidden = spec.mask.hidden(rows.repeat(spec.group), keys, spec.seqlen_q, spec.seqlen_kv)
        expected = exact_out(q, k, v, hidden, spec)
        found = call.arranged(call.out)[:, :, rows].float().reshape(expected.shape)
        return float((found - expected).norm() / expected.norm())


def _check(q: Any, k: Any, v: Any, dropout: float) -> None:
    for x in (q, k, v):
        if type(x) not in (Tensor, nn.Parameter):
            raise UnrecordableError(f"tensors of the class {type(x).__name__}")
        if x.device.type not in ("cpu", "cuda"):
            raise UnrecordableError(f"tensors on {x.device.type}")
        if x.layout != torch.strided or x.is_nested:
            raise UnrecordableError("tensors that are nested or sparse")
    if _jit.is_tracing():
        raise UnrecordableError("calls that torch.jit.trace records")
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnrecordableError("calls that a CUDA graph captures")
    if dropout > 0:
        raise UnrecordableError("dropout")


def _four(x: Tensor) -> Tensor:
    """(..., S, D) as (B, H, S, D): a missing axis is 1, additional axes become part of the batch."""
    if x.ndim > 4:
        return x.flatten(0, x.ndim - 4)
    return x.unsqueeze(1) if x.ndim == 3 else x[None, None] if x.ndim == 2 else x


def _spec(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: Mask, scale: float | None, softcap: float = 0.0
) -> AttentionSpec:
    if out.dtype not in FROM_TORCH or out.dtype.itemsize < 2:
        raise UnrecordableError(f"tensors of {out.dtype}")
    if (k.shape[:3], q.shape[0], q.shape[3]) != (v.shape[:3], k.shape[0], k.shape[3]):
        raise UnrecordableError("q, k, v that are broadcast against each other")
    try:
        return AttentionSpec.make(
            batch=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            seqlen_q=q.shape[2],
            seqlen_kv=k.shape[2],
            head_dim=q.shape[3],
            head_dim_v=v.shape[3],
            # autocast casts inside the call, so the output has the dtype of the computation.
            dtype=FROM_TORCH[out.dtype],
            scale=scale,
            mask=mask,
            softcap=softcap,
            direction="training" if out.requires_grad else "forward",
        )
    except InputError as error:
        raise UnrecordableError(f"a question that attnbench does not know ({error})") from error


def _repeats(q: Tensor, k: Tensor, v: Tensor) -> int:
    """How many equal neighbouring copies k and v have of each head: models repeat heads to have as many as q."""
    heads = k.shape[1]
    if not (1 < heads == q.shape[1] == v.shape[1]) or 0 in k.shape or 0 in v.shape:
        return 1
    alike = (k[0, 1:, 0] == k[0, :-1, 0]).all(dim=-1).tolist()
    for group in (n for n in range(heads, 1, -1) if heads % n == 0):
        if all(alike[head] for head in range(heads - 1) if (head + 1) % group):
            groups = [x.view(x.shape[0], -1, group, *x.shape[2:]) for x in (k, v)]
            if all(torch.equal(x[:, :, 1:], x[:, :, :1].expand_as(x[:, :, 1:])) for x in groups):
                return group
    return 1
