"""The promises of the contract, each with its check, from the plain to the special."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ...problem.lengths_kind import BATCHES, Batch
from ...problem.spec import AttentionSpec
from .batches import check_batch
from .conduct import (
    check_autograd,
    check_graph,
    check_inputs,
    check_memory,
    check_new_values,
    check_refusals,
    check_repeated_calls,
    check_results_kept,
    check_runs,
    check_shared_gpu,
    check_stream,
    check_threads,
    check_torch_state,
    check_whole,
)
from .growth import check_growth, long_specs
from .numbers import (
    check_alignment,
    check_declared_error,
    check_descales,
    check_error,
    check_grouping,
    check_lse,
    check_numbers,
    check_returned,
    check_strides,
    check_window,
)
from .sinks import check_sinks
from .subject import Subject

__all__ = ["CHECKS", "Check"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One promise of the contract.

    ``wrong`` says what is wrong on a spec; ``look`` tells the author where to look.  Specs have ``features`` beyond the
    plain one, or ``mixed`` ones at random.  ``after`` names checks that must not have failed; ``only`` limits it to
    plans of one direction, ``on`` to a device type.  ``specs`` draws specs of its own, which are not shrunk; ``batch``
    and ``sinks`` take specs that are served so.
    """

    name: str
    wrong: Callable[[Subject, AttentionSpec], str | None]
    look: str
    features: tuple[str, ...] = ()
    mixed: bool = False
    after: tuple[str, ...] = ()
    only: Literal["forward", "training"] | None = None
    on: str | None = None
    specs: Callable[[Subject], list[AttentionSpec]] | None = None
    batch: Batch | None = None
    sinks: bool = False
    count: int = 4


_PLAIN = ("out", "gradients")
_SAME = (*_PLAIN, "repeated calls", "new values")


def _of_batch(batch: Batch) -> Check:
    """The numbers of batches of sequences of unequal length."""
    return Check(
        name=f"{batch} batch",
        wrong=partial(check_batch, batch=batch),
        look="where sequences start and end, scales and tiles that cross a border, rows that belong to no sequence",
        batch=batch,
        mixed=True,
        after=(*_SAME, "empty rows", "combinations"),
        count=6,
    )


def _of_feature(name: str, look: str) -> Check:
    """The numbers of specs with one feature beside exact attention."""
    return Check(name=name, wrong=check_numbers, look=look, features=(name,), after=_PLAIN)


_OF_FEW_TOKENS = (
    Check(
        name="refusals",
        wrong=check_refusals,
        look="refusals and further_refusals must depend on spec and device alone, one sentence for each reason",
        count=40,
    ),
    Check(
        name="runs",
        wrong=check_runs,
        look="the row or further_refusals must refuse this spec, or prepare and run must serve it",
        mixed=True,
        count=12,
    ),
    Check(
        name="returned",
        wrong=check_returned,
        look="dtype and layout of what run returns: out and gradients (B, H, S, D) in the input's dtype, lse in fp32",
    ),
    Check(
        name="inputs",
        wrong=check_inputs,
        look="in-place operations on q, k, v, their views, or on what was saved",
        after=("returned",),
    ),
    Check(
        name="torch's state",
        wrong=check_torch_state,
        look="settings, seeds and streams that a call changes: put back what was there, or do not touch it",
        count=2,
    ),
    Check(
        name="out",
        wrong=check_error,
        look="the two products and the softmax, or a declared_error that is too small",
        only="forward",
        after=("returned", "inputs"),
        count=6,
    ),
    Check(
        name="gradients",
        wrong=check_error,
        look="which Q, K, V, out and LSE the backward computes with (operands.tensors()), or its declared_error",
        only="training",
        after=("returned", "inputs", "out", "LSE"),
        count=6,
    ),
    Check(
        name="declared error",
        wrong=check_declared_error,
        look="declared_error, or error_on where it depends on more than the type: a little above what is found here",
        after=("returned", "inputs", *_PLAIN),
        specs=Subject.typical,
    ),
    Check(
        name="LSE",
        wrong=check_lse,
        look="natural logarithm of the scaled scores, with the maximum added back, not the base-2 one of the kernel",
        only="forward",
        after=("returned", "out"),
    ),
    Check(
        name="repeated calls",
        wrong=check_repeated_calls,
        look="what a call leaves to the next: workspaces, semaphores, amax histories, operands that run changes",
        after=_PLAIN,
        count=2,
    ),
    Check(
        name="new values",
        wrong=check_new_values,
        look="caches keyed by data_ptr or shape: quantised operands, descales, outputs",
        after=(*_PLAIN, "repeated calls"),
        count=2,
    ),
    Check(
        name="results kept",
        wrong=check_results_kept,
        look="output buffers that are used again: allocate them in every call",
        after=_SAME,
        count=2,
    ),
    _of_feature("lengths", "Sq and Skv taken for one another, and the tail of the last tile"),
    _of_feature("causal", "the causal mask, the diagonal included"),
    Check(
        name="alignment",
        wrong=check_alignment,
        look="the offset of query 0 among the keys: spec.mask.offset(Sq, Skv)",
        features=("alignment",),
        after=(*_PLAIN, "lengths", "causal"),
        count=6,
    ),
    Check(
        name="window",
        wrong=check_window,
        look="both sides of the window count keys beside the query's own: j from i - left to i + right, inclusive",
        features=("window",),
        after=_PLAIN,
        count=6,
    ),
    Check(
        name="empty rows",
        wrong=check_numbers,
        look="rows that see no key: out 0, lse -inf, gradients 0",
        features=("empty",),
        after=(*_PLAIN, "lengths", "causal", "alignment"),
    ),
    Check(
        name="grouping",
        wrong=check_grouping,
        look="query head h reads key head h // (H // Hkv); dk and dv add up over the group",
        features=("grouping",),
        after=_PLAIN,
    ),
    _of_feature("softcap", "softcap * tanh(scaled score / softcap), before the mask, and its slope in the backward"),
    _of_feature(
        "scale", "spec.scale as given, where it is 0 or negative too: a row's maximum is that of the scaled scores"
    ),
    _of_feature("head_dim_v", "where v's head dimension is not q's: out and dv have v's"),
    Check(
        name="descales",
        wrong=check_descales,
        look="prepare, of quantised tensors: all three descales, in the library's shape, for the right heads",
        only="forward",
        after=("out", "LSE", "repeated calls"),
    ),
    Check(
        name="strides",
        wrong=check_strides,
        look="strides, storage offsets and alignment of q, k, v and grad_out: copy in prepare what cannot be read",
        after=(*_PLAIN, "repeated calls"),
        count=3,
    ),
    Check(
        name="autograd",
        wrong=check_autograd,
        look="a backward that changes or frees what was saved, or returns gradients in another order",
        only="training",
        after=(*_PLAIN, "repeated calls"),
        count=2,
    ),
    Check(
        name="whole",
        wrong=check_whole,
        look="whole must answer as prepare and run do, whatever the strides, or be None for the spec",
        mixed=True,
        only="forward",
        after=("out",),
    ),
    Check(
        name="threads",
        wrong=check_threads,
        look="workspaces and attributes that two calls share",
        after=(*_SAME, "results kept"),
        count=2,
    ),
    Check(
        name="memory",
        wrong=check_memory,
        look="caches and attributes that hold on to operands or results",
        after=("new values", "results kept"),
        count=2,
    ),
    Check(
        name="stream",
        wrong=check_stream,
        look="every launch and copy on torch.cuda.current_stream(), with no stream of its own left running",
        after=_SAME,
        on="cuda",
        count=2,
    ),
    Check(
        name="combinations",
        wrong=check_numbers,
        look="features that are right alone and wrong together",
        mixed=True,
        after=_PLAIN,
        count=12,
    ),
    *map(_of_batch, BATCHES),
    Check(
        name="sinks",
        wrong=check_sinks,
        look="the log-sum-exp's base and sign, and a backward that takes another one than it was given",
        sinks=True,
        mixed=True,
        after=(*_SAME, "LSE", "empty rows", "combinations"),
    ),
    Check(
        name="shared GPU",
        wrong=check_shared_gpu,
        look="barriers whose memory is used again, clocks, waiting that gives up: a kernel is stopped and goes on",
        mixed=True,
        after=(*_SAME, "stream", "combinations"),
        on="cuda",
        count=2,
    ),
    Check(
        name="CUDA graph",
        wrong=check_graph,
        look="values read on the host, or memory of the first call, that a replay does not see anew",
        after=(*_SAME, "stream"),
        on="cuda",
        count=1,
    ),
)
# Last, and only of kernels without another fault: it takes longest.
CHECKS: tuple[Check, ...] = (
    *_OF_FEW_TOKENS,
    Check(
        name="growth",
        wrong=check_growth,
        look="sums over many tokens: promote FP8 products to fp32, or declare in error_growth how they lose",
        specs=long_specs,
        after=tuple(each.name for each in _OF_FEW_TOKENS if each.on is None),
    ),
)
