"""Cases for the FP8 backward's Hopper kernels, and checks of a kernel on one of them.

The result is compared with the same kernel in plain Triton and with dense FP64 on the operands.  On a machine
without a GPU the Hopper kernels are emulated and the plain ones interpreted, with the small cases only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import dense
import pytest
import torch
from agreement_sweep import visible
from dense import distance
from gluon_on_cpu import emulated
from supervised_work import ItemDone, ItemLost, ItemStarted
from torch import Tensor

from attnbench import AttentionSpec, Mask
from attnbench.backends.triton.backward.contract import KERNELS as BACKWARDS
from attnbench.backends.triton.backward.tiles import Ring, Tile, Tiles
from attnbench.kernels.contract import Operands, gradient_dtype
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.fp8 import Recipe, quantise

if TYPE_CHECKING:
    from attnbench.backends.triton.backward.operands import Prepared

Kind = Literal["keys", "queries", "all"]  # dK with dV; dQ; all three at once, which the plain kernels do in turns
# By kernel, padded head dimension and whether the sums are e4m3 (`narrow`): what is tried, the one first that every
# case runs with.
RINGS: dict[tuple[Kind, int, bool], tuple[Ring, ...]] = {
    ("keys", 128, False): (Ring(64, 3), Ring(64, 2), Ring(64, 4)),
    ("queries", 128, False): (Ring(64, 4), Ring(64, 3), Ring(64, 6)),
    ("keys", 64, False): (Ring(64, 4), Ring(64, 2), Ring(64, 3), Ring(64, 6)),
    ("queries", 64, False): (Ring(64, 4), Ring(64, 3), Ring(64, 6)),
    ("keys", 128, True): (Ring(64, 4), Ring(64, 5)),
    ("queries", 128, True): (Ring(64, 4), Ring(64, 6)),
    ("keys", 64, True): (Ring(64, 4), Ring(64, 6)),
    ("queries", 64, True): (Ring(64, 4), Ring(64, 6)),
    ("all", 128, False): (Ring(64, 2),),  # what there is
    ("all", 64, False): (Ring(64, 2),),
    ("all", 192, False): (Ring(64, 2),),
}
SAME = 0.02  # relative L2 between two ways to sum the same e4m3 products
# Blocks as long as those of the rings: in e4m3 a row of dS is rounded in units of its largest number in a block.
PLAIN = Tile(64, 64, 4, 2)
ALLOWED = {kernel.narrow: kernel.declared_error for kernel in BACKWARDS}
RUNS = 4  # with the same bits
# Root mean square of what rounding to bf16 changes, relative, at most: its last place is 2⁻⁷, its errors spread evenly.
ROUNDED = 2**-7 / math.sqrt(12)
NAMES: dict[Kind, tuple[str, ...]] = {"keys": ("dk", "dv"), "queries": ("dq",), "all": ("dq", "dk", "dv")}
# The modules that hold Gluon's functions.
KERNELS = [
    f"attnbench.backends.triton.{name}"
    for name in (
        *(f"backward.hopper.{kernel}" for kernel in (
            "fused", "fused_sums", "fused_pieces", "fused_tiles", "keys", "queries", "shared", "narrow", "narrow_keys",
            "narrow_queries", "loading", "sequences", "values",
        )),
        "forward.hopper.softmax",
    )
]  # fmt: skip
_END = "bottom-right"
_CAUSAL, _CAUSAL_END = Mask(right=0), Mask(right=0, alignment=_END)


class Case(NamedTuple):
    """A problem; with ``all_rings`` every ring runs it, otherwise only the first."""

    spec: AttentionSpec
    rotation: Literal["none", "hadamard"] = "hadamard"
    all_rings: bool = False


class Job(NamedTuple):
    """One kernel with one ring on one case."""

    kind: Kind
    case: str
    ring: Ring
    narrow: bool = False


def _spec(seqlen_q: int, seqlen_kv: int, mask: Mask = Mask(), **more: Any) -> AttentionSpec:  # noqa: B008
    fields = {"batch": 1, "heads": 2, "head_dim": 128, "direction": "training", **more}
    return AttentionSpec.make(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, mask=mask, **fields)


CASES = {
    "none": Case(_spec(512, 512), all_rings=True),
    "causal": Case(_spec(1024, 1024, _CAUSAL, batch=2), all_rings=True),
    "no rotation": Case(_spec(512, 512), "none", all_rings=True),
    "one block": Case(_spec(64, 128, heads=1), "none"),
    "few tokens": Case(_spec(1, 5, heads=3), "none"),
    "odd": Case(_spec(333, 457), "none"),
    "odd causal, groups of 2": Case(_spec(777, 777, _CAUSAL, batch=2, heads=4, kv_heads=2)),
    "groups of 4": Case(_spec(600, 600, heads=8, kv_heads=2)),
    "causal to the end, groups of 8": Case(_spec(300, 900, _CAUSAL_END, heads=8, kv_heads=1)),
    "causal to the end, fewer keys": Case(_spec(900, 300, _CAUSAL_END)),
    "causal from the start, fewer keys": Case(_spec(900, 300, _CAUSAL)),
    "causal from the start, more keys": Case(_spec(300, 900, _CAUSAL)),
    "window before": Case(_spec(1000, 1000, Mask(left=200, right=0), heads=4, kv_heads=2)),
    "window both ways, to the end": Case(_spec(800, 650, Mask(70, 33, _END)), "none"),
    "left edge alone": Case(_spec(700, 800, Mask(left=100)), "none"),
    "fp16": Case(_spec(400, 400, _CAUSAL, dtype="fp16")),
    "fp32": Case(_spec(400, 400, _CAUSAL, dtype="fp32")),
    "long causal": Case(_spec(8192, 8192, _CAUSAL)),
    "D 64": Case(_spec(512, 512, head_dim=64), all_rings=True),
    "D 64, causal, groups of 2": Case(
        _spec(777, 777, _CAUSAL, head_dim=64, batch=2, heads=4, kv_heads=2), all_rings=True
    ),
    "D 64, window to the end": Case(_spec(700, 500, Mask(90, 20, _END), head_dim=64), "none"),
    "D 64, long": Case(_spec(8192, 8192, head_dim=64)),
    "D 96, causal to the end, fp16": Case(_spec(300, 400, _CAUSAL_END, head_dim=96, dtype="fp16"), "none"),
    "D 96, rotated": Case(_spec(300, 400, head_dim=96)),
    "D 128, Dv 64": Case(_spec(300, 400, _CAUSAL, head_dim_v=64, kv_heads=1)),
    "D 64, Dv 128": Case(_spec(400, 300, head_dim=64, head_dim_v=128, kv_heads=1)),
    "D 192, Dv 128": Case(_spec(512, 512, head_dim=192, head_dim_v=128), "none"),
    "D 192, Dv 128, causal, groups of 2": Case(
        _spec(777, 777, _CAUSAL, batch=2, heads=4, kv_heads=2, head_dim=192, head_dim_v=128), "none"
    ),
    "D 192, Dv 64, window to the end": Case(_spec(700, 500, Mask(90, 20, _END), head_dim=192, head_dim_v=64), "none"),
    "D 170, Dv 100, fp16": Case(_spec(300, 400, head_dim=170, head_dim_v=100, dtype="fp16"), "none"),
    "D 192, Dv 192": Case(_spec(512, 512, head_dim=192), "none"),
    "D 192, Dv 192, causal, groups of 2": Case(_spec(777, 777, _CAUSAL, heads=4, kv_heads=2, head_dim=192), "none"),
    "D 192, few tokens": Case(_spec(1, 5, heads=3, head_dim=192, head_dim_v=128), "none"),
    "D 192, long causal": Case(_spec(8192, 8192, _CAUSAL, head_dim=192, head_dim_v=128), "none"),
}


def jobs_of(kind: Kind, narrow: bool) -> list[Job]:
    """All jobs of a kernel, with e4m3 in the sums (``narrow``) or bf16."""
    jobs = []
    for name, case in CASES.items():
        size = next(each for each in (64, 128, 192) if each >= max(case.spec.head_dim, case.spec.head_dim_v))
        rings = RINGS.get((kind, size, narrow), ())
        jobs += [Job(kind, name, ring, narrow) for ring in (rings if case.all_rings else rings[:1])]
    return jobs


class Problem(NamedTuple):
    """A case on a device: the operands, the inputs of plain and Hopper kernels, and the gradient of the output."""

    spec: AttentionSpec
    operands: Operands
    plain: Prepared
    hopper: Prepared
    grad_out: Tensor


def _problem(case: Case, device: str, narrow: bool, fused: bool) -> Problem:
    """For Hopper's ``fused`` kernel or its others.

    With the output and log-sum-exp that an exact forward leaves, except on ``meta``, which has no numbers.
    """
    from attnbench.backends.triton.backward import launch as backward_launch

    spec, dtype = case.spec, TO_TORCH[case.spec.dtype]
    generator = None if device == "meta" else torch.Generator(device).manual_seed(0)

    def normal(heads: int, length: int, size: int) -> Tensor:
        return torch.randn(spec.batch, heads, length, size, generator=generator, device=device).to(dtype)

    q, grad_out = normal(spec.heads, spec.seqlen_q, spec.head_dim), normal(spec.heads, spec.seqlen_q, spec.head_dim_v)
    k, v = (normal(spec.kv_heads, spec.seqlen_kv, size) for size in (spec.head_dim, spec.head_dim_v))
    recipe = Recipe("head", rotation=case.rotation)
    quantised = quantise(q, recipe, rotate=True), quantise(k, recipe, rotate=True), quantise(v, recipe)
    operands = Operands(spec, *quantised)
    if device == "meta":
        out, lse = torch.empty_like(grad_out), torch.empty(grad_out.shape[:3], device=device)
    else:
        out, lse = dense.dense_attention(*operands.tensors(torch.float64), spec)
    saved = out.to(gradient_dtype(spec)), lse.float()
    ways = (PLAIN, False), (PLAIN._replace(hopper=Ring(64, 4)), fused)
    given = (
        backward_launch.prepared(spec, *quantised, *saved, grad_out, narrow, Tiles(tile, tile), fused=at_once)
        for tile, at_once in ways
    )
    return Problem(spec, operands, *given, grad_out)


def additions(spec: AttentionSpec) -> int:
    """The largest number of programs of the fused kernel that add to one dQ."""
    from attnbench.backends.triton.backward.hopper.launch import KEPT

    return -(-spec.seqlen_kv // KEPT)


def sums_off(spec: AttentionSpec) -> float:
    """The relative L2 error of the fused kernel's dQ that its bf16 sums may cause.

    What is added was rounded, and every sum but the first, which is one addend, is: as if the whole were rounded as
    often as there are additions, where no sum on the way is larger than it, and errors add up as random steps do.
    """
    return ROUNDED * math.sqrt(additions(spec))


def run(given: Prepared, kind: Kind, tile: Tile, dtype: torch.dtype, narrow: bool = False) -> tuple[Tensor, ...]:
    """(dk, dv), (dq,) or (dq, dk, dv) by one kernel, in plain Triton by two; ``given`` was prepared for it.

    Raises RuntimeError where a Hopper kernel is wanted that does not serve.
    """
    from attnbench.backends.triton.backward import launch as backward_launch

    if tile.hopper is not None and not given.served:
        raise RuntimeError("the Hopper kernels do not serve this")
    if kind == "all":
        if tile.hopper is not None:
            sums = torch.zeros(given.layout.sums, dtype=torch.bfloat16, device=given.q.data.device)
            return backward_launch.run_all(given, sums, dtype)
        return *run(given, "queries", tile, dtype, narrow), *run(given, "keys", tile, dtype, narrow)
    if kind == "keys":
        return backward_launch.run_keys(given, tile, narrow, dtype)
    return (backward_launch.run_queries(given, tile, narrow, dtype),)


def launch(job: Job) -> None:
    """Both kernels of a job on tensors without memory, for ``compiled_for_hopper``."""
    problem = _problem(CASES[job.case], "meta", job.narrow, job.kind == "all")
    for given, ring in ((problem.plain, None), (problem.hopper, job.ring)):
        run(given, job.kind, PLAIN._replace(hopper=ring), gradient_dtype(problem.spec), job.narrow)


def check_all(jobs: list[Job], say: Callable[[Any], None]) -> None:
    """Sends the problem of each job, or None."""
    on_gpu = torch.cuda.is_available()
    dense.visible = visible  # the same a row at a time
    torch.zeros(1, device="cuda" if on_gpu else "cpu")  # the GPU's context takes long, and is no case's
    with nullcontext() if on_gpu else on_cpu(lambda: True):
        for job in jobs:
            say(ItemStarted(job))
            say(ItemDone(job, problem_of(job)))


def problem_of(job: Job) -> str | None:
    """The problem of a job in one line, or None."""
    problem, plain, truth, sizes = _known(job.case, job.kind, job.narrow)
    tile, dtype = PLAIN._replace(hopper=job.ring), gradient_dtype(problem.spec)
    first, *more = (run(problem.hopper, job.kind, tile, dtype, job.narrow) for _ in range(RUNS))
    problems = []
    for i, name in enumerate(NAMES[job.kind]):
        summed = (job.kind, name) == ("all", "dq")
        same = SAME + sums_off(problem.spec) if summed else SAME
        off = distance(first[i], plain[i].double(), sizes[i]), distance(first[i], truth[i], sizes[i])
        for each, allowed, other in zip(off, (same, ALLOWED[job.narrow]), ("plain Triton", "FP64"), strict=True):
            if not each <= allowed:
                problems.append(f"{name} is off by {each:.3g} from {other}, {allowed:.3g} allowed")
        again = max(distance(other[i], first[i].double(), sizes[i]) for other in more)
        # Between two runs there are two orders, and the rounding of the result; two addends have one order.
        anyhow = math.sqrt(2) * sums_off(problem.spec) if summed and additions(problem.spec) > 2 else 0.0
        if again > anyhow:
            problems.append(f"{name} is off by {again:.3g} when it runs again")
    return "; ".join(problems) or None


@lru_cache(maxsize=1)
def _known(
    name: str, kind: Kind, narrow: bool
) -> tuple[Problem, tuple[Tensor, ...], tuple[Tensor, ...], tuple[float, ...]]:
    """The last case is cached for other rings."""
    problem = _problem(CASES[name], "cuda" if torch.cuda.is_available() else "cpu", narrow, kind == "all")
    exact = (*problem.operands.tensors(torch.float64), problem.grad_out, problem.spec)
    part = {"keys": slice(1, 3), "queries": slice(0, 1), "all": slice(0, 3)}[kind]
    plain = run(problem.plain, kind, PLAIN, gradient_dtype(problem.spec), narrow)
    return problem, plain, dense.dense_gradients(*exact)[part], dense.gradient_sizes(*exact)[part]


@contextmanager
def on_cpu(late: Callable[[], bool], ran: Callable[[str, Prepared], None] | None = None) -> Iterator[None]:
    """Runs Gluon's kernels in the emulator and the others in Triton's interpreter.

    ``late`` says of each program when what is asynchronous happens; ``ran`` is told of what runs, and on what.
    """
    from attnbench.backends.triton.backward.hopper import launch as backward_hopper_launch
    from attnbench.backends.triton.forward.hopper import launch as forward_hopper_launch

    def emulating(start: Callable[..., None]) -> Callable[..., None]:
        def started(given: Prepared, *args: Any) -> None:
            if ran is not None:
                ran(start.__name__, given)
            with emulated(late, *KERNELS):
                start(given, *args)

        return started

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_hopper_launch, "runs_on", lambda device: True)
        for name in ("run_all", "run_values", "run_keys", "run_queries"):
            patch.setattr(backward_hopper_launch, name, emulating(getattr(backward_hopper_launch, name)))
        yield


def wrong(jobs: list[Job], found: dict[Job, Any]) -> list[str]:
    """A line for each job with a problem."""
    problems = {job: found.get(job, "not reached in time") for job in jobs}
    return [f"{name_of(job)}: {x.reason if isinstance(x, ItemLost) else x}" for job, x in problems.items() if x]


def name_of(job: Job) -> str:
    """The printed name of a job."""
    return f"{job.kind}, {'e4m3 sums, ' if job.narrow else ''}{job.case}, {job.ring}"
