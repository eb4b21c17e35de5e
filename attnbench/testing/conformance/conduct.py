"""Checks of a kernel's side effects.  Each function returns what is wrong, or None."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...choosing.selector import choose
from ...errors import RefusedError
from ...harness.cases.inputs import Drawn
from ...harness.measure.accuracy import TensorName
from ...harness.measure.probes import negate, same_bits, undo_negation
from ...harness.measure.replay import RecordingError, replay_of
from ...kernels.contract import Inputs, Saved
from ...kernels.devices import bind
from ...kernels.execution import Execution
from ...problem.fp8 import Quantised
from ...problem.spec import AttentionSpec
from ..neighbour import NeighbourError, neighbour
from .subject import Subject, inputs_of, truth_of

__all__ = [
    "check_autograd",
    "check_graph",
    "check_inputs",
    "check_memory",
    "check_new_values",
    "check_refusals",
    "check_repeated_calls",
    "check_results_kept",
    "check_runs",
    "check_shared_gpu",
    "check_stream",
    "check_threads",
    "check_torch_state",
    "check_whole",
]

_ROUNDS = 4
_LONGEST_SENTENCE = 300
_SHARING_SECONDS = 1.5
_QUEUED = 16  # calls at a time, so that a GPU time slice ends within the kernel
_SLEEP = 20_000_000  # cycles: about 10 ms, longer than a small kernel takes
_TWO_SENTENCES = re.compile(r"[.!?]\s+[A-Z]")


def check_refusals(subject: Subject, spec: AttentionSpec) -> str | None:
    """Refusals are sentences, the same when asked again; and what is refused cannot be reached."""
    kernels = [subject.forward] if subject.backward is None else [subject.forward, subject.backward]
    for kernel in kernels:
        first = list(kernel.refusals(spec, subject.facts))
        again = list(kernel.refusals(spec, subject.facts))
        if first != again:
            return f"{kernel.name} refuses with {first}, and asked again with {again}"
        for sentence in first:
            if not isinstance(sentence, str) or not sentence.strip() or "\n" in sentence:
                return f"{kernel.name} refuses with {sentence!r}, which is no sentence"
            if len(sentence) > _LONGEST_SENTENCE or _TWO_SENTENCES.search(sentence):
                return f"{kernel.name} refuses with more than one sentence: {sentence!r}"
    reasons = subject.refusals(spec)
    try:
        choose(spec, subject.device, backend=str(subject.plan), table=subject.no_table, known=subject.registry)
    except RefusedError as error:
        return None if reasons else f"attention(backend=...) refuses it, because {error}, where the kernel does not"
    return "attention(backend=...) would run what the kernel refuses" if reasons else None


def check_runs(subject: Subject, spec: AttentionSpec) -> str | None:
    """A spec that is not refused runs; the caller reports an exception."""
    inputs = inputs_of(spec, subject.device)
    subject.answers(spec, inputs)
    if subject.device.type == "cuda":
        torch.cuda.synchronize(subject.device)
    return None


def check_inputs(subject: Subject, spec: AttentionSpec) -> str | None:
    """Neither the inputs nor what was saved for the backward are changed."""
    inputs = inputs_of(spec, subject.device)
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    before = {name: x.clone() for name, x in given.items()}
    operands = subject.forward.prepare(inputs.qkv, spec)
    result = subject.forward.run(operands)
    if subject.backward is not None and inputs.grad_out is not None:
        for name, x in zip("qkv", (operands.q, operands.k, operands.v), strict=True):
            given[f"the operand {name}"] = x.data if isinstance(x, Quantised) else x
        given |= {"out": result.out, "grad_out": inputs.grad_out}
        if result.lse is not None:
            given["lse"] = result.lse
        before |= {name: x.clone() for name, x in given.items() if name not in before}
        subject.backward.run(Saved(operands.kept(), result.out, result.lse, result.state), inputs.grad_out)
    changed = [name for name, x in given.items() if not same_bits(x, before[name])]
    return f"{', '.join(changed)} changed during the call" if changed else None


def check_torch_state(subject: Subject, spec: AttentionSpec) -> str | None:
    """Torch's own state, random numbers included, is as it was before the call."""
    inputs = inputs_of(spec, subject.device)
    before = _torch_state(subject.device)
    subject.answers(spec, inputs)
    after = _torch_state(subject.device)
    changed = [name for name, was in before.items() if after[name] != was]
    return f"the call leaves another {' and '.join(changed)} behind" if changed else None


def _torch_state(device: torch.device) -> dict[str, object]:
    state: dict[str, object] = {
        "random state": torch.get_rng_state().numpy().tobytes(),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "precision of fp32 products": torch.get_float32_matmul_precision(),
        "number of threads": torch.get_num_threads(),
        "choice of deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":
        state |= {
            "random state of the GPU": torch.cuda.get_rng_state(device).numpy().tobytes(),
            "current device": torch.cuda.current_device(),
            "current stream": torch.cuda.current_stream(device).cuda_stream,
        }
    return state


def check_new_values(subject: Subject, spec: AttentionSpec) -> str | None:
    """Other values at the same addresses are computed anew."""
    inputs = inputs_of(spec, subject.device)
    truth = truth_of(subject, spec, inputs)
    subject.answers(spec, inputs)
    negate(*_all(inputs))
    problem = subject.wrong(spec, undo_negation(subject.answers(spec, inputs)), truth)
    return None if problem is None else f"with all inputs negated in place {problem}"


def check_results_kept(subject: Subject, spec: AttentionSpec) -> str | None:
    """A later call leaves an earlier one's results alone."""
    inputs, other = inputs_of(spec, subject.device), inputs_of(spec, subject.device)
    negate(*_all(other))
    first = _errors(subject, subject.answers(spec, inputs))
    kept = {name: x.clone() for name, x in first.items()}
    subject.answers(spec, other)
    changed = [name for name, x in first.items() if not same_bits(x, kept[name])]
    return f"{', '.join(changed)} of the first call changed in the second" if changed else None


def check_repeated_calls(subject: Subject, spec: AttentionSpec) -> str | None:
    """The same inputs again: the same bits, or said how far they are apart."""
    inputs = inputs_of(spec, subject.device)
    truth = truth_of(subject, spec, inputs)
    first = _errors(subject, subject.answers(spec, inputs))
    bits = True
    for number in range(2, 2 + _ROUNDS):
        again = _errors(subject, subject.answers(spec, inputs))
        if problem := subject.wrong(spec, again, truth):
            return f"call {number} on the same inputs: {problem}"
        bits = bits and all(same_bits(x, again[name]) for name, x in first.items())
    operands = subject.forward.prepare(inputs.qkv, spec)
    for turn in ("first", "second"):
        if problem := subject.wrong(spec, subject.answers_of(operands, inputs.grad_out), truth):
            return f"the {turn} run on the same operands: {problem}"
    subject.note("repeated calls", "the same bits every time" if bits else "not the same bits every time")
    return None


def check_threads(subject: Subject, spec: AttentionSpec) -> str | None:
    """Two threads at once, each with inputs of its own."""
    inputs = inputs_of(spec, subject.device)
    truth = truth_of(subject, spec, inputs)
    negated = inputs_of(spec, subject.device)
    negate(*_all(negated))
    barrier = threading.Barrier(2)
    problems: list[str] = []

    def work(mine: Drawn, back: Callable[[dict[TensorName, Tensor]], dict[TensorName, Tensor]]) -> None:
        try:
            bind(subject.device)  # as attention() does
            for _ in range(_ROUNDS):
                barrier.wait(timeout=60)
                wrong = subject.wrong(spec, back(subject.answers(spec, mine)), truth)
                problems.extend([wrong] if wrong else [])
        except threading.BrokenBarrierError:
            return  # the other thread has said why
        except Exception as error:  # a kernel may raise anything, and a thread's end would go unnoticed
            problems.append(f"{type(error).__name__}: {error}")
            barrier.abort()

    threads = [threading.Thread(target=work, args=each) for each in ((inputs, dict), (negated, undo_negation))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return f"in two threads at once {problems[0]}" if problems else None


def check_memory(subject: Subject, spec: AttentionSpec) -> str | None:
    """Once results are dropped, inputs and results are freed; calls with the same spec do not pile anything up."""
    _warm(subject, spec)
    live, allocated = _live(subject)
    for _ in range(_ROUNDS):
        _warm(subject, spec)
    now, later = _live(subject)
    if now > live:
        return f"{now - live} more tensors are alive after {_ROUNDS} calls that were over"
    if later > allocated:
        return f"{later - allocated} more bytes of the GPU are taken after {_ROUNDS} calls that were over"
    inputs = inputs_of(spec, subject.device)
    refs = {name: _ref(getattr(inputs, name)) for name in ("q", "k", "v")}
    found = subject.answers(spec, inputs)
    refs |= {name: _ref(x) for name, x in found.items()}
    del inputs, found
    gc.collect()
    held = [name for name, ref in refs.items() if not ref.expired()]
    return f"{', '.join(held)} stay in memory after the call" if held else None


def _ref(x: Tensor) -> Any:
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]


def _warm(subject: Subject, spec: AttentionSpec) -> None:
    subject.answers(spec, inputs_of(spec, subject.device))


def _live(subject: Subject) -> tuple[int, int]:
    gc.collect()
    # By type, because isinstance would wake the lazy proxies that other packages leave about.
    tensors = sum(issubclass(type(each), Tensor) for each in gc.get_objects())
    if subject.device.type != "cuda":
        return tensors, 0
    torch.cuda.synchronize(subject.device)
    return tensors, torch.cuda.memory_allocated(subject.device)


def check_autograd(subject: Subject, spec: AttentionSpec) -> str | None:
    """Gradients through autograd: right, twice, only for leaves that require them, none in no_grad."""
    inputs = inputs_of(spec, subject.device)
    assert subject.backward is not None, "only training plans come here"
    assert inputs.grad_out is not None, "a training spec has a gradient"
    truth = truth_of(subject, spec, inputs)
    execution = Execution(spec, subject.forward, subject.backward)
    leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = execution(Inputs.of(leaves))
    if not out.requires_grad:
        return "out carries no gradient"
    if lse is not None and lse.requires_grad:
        return "lse carries a gradient"
    names: tuple[TensorName, ...] = ("dq", "dk", "dv")
    for turn in ("", "in a second backward "):
        found = torch.autograd.grad(out, leaves, inputs.grad_out, retain_graph=True)
        if problem := subject.wrong(spec, dict(zip(names, found, strict=True)), truth):
            return f"through autograd {turn}{problem}"
    for index, name in enumerate(names):
        mine = [x.detach().clone().requires_grad_(each == index) for each, x in enumerate(leaves)]
        execution(Inputs.of(mine))[0].backward(inputs.grad_out)  # type: ignore[no-untyped-call]
        if [x.grad is not None for x in mine] != [each == index for each in range(3)]:
            return f"where {name} alone is wanted, other gradients come"
        only = mine[index].grad
        if only is None or subject.wrong(spec, {name: only}, truth):
            return f"where {name} alone is wanted, it is another one"
    with torch.no_grad():
        if execution(Inputs.of(leaves))[0].requires_grad:
            return "out carries a gradient in no_grad"
    return None


def check_whole(subject: Subject, spec: AttentionSpec) -> str | None:
    """What a call gives where one function stands for ``prepare`` and ``run``: shapes, types and numbers as theirs."""
    inputs = inputs_of(spec, subject.device)
    if subject.forward.whole(spec, subject.device.type) is None:
        return None
    expected = subject.answers(spec, inputs)
    out, lse = Execution(spec, subject.forward)(inputs.qkv)
    found: dict[TensorName, Tensor] = {"out": out} if lse is None else {"out": out, "lse": lse}
    if spec.return_lse and "lse" not in found:
        return "whole returns no lse, and the spec asks for one"
    for name, x in found.items():
        if (x.shape, x.dtype) != (expected[name].shape, expected[name].dtype):
            return f"whole returns {name} as {x.dtype} {tuple(x.shape)}, run another"
    problem = subject.wrong(spec, found, truth_of(subject, spec, inputs))
    return None if problem is None else f"by whole {problem}"


def check_stream(subject: Subject, spec: AttentionSpec) -> str | None:
    """Inputs that a side stream makes late, read on that stream, with no synchronisation between."""
    inputs = inputs_of(spec, subject.device)
    truth = truth_of(subject, spec, inputs)
    subject.answers(spec, inputs)
    grad_out = None if inputs.grad_out is None else torch.zeros_like(inputs.grad_out)
    q, k, v = (torch.zeros_like(x) for x in (inputs.q, inputs.k, inputs.v))
    late = Drawn(q, k, v, grad_out, inputs.drawn_on)
    stream = torch.cuda.Stream(subject.device)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(subject.device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_SLEEP)  # type: ignore[no-untyped-call]
        for mine, given in zip(_all(late), _all(inputs), strict=True):
            mine.copy_(given)
        found = subject.answers(spec, late)
        copies = {name: x.clone() for name, x in found.items()}
    torch.cuda.synchronize(subject.device)
    problem = subject.wrong(spec, copies, truth)
    return None if problem is None else f"on a side stream {problem}"


def check_shared_gpu(subject: Subject, spec: AttentionSpec) -> str | None:
    """The same answers while another process computes on the GPU, which goes from one to the other in turns."""
    inputs = inputs_of(spec, subject.device)
    truth = truth_of(subject, spec, inputs)
    first = _errors(subject, subject.answers(spec, inputs))
    calls = 0
    try:
        with neighbour(subject.device):
            ends = time.monotonic() + _SHARING_SECONDS
            while time.monotonic() < ends:
                queued = [_errors(subject, subject.answers(spec, inputs)) for _ in range(_QUEUED)]
                calls += _QUEUED
                for found in queued:
                    if all(same_bits(x, first[name]) for name, x in found.items()):
                        continue
                    if problem := subject.wrong(spec, found, truth):
                        return f"beside another process on the GPU, in one of {calls} calls, {problem}"
    except NeighbourError as error:
        subject.note("shared GPU", f"not asked: {error}")
        return None
    subject.note("shared GPU", f"{calls} calls beside another process")
    return None


def check_graph(subject: Subject, spec: AttentionSpec) -> str | None:
    """A CUDA graph replays it on other values with the right result; that it cannot be recorded is only noted."""
    inputs = inputs_of(spec, subject.device)
    truth = truth_of(subject, spec, inputs)
    kept: dict[TensorName, Tensor] = {}

    def call() -> tuple[Tensor, ...]:
        kept.update(subject.answers(spec, inputs))
        return tuple(kept.values())

    call()
    torch.cuda.synchronize(subject.device)
    try:
        replay = replay_of(call, subject.device)
    except RecordingError as error:
        subject.note("CUDA graph", f"cannot be captured: {error}")
        return None
    if replay is None:
        return "a replay gives another answer than the call"
    negate(*_all(inputs))
    replay()
    torch.cuda.synchronize(subject.device)
    problem = subject.wrong(spec, undo_negation(kept), truth)
    return None if problem is None else f"in a replay on negated inputs {problem}"


def _all(inputs: Drawn) -> list[Tensor]:
    return [x for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out) if x is not None]


def _errors(subject: Subject, found: dict[TensorName, Tensor]) -> dict[TensorName, Tensor]:
    return {name: x for name, x in found.items() if name in subject.tensors}
