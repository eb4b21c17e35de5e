"""The FP8 backward under Triton's interpreter: compared with dense FP64 on its operands, and refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import dense
import pytest
import torch
from backward_problems import LONG, check, make, rounded_to_e4m3, saved
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from problems import Problem, problems

from attnbench import Mask
from attnbench.backends.emulated import BACKEND as EMULATED
from attnbench.backends.sdpa.flash import BACKEND as SDPA
from attnbench.backends.triton import BACKEND, TritonForward
from attnbench.backends.triton.backward.contract import KERNELS, TritonBackward
from attnbench.backends.triton.backward.tiles import Tile, Tiles, tiles_of
from attnbench.backends.triton.forward.contract import RECIPES
from attnbench.errors import InputError
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import ForwardKernel, Inputs, Saved
from attnbench.kernels.registry import Registry, registry
from attnbench.problem.fp8 import Quantised, Recipe, quantise
from examples import every_pair, examples

pytest.importorskip("triton")

WIDE, NARROW = KERNELS
CPU = Device("cpu", "CPU")
GRANULARITIES = ["tensor", "head", "block", "token"]
# Beside the operands' and dO's rounding, which the truth of these tests has too: bf16 or e4m3 for P and dS.
ALLOWED = {"triton:fp8": 0.01, "triton:fp8-all": 0.06}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@settings(max_examples=examples(5, 40), phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target])
@given(
    problem=problems(dtypes=("bf16", "fp16", "fp32")),
    granularities=st.tuples(*[st.sampled_from(GRANULARITIES)] * 3),
    rotated=st.booleans(),
)
def test_any_small_problem_agrees_with_fp64_on_its_operands(
    kernel: TritonBackward, problem: Problem, granularities: tuple[str, ...], rotated: bool
) -> None:
    q, k, v, grad_out = (x.transpose(1, 2) if problem.layout == "bshd" else x for x in problem.tensors())
    rotation = "hadamard" if rotated else "none"
    recipes = tuple(Recipe(each, rotation=rotation) for each in granularities)
    grad_out.copy_(rounded_to_e4m3(grad_out))
    kept = grad_out.clone()
    check(kernel, saved(problem.spec, q, k, v, recipes), grad_out, ALLOWED[kernel.name])
    assert torch.equal(grad_out, kept)


@pytest.mark.parametrize(("problem", "kernel"), every_pair(LONG, KERNELS))
def test_blocks_are_skipped_and_masked_as_the_mask_requires(
    problem: tuple[int, int, Mask], kernel: TritonBackward
) -> None:
    seqlen_q, seqlen_kv, mask = problem
    spec, (q, k, v, grad_out) = make(seqlen_q, seqlen_kv, mask=mask)
    tiles = Tiles(Tile(32, 64, 4, 2), Tile(64, 32, 4, 2))
    tiled = TritonBackward(kernel.name, narrow=kernel.narrow, declared_error=0.1, tiles=tiles)
    check(tiled, saved(spec, q, k, v, (Recipe("head"),) * 3), grad_out, ALLOWED[kernel.name])


@pytest.mark.parametrize(
    ("kernel", "sizes", "recipe"),
    [
        (WIDE, (256, 256), Recipe("token")),
        (WIDE, (192, 128), Recipe("head", rotation="hadamard")),
        (NARROW, (160, 64), Recipe("head", rotation="hadamard")),
    ],
    ids=["256", "192 and 128", "160 and 64, e4m3 sums"],
)
def test_wide_heads_use_a_separate_kernel_for_each_gradient(
    kernel: TritonBackward, sizes: tuple[int, int], recipe: Recipe
) -> None:
    head_dim, head_dim_v = sizes
    spec, (q, k, v, grad_out) = make(40, 70, mask=Mask(right=0), head_dim=head_dim, head_dim_v=head_dim_v)
    assert tiles_of(spec, 256, (9, 0), kernel.narrow).values is not None
    check(kernel, saved(spec, q, k, v, (recipe,) * 3), grad_out, ALLOWED[kernel.name])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_padding_keys_have_no_effect_when_all_scores_are_very_negative(kernel: TritonBackward) -> None:
    """Theirs are 0, and so far above the log-sum-exp that fp32 has no such P."""
    spec, (q, k, v, grad_out) = make(40, 70, head_dim=64)
    given_ = saved(spec, q / 8 + 4, k / 8 - 4, v, (Recipe("head"),) * 3)
    assert given_.lse.max() < -100
    check(kernel, given_, grad_out, ALLOWED[kernel.name])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_each_block_of_queries_has_its_own_descale(kernel: TritonBackward) -> None:
    """Powers of two, so that the gradient of the output stays exact."""
    spec, (q, k, v, grad_out) = make(270, 40)
    grad_out = (grad_out * 2.0 ** (torch.arange(270) // 128 * 3)[:, None]).to(q.dtype)
    check(kernel, saved(spec, q, k, v, (Recipe("head"),) * 3), grad_out, ALLOWED[kernel.name])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_expanded_and_zero_gradients_are_read_correctly(kernel: TritonBackward) -> None:
    spec, (q, k, v, _) = make(70, 90)
    given_ = saved(spec, q, k, v, (Recipe("head"),) * 3)
    ones = torch.ones(1, dtype=torch.bfloat16).expand(1, 2, 70, 32)
    pairs = zip(kernel.run(given_, ones), kernel.run(given_, ones.clone()), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)
    check(kernel, given_, ones, ALLOWED[kernel.name])
    assert not any(x.any() for x in kernel.run(given_, torch.zeros_like(ones)))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_backward_follows_another_forward(kernel: TritonBackward) -> None:
    """From the emulated one, whose operands are laid out by its callers: here (B, S, H, D) in memory."""
    spec, tensors = make(70, 90, heads=4, kv_heads=2)
    q, k, v, grad_out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)
    forward = next(each for each in EMULATED.kernels if each.name == "emulated:fp8")
    assert isinstance(forward, ForwardKernel)
    assert kernel.cannot_follow(forward, CPU) is None
    operands = forward.prepare(Inputs(q, k, v), spec)
    before = [x.data.clone() for x in (operands.q, operands.k, operands.v) if isinstance(x, Quantised)]
    found = kernel.run(Saved(operands, *forward.run(operands)[:2]), grad_out)
    for x, wanted in zip(found, dense.dense_gradients(q, k, v, grad_out, spec), strict=True):
        assert dense.relative_l2(x, wanted) < 2 * kernel.declared_error
    after = [x.data for x in (operands.q, operands.k, operands.v) if isinstance(x, Quantised)]
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(before, after, strict=True))


def test_dq_is_as_accurate_with_few_keys_as_with_many() -> None:
    """Relative to gradients whose parts do not cancel, which over two keys they may do by chance."""
    forward = TritonForward("fp8")
    for seqlen_kv, seed in itertools.product((1, 2, 5), range(examples(2, 6))):
        spec, tensors = make(1, seqlen_kv, heads=1, head_dim=64)
        generator = torch.Generator().manual_seed(seed)
        q, k, v, grad_out = (torch.randn(x.shape, generator=generator).to(torch.bfloat16) for x in tensors)
        operands = forward.prepare(Inputs(q, k, v), spec)
        dq, _, _ = WIDE.run(Saved(operands, *forward.run(operands)[:2]), grad_out)
        wanted, _, _ = dense.dense_gradients(q, k, v, grad_out, spec)
        size = 0.1 * dense.gradient_sizes(q, k, v, grad_out, spec)[0]
        assert (dq.double() - wanted).norm().item() <= 2 * WIDE.declared_error * max(wanted.norm().item(), size)


def test_the_backward_follows_exactly_the_forwards_that_save_plain_e4m3() -> None:
    known = registry()
    theirs = {
        "fa3:fp8", "fa3-vllm:fp8", "torch-fp8:fp8", "cudnn:fp8", "te:fp8", "flashinfer:fp8", "flex:fp8",
        *(f"emulated:fp8{options}" for options in ("", "-tensor", "-block", "-token", "-token-hadamard")),
    }  # fmt: skip
    ours = {name for name in known.forwards if name.startswith("triton:")} - {"triton:fp8-pv"}
    for kernel in KERNELS:
        assert {name for name, forward in known.forwards.items() if kernel.accepts(forward)} == theirs | ours
        assert all(kernel.cannot_follow(TritonForward(precision), CPU) is None for precision in RECIPES)
        assert "forwards that leave e4m3" in str(kernel.cannot_follow(known.forward("sage:int8-fp8"), CPU))
    made = {"emulated:fp8-acc13": True, "emulated:fp8-smooth": False, "emulated:fp8-tensor-e5m2": False}
    assert {name: WIDE.accepts(known.forward(name)) for name in made} == made


def test_plans_of_triton_forwards_list_both_triton_backwards_first() -> None:
    spec, _ = make(20, 30)
    known = Registry([SDPA, BACKEND])
    both = ["triton:fp8", "triton:fp8-all"]
    for forward in BACKEND.kernels:
        if isinstance(forward, ForwardKernel) and KERNELS[0].accepts(forward):
            partners = [plan.backward for plan in known.plans_with(forward.name, spec)]
            assert partners[:2] == both
            assert (len(partners) > 2) is forward.mixes
    made = known.plans_with("triton:fp8-block", spec)
    assert [plan.backward for plan in made][:2] == both


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter's arithmetic with what is no number
def test_a_nan_log_sum_exp_is_not_treated_as_a_query_without_keys() -> None:
    spec, (q, k, v, grad_out) = make(40, 50)
    given_ = saved(spec, q, k, v, (Recipe("head"),) * 3)
    given_.lse[0, 1, 3] = torch.nan
    dq, _, _ = WIDE.run(given_, grad_out)
    assert dq[0, 1, 3].isnan().all()
    assert dq[0, 0].isfinite().all()


def test_operands_that_are_not_plain_e4m3_are_an_error_with_a_reason() -> None:
    spec, (q, k, v, grad_out) = make(20, 30)
    plain = saved(spec, q, k, v, (Recipe("head"),) * 3)
    operands = plain.operands
    e5m2, smooth = Recipe("head", "e5m2"), Recipe("token", smoothing=True)
    wrong = {
        "16 bits": replace(operands, q=q),
        "e4m3, v is torch.float8_e5m2": replace(operands, v=quantise(v, e5m2)),
        "smoothing, and k": replace(operands, k=quantise(k, smooth, smooth=True)),
        "rotated together": replace(operands, q=quantise(q, Recipe(rotation="hadamard"), rotate=True)),
        "descales": replace(operands, v=replace(operands.v, descale=torch.ones(1, 1, 7, 1))),
    }
    for message, each in wrong.items():
        with pytest.raises(InputError, match=message):
            WIDE.run(Saved(each, plain.out, plain.lse), grad_out)
    with pytest.raises(InputError, match="log-sum-exp"):
        WIDE.run(Saved(operands, plain.out, None), grad_out)


def test_unsupported_specs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, _ = make(20, 30)
    assert WIDE.refusals(spec, CPU) == []
    assert WIDE.refusals(make(2, 2, head_dim=192, head_dim_v=128)[0], CPU) == []
    assert "257 is outside" in WIDE.refusals(make(2, 2, head_dim=257)[0], CPU)[0]
    many = spec.replace(batch=40000)
    assert "65535 heads" in WIDE.refusals(many, CPU)[0]
    old = Device("cuda", "an older GPU", (8, 9))
    assert "compute capability 9.0" in WIDE.refusals(spec, old)[0]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" in WIDE.refusals(spec, Device("cuda", "H200", (9, 0)))[0]
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "interpreter" in WIDE.refusals(spec, CPU)[0]
    assert WIDE.refusals(spec, Device("cuda", "H200", (9, 0))) == []
