"""The forward of ``triton`` under Triton's interpreter: dense FP64, layouts, leaks, refusals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from dense import dense_attention, relative_l2
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import Problem, problems, tensors_of
from torch import Tensor

from attnbench.backends import triton as backend
from attnbench.backends.reference import BACKEND as REFERENCE
from attnbench.backends.triton.forward.contract import RECIPES
from attnbench.backends.triton.interpreter import interpreted
from attnbench.errors import InputError, UnknownBackendError
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import ForwardKernel, Inputs, Operands, Result
from attnbench.kernels.registry import Registry
from attnbench.problem.fp8 import Quantised, Recipe, quantise
from attnbench.problem.mask import Mask
from attnbench.problem.spec import GRANULARITIES, AttentionSpec
from attnbench.testing import check_backend
from attnbench.testing.conformance import suite
from attnbench.testing.conformance.checks import CHECKS
from examples import every_pair, examples

pytest.importorskip("triton")
if not interpreted():
    pytest.skip("kernels are compiled here, which the tests in tests/gpu run", allow_module_level=True)

from attnbench.backends.triton.forward import launch as triton_forward
from attnbench.backends.triton.forward import plan as triton_plan
from attnbench.backends.triton.forward.tiles import Tile

H200 = Device("cuda", "NVIDIA H200", (9, 0))
CPU = Device("cpu", "CPU")
WIDE, ONE_PASS = "fp8-pv", "fp8-onepass"
NAMES = (*RECIPES, WIDE, ONE_PASS)
TILES = (
    Tile(64, 128, 4, 3),
    Tile(32, 32, 4, 2, promotion=32),
    Tile(64, 32, 4, 2, tma=False),
    Tile(16, 64, 4, 2, tma=False, parts=2, interleaved=True),
    Tile(32, 64, 4, 2, parts=4, interleaved=True),
)
_ROUNDING = 2.0**-4  # of a number to e4m3's three mantissa bits, at most
_SPARE = 0.005  # bf16 outputs, FP32 sums, numbers of P below e4m3's normal ones


def forward(name: str, tile: Tile | None = None) -> backend.TritonForward:
    named = {WIDE: backend.TritonWideScores, ONE_PASS: backend.TritonOnePass}
    return named[name](tile) if name in named else backend.TritonForward(name, tile)


def assert_agrees(operands: Operands, result: Result) -> None:
    """Asserts agreement with exact attention up to the rounding of P, by element relative to attention on |V|."""
    spec = operands.spec
    q, k, v = operands.tensors(torch.float64)
    out, lse = dense_attention(q, k, v, spec)
    sizes, _ = dense_attention(q, k, v.abs(), spec)
    seen = lse > -math.inf
    assert result.out.shape == out.shape
    assert bool(((result.out.double() - out).abs() <= (_ROUNDING + _SPARE) * sizes + 1e-12).all())
    assert relative_l2(result.out, out) <= 0.05 or out.numel() < 1000
    assert (result.lse.dtype, result.lse.shape) == (torch.float32, lse.shape)
    assert torch.equal(result.lse > -math.inf, seen)
    torch.testing.assert_close(result.lse[seen].double(), lse[seen], rtol=1e-5, atol=1e-5)


def tensors(spec: AttentionSpec) -> list[torch.Tensor]:
    return tensors_of(Problem(spec, "bhsd", False, 0))[:3]


def run_and_check(kernel: ForwardKernel, inputs: Sequence[Tensor | Quantised], spec: AttentionSpec) -> Result:
    """Runs the kernel, asserts exact attention on its operands and returns the result."""
    operands = kernel.prepare(Inputs.of(inputs), spec)
    result = kernel.run(operands)
    assert_agrees(operands, result)
    return result


@given(problems(("bf16", "fp16", "fp32")), st.sampled_from(NAMES), st.sampled_from(TILES))
@settings(max_examples=examples(6, 60), deadline=None)
def test_the_kernel_agrees_with_exact_attention_on_its_quantised_operands(
    problem: Problem, name: str, tile: Tile
) -> None:
    kernel, spec = forward(name, tile), problem.spec
    assume(name not in (WIDE, ONE_PASS) or spec.dtype != "fp32")
    inputs = tensors_of(problem)[:3]
    assert kernel.refusals(spec, CPU) == []
    before = [x.clone() for x in inputs]
    assert run_and_check(kernel, inputs, spec).out.dtype == inputs[0].dtype
    assert all(torch.equal(x, old) for x, old in zip(inputs, before, strict=True))


_LENGTHS = [(70, 199), (200, 70), (1, 150), (128, 192)]


@pytest.mark.parametrize(
    ("mask", "case"),
    every_pair(
        [
            Mask(right=0, alignment="bottom-right"),  # with 199 keys, of the last block that 64 queries see, one
            Mask(right=0),
            Mask(left=90, right=11, alignment="bottom-right"),
            Mask(left=40),
            Mask(left=0, right=0),
            Mask(right=80),
            Mask(),
        ],
        # Each place has another name and, after four, another length.
        [(("fp8", "fp8-token", WIDE, ONE_PASS)[i % 4], _LENGTHS[(i + i // 4) % 4]) for i in range(16)],
    ),
)
def test_skipped_masked_and_full_blocks_of_keys_agree_with_fp64(mask: Mask, case: tuple[str, tuple[int, int]]) -> None:
    name, lengths = case
    spec = AttentionSpec.make(batch=1, heads=1, seqlen_q=lengths[0], seqlen_kv=lengths[1], head_dim=64, mask=mask)
    run_and_check(forward(name, Tile(64, 64, 4, 2)), tensors(spec), spec)


@pytest.mark.parametrize(
    ("sizes", "tma"),
    every_pair([(80, 80), (96, 96), (192, 128), (256, 256), (64, 256), (5, 7)], [True, False]),
)
def test_all_head_dimensions_agree_with_fp64(sizes: tuple[int, int], tma: bool) -> None:
    head_dim, head_dim_v = sizes
    spec = AttentionSpec.make(
        batch=1, heads=2, kv_heads=1, seqlen_q=33, seqlen_kv=50, head_dim=head_dim, head_dim_v=head_dim_v,
        mask=Mask(right=0, alignment="bottom-right"), softcap=5.0,
    )  # fmt: skip
    run_and_check(backend.TritonForward("fp8", Tile(32, 32, 4, 2, tma=tma)), tensors(spec), spec)


@pytest.mark.parametrize(
    ("scale", "softcap", "name"), every_pair([0.0, -0.3, 3.0], [0.0, 2.0], ["fp8", "fp8-token", WIDE])
)
def test_all_scales_agree_with_fp64(scale: float, softcap: float, name: str) -> None:
    spec = AttentionSpec.make(
        batch=1, heads=1, seqlen_q=70, seqlen_kv=40, head_dim=64, scale=scale, softcap=softcap,
        mask=Mask(right=0, alignment="bottom-right"),
    )  # fmt: skip
    run_and_check(forward(name), tensors(spec), spec)


@given(
    st.sampled_from(GRANULARITIES), st.sampled_from([1, 2]), st.sampled_from([64, 24]), st.sampled_from(TILES),
    st.sampled_from(["bhsd", "bshd", "sbhd"]), st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=examples(4, 50), deadline=None)
def test_descales_of_any_size_are_used(
    granularity: str, kv_heads: int, head_dim: int, tile: Tile, layout: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    spec = AttentionSpec.make(
        batch=2, heads=4, kv_heads=kv_heads, seqlen_q=17, seqlen_kv=150, head_dim=head_dim, dtype="e4m3",
        descale=granularity, mask=Mask(right=0, alignment="bottom-right"),
    )  # fmt: skip
    inputs = []
    for index, (heads, length) in enumerate(((4, 17), (kv_heads, 150), (kv_heads, 150))):
        x = quantise(torch.randn(2, heads, length, head_dim, generator=generator), Recipe(granularity))
        low, high = (-30.0, 4.0) if index == 2 else (-9.0, -6.0)
        exponent = low + (high - low) * torch.rand(x.descale.shape, generator=generator)
        if granularity == "block":
            exponent = exponent[:, :, ::128].repeat_interleave(128, dim=2)[:, :, :length]
        order = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}[layout]
        back = [order.index(axis) for axis in range(4)]
        data = x.data.view(torch.uint8).permute(order).contiguous().permute(back).view(torch.float8_e4m3fn)
        inputs.append(Quantised(data, 2.0**exponent, granularity))
    assert run_and_check(backend.TritonForward("fp8", tile), inputs, spec).out.dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "safe"), [("fp8-token-hadamard", True), ("fp8-head", False)])
def test_no_output_depends_on_later_tokens(name: str, safe: bool) -> None:
    """Bit for bit; scales of a head are no such recipe, which shows that the test would notice."""
    spec = AttentionSpec.make(batch=1, heads=2, kv_heads=1, seqlen_q=100, head_dim=64, mask=Mask(right=0))
    kernel = backend.TritonForward(name, Tile(32, 64, 4, 2))
    inputs = tensors(spec)
    first = kernel.run(kernel.prepare(Inputs.of(inputs), spec))
    for at in (40, 64):
        changed = [torch.cat([x[:, :, :at], 1000.0 * x[:, :, at:].flip(2)], 2) for x in inputs]
        second = kernel.run(kernel.prepare(Inputs.of(changed), spec))
        same = torch.equal(first.out[:, :, :at], second.out[:, :, :at])
        assert same or not safe
        assert torch.equal(first.lse[:, :, :at], second.lse[:, :, :at]) or not safe
    assert same == safe


@pytest.mark.parametrize(("name", "which"), every_pair(["fp8", "fp8-token", WIDE], [0, 1, 2]))
def test_nonfinite_values_propagate_to_the_output(name: str, which: int) -> None:
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=20, head_dim=64, mask=Mask(right=0))
    kernel, inputs = forward(name), tensors(spec)
    inputs[which][0, 1, 0, 3] = math.nan
    out = kernel.run(kernel.prepare(Inputs.of(inputs), spec)).out
    assert bool(out[0, 0].isfinite().all())
    assert bool(out[0, 1, 0].isnan().all())


@pytest.mark.parametrize("heads_in_turn", [4, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in (1, 2, 6))])
def test_every_program_computes_a_different_block(heads_in_turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the section: one that does not divide those of all batches leaves a shorter last one."""
    monkeypatch.setattr(triton_forward, "_section", lambda *_: heads_in_turn)
    monkeypatch.setattr(triton_forward, "layout_of", triton_forward.layout_of.__wrapped__)  # no section is kept
    monkeypatch.setattr(triton_plan, "plan", triton_plan.plan.__wrapped__)
    spec = AttentionSpec.make(batch=2, heads=3, seqlen_q=40, head_dim=64, mask=Mask(right=0))
    run_and_check(backend.TritonForward("fp8", Tile(16, 32, 4, 2)), tensors(spec), spec)


def test_a_gpu_is_refused_under_the_interpreter_and_a_cpu_without(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, spec = backend.TritonForward("fp8"), AttentionSpec.make(batch=1, heads=2, seqlen_q=256, head_dim=64)
    assert kernel.refusals(spec, CPU) == []
    assert "TRITON_INTERPRET" in kernel.refusals(spec, H200)[0]
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET=1" in kernel.refusals(spec, CPU)[0]
    assert kernel.refusals(spec, H200) == []


def test_tensors_that_are_not_plain_are_an_error() -> None:
    kernel = backend.TritonForward("fp8")
    spec = AttentionSpec.make(batch=1, heads=1, seqlen_q=8, head_dim=16, dtype="e4m3", descale="head")
    x = torch.randn(1, 1, 8, 16)
    plain, e5m2 = quantise(x, Recipe()), quantise(x, Recipe(format="e5m2"))
    smooth = quantise(x, Recipe(smoothing=True), smooth=True)
    rotated = quantise(x, Recipe(rotation="hadamard"), rotate=True)
    for wrong, sentence in (
        ((e5m2, plain, plain), "q is torch.float8_e5m2"),
        ((plain, smooth, plain), "no smoothing"),
        ((plain, rotated, plain), "rotated together"),
        ((plain, plain, rotated), "V as it is"),
    ):
        with pytest.raises(InputError, match=sentence):
            kernel.prepare(Inputs.of(wrong), spec)
    run_and_check(kernel, (rotated, rotated, plain), spec)


def test_kernel_names_select_their_recipes() -> None:
    known = Registry([backend.BACKEND])
    assert known.forward("triton:fp8").recipe == Recipe("head", rotation="hadamard")
    assert known.forward("triton:fp8-block-hadamard").recipe == Recipe("block", rotation="hadamard")
    assert "triton:fp8-block-hadamard" not in known.forwards
    with pytest.raises(UnknownBackendError, match="there are fp8, fp8-head"):
        known.forward("triton:fp8-hadamard-token")


def test_availability_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.BACKEND.availability().ok
    for version, sentence in ((None, "not installed"), ("3.3.1", "no descriptors made on the host")):
        monkeypatch.setattr(backend, "installed", lambda *_, version=version: version)
        found = backend.BACKEND.availability()
        assert sentence in (found.reason or "")
        assert "triton>=3.4" in (found.install or "")
    for version in ("3.4.0", "3.10.0+git1", "unknown"):
        monkeypatch.setattr(backend, "installed", lambda *_, version=version: version)
        assert backend.BACKEND.availability().ok


@pytest.mark.parametrize(
    ("head_dim", "outliers"),
    [
        (64, False),
        (128, True),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in ((64, True), (128, False), (256, False), (256, True))
        ),
    ],
)
def test_with_16_bit_scores_only_p_and_v_contribute_error(head_dim: int, outliers: bool) -> None:
    spec = AttentionSpec.make(batch=1, heads=1, seqlen_q=32, seqlen_kv=512, head_dim=head_dim)
    q, k, v = tensors(spec)
    if outliers:  # one number in a thousand, ten times as large
        q, k, v = (torch.where(torch.rand(x.shape) < 0.001, 10 * x, x) for x in (q, k, v))
    operands = forward(WIDE).prepare(Inputs(q, k, v), spec)
    out = forward(WIDE).run(operands).out
    quantised_v = operands.tensors()[2]
    rounding_of_p = 0.026  # half a step of e4m3, root mean square, and the little that the sums add
    assert relative_l2(out, dense_attention(q.double(), k.double(), quantised_v.double(), spec)[0]) <= rounding_of_p
    assert relative_l2(out, dense_attention(q.double(), k.double(), v.double(), spec)[0]) <= 0.04


def test_training_quantises_only_v_and_keeps_the_callers_q_and_k() -> None:
    spec = AttentionSpec.make(batch=1, heads=2, kv_heads=1, seqlen_q=20, head_dim=64, direction="training")
    q, k, v = tensors(spec)
    operands = forward(WIDE).prepare(Inputs(q.requires_grad_(), k, v), spec)
    assert [x.data_ptr() for x in (operands.q, operands.k)] == [q.data_ptr(), k.data_ptr()]
    assert not operands.q.requires_grad
    assert relative_l2(operands.tensors()[2], v) < 0.04
    follows = [each.name for each in Registry([REFERENCE, backend.BACKEND]).backwards.values()
               if each.cannot_follow(forward(WIDE), CPU) is None]  # fmt: skip
    assert "reference:fp32" in follows
    assert not [name for name in follows if name.startswith("triton")]


@pytest.mark.parametrize(
    ("name", "most"),
    [("fp8", 1), *(pytest.param(name, 99, marks=pytest.mark.exhaustive) for name in ("fp8", "fp8-token", WIDE))],
)
def test_the_backend_passes_the_conformance_suite(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On at most so many specs a check; on one, without what is compared with FP64 above and in test_triton_packed."""
    chosen = [each for each in CHECKS if most > 1 or not (each.specs or each.features or "batch" in each.name)]
    few = tuple(replace(each, count=min(each.count, most)) for each in chosen)
    monkeypatch.setattr(suite, "CHECKS", few)
    alone = replace(backend.BACKEND, kernels=(forward(name),))
    assert check_backend(f"triton:{name}", "cpu", known=Registry([REFERENCE, alone]), quiet=True).ok
