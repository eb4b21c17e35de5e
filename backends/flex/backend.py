"""torch's FlexAttention, compiled: 16 bits on CUDA and the CPU, and float8 on Ada and Hopper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch._functorch.config  # which torch itself imports only with its first compilation
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from attnbench.kernels.capabilities import Capabilities, Device
from attnbench.kernels.contract import (
    Backend,
    BackwardKernel,
    ForwardKernel,
    Inputs,
    Kernel,
    Operands,
    Result,
    Saved,
    gradient_dtype,
)
from attnbench.kernels.devices import describe
from attnbench.kernels.plan import precision_of
from attnbench.problem.fp8 import Quantised, Recipe, quantise, quantise_with
from attnbench.problem.lengths_kind import BATCHES
from attnbench.problem.spec import AttentionSpec

from ..common.cuda_limits import entry_refusals
from ..common.declared_errors import DECLARED_ERROR, DECLARED_GRADIENT_ERROR, SHORT_ACCUMULATOR
from ..common.installed import torch_availability
from ..common.layout import aligned, near
from ..common.unpadding import unpads_forward
from .blocks import block_mask, packed_blocks
from .compiler import compiler_reason
from .tiles import kernel_options

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import FlexKernelOptions

__all__ = ["BACKEND"]

_PROGRAMS = 2**16  # compiled variants to keep in a process; dynamo's default of 8 is a guess at models, not at this
_PRECISIONS = ("bf16", "fp16")
# A block of the mask that spans two sequences multiplies the other one's V by 0, which leaves NaN.
_PACKS: dict[str, Any] = {"lengths": BATCHES, "isolates": False}
_RECIPE = Recipe("head", "e4m3")
_NO_FP8_GRADIENTS = "torch has no gradients of FlexAttention in float8; a 16-bit backward can follow flex:fp8"
_ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _Native:
    """The arguments of the compiled function; ``descale`` (B, H, 1, 1) multiplies an FP8 output."""

    q: Tensor
    k: Tensor
    v: Tensor
    blocks: BlockMask | None
    score_mod: _ScoreMod | None
    options: FlexKernelOptions
    descale: Tensor | None = None


def _attend(native: _Native, scale: float, lse: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    out, aux = flex_attention(
        native.q,
        native.k,
        native.v,
        score_mod=native.score_mod,
        block_mask=native.blocks,
        scale=scale,
        enable_gqa=native.q.shape[1] != native.k.shape[1],
        kernel_options=native.options.copy(),
        return_aux=AuxRequest(lse=lse),
    )
    if native.descale is not None:
        out = (out.to(torch.float32) * native.descale).to(dtype)
    return out, aux.lse


@cache
def _compiled(dynamic: bool | None) -> Callable[..., tuple[Tensor, Tensor | None]]:
    return torch.compile(_attend, fullgraph=True, dynamic=dynamic)


def _unchecked_indices() -> AbstractContextManager[object]:
    """Without inductor's check of indices, which on the CPU compares queries with the size of a tile (torch 2.13)."""
    from torch._inductor import config

    unchecked: AbstractContextManager[object] = config.patch(assert_indirect_indexing=False)
    return unchecked


def _call(native: _Native, spec: AttentionSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Runs the compiled function; where it may not be compiled once more it raises, because of ``fullgraph``.

    On CUDA fixed shapes spare the kernel its bounds checks, on the CPU they would only cost compilations.  Packed
    batches have other totals at each step; from the second total on their program takes any.
    """
    on_cpu = native.q.device.type == "cpu"
    dynamic = True if on_cpu else False if spec.lengths is None else None
    with (
        # Not imported above: torch imports its compiler where it is first asked for, which takes a second or more.
        torch._dynamo.config.patch(recompile_limit=_PROGRAMS, accumulated_recompile_limit=_PROGRAMS),
        _unchecked_indices() if on_cpu and spec.lengths is not None else nullcontext(),
    ):
        return _compiled(dynamic)(native, spec.scale, not on_cpu, dtype)


def _score_mod(factor: Tensor | None, cap: Tensor | None) -> _ScoreMod | None:
    """Scores times ``factor`` (B, H), then capped; None if neither is given."""
    if factor is None and cap is None:
        return None

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # FlexAttention passes a score of the tensors' own type.  In float8 a product would be cut off at 448, so the
        # score is widened first, which costs nothing: registers hold fp32.
        wide = score.to(torch.float32)
        if factor is not None:
            wide = wide * factor[batch, head]
        return wide if cap is None else cap * torch.tanh(wide / cap)

    return score_mod


def _cap(spec: AttentionSpec, device: torch.device) -> Tensor | None:
    return torch.full((), spec.softcap, dtype=torch.float32, device=device) if spec.softcap else None


def _options(spec: AttentionSpec, device: torch.device, precision: str) -> FlexKernelOptions:
    return cast("FlexKernelOptions", kernel_options(spec, describe(device).capability, precision))


class _Flex(Kernel):
    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        reason = compiler_reason(device.type)
        return ([reason] if reason else []) + entry_refusals(spec, device, spec.kv_heads)


@unpads_forward()
class FlexForward(_Flex, ForwardKernel):
    """``torch.compile(flex_attention)`` in 16 bits; for training it records a graph for its own backward."""

    preference = 50
    evidence: Mapping[str, str] = {"cpu": r"Call CompiledFxGraph", "cuda": r"triton_tem_(?!\w*backward)"}

    def __init__(self, precision: str) -> None:
        self.name = f"flex:{precision}"
        self.declared_error = DECLARED_ERROR[precision]
        self.rows = {
            "cpu": Capabilities(dtypes=(precision,), training=False, lse=False, **_PACKS),
            "cuda": Capabilities(dtypes=(precision,), capability=(8, 0), head_dims=(16, 256, 1), **_PACKS),
        }

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """The tensors as they are where rows are contiguous, the blocks of the mask, the cap and the tile."""
        q, k, v = inputs.unquantised()
        cap = _cap(spec, q.device)
        if inputs.lengths is None:
            blocks = block_mask(spec.mask, spec.seqlen_q, spec.seqlen_kv, q.device)
        else:
            blocks = packed_blocks(spec.mask, inputs.lengths, q.shape[2], k.shape[2])
        rows = partial(aligned, vector=q.element_size())
        # Detached, because flex refuses leaves on the CPU even where no gradients are recorded.
        q_, k_, v_ = (near(rows(x.detach())) for x in (q, k, v))
        options = _options(spec, q.device, precision_of(self.name))
        native = _Native(q_, k_, v_, blocks, _score_mod(None, cap), options)
        return Operands(spec, q, k, v, native, inputs.lengths)

    def run(self, operands: Operands) -> Result:
        """The compiled kernel; for training on leaves of its own, so that the caller's graph is left alone."""
        native: _Native = operands.native
        spec = operands.spec
        if not spec.training:
            with torch.no_grad():
                return Result(*_call(native, spec, native.q.dtype))
        q, k, v = (x.detach().requires_grad_() for x in (native.q, native.k, native.v))
        # The backward may be asked for twice, so it must not be compiled to write on what was saved for it.
        with torch.enable_grad(), torch._functorch.config.patch(donated_buffer=False):
            out, lse = _call(replace(native, q=q, k=k, v=v), spec, native.q.dtype)
        return Result(out.detach(), None if lse is None else lse.detach(), (out, (q, k, v)))


class FlexBackward(_Flex, BackwardKernel):
    """The compiled backward of the graph that ``flex`` in the same precision recorded."""

    needs_lse = False
    evidence: Mapping[str, str] = {"cuda": r"triton_tem_\w*backward"}

    def __init__(self, precision: str) -> None:
        self.name = f"flex:{precision}"
        self.declared_error = DECLARED_GRADIENT_ERROR[precision]
        self.follows = (self.name,)
        # Sequences of unequal length: not until enough of their gradients were seen right on a GPU.
        self.rows = {"cuda": Capabilities(dtypes=(precision,), capability=(8, 0), head_dims=(16, 256, 1))}

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """autograd through the recorded graph, which stays for the next call."""
        out, leaves = saved.state
        with torch._functorch.config.patch(donated_buffer=False):  # looked at here too, before the graph may stay
            dq, dk, dv = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        return dq, dk, dv


class FlexFp8Forward(_Flex, ForwardKernel):
    """``torch.compile(flex_attention)`` on e4m3 tensors.

    From 16 bits, Q and K are scaled by reciprocal factors that balance a head's magnitudes, so that scores need no
    descale; given descales are applied in a score modification.  The output is e4m3 without a scale of its own, in
    range because each row is an average of V's; V's descale multiplies it afterwards.
    """

    declared_error = 0.08
    error_growth = SHORT_ACCUMULATOR
    leaves = "e4m3"
    preference = None
    evidence: Mapping[str, str] = {"cuda": r"triton_tem_(?!\w*backward)"}

    def __init__(self) -> None:
        self.name = "flex:fp8"
        self.rows = {
            "cuda": Capabilities(
                dtypes=("bf16", "fp16", "e4m3"),
                capability=(8, 9),
                capability_below=(10, 0),
                head_dims=(32, 256, 1),
                descales=("tensor", "head"),
            )
        }

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """Each head quantised; or as the caller did it, with the product of Q's and K's descales by query head."""
        cap, given = _cap(spec, inputs.device), inputs.quantised()
        if given is None:
            q, k, v = inputs.unquantised()
            return _laid_out(*_balanced(q, k, spec), quantise(v, _RECIPE), spec, _score_mod(None, cap))
        factor = _per_query_head(given[0].descale, spec) * _per_query_head(given[1].descale, spec)
        return _laid_out(*given, spec, _score_mod(factor, cap))

    def run(self, operands: Operands) -> Result:
        """The compiled kernel."""
        spec = operands.spec
        with torch.no_grad():
            return Result(*_call(operands.native, spec, gradient_dtype(spec)))


class FlexFp8Backward(BackwardKernel):
    """Listed for its reason: FlexAttention has no gradients in float8, and no other precision replaces them.

    Its lowering multiplies out by grad_out in their own type, which no float8 product supports (pytorch#154750).
    """

    name = "flex:fp8"
    declared_error = 0.08
    follows = ("flex:fp8",)

    def __init__(self, rows: Mapping[str, Capabilities]) -> None:
        self.rows = rows

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Always refused."""
        return [_NO_FP8_GRADIENTS]

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cannot be reached."""
        raise NotImplementedError(_NO_FP8_GRADIENTS)


def _laid_out(q: Quantised, k: Quantised, v: Quantised, spec: AttentionSpec, score_mod: _ScoreMod | None) -> Operands:
    """Rows contiguous in Q and K, tokens contiguous in V: what FP8 products need below Blackwell."""
    native = _Native(
        q.data.contiguous(),
        k.data.contiguous(),
        v.data.mT.contiguous().mT,
        block_mask(spec.mask, spec.seqlen_q, spec.seqlen_kv, q.data.device),
        score_mod,
        _options(spec, q.data.device, "fp8"),
        _per_query_head(v.descale, spec)[..., None, None],
    )
    return Operands(spec, q, k, v, native)


def _per_query_head(descale: Tensor, spec: AttentionSpec) -> Tensor:
    """A descale per tensor or head as (B, H), contiguous."""
    flat = descale.flatten(1)
    if flat.shape[1] == spec.kv_heads:
        flat = flat.repeat_interleave(spec.group, dim=1)
    return flat.expand(spec.batch, spec.heads).contiguous()


def _balanced(q: Tensor, k: Tensor, spec: AttentionSpec) -> tuple[Quantised, Quantised]:
    """Q and K in e4m3 with descales whose product is 1, one pair for each key head and its group of query heads."""
    shape = (spec.batch, spec.kv_heads, 1, 1)
    most_q = q.abs().reshape(spec.batch, spec.kv_heads, -1).amax(-1).to(torch.float32).view(shape)
    most_k = k.abs().amax(dim=(2, 3), keepdim=True).to(torch.float32)
    # All-zero heads need no balance; what is not finite stays visible in the data.
    k_descale = torch.where((most_q > 0) & (most_k > 0), (most_k / most_q).sqrt(), 1.0)
    q_descale = k_descale.reciprocal().repeat_interleave(spec.group, dim=1)
    return (
        Quantised(quantise_with(q.to(torch.float32), q_descale, "e4m3"), q_descale, "head"),
        Quantised(quantise_with(k.to(torch.float32), k_descale, "e4m3"), k_descale, "head"),
    )


_FP8 = FlexFp8Forward()
BACKEND = Backend(
    name="flex",
    summary="torch's FlexAttention, compiled by inductor",
    availability=torch_availability,
    kernels=(
        *(kernel(precision) for precision in _PRECISIONS for kernel in (FlexForward, FlexBackward)),
        _FP8,
        FlexFp8Backward(_FP8.rows),
    ),
    compiles=True,
    built_on=("triton",),
)
