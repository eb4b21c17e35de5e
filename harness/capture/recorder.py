"""Record the real Q, K, V (and dO) of a program's attention calls, within a limit of bytes."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from attnbench.errors import AttnbenchError, MisuseError
from attnbench.files.atomic import Draft
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.spec import AttentionSpec
from attnbench.text.printable import printable

from .file import LONGEST_CALL, MOST_CALLS, SUFFIX, CapturedCall, CapturedIndex, input_bytes, write_captured
from .hooks import Call, UnrecordableError, watch_calls
from .reservoir import Reservoir

__all__ = ["MAX_BYTES", "MOST", "Recorder", "capture"]

MAX_BYTES = 2**28
MOST = 64
_CUT = 4  # a call larger than the whole budget is cut down to 1/4 of it, so that other calls fit as well
_MOST_REASONS = 100
_LONGEST_REASON = 300
_active = threading.Lock()


@dataclass(eq=False)
class _Recording:
    """A call that is kept for now.  In training ``tensors`` lacks grad_out until a backward has run."""

    about: CapturedCall
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """The kept part of a call: all of it, or its first batch entries and some key heads with their query heads.

    Of sequences with lengths of their own all are kept.
    """

    whole: AttentionSpec
    spec: AttentionSpec
    kv_heads: list[int] | None = None

    @torch.no_grad()
    def copy(self, x: Tensor) -> Tensor:
        """This part of a tensor (B, H or Hkv, S, D), on the CPU, contiguous, in the dtype of the computation.

        Raises UnrecordableError if it holds values that are not finite.
        """
        if self.kv_heads is not None:
            x = x[: self.spec.batch]
            x = x.view(len(x), self.whole.kv_heads, -1, *x.shape[2:])[:, self.kv_heads].flatten(1, 2)
        copied = torch.empty(x.shape, dtype=TO_TORCH[self.spec.dtype], device="cpu").copy_(x)
        if not bool(torch.isfinite(copied).all()):
            raise UnrecordableError("values that are not finite")
        return copied


class Recorder:
    """The attention calls seen so far.

    ``seen`` counts all; ``unrecorded`` counts, by reason, those that cannot be recorded, and ``without_gradient`` those
    without a gradient.  The others are kept (``recorded``) or were displaced because of the budget.
    """

    def __init__(self, max_bytes: int, most: int) -> None:
        self.seen = 0
        self.unrecorded: Counter[str] = Counter()
        self.without_gradient: Counter[str] = Counter()
        self._kept: Reservoir[_Recording] = Reservoir(max_bytes, most)
        self._lock = threading.RLock()  # gradients arrive in autograd's own threads
        self._written = False

    @property
    def recorded(self) -> int:
        """How many calls are kept."""
        return len(self._kept.items)

    @property
    def tensor_bytes(self) -> int:
        """The bytes of the tensors that are kept."""
        return sum(x.nbytes for kept in self._kept.items for x in kept.tensors.values())

    @property
    def left_out(self) -> list[str]:
        """A sentence for each reason why something seen is not kept."""
        sentences = [f"{count} not recorded: {reason}" for reason, count in self.unrecorded.most_common()]
        sentences += [f"{count} without its gradient: {why}" for why, count in self.without_gradient.most_common()]
        if displaced := self.seen - self.unrecorded.total() - self.recorded:
            sentences.insert(0, f"{displaced} gave way to others within the budget")
        return sentences

    def record(self, make: Callable[[], Call]) -> None:
        """Keep a call if the budget allows it.  An exception becomes a reason: recording never fails the program."""
        with self._lock:
            self.seen += 1
            try:
                self._record(make())
            except Exception as error:
                _count(self.unrecorded, error)

    def _record(self, call: Call) -> None:
        part = self._part(call.spec)
        name = printable(call.module, "?")[-LONGEST_CALL:] or "no module"
        new = _Recording(
            CapturedCall(
                name=name,
                number=self.seen - 1,
                spec=part.spec,
                whole=call.spec if part.kv_heads is not None else None,
                kv_heads=part.kv_heads,
                lengths=call.lengths,
            )
        )
        gone = self._kept.offer(new, kind=_kind(part.spec), source=name, size=input_bytes(part.spec))
        for old in gone:
            old.tensors.clear()  # a graph that waits for its backward may keep the recording alive much longer
        if new in gone:
            return
        try:
            for x, tensor in {"q": call.q, "k": call.k, "v": call.v}.items():
                new.tensors[x] = part.copy(tensor)
        except BaseException:
            self._kept.remove(new)
            raise
        if call.out.grad_fn is not None and call.spec.training:
            # A hook of the node, because the program's tensor must not change.  It must not hold the call, or the
            # graph would hold itself.
            call.out.grad_fn.register_prehook(partial(self._gradient, new, part, call.arranged, call.out.output_nr))

    def _gradient(
        self,
        recording: _Recording,
        part: _Part,
        arranged: Callable[[Tensor], Tensor],
        place: int,
        gradients: tuple[Tensor | None, ...],
    ) -> None:
        with self._lock:
            gradient = gradients[place]
            # Without q the call was displaced; of several backwards the first counts.
            if gradient is None or "q" not in recording.tensors or "grad_out" in recording.tensors or self._written:
                return
            try:
                recording.tensors["grad_out"] = part.copy(arranged(gradient.detach()))
            except Exception as error:
                _count(self.without_gradient, error)

    def _part(self, spec: AttentionSpec) -> _Part:
        budget, size = self._kept.max_bytes, input_bytes(spec)
        if size <= budget:
            return _Part(spec, spec)
        entries = spec.batch if spec.lengths is None else 1  # sequences with lengths stay together
        unit = size // (entries * spec.kv_heads)
        if unit > budget:
            raise UnrecordableError("a call of which one key head of one batch entry is larger than the budget")
        units = max(1, budget // _CUT // unit)
        kv_heads = min(units, spec.kv_heads)
        batch = spec.batch if spec.lengths is not None else max(1, min(spec.batch, units // spec.kv_heads))
        heads = [spec.kv_heads * place // kv_heads for place in range(kv_heads)]
        return _Part(spec, spec.replace(batch=batch, heads=kv_heads * spec.group, kv_heads=kv_heads), heads)

    def write(self, path: Path) -> None:
        """Write what is kept.  Raises OSError."""
        with self._lock:
            self._written = True  # a graph may outlive the program and still deliver gradients
        kept = self._kept.items
        for each in kept:
            if "grad_out" not in each.tensors:  # no backward ran
                specs = {"spec": each.about.spec, "whole": each.about.whole}
                forward = {name: spec and spec.replace(direction="forward") for name, spec in specs.items()}
                each.about = each.about.model_copy(update=forward)
        index = CapturedIndex(
            torch=torch.__version__,
            seen=self.seen,
            unrecorded=dict(self.unrecorded),
            calls=[each.about for each in kept],
        )
        write_captured(path, index, [each.tensors for each in kept])


@contextmanager
def capture(path: str | Path, *, max_bytes: int = MAX_BYTES, most: int = MOST) -> Iterator[Recorder]:
    """Record the attention calls made while it is open, and write them to ``path`` (.safetensors) at its end.

    Q, K, V and, if a backward runs, dO are kept in the dtype of the computation; at most ``most`` calls, whose tensors
    take at most ``max_bytes`` in memory and in the file.  Of more calls, some of every kind of shape, of each module
    and from all times are kept.  attnbench.harness.capture.hooks lists which calls are seen; other processes' are not.
    Results, random numbers and the autograd graph do not change, but code under torch.compile runs eagerly.  The file
    is written completely or not at all, also if the block raises.

    Raises MisuseError for a path without the suffix, a budget below 1 or a capture within a capture; OutputError if the
    file cannot be written; AttnbenchError if the block succeeded and nothing was recorded.
    """
    path = Path(path).absolute()
    if path.suffix != SUFFIX:
        raise MisuseError(f"captured tensors go into a {SUFFIX} file, not {path.name!r}")
    if max_bytes < 1 or not 1 <= most <= MOST_CALLS:
        raise MisuseError(f"a capture keeps at least 1 byte and 1 to {MOST_CALLS} calls, not {max_bytes} and {most}")
    if not _active.acquire(blocking=False):
        raise MisuseError("another capture is open; one at a time sees the program")
    owner = os.getpid()
    try:
        draft = Draft(path)  # report missing space or permission before the program runs
        recorder = Recorder(max_bytes, most)
        try:
            try:
                with watch_calls(recorder.record):
                    yield recorder
            finally:
                # A fork of the program may also leave this block.
                if recorder.recorded and os.getpid() == owner:
                    with draft.by_name() as scratch:
                        recorder.write(scratch)
                    draft.keep()
            if not recorder.recorded:
                reason = "; ".join(recorder.left_out) or "no attention call was seen"
                raise AttnbenchError(f"nothing was recorded, so {path.name} was not written: {reason}")
        finally:
            if os.getpid() == owner:
                draft.discard()
    finally:
        _active.release()


def _kind(spec: AttentionSpec) -> str:
    """The key of calls that differ only in batch, or by a factor below two in length."""
    lengths = {"seqlen_q": 2 ** spec.seqlen_q.bit_length(), "seqlen_kv": 2 ** spec.seqlen_kv.bit_length()}
    own = "" if spec.lengths is None else f" {spec.lengths.batch}"
    sizes = f"{spec.heads} {spec.kv_heads} {spec.head_dim} {spec.head_dim_v}"
    return f"{sizes} {spec.mask.kind} {lengths} {spec.direction}{own}"


def _count(reasons: Counter[str], error: Exception) -> None:
    message = printable(str(error).strip().partition("\n")[0], "?")
    reason = message if isinstance(error, UnrecordableError) else f"recording failed: {type(error).__name__}: {message}"
    known = reason in reasons or len(reasons) < _MOST_REASONS
    reasons[reason[:_LONGEST_REASON] if known else "other reasons"] += 1
