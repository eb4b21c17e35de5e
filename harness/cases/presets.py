"""The named sweeps: real sizes on a GPU, sizes that a laptop can finish on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from attnbench.errors import InputError
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec, Direction

from .case import Case, case_name, tensor_dtype
from .inputs import DEFAULT_FAMILIES
from .models import model_layers
from .spread import spread_shapes
from .unequal_presets import Shape, packed_on_cpu, packed_on_gpu, padded_on_cpu, padded_on_gpu

__all__ = ["PRESETS", "Preset", "preset_cases"]

_NO_MASK = Mask()
_CAUSAL = Mask(right=0)
_APPENDED = Mask(right=0, alignment="bottom-right")  # new queries at the end of a longer cache
_TOKENS = 16384  # batch · queries of a GPU case, as in FlashAttention's benchmarks
_HIDDEN = 2048  # heads · head_dim of a GPU case
_HEAD_DIMS = (64, 80, 96, 128, 192, 256)


def preset_cases(name: str, dtype: str, device_type: str) -> list[Case]:
    """The cases of a preset for a sweep of ``dtype`` (fp8, bf16, fp16, fp32) on ``cpu`` or ``cuda``.

    Raises InputError if there is no such preset.
    """
    if name not in PRESETS:
        raise InputError(f"presets are {', '.join(PRESETS)}, not {name!r}")
    tensors = tensor_dtype(dtype)
    preset = PRESETS[name]
    cases = []
    for shape in (preset.on_gpu if device_type == "cuda" else preset.on_cpu)():
        spec, lengths = shape if isinstance(shape, tuple) else (shape, None)
        spec = spec.replace(dtype=tensors)
        cases.append(Case(case_name(spec, lengths), spec, preset.families, lengths))
    return cases


def _full(
    head_dim: int,
    seqlen: int,
    mask: Mask = _NO_MASK,
    group: int = 1,
    direction: Direction = "forward",
    hidden: int = _HIDDEN,
) -> AttentionSpec:
    """A GPU case of about _TOKENS tokens and ``hidden`` width, its heads a multiple of ``group``."""
    heads = max(1, hidden // head_dim // group) * group
    return _square(max(1, _TOKENS // seqlen), heads, head_dim, seqlen, mask, group, direction)


def _small(
    head_dim: int, seqlen: int, mask: Mask = _NO_MASK, group: int = 1, direction: Direction = "forward"
) -> AttentionSpec:
    return _square(1, max(4, group), head_dim, seqlen, mask, group, direction)


def _square(
    batch: int, heads: int, head_dim: int, seqlen: int, mask: Mask, group: int, direction: Direction
) -> AttentionSpec:
    return AttentionSpec.make(
        batch=batch,
        heads=heads,
        kv_heads=heads // group,
        seqlen_q=seqlen,
        head_dim=head_dim,
        mask=mask,
        direction=direction,
    )


def _appended(head_dim: int, queries: int, keys: int, heads: int, kv_heads: int, batch: int = 1) -> AttentionSpec:
    return AttentionSpec.make(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seqlen_q=queries,
        seqlen_kv=keys,
        head_dim=head_dim,
        mask=_APPENDED,
    )


def _quick_gpu() -> Iterator[AttentionSpec]:
    yield _full(64, 4096)
    yield _full(64, 16384, _CAUSAL)
    yield _full(128, 1024, _CAUSAL)
    yield _full(128, 4096)
    yield _full(128, 4096, _CAUSAL, group=4)
    yield _full(128, 16384, _CAUSAL)
    yield _full(256, 4096)
    yield _full(256, 16384, _CAUSAL)
    yield _full(64, 4096, _CAUSAL, direction="training")
    yield _full(128, 4096, _CAUSAL, direction="training")
    yield _full(128, 8192, _CAUSAL, group=8, direction="training")
    yield _full(128, 16384, direction="training")


def _quick_cpu() -> Iterator[AttentionSpec]:
    yield _small(128, 512)
    yield _small(64, 1024, _CAUSAL)
    yield _small(128, 512, _CAUSAL, group=4)
    yield _small(64, 512, _CAUSAL, direction="training")


def _broad(direction: Direction) -> Iterator[AttentionSpec]:
    """Head sizes, groupings and length classes in one direction: 60 specs."""
    for head_dim in _HEAD_DIMS:
        for seqlen in (512, 2048, 8192):
            for mask in (_NO_MASK, _CAUSAL):
                yield _full(head_dim, seqlen, mask, direction=direction)
    for head_dim in (64, 128, 256):
        for group in (4, 8):
            for seqlen in (1024, 4096):
                yield _full(head_dim, seqlen, _CAUSAL, group, direction)
    for head_dim in (64, 128):
        for seqlen in (1023, 4097):
            yield _full(head_dim, seqlen, _CAUSAL, direction=direction)
        for mask in (_NO_MASK, _CAUSAL):
            yield _full(head_dim, 16384, mask, direction=direction)
    for head_dim in (64, 128):
        for mask in (_NO_MASK, _CAUSAL):
            yield _full(head_dim, 32768, mask, direction=direction, hidden=_HIDDEN // 2)


def _inference_gpu() -> Iterator[AttentionSpec]:
    yield from _broad("forward")
    for queries, keys in ((128, 8192), (1024, 16384)):
        for head_dim in (64, 128):
            yield _appended(head_dim, queries, keys, heads=32, kv_heads=8, batch=4)


def _broad_cpu(direction: Direction) -> Iterator[AttentionSpec]:
    for head_dim in (64, 80, 128):
        for seqlen in (256, 511, 1024):
            for mask in (_NO_MASK, _CAUSAL):
                yield _small(head_dim, seqlen, mask, direction=direction)
    for group in (4, 8):
        yield _small(128, 512, _CAUSAL, group, direction)


def _long_gpu() -> Iterator[AttentionSpec]:
    for keys in (32768, 65536, 131072):
        for head_dim in (64, 128, 256):
            yield _appended(head_dim, 128, keys, heads=32, kv_heads=4)
            yield _appended(head_dim, 2048, keys, heads=8, kv_heads=2)
    for head_dim in (64, 128):
        yield _full(head_dim, 32768, _CAUSAL, hidden=512)
        yield _full(head_dim, 65536, _CAUSAL, hidden=256)


def _long_cpu() -> Iterator[AttentionSpec]:
    for keys in (8192, 32768):
        for head_dim in (64, 128):
            yield _appended(head_dim, 64, keys, heads=2, kv_heads=1)


class Preset(NamedTuple):
    """A named sweep: its specs, some with lengths, on either type of device, and the input families for its errors."""

    on_gpu: Callable[[], Iterable[AttentionSpec | Shape]]
    on_cpu: Callable[[], Iterable[AttentionSpec | Shape]]
    families: tuple[str, ...] = DEFAULT_FAMILIES


PRESETS = {
    "quick": Preset(_quick_gpu, _quick_cpu),
    "inference": Preset(_inference_gpu, lambda: _broad_cpu("forward")),
    "training": Preset(lambda: _broad("training"), lambda: _broad_cpu("training")),
    # Only V with a mean exposes a short accumulator, whose error is small until there are many keys.
    "long": Preset(_long_gpu, _long_cpu, (*DEFAULT_FAMILIES, "biased-v")),
    "packed": Preset(packed_on_gpu, packed_on_cpu),
    "padded": Preset(padded_on_gpu, padded_on_cpu),
    "models": Preset(lambda: model_layers("cuda"), lambda: model_layers("cpu")),
    "table": Preset(lambda: spread_shapes(112, "cuda"), lambda: spread_shapes(16, "cpu")),
}
