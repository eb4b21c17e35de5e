"""``triton``: our own FP8 attention in Triton: quantisation, forward and backward.

A forward's name is its recipe: ``fp8`` scales per (batch, head) with Q and K rotated, ``fp8-head`` without the
rotation, and ``fp8-`` followed by ``tensor``, ``block`` or ``token`` and, if rotated, ``hadamard``.  The rotation
spreads outliers; with scales of a token each output is independent of later tokens, bit for bit, under a causal mask.
``fp8-pv`` leaves Q and K in 16 bits: only P·V is FP8.  ``fp8-onepass`` finds scales in one pass: of blocks of keys, and
of each query in the attention kernel.

Importing this imports no Triton.
"""

from __future__ import annotations

from attnbench.errors import UnknownBackendError
from attnbench.kernels.contract import Availability, Backend, BackwardKernel, ForwardKernel

from ..common.installed import installed, release
from .backward import contract as backward
from .forward.contract import RECIPES, TritonForward, TritonOnePass, TritonWideScores

__all__ = ["BACKEND", "TritonForward", "TritonOnePass", "TritonWideScores"]

_INSTALL = "pip install 'triton>=3.4'"
_LEAST = (3, 4)  # the first with descriptors made on the host
_LISTED = ("fp8", "fp8-head", "fp8-token", "fp8-token-hadamard")


def _availability() -> Availability:
    version = installed("triton", "triton", "pytorch-triton")
    if version is None:
        return Availability(reason="triton is not installed", install=_INSTALL)
    found = release(version)
    if found is not None and found < _LEAST:
        reason = f"triton {version} has no descriptors made on the host; 3.4 has them"
        return Availability(reason=reason, origin="triton", install=_INSTALL)
    return Availability(version=version, origin="triton")


def _resolve(precision: str) -> tuple[ForwardKernel | BackwardKernel, ...]:
    """The forward of a recipe that is not listed.  Raises UnknownBackendError."""
    if precision not in RECIPES:
        raise UnknownBackendError(f"no kernel is named 'triton:{precision}'; there are {', '.join(RECIPES)}")
    return (TritonForward(precision),)


BACKEND = Backend(
    name="triton",
    summary="FP8 attention of our own in Triton",
    availability=_availability,
    kernels=(
        *(TritonForward(precision) for precision in _LISTED),
        TritonWideScores(),
        TritonOnePass(),
        *backward.KERNELS,
    ),
    resolve=_resolve,
    yardstick=("cpu",),
    compiles=True,
    built_on=("triton",),
)
