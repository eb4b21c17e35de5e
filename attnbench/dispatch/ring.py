"""``attention`` of sequences that the ranks of a group share: a ring of our own, in which keys and values go around.

torch's own ring (``torch.distributed.tensor.experimental``) cannot carry these kernels.  Its private functions, which
have moved between releases, send K and V as one tensor of one type: FP8 and its scales do not fit, and its backward
makes gradients in the type that was sent.  It would quantise Q anew at each step.  And it sends sums of gradients
around in FP32, N times for N ranks, where gradients of 16 bits are sent N - 1 times here.

Forward: at each step a kernel answers for the keys that are here (``ring_parts``) while the next ones arrive; outputs
and log-sum-exps are merged in FP32.  Backward: each step's kernel is given the merged output and log-sum-exp, by which
exp(S - LSE) is the share of the whole row, as with sinks; dK and dV go straight home in the type that kernels return
and are added up there in FP32.  If every plan takes e4m3 as the first kernel makes it, Q, K and V are quantised once,
and K and V are sent in e4m3 with their scales; else they are sent as they are.  Either way forward and backward of a
step compute with the same numbers, so gradients are those of what was sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from ..choosing.choice import Choice
from ..choosing.selector import choose
from ..choosing.table_advice import warn_of_rule
from ..errors import AttnbenchError, InputError, PeerError
from ..kernels.contract import Inputs, Operands, Result, Saved, gradient_dtype
from ..kernels.devices import bind, describe
from ..kernels.execution import Execution, Underived, as_written
from ..kernels.registry import registry
from ..problem.fp8 import Quantised
from ..problem.lengths import CHECK
from ..problem.spec import AttentionSpec, Granularity
from ..problem.tensor_kinds import as_autocast, intercepted, plain
from ..state import Cache, Slot
from .context import Wish, asked_in_context, asked_in_environment, wished
from .question import Question, check_askable, key_of, settled, spec_of, wants_gradients
from .ring_exchange import Group, Message, Operand, Pending
from .ring_parts import Part, part_at, parts_of

__all__ = ["Shared", "attention", "explain", "sharing"]


class Shared(NamedTuple):
    """Sequences that so many ranks share, and what answers for them instead of ``attnbench.attention``."""

    ranks: int
    attend: Callable[[Question], Tensor | tuple[Tensor, Tensor]]


sharing: Slot[Shared] = Slot()
_NO_WINDOWS = (None, (None, None), (None, 0))
# Not asked again after an autotune or a demotion, which may come at another call on other ranks.
_steps: Cache[tuple[Any, ...], Steps] = Cache()


@dataclass(frozen=True)
class Steps:
    """What each step of a ring runs, by the part of the keys: the same on all ranks.

    ``descale`` is the granularity of the scales with which Q, K and V are quantised once and K and V are sent in e4m3;
    None where tensors are sent as they are.
    """

    executions: Mapping[str, Execution]
    descale: Granularity | None

    @property
    def sent(self) -> str:
        """The type in which keys and values are sent."""
        return "e4m3" if self.descale is not None else next(iter(self.executions.values())).spec.dtype

    def __str__(self) -> str:
        plans = ", ".join(f"{name} by {execution.plan}" for name, execution in self.executions.items())
        return f"{plans}, sent in {self.sent}"


def attention(group: Group, question: Question) -> Tensor | tuple[Tensor, Tensor]:
    """``attnbench.attention`` where each rank of the group holds its places of the sequences (``ring_parts.places``).

    Every rank must call it for the same shapes and arguments; at the first call of each they compare, with
    ATTNBENCH_CHECK=1 at every call.  Raises InputError for arguments that no ring serves, PeerError if ranks differ or
    one is gone, what ``choose`` raises.
    """
    question = _askable(question)
    q, k, v = question[:3]
    training = wants_gradients(q, k, v)
    wish, variable = asked_in_context(), asked_in_environment()
    key = (*key_of(q, k, v, question[3:17], training, wish, variable), group.name, group.rank, group.size)
    steps = _steps.entries.get(key)
    if steps is None:
        steps = _steps.of(key, _agreed, group, question, training, wished(wish, variable))
    elif os.environ.get(CHECK) == "1":
        _compare(group, question, training, steps)
    group.sent[steps.sent] += 1
    q, k, v = _heads_first(question)
    if training:
        out, lse = _Ring.apply(q, k, v, group, steps, question.is_causal)  # type: ignore[no-untyped-call]
    else:
        out, lse, _, _ = _forward(q, k, v, group, steps, question.is_causal)
    if question.layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if question.return_lse else out


def explain(size: int, question: Question) -> dict[str, Choice]:
    """What ``attention`` would run on one of so many ranks, by the part of the keys.  Raises what it would raise."""
    question = _askable(question)
    wish = settled(question, wished(asked_in_context(), asked_in_environment()))
    return _choices(size, question, wants_gradients(*question[:3]), wish)[1]


def _askable(question: Question) -> Question:
    """The question with q, k and v as kernels read them.  Raises InputError for what no ring serves."""
    check_askable(*question[:3], question.window)
    if intercepted(*question[:3]):
        raise InputError("attention over several ranks takes plain tensors, not those of torch.func or fake ones")
    if question.layout == "thd" or question[17:23] != (None,) * 6:
        raise InputError("sequences of unequal length are not served over several ranks; call attention outside")
    # As given: a window that is as wide as what one rank holds would pass for none.
    if question.window not in _NO_WINDOWS or question.sinks is not None or question[14:17] != (None, None, None):
        raise InputError("windows, sinks and descales are not served over several ranks; call attention outside")
    causal = True if question.window == (None, 0) else question.is_causal
    q, k, v = as_autocast(*plain(*question[:3]))
    return question._replace(q=q, k=k, v=v, is_causal=causal, window=None, causal_alignment="top-left")


def _heads_first(question: Question) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = question[:3]
    return (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)) if question.layout == "bshd" else (q, k, v)


def _agreed(group: Group, question: Question, training: bool, wish: Wish) -> Steps:
    """What every rank has chosen.  Raises PeerError if another rank chose something else, or cannot."""
    try:
        steps = _planned(group, question, training, wish)
    except AttnbenchError as error:
        with suppress(PeerError):  # the others have; what is wrong here comes first
            group.agree(f"cannot: {error}", question.q.device)
        raise
    _compare(group, question, training, steps)
    return steps


def _compare(group: Group, question: Question, training: bool, steps: Steps) -> None:
    """Raise PeerError unless all ranks ask the same and run the same steps; waits for the device."""
    group.agree(f"{spec_of(question, training, None)}, {steps}", question.q.device)


def _planned(group: Group, question: Question, training: bool, wish: Wish) -> Steps:
    parts, choices = _choices(group.size, question, training, settled(question, wish))
    known, executions = registry(), {}
    for name, choice in choices.items():
        warn_of_rule(choice, question.q.device)
        plan = choice.plan
        backward = None if plan.backward is None else known.backward(plan.backward)
        executions[name] = Execution(choice.spec, known.forward(plan.forward), backward)
    q, k, v = (x.detach() for x in _heads_first(question))
    return Steps(executions, _descale(executions, parts, q, k, v))


def _choices(size: int, question: Question, training: bool, wish: Wish) -> tuple[tuple[Part, ...], dict[str, Choice]]:
    """The parts that some rank of so many computes, and the choice for each, under this settled wish."""
    whole = spec_of(question, training, None)
    causal = question.is_causal
    if causal and whole.seqlen_q != whole.seqlen_kv:
        raise InputError(f"causal attention over ranks has as many keys as queries, not {whole.seqlen_kv}")
    if causal and whole.seqlen_q % 2:
        raise InputError(
            f"a rank holds two equal pieces of a causal sequence: an even number of tokens, not {whole.seqlen_q}"
        )
    parts = parts_of(causal, size)
    return parts, {
        part.name: choose(
            part.spec(whole), question.q.device, backend=wish.backend, asked_by=wish.asked_by,
            fp8=wish.dtype == "fp8", max_error=wish.max_error,
        )
        for part in parts
    }  # fmt: skip


def _descale(
    executions: Mapping[str, Execution], parts: tuple[Part, ...], q: Tensor, k: Tensor, v: Tensor
) -> Granularity | None:
    """The granularity in which the first step's kernel quantises, if every kernel takes what it makes; else None."""
    own = executions[parts[0].name]
    if own.forward.leaves != "e4m3":
        return None
    with torch.no_grad(), as_written(q.device):
        made = own.forward.prepare(Inputs(q, k, v), own.spec)
        tensors = made.q, made.k, made.v
        if not all(isinstance(x, Quantised) and x.mean is None for x in tensors):
            return None
        granularities = {x.granularity for x in tensors if isinstance(x, Quantised)}
        if len(granularities) > 1:
            return None
        (granularity,) = granularities
        for part in parts[1:] or parts:
            execution = executions[part.name]
            spec = _of_e4m3(execution.spec, granularity)
            if execution.forward.leaves != "e4m3" or execution.forward.refusals(spec, describe(q.device)):
                return None
            try:
                execution.forward.prepare(Inputs.of(_operands_of(part, *tensors)), spec)
            except InputError:  # such as one that takes nothing rotated, which no row says
                return None
    return granularity


def _of_e4m3(spec: AttentionSpec, granularity: Granularity) -> AttentionSpec:
    return spec.replace(dtype="e4m3", descale=granularity, direction="forward")


def _rows(x: Operand, start: int, stop: int) -> Operand:
    """Some tokens of x (B, H, S, D)."""
    if not isinstance(x, Quantised):
        return x[:, :, start:stop]
    descale = x.descale if x.descale.shape[2] == 1 else x.descale[:, :, start:stop]
    return Quantised(x.data[:, :, start:stop], descale, x.granularity, x.rotated)


def _length(x: Operand) -> int:
    return (x.data if isinstance(x, Quantised) else x).shape[2]


def _operands_of(part: Part, q: Operand, k: Operand, v: Operand) -> tuple[Operand, Operand, Operand]:
    """The queries and keys of a part, of a rank's queries and another's keys."""
    if part.half_q:
        q = _rows(q, _length(q) // 2, _length(q))
    if part.half_kv:
        k, v = (_rows(x, 0, _length(x) // 2) for x in (k, v))
    return q, k, v


def _operands(execution: Execution, descale: Granularity | None, q: Operand, k: Operand, v: Operand) -> Operands:
    """What the forward of a step computes with: the tensors as they came, or quantised here."""
    spec = execution.spec if descale is None else _of_e4m3(execution.spec, descale)
    return execution.forward.prepare(Inputs(q, k, v), spec)


class _Merged:
    """The output (B, H, S, Dv) and log-sum-exp (B, H, S) of all keys so far, in FP32 or wider."""

    def __init__(self, result: Result) -> None:
        assert result.lse is not None, "kernels without an LSE refuse a part"
        self.lse = result.lse
        self.out = result.out.to(torch.promote_types(result.out.dtype, torch.float32), copy=True)

    def add(self, result: Result, first: int) -> None:
        """Merge what other keys give the queries from ``first`` on."""
        assert result.lse is not None, "kernels without an LSE refuse a part"
        mine, out = self.lse[:, :, first:], self.out[:, :, first:]
        total = torch.logaddexp(mine, result.lse)
        out.mul_((mine - total).exp_()[..., None])
        out.addcmul_(result.out, (result.lse - total).exp_()[..., None])
        self.lse = total if first == 0 else torch.cat([self.lse[:, :, :first], total], dim=2)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, group: Group, steps: Steps, causal: bool
) -> tuple[Tensor, Tensor, tuple[Operand, Tensor | None], Message]:
    """(out, lse, (q and the message with k and v, None where they are sent as they are), the message's layout)."""
    bind(q.device)
    with as_written(q.device):
        own = steps.executions[part_at(0, group.rank, causal).name]
        operands = own.forward.prepare(Inputs(q, k, v), own.spec)
        mine: tuple[Operand, Operand, Operand] = q, k, v
        if steps.descale is not None:
            mine = operands.q, operands.k, operands.v
        layout = Message(*mine[1:])
        packed = None if group.size == 1 and steps.descale is None else layout.pack(*mine[1:])
        held, merged = packed, None
        for step in range(group.size):
            arriving = None
            if step < group.size - 1:
                assert held is not None, "it was packed"
                arriving = group.pass_on(held)
            part = part_at(step, group.rank, causal)
            if merged is None:
                merged = _Merged(own.forward.run(operands))
                del operands
            else:
                assert held is not None, "it has arrived"
                execution = steps.executions[part.name]
                seen = _operands_of(part, mine[0], *layout.unpack(held))
                result = execution.forward.run(_operands(execution, steps.descale, *seen))
                merged.add(result, _length(mine[0]) // 2 if part.half_q else 0)
            if arriving is not None:
                held = arriving.arrived()
    assert merged is not None, "a group has a rank"
    dtype = gradient_dtype(own.spec)
    lse = merged.lse if q.dtype == torch.float64 else merged.lse.to(torch.float32)
    kept = (mine[0], packed) if steps.descale is not None else (q, None)
    return merged.out.to(dtype), lse, kept, layout


class _Home:
    """dK (B, Hkv, S, D) and dV of this rank's own keys, added up as they come home."""

    def __init__(self, group: Group, dk: Tensor, dv: Tensor) -> None:
        wide = torch.promote_types(dk.dtype, torch.float32)
        self._group, self.dk, self.dv = group, dk.to(wide), dv.to(wide)
        self._pending: tuple[Pending, int] | None = None

    def send(self, step: int, causal: bool, dk: Tensor, dv: Tensor) -> None:
        """Send the gradients of a step's keys to the rank that holds them, and receive another's of ours."""
        self.settle()
        group, length = self._group, self.dk.shape[2]
        theirs = part_at(step, (group.rank + step) % group.size, causal)
        count = length // 2 if theirs.half_kv else length
        batch, heads = self.dk.shape[:2]
        size = batch * heads * count * (self.dk.shape[3] + self.dv.shape[3])
        self._pending = group.send_home(step, torch.cat([dk.flatten(), dv.flatten()]), size), count

    def settle(self) -> None:
        """Add what is still under way."""
        if self._pending is None:
            return
        pending, count = self._pending
        self._pending, received = None, pending.arrived()
        start = 0
        for total in (self.dk, self.dv):
            seen = total[:, :, :count]
            seen += received[start : start + seen.numel()].view(seen.shape)
            start += seen.numel()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group, steps: Steps, causal: bool
    ) -> tuple[Tensor, Tensor]:
        with record_function("attnbench::attention"):  # what its share of a training is measured by
            out, lse, (own_q, packed), layout = _forward(q, k, v, group, steps, causal)
        if isinstance(own_q, Quantised):
            ctx.quantised = own_q.granularity, own_q.rotated
            ctx.save_for_backward(own_q.data, own_q.descale, packed, out, lse)
        else:
            ctx.quantised = None
            ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.steps, ctx.causal, ctx.layout = group, steps, causal, layout
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        first, second, third, out, lse = ctx.saved_tensors
        q: Operand = first if ctx.quantised is None else Quantised(first, second, *ctx.quantised)
        with torch.no_grad(), as_written(grad_out.device), record_function("attnbench::attention_backward"):
            bind(grad_out.device)  # autograd's own thread
            packed = third if ctx.quantised is not None else ctx.layout.pack(second, third)
            gradients = _backward(q, packed, out, lse, grad_out, ctx.group, ctx.steps, ctx.causal, ctx.layout)
        wanted = zip(gradients, ctx.needs_input_grad, strict=False)
        found = [gradient if needed else None for gradient, needed in wanted]
        if torch.is_grad_enabled():  # create_graph=True: somebody may differentiate these
            found = [None if each is None else Underived.apply(each, out, grad_out) for each in found]  # type: ignore[no-untyped-call]
        return *found, None, None, None


def _backward(
    q: Operand, packed: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, group: Group, steps: Steps, causal: bool,
    layout: Message,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of this rank's q, k and v."""
    held, half, home, dq = packed, _length(q) // 2, None, None
    for step in range(group.size):
        arriving = group.pass_on(held) if step < group.size - 1 else None
        part = part_at(step, group.rank, causal)
        execution = steps.executions[part.name]
        assert execution.backward is not None, "a step of a training has a backward"
        seen = _operands_of(part, q, *layout.unpack(held))
        if steps.descale is None:
            operands = execution.forward.prepare(Inputs(*seen), execution.spec).kept()
        else:
            operands = Operands(execution.spec, *seen)
        rows = (out, lse, grad_out)
        if part.half_q:
            rows = (out[:, :, half:].contiguous(), lse[:, :, half:].contiguous(), grad_out[:, :, half:])
        dq_, dk_, dv_ = execution.backward.run(Saved(operands, *rows[:2]), rows[2])
        if home is None or dq is None:
            dq, home = dq_.to(torch.promote_types(dq_.dtype, torch.float32), copy=True), _Home(group, dk_, dv_)
        else:
            dq[:, :, half if part.half_q else 0 :] += dq_
            home.send(step, causal, dk_, dv_)
        if arriving is not None:
            held = arriving.arrived()
    assert home is not None, "a group has a rank"
    assert dq is not None, "a group has a rank"
    home.settle()
    return dq.to(out.dtype), home.dk.to(out.dtype), home.dv.to(out.dtype)
