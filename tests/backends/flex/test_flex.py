"""Compiled FlexAttention: results on the CPU, block masks, compilations and refusals."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from dense import dense_attention, relative_l2
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import needs_avx2
from packed import Documents, documents
from problems import Problem, masks
from torch.nn.attention.flex_attention import create_block_mask
from torch.profiler import ProfilerActivity, profile

from attnbench.backends.flex import backend as flex
from attnbench.backends.flex.blocks import BLOCK, block_mask, packed_blocks
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.kernels.registry import registry
from attnbench.problem.fp8 import Recipe, quantise
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec
from examples import examples

CPU = Device("cpu", "CPU")
H200 = Device("cuda", "NVIDIA H200", (9, 0))
FORWARDS = {k.name: k for k in flex.BACKEND.kernels if isinstance(k, ForwardKernel)}
BACKWARDS = {k.name: k for k in flex.BACKEND.kernels if isinstance(k, BackwardKernel)}
CAUSAL_END = Mask(right=0, alignment="bottom-right")


def spec_of(seqlen_q: int, seqlen_kv: int, mask: Mask, **more: object) -> AttentionSpec:
    sizes = {"batch": 1, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "bf16", **more}
    return AttentionSpec.make(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, mask=mask, **sizes)


def run_flex(spec: AttentionSpec, strided: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Flex's output for normal tensors, and the FP64 reference."""
    q, k, v, _ = Problem(spec, "bhsd", strided, 0).tensors()
    forward = FORWARDS[f"flex:{spec.dtype}"]
    assert forward.refusals(spec, CPU) == []
    result = forward.run(forward.prepare(Inputs(q, k, v), spec))
    assert result.lse is None
    assert result.out.dtype == q.dtype
    return result.out, dense_attention(q, k, v, spec)[0]


# More variants than dynamo keeps by default (8).
SPECS = [
    spec_of(64, 64, Mask()),
    spec_of(130, 257, Mask()),
    spec_of(257, 130, CAUSAL_END),  # rows without a key
    spec_of(300, 140, Mask(left=7, right=3)),  # rows without a key
    spec_of(257, 300, Mask(left=40, alignment="bottom-right"), batch=2),
    spec_of(130, 257, CAUSAL_END, softcap=2.0, scale=0.9),
    spec_of(130, 130, Mask(), softcap=0.5, scale=0.9),
    spec_of(130, 130, Mask(right=0), head_dim_v=24),
    spec_of(1, 257, CAUSAL_END),
    spec_of(130, 257, Mask(right=0), dtype="fp16", scale=-0.3),
]


@needs_avx2
@pytest.mark.parametrize(
    ("kept", "specs"),
    [(1, [SPECS[5], SPECS[2]]), pytest.param(8, SPECS, marks=pytest.mark.exhaustive)],
    ids=["one", "eight"],
)
def test_more_programs_than_dynamos_limit_run_compiled_and_agree_with_fp64(
    kept: int, specs: list[AttentionSpec]
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for spec in specs:
        with torch._dynamo.config.patch(recompile_limit=kept):
            out, truth = run_flex(spec)
        assert relative_l2(out, truth) <= FORWARDS[f"flex:{spec.dtype}"].declared_error, str(spec)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > kept
    spec = specs[-2]
    q, k, v, _ = Problem(spec, "bhsd", False, 0).tensors()
    operands = FORWARDS["flex:bf16"].prepare(Inputs(q, k, v), spec)
    with profile(activities=[ProfilerActivity.CPU]) as ran:
        FORWARDS["flex:bf16"].run(operands)
    names = {event.key for event in ran.key_averages()}
    assert any(re.search(FORWARDS["flex:bf16"].evidence["cpu"], name) for name in names)
    assert not any(re.fullmatch(r"aten::(bmm|matmul|_softmax)", name) for name in names)  # the eager one's operators


@needs_avx2
def test_exceeding_the_limit_of_compilations_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(flex, "_PROGRAMS", 1)
    run_flex(spec_of(64, 64, Mask()))
    with pytest.raises(Exception, match="fullgraph"):
        run_flex(spec_of(64, 64, Mask(), heads=2))


@needs_avx2
def test_other_windows_lengths_and_caps_reuse_the_program() -> None:
    torch._dynamo.reset()
    run_flex(spec_of(130, 257, Mask(left=7, right=3), softcap=2.0))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    out, truth = run_flex(spec_of(140, 399, Mask(left=90, right=0), softcap=0.4))
    assert relative_l2(out, truth) <= 0.01
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@needs_avx2
def test_inputs_that_require_gradients_run_without_recording_them() -> None:
    spec = spec_of(64, 64, Mask())
    q, k, v, _ = (x.requires_grad_() for x in Problem(spec, "bhsd", False, 0).tensors())
    forward = FORWARDS["flex:bf16"]
    assert not forward.run(forward.prepare(Inputs(q, k, v), spec)).out.requires_grad


@given(masks(), st.integers(1, 600), st.integers(1, 600))
@settings(max_examples=examples(30, 200))
def test_blocks_agree_with_create_block_mask(mask: Mask, sq: int, skv: int) -> None:
    spec = spec_of(sq, skv, mask)
    blocks = block_mask(spec.mask, sq, skv, torch.device("cpu"))
    if blocks is None:
        assert spec.mask.kind == "none"
        return
    query, key = torch.arange(sq)[:, None], torch.arange(skv)[None, :]
    zero = torch.zeros((), dtype=torch.int64)
    sees = torch.zeros(sq, skv, dtype=torch.bool)
    for row in range(sq):
        start, stop = spec.mask.span(row, sq, skv)
        sees[row, start:stop] = True
    assert torch.equal(blocks.mask_mod(zero, zero, query, key), sees)
    theirs = create_block_mask(lambda b, h, i, j: sees[i, j], None, None, sq, skv, device="cpu")
    for counts, indices in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        assert torch.equal(getattr(blocks, counts), getattr(theirs, counts))
        for row, count in enumerate(getattr(blocks, counts).flatten().tolist()):
            ours, want = (getattr(each, indices)[0, 0, row, :count].sort().values for each in (blocks, theirs))
            assert torch.equal(ours, want)


def test_blocks_of_a_long_window_are_computed_without_a_dense_mask() -> None:
    length = 2**17  # a matrix of pairs would be 16 GiB
    blocks = block_mask(Mask(left=1000, right=0), length, length, torch.device("cpu"))
    assert blocks is not None
    assert int(blocks.kv_num_blocks.max()) <= 3


@given(documents(400, masks()))
@settings(max_examples=examples(30, 200))
def test_blocks_of_a_packed_batch_hide_other_sequences(batch: Documents) -> None:
    queries, keys = (sum(side) for side in zip(*batch.lengths, strict=True))
    whole, lengths, spec = batch.batched(batch.parts())
    sees = torch.zeros(queries, keys, dtype=torch.bool)
    for own in lengths.sequences(spec, whole[0], whole[1]):
        for row in range(own.spec.seqlen_q):
            start, stop = spec.mask.span(row, own.spec.seqlen_q, own.spec.seqlen_kv)
            sees[own.queries.start + row, own.keys.start + start : own.keys.start + stop] = True
    blocks = packed_blocks(spec.mask, lengths, queries, keys)
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(blocks.mask_mod(zero, zero, torch.arange(queries)[:, None], torch.arange(keys)[None, :]), sees)
    grid = torch.nn.functional.pad(sees, (0, -keys % BLOCK, 0, -queries % BLOCK))
    grid = grid.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2)
    assert bool((blocks.to_dense()[0, 0].bool() >= grid.any(3).any(2)).all())
    counts, indices = blocks.full_kv_num_blocks[0, 0], blocks.full_kv_indices[0, 0]
    full = {(row, int(each)) for row, count in enumerate(counts) for each in indices[row, :count]}
    assert full == {(int(row), int(column)) for row, column in grid.all(3).all(2).nonzero()}


def test_blocks_of_a_batch_are_cached_until_its_lengths_change() -> None:
    batch = Documents(((100, 100), (30, 30)))
    _, lengths, spec = batch.batched(batch.parts())
    starts = lengths.starts[0]
    lengths = replace(lengths, kv=starts)
    kept = packed_blocks(spec.mask, lengths, 130, 130)
    assert packed_blocks(spec.mask, lengths, 130, 130) is kept
    assert packed_blocks(Mask(right=0), lengths, 130, 130) is not kept
    starts[1] = 50
    assert packed_blocks(spec.mask, lengths, 130, 130) is not kept


@needs_avx2
@pytest.mark.exhaustive
@pytest.mark.parametrize("mask", [Mask(), CAUSAL_END, Mask(left=20, right=0)], ids=str)
def test_packed_sequences_have_the_results_that_they_have_alone(mask: Mask) -> None:
    cases = (((130, 257), (0, 4), (1, 1)), None), (((200, 40), (7, 7)), "left"), (((3, 0), (64, 300), (9, 9)), "right")
    for pairs, padding in cases:
        batch = Documents(pairs, mask, padding=padding)
        whole, lengths, spec = batch.batched(batch.parts())
        spec = spec.replace(direction="forward")
        forward = FORWARDS["flex:bf16"]
        assert forward.refusals(spec, CPU) == []
        out = forward.run(forward.prepare(Inputs(*whole[:3], lengths), spec)).out
        for own in lengths.sequences(spec, whole[0], whole[1]):
            exact = dense_attention(own.q(whole[0]), own.kv(whole[1]), own.kv(whole[2]), own.spec)[0]
            assert relative_l2(own.q(out), exact) <= 0.01


def test_an_fp8_backward_is_refused_and_a_16_bit_one_can_follow() -> None:
    spec = spec_of(64, 64, Mask(), head_dim=64, direction="training")
    backward = BACKWARDS["flex:fp8"]
    assert backward.refusals(spec, H200) == [
        "torch has no gradients of FlexAttention in float8; a 16-bit backward can follow flex:fp8"
    ]
    forward = FORWARDS["flex:fp8"]
    operands = forward.prepare(Inputs.of(Problem(spec, "bhsd", False, 0).tensors()[:3]), spec)
    with pytest.raises(NotImplementedError, match="no gradients"):
        backward.run(Saved(operands, None, None), None)
    plans = {str(plan) for plan in registry().plans_with("flex:fp8", spec)}
    assert {"flex:fp8>flex:fp8", "flex:fp8>sdpa-flash:bf16"} <= plans


@pytest.mark.parametrize("given", ["bf16", "tensor", "head"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_fp8_operands_represent_the_requested_attention(given: str, softcap: float) -> None:
    """The arithmetic around the kernel, which needs no GPU: factors, cap and layouts, put through plain products."""
    spec = spec_of(64, 80, Mask(), head_dim=32, batch=2, softcap=softcap)
    q, k, v, _ = Problem(spec, "bhsd", False, 0).tensors()
    gains = torch.tensor([0.02, 3.0])[None, :, None, None]  # heads of different magnitudes need factors of their own
    k, v = k * gains, v * gains
    forward = FORWARDS["flex:fp8"]
    if given == "bf16":
        operands = forward.prepare(Inputs(q, k, v), spec)
    else:
        operands = forward.prepare(Inputs.of(quantise(x, Recipe(given)) for x in (q, k, v)), spec)
    native = operands.native
    assert native.v.stride(-2) == 1  # V with its tokens contiguous
    assert native.q.stride(-1) == native.k.stride(-1) == 1
    shared = native.k.double().repeat_interleave(spec.group, 1)
    scores = native.q.double() @ shared.mT * spec.scale
    if native.score_mod is not None:
        sizes = enumerate(scores.shape)
        index = [torch.arange(n).view([-1 if axis == i else 1 for i in range(4)]) for axis, n in sizes]
        scores = native.score_mod(scores, *index).double()
    assert (native.score_mod is None) == (given == "bf16" and not softcap)
    out = scores.softmax(-1) @ native.v.double().repeat_interleave(spec.group, 1) * native.descale
    truth = dense_attention(*operands.tensors(), spec)[0]  # of the dequantised tensors, in bf16
    assert relative_l2(out, truth) < 0.01
    if given == "bf16":
        assert relative_l2(out, dense_attention(q, k, v, spec)[0]) < 0.08
        most = [x.float().abs().unflatten(1, (spec.kv_heads, -1)).amax(dim=(2, 3, 4)) for x in (native.q, native.k)]
        assert torch.allclose(*most, rtol=0.1)  # brought together, which keeps both away from the ends of e4m3


@pytest.mark.parametrize("hole", ["q", "k", "v"])
def test_fp8_operands_of_zeros_and_nan_are_preserved(hole: str) -> None:
    spec = spec_of(8, 8, Mask(), head_dim=32)
    tensors = dict(zip("qkv", Problem(spec, "bhsd", False, 0).tensors()[:3], strict=True))
    for value in (0.0, float("nan")):
        given = {**tensors, hole: torch.full_like(tensors[hole], value)}
        found = dict(zip("qkv", FORWARDS["flex:fp8"].prepare(Inputs(**given), spec).tensors(), strict=True))
        assert torch.equal(found[hole].nan_to_num(7.0), torch.full_like(found[hole], 7.0 if value else 0.0))
