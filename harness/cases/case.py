"""A case of a sweep: a named spec, and which plans belong to a sweep of a dtype."""

from __future__ import annotations

from dataclasses import dataclass

from attnbench.errors import InputError
from attnbench.kernels.plan import Plan
from attnbench.problem.spec import AttentionSpec

from ..capture.file import CapturedFamily
from ..sequence_lengths import SequenceLengths, check_lengths
from .inputs import DEFAULT_FAMILIES, FAMILIES

__all__ = ["SWEEP_DTYPES", "Case", "admits", "case_name", "tensor_dtype"]

SWEEP_DTYPES = ("fp8", "bf16", "fp16", "fp32")
LONGEST_NAME = 200


@dataclass(frozen=True)
class Case:
    """One spec with a name that is unique within a sweep, and the input families for its errors.

    Times are taken on the first family.  A captured family must be a CapturedFamily, which knows its file, not the text
    ``captured:FILE``.  Raises InputError on an empty or overlong name, an unknown family, or a spec of FP8 tensors: a
    sweep quantises tensors itself.

    ``lengths`` are those of the sequences of a packed or padded spec, which needs them; with rectangular tensors they
    say what these are an alternative to.
    """

    name: str
    spec: AttentionSpec
    families: tuple[str, ...] = DEFAULT_FAMILIES
    lengths: SequenceLengths | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= LONGEST_NAME or not self.name.isprintable():
            raise InputError(f"a case's name must be 1 to {LONGEST_NAME} printable characters, not {self.name[:50]!r}")
        if not self.families or len(set(self.families)) < len(self.families):
            raise InputError("a case needs at least one input family, and none twice")
        drawn = [family for family in self.families if not isinstance(family, CapturedFamily)]
        if unknown := [family for family in drawn if family not in FAMILIES]:
            raise InputError(f"input families are {', '.join(FAMILIES)} and captured:FILE, not {unknown[0][:50]!r}")
        if self.spec.descale is not None:
            raise InputError(f"a case has tensors of 16 bits or more, not {self.spec.dtype}")
        check_lengths(self.spec, self.lengths)

    @property
    def flops(self) -> float:
        """The operations of exact attention over the pairs that its sequences see, as in ``AttentionSpec.flops``."""
        return self.spec.flops if self.lengths is None else self.lengths.flops(self.spec)


def case_name(spec: AttentionSpec, lengths: SequenceLengths | None) -> str:
    """The name of a case that has no other: its spec and how its lengths were drawn, as many have the same spec."""
    return str(spec) if lengths is None else f"{spec}, {lengths}"


def tensor_dtype(sweep_dtype: str) -> str:
    """The dtype of a sweep's tensors: bf16 for ``fp8``, where FP8 kernels are compared with 16-bit ones.

    Raises InputError if there is no such sweep.
    """
    if sweep_dtype not in SWEEP_DTYPES:
        raise InputError(f"a sweep's dtype is one of {', '.join(SWEEP_DTYPES)}, not {sweep_dtype!r}")
    return "bf16" if sweep_dtype == "fp8" else sweep_dtype


def admits(sweep_dtype: str, plan: Plan) -> bool:
    """Whether the plan belongs to a sweep of that dtype: FP8 plans only to ``fp8``, the others to any."""
    return sweep_dtype == "fp8" or not plan.fp8
