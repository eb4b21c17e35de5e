"""The rows that a guard computes: equal to dense attention in FP64, without effects on the program."""

from random import Random

import dense
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import Documents, documents
from problems import masks, problems, tensors_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnbench import AttentionSpec, Mask
from attnbench.guarding.check import Sums, aside, gradient_sums, out_sums, part, pick_groups, pick_rows
from attnbench.guarding.rows import Rows, used
from attnbench.problem.fp8 import Recipe, quantise
from examples import examples

WRONG = 1.25


def read(sums: Sums) -> tuple[bool, dict[str, tuple[Tensor, Tensor]]]:
    usable, found = sums.read()
    return usable, {name: tuple(torch.tensor(x, dtype=torch.float64) for x in pair) for name, pair in found.items()}


def agree(found: Tensor, truth: list[Tensor]) -> None:
    """Compares sums of squares by head, with a tolerance for rounding relative to the largest."""
    expected = torch.stack([each.square().sum() for each in truth])
    assert (found - expected).abs().max() <= 1e-8 * expected.max() + 1e-20, (found, expected)


@settings(max_examples=examples(30, 200))
@given(problem=problems())
def test_checked_output_rows_agree_with_dense_attention(problem):
    q, k, v, _ = tensors_of(problem)
    truth, _ = dense.dense_attention(q, k, v, problem.spec)
    picks = pick_rows(problem.spec, Random(problem.seed))
    usable, found = read(out_sums(q, k, v, truth * WRONG, problem.spec, picks))
    rows = [truth[pick.batch, pick.head, list(pick.rows)] for pick in picks]
    agree(found["out"][0], [(WRONG - 1) * each for each in rows])
    agree(found["out"][1], rows)
    assert usable


@settings(max_examples=examples(30, 200))
@given(problem=problems())
def test_checked_gradient_rows_agree_with_dense_attention(problem):
    spec = problem.spec
    q, k, v, grad_out = tensors_of(problem)
    truth = dict(zip(("dq", "dk", "dv"), dense.dense_gradients(q, k, v, grad_out, spec), strict=True))
    groups = pick_groups(spec, Random(problem.seed))
    own = part(groups, q, k, v)
    wrong = {name: x * WRONG for name, x in truth.items()}
    _, found = read(gradient_sums(own, groups, grad_out, tuple(wrong.values()), spec))
    rows: dict[str, list[Tensor]] = {"dq": [], "dk": [], "dv": []}
    for group in groups:
        places = [(group.kv_head * spec.group + head, row) for head, row in group.queries]
        rows["dq"].append(torch.stack([truth["dq"][group.batch, head, row] for head, row in places]))
        for name in ("dk", "dv"):
            rows[name].append(truth[name][group.batch, group.kv_head, list(group.keys)])
    for name, each in rows.items():
        agree(found[name][0], [(WRONG - 1) * x for x in each])
        size = torch.stack([x.square().sum() for x in each])
        assert (found[name][1] >= size * (1 - 1e-8) - 1e-20).all(), name
    agree(found["dv"][1], rows["dv"])


@pytest.mark.parametrize("granularity", ["tensor", "head", "block", "token"])
def test_prequantised_inputs_are_compared_at_their_quantised_values(granularity):
    spec = AttentionSpec.make(
        batch=2, heads=4, kv_heads=2, seqlen_q=150, head_dim=16, dtype="e4m3", descale=granularity, mask=Mask(right=0)
    )
    shapes = [(2, 4, 150, 16), (2, 2, 150, 16), (2, 2, 150, 16)]
    q, k, v = (quantise(torch.randn(shape) * 3, Recipe(granularity)) for shape in shapes)
    truth, _ = dense.dense_attention(*(x.dequantised(torch.float64) for x in (q, k, v)), spec)
    usable, found = read(out_sums(q, k, v, truth.float(), spec, pick_rows(spec, Random(0))))
    assert usable
    assert (found["out"][0] <= 1e-12 * found["out"][1]).all()


def test_a_cancelling_sum_is_compared_relative_to_its_terms():
    """With one key dq and dk are zero, and rounding errors there do not count; dv is compared as usual."""
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=5, seqlen_kv=1, head_dim=8, direction="training", dtype="fp32")
    q, do = (torch.randn(1, 2, 5, 8) for _ in range(2))
    k, v = (torch.randn(1, 2, 1, 8) for _ in range(2))
    groups = pick_groups(spec, Random(0))
    own = part(groups, q, k, v)
    truth = dense.dense_gradients(q, k, v, do, spec)
    assert truth[0].norm() < 1e-12
    gradients = tuple(x + 1e-4 for x in truth)
    _, found = read(gradient_sums(own, groups, do, gradients, spec))
    assert all((found[name][0] <= (2e-3) ** 2 * found[name][1]).all() for name in ("dq", "dk"))
    assert (found["dq"][1] > 0.01).all()


def test_subnormal_outputs_are_not_an_error():
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=5, head_dim=8, dtype="fp32")
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), torch.zeros(1, 2, 5, 8)
    out = torch.full_like(v, torch.finfo(torch.float32).smallest_normal / 4)
    _, found = read(out_sums(q, k, v, out, spec, pick_rows(spec, Random(0))))
    assert (found["out"][0] > 0).all()
    assert (found["out"][0] <= found["out"][1] / 16 * (1 + 1e-9)).all()


def test_fp16_gradient_overflow_is_not_checked():
    spec = AttentionSpec.make(batch=1, heads=1, seqlen_q=6, head_dim=8, direction="training", dtype="fp16")
    x = [torch.randn(1, 1, 6, 8).half() for _ in range(4)]
    groups = pick_groups(spec, Random(0))
    own = part(groups, *x[:3])
    for dtype, usable in ((torch.float16, False), (torch.bfloat16, True)):
        gradients = tuple(torch.full((1, 1, 6, 8), torch.inf, dtype=dtype) for _ in range(3))
        assert read(gradient_sums(own, groups, x[3], gradients, spec))[0] == usable


def test_rows_and_keys_are_sampled_uniformly():
    spec = AttentionSpec.make(batch=2, heads=4, kv_heads=2, seqlen_q=3, seqlen_kv=2, head_dim=8)
    draw = Random(0)
    rows = [(pick.batch, pick.head, row) for _ in range(300) for pick in pick_rows(spec, draw) for row in pick.rows]
    groups = [group for _ in range(600) for group in pick_groups(spec, draw)]
    queries = [(group.batch, group.kv_head, *query) for group in groups for query in group.queries]
    keys = [(group.batch, group.kv_head, key) for group in groups for key in group.keys]
    for drawn, count in ((rows, 2 * 4 * 3), (queries, 2 * 2 * 2 * 3), (keys, 2 * 2 * 2)):
        shares = [drawn.count(each) * count / len(drawn) for each in set(drawn)]
        assert len(shares) == count
        assert all(0.8 < share < 1.2 for share in shares)


class OperatorRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_modes_and_autocast_do_not_affect_the_check():
    x = torch.randn(4, 4, requires_grad=True)
    with OperatorRecorder() as seen, torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        with aside(x.device):
            y = x @ x
            made = torch.zeros(3)
        assert (y.dtype, y.requires_grad, made.device.type) == (torch.float32, False, "cpu")
        assert not seen.names
        assert (x @ x).dtype == torch.bfloat16
    assert seen.names


@settings(max_examples=examples(6, 100))
@given(documents(20, masks(), heads=(4, 2), head_dim=8, head_dim_v=8,
                 padding=st.sampled_from([None, "left", "right"])))  # fmt: skip
def test_checked_rows_of_unequal_lengths_agree_with_each_sequence_alone(batch: Documents) -> None:
    """Padding holds NaN; every head and row of each tensor agrees with dense attention of its own sequence."""
    (q, k, v, do), lengths, spec = batch.batched(batch.parts())
    own = list(lengths.sequences(spec, q, k))
    out, dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64) for x in (do, q, k, v))
    for each in own:
        parts = each.q(q), each.kv(k), each.kv(v)
        each.q(out).copy_(dense.dense_attention(*parts, each.spec)[0])
        exact = dense.dense_gradients(*parts, each.q(do), each.spec)
        for whole, x in zip((each.q(dq), each.kv(dk), each.kv(dv)), exact, strict=True):
            whole.copy_(x)
    rows = Rows.of(spec, lengths, q, k, v)
    picks, groups = pick_rows(rows.spec, Random(batch.seed)), pick_groups(rows.spec, Random(batch.seed))
    whole = part(groups, rows.q, rows.k, rows.v)
    for factor in (1.0, WRONG):
        _, found = read(out_sums(rows.q, rows.k, rows.v, out * factor, rows.spec, picks, rows.seen))
        given_ = used(do, rows.seen.used_q)
        wrong = (dq * factor, dk * factor, dv * factor)
        usable, sums = read(gradient_sums(whole, groups, given_, wrong, rows.spec, rows.seen))
        assert usable
        for name, (errors, sizes) in {**found, **sums}.items():
            expected = (factor - 1) ** 2 * sizes
            if name in ("dq", "dk"):  # sizes that cancel count as more
                assert (errors <= expected * (1 + 1e-6) + 1e-12).all(), name
            else:
                torch.testing.assert_close(errors, expected, rtol=1e-6, atol=1e-12)
    if batch.padding is None and all(map(all, batch.lengths)):
        assert found["out"][1].any()
        assert sums["dv"][1].any()
