"""A capture holds what attention was really given, within its budget, and the program never notices."""

import weakref
from collections import Counter
from collections.abc import Iterable
from statistics import mean

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from planted import FakeForward
from programs import ORIGINAL, Model, attend, qkv, step

import attnbench
from attnbench.errors import AttnbenchError, InputError, MalformedFileError
from attnbench.harness.capture import recorder as capture_module
from attnbench.harness.capture.file import read_captured
from attnbench.harness.capture.recorder import capture
from attnbench.harness.capture.reservoir import Reservoir
from attnbench.harness.cases.file import read_captured_cases
from attnbench.harness.cases.inputs import draw
from attnbench.harness.sequence_lengths import SequenceLengths
from attnbench.kernels.contract import Inputs
from attnbench.kernels.execution import Execution
from attnbench.problem.mask import Mask


@pytest.fixture
def file(tmp_path):
    return tmp_path / "acts.safetensors"


def test_the_tensors_are_those_that_attention_was_given_and_the_gradient_is_autograd_s(file):
    model = Model()
    with capture(file) as recorder:
        step(model)
        with torch.no_grad():
            model(torch.randn(1, 3, 16))
    assert (recorder.seen, recorder.recorded, recorder.left_out) == (4, 4, [])
    calls = read_captured(file)
    given = [model.layers[0].given[0], model.layers[1].given[0], model.layers[0].given[1], model.layers[1].given[1]]
    for number, (call, (q, k, v, out)) in enumerate(zip(calls.calls, given, strict=True)):
        assert call.name == f"layers.{number % 2}"
        assert call.spec.mask == Mask(right=0)
        assert call.spec.direction == ("training" if number < 2 else "forward")
        tensors = calls.tensors(number)
        expected = {"q": q, "k": k, "v": v} | ({"grad_out": out.grad} if number < 2 else {})
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], x) for name, x in expected.items())


def graph(out):
    """The names of the nodes behind a result."""
    names, nodes = [], [out.grad_fn]
    while nodes:
        node = nodes.pop()
        names.append(type(node).__name__)
        nodes += [each for each, _ in node.next_functions if each is not None]
    return names


def test_the_graph_is_the_program_s_and_nothing_outlives_it(file):
    q, k, v = qkv(requires_grad=True)
    plain = graph(attend(q, k, v))
    with capture(file) as recorder:
        out = attend(q, k, v)
        assert graph(out) == plain
        assert out._backward_hooks is None
        gone = weakref.ref(out)
        del out
        assert gone() is None
        late = attend(q, k, v)
    assert read_captured(file).calls[0].spec.direction == "forward"  # gradients were on, but no backward ran
    late.sum().backward()  # after its end
    assert recorder.tensor_bytes == 2 * 3 * q.nbytes
    assert F.scaled_dot_product_attention is ORIGINAL


def test_other_ranks_get_their_axes(file):
    with capture(file):
        attend(*(torch.randn(5, 8) for _ in range(3)))
        attend(*(torch.randn(3, 5, 8) for _ in range(3)))
        x = torch.randn(2, 3, 4, 5, 8, requires_grad=True)
        attend(x, x, x).sum().backward()
    calls = read_captured(file)
    sizes = [(call.spec.batch, call.spec.heads, call.spec.seqlen_q) for call in calls.calls]
    assert sizes == [(1, 1, 5), (3, 1, 5), (6, 4, 5)]
    assert torch.equal(calls.tensors(2)["q"], x.detach().flatten(0, 1))
    assert torch.equal(calls.tensors(2)["grad_out"], torch.ones(6, 4, 5, 8))


def test_grouped_heads_are_stored_once_also_where_the_program_repeats_them(file):
    q, k, v = qkv(heads=4, kv_heads=2)
    repeated = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    almost = [repeated[0], repeated[1].clone()]
    almost[1][0, 1, 5, 7] += 1
    with capture(file):
        attend(q, k, v, enable_gqa=True)
        attend(q, *repeated)
        attend(q, *almost)
        attend(q, k[:, :1].expand_as(q), v[:, :1].expand_as(q))
    calls = read_captured(file)
    assert [call.spec.kv_heads for call in calls.calls] == [2, 2, 4, 1]
    assert torch.equal(calls.tensors(0)["k"], k)
    assert torch.equal(calls.tensors(1)["v"], v)
    assert torch.equal(calls.tensors(2)["v"], almost[1])


def test_masks_are_recognised_and_what_is_none_is_counted_with_its_reason(file):
    q, k, v = qkv()
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    padding = torch.tensor([True] * 5 + [False]) & (torch.rand(6, 6) < 0.5).fill_diagonal_(True)
    learned = torch.zeros(6, 6, requires_grad=True)
    with capture(file) as recorder:
        attend(q, k, v, attn_mask=causal)
        causal = causal.triu(-2)
        attend(q, k, v, attn_mask=causal, scale=0.5)
        causal.fill_(True)  # the same tensor, another mask
        attend(q, k, v, attn_mask=causal)
        attend(q[:, :, :2], k, v, is_causal=True)
        attend(q, k, v, attn_mask=padding)
        attend(q, k, v, attn_mask=learned)
        attend(q, k, v, dropout_p=0.5)
        attend(q * torch.nan, k, v)
        attend(q, k[:, :, :0], v[:, :, :0])
        attend(*(x.to("meta") for x in (q, k, v)))
        torch.vmap(attend)(*(torch.randn(3, 1, 2, 6, 8) for _ in range(3)))
    masks = [call.spec.mask for call in read_captured(file).calls]
    assert masks == [Mask(right=0), Mask(2, 0), Mask(), Mask(right=0)]
    assert read_captured(file).calls[1].spec.scale == 0.5
    assert recorder.seen == 11
    reasons = recorder.unrecorded
    assert reasons.total() == 7
    for message in ("neither causal nor a window", "learned", "dropout", "not finite", "seqlen_kv", "meta", "storage"):
        assert sum(count for reason, count in reasons.items() if message in reason) == 1, (message, reasons)


def test_a_gradient_that_is_not_finite_leaves_a_forward_call(file):
    q, k, v = qkv(requires_grad=True)
    with capture(file) as recorder:
        attend(q, k, v).backward(torch.full((1, 2, 6, 8), torch.inf))
    assert recorder.left_out == ["1 without its gradient: values that are not finite"]
    assert read_captured(file).calls[0].spec.direction == "forward"


def test_our_own_attention_is_recorded_once_with_all_that_was_asked(file):
    q, k, v = qkv(heads=4, kv_heads=2, length=7, requires_grad=True)
    rows = [x.detach().transpose(1, 2) for x in (q, k, v)]
    with capture(file) as recorder:
        out = attnbench.attention(q, k, v, window=(3, 0), causal_alignment="bottom-right", softcap=5.0, scale=0.2)
        out.retain_grad()
        out.square().sum().backward()
        attnbench.attention(*rows, is_causal=True, layout="bshd", return_lse=True, backend="sdpa-flash")
    assert (recorder.seen, recorder.recorded) == (2, 2)
    calls = read_captured(file)
    first, second = (call.spec for call in calls.calls)
    assert (first.mask, first.softcap, first.scale, first.kv_heads) == (Mask(3, 0), 5.0, 0.2, 2)
    assert torch.equal(calls.tensors(0)["grad_out"], out.grad)
    assert (second.mask, second.return_lse) == (Mask(right=0), False)
    assert torch.equal(calls.tensors(1)["k"], k)


def test_kernels_of_ours_that_use_sdpa_or_compile_run_as_ever(file):
    spec = attnbench.AttentionSpec.make(batch=1, heads=2, seqlen_q=6, head_dim=8, dtype="fp32")
    compiled = torch.compile(lambda x: x + torch.compiler.is_compiling(), backend="eager")
    q, k, v = qkv()
    kernel = FakeForward("fake:fp32", change=lambda out: attend(q, k, v) + compiled(torch.zeros(1)))
    with capture(file) as recorder:
        out, _ = Execution(spec, kernel)(Inputs(q, k, v))
    assert torch.equal(out, attend(q, k, v) + 1)
    assert recorder.seen == 1


LENGTH = 64
EACH = 4 * 2 * LENGTH * 8 * 4  # bytes of q, k, v and grad_out, 2 heads, fp32


def test_the_budget_holds_in_the_file_and_meanwhile(file, monkeypatch):
    held, copies, copy = [], [], capture_module._Part.copy

    def watched(part, x):
        copied = copy(part, x)
        copies.append(weakref.ref(copied))
        return copied

    monkeypatch.setattr(capture_module._Part, "copy", watched)
    with capture(file, max_bytes=5 * EACH) as recorder:
        pending = []
        for number in range(40):
            q, k, v = qkv(length=LENGTH, requires_grad=True)
            pending.append((q, attend(q, k, v)))
            if number % 3 == 0:
                pending.pop()[1].sum().backward()
            held.append(sum(x.nbytes for each in copies if (x := each()) is not None))
            assert recorder.tensor_bytes == held[-1]
    assert max(held) <= 5 * EACH
    calls = read_captured(file)
    assert len(calls.calls) == 5
    assert max(call.number for call in calls.calls) > 5  # not the first ones
    assert sum(x.nbytes for number in range(5) for x in calls.tensors(number).values()) <= 5 * EACH
    assert "35 gave way to others" in recorder.left_out[0]


def test_of_a_call_larger_than_the_budget_whole_groups_of_heads_are_kept(file):
    q, k, v = qkv(batch=2, heads=8, kv_heads=4, length=16, requires_grad=True)
    unit = (2 * 2 + 2) * 16 * 8 * 4  # a key head with its two query heads: q, grad_out, k, v
    with capture(file, max_bytes=7 * unit) as recorder:
        out = attend(q, k, v, enable_gqa=True)
        out.retain_grad()
        out.square().sum().backward()
    assert recorder.recorded == 1
    calls = read_captured(file)
    (call,) = calls.calls
    assert (call.spec.batch, call.spec.heads, call.spec.kv_heads) == (1, 2, 1)
    assert (call.whole.batch, call.whole.heads, call.whole.direction) == (2, 8, "training")
    (head,) = call.kv_heads
    expected = {
        "q": q[:1, 2 * head : 2 * head + 2],
        "k": k[:1, head : head + 1],
        "v": v[:1, head : head + 1],
        "grad_out": out.grad[:1, 2 * head : 2 * head + 2],
    }
    assert all(torch.equal(calls.tensors(0)[name], x) for name, x in expected.items())
    with pytest.raises(AttnbenchError, match="one key head"), capture(file, max_bytes=unit - 1):
        attend(q, k, v, enable_gqa=True)


@pytest.mark.parametrize(
    ("units", "sizes", "heads"),
    [
        (4 * 9, (2, 4), [0, 1, 2, 3]),
        (4 * 4, (1, 4), [0, 1, 2, 3]),
        (4 * 3, (1, 3), [0, 1, 2]),
        (4 * 2, (1, 2), [0, 2]),
        (100, (3, 4), None),
    ],
)
def test_batch_entries_go_before_heads(file, units, sizes, heads):
    q, k, v = (x.transpose(1, 2) for x in qkv(batch=3, heads=16, length=4))  # (3, 4, 16, 8), not contiguous
    unit = 3 * 16 * 8 * 4
    batch = 3 if units == 100 else 30
    q, k, v = (x.repeat(batch // 3, 1, 1, 1) for x in (q, k, v))
    with capture(file, max_bytes=units * unit):
        attend(q, k, v)
    (call,) = read_captured(file).calls
    assert (call.spec.batch, call.spec.kv_heads) == sizes
    assert (call.whole is None) == (units == 100)
    assert call.kv_heads == heads
    assert torch.equal(read_captured(file).tensors(0)["v"], v[: sizes[0], heads or slice(None)])


CPU = torch.device("cpu")
STARTS = torch.tensor([0, 9, 9, 40], dtype=torch.int32)
USED = torch.tensor([3, 8], dtype=torch.int32)


def packed(q, kv):
    return attnbench.attention(q, kv, kv, layout="thd", cu_seqlens_q=STARTS, is_causal=True, max_seqlen_q=37)


def test_what_was_captured_is_measured_with_the_lengths_that_it_had(file):
    q, kv = torch.randn(40, 4, 16, dtype=torch.bfloat16), torch.randn(40, 2, 16, dtype=torch.bfloat16)
    rows = torch.randn(2, 2, 8, 16, dtype=torch.bfloat16)
    leaf = q.clone().requires_grad_()
    with capture(file) as recorder:
        packed(leaf, kv).sum().backward()
        attnbench.attention(rows, rows, rows, kv_lengths=USED, padding_side="left")
        packed(q, kv)
        empty = torch.tensor([0, 8, 8], dtype=torch.int32)
        attnbench.attention(
            q[:8], kv[:4], kv[:4], layout="thd", cu_seqlens_q=empty, cu_seqlens_kv=torch.tensor([0, 0, 4]).int()
        )
    assert (recorder.seen, recorder.recorded) == (4, 3)
    assert recorder.left_out == ["1 not recorded: sequences that are too many, or of which none has a query and a key"]
    training, padded, forward = cases = read_captured_cases(file, "fp8")
    assert training.lengths == forward.lengths == SequenceLengths(layout="packed", q=(9, 0, 31))
    assert padded.lengths == SequenceLengths(layout="left-padded", q=(8, 8), kv=(3, 8))
    assert (
        training.spec
        == attnbench.explain(leaf, kv, kv, layout="thd", cu_seqlens_q=STARTS, is_causal=True, max_seqlen_q=37).spec
    )
    x = draw(training.spec, training.families[0], CPU, training.lengths)
    assert torch.equal(x.q[0].transpose(0, 1), q)
    assert x.q[0].transpose(0, 1).is_contiguous()
    assert torch.equal(x.grad_out, torch.ones_like(x.q))
    assert torch.equal(x.lengths.q, STARTS)
    assert all(draw(case.spec, "normal", CPU, case.lengths).lengths is not None for case in cases)
    with pytest.raises(InputError, match="other lengths"):
        draw(training.spec, training.families[0], CPU, SequenceLengths(layout="packed", q=(9, 1, 30)))


def test_lengths_that_do_not_fit_their_call_are_reported(file):
    x = torch.randn(40, 2, 16, dtype=torch.bfloat16)
    with capture(file):
        packed(x, x)
    broken = file.read_bytes().replace(b'\\"q\\":[9,0,31]', b'\\"q\\":[9,0,99]')
    file.write_bytes(broken)
    with pytest.raises(MalformedFileError, match="lengths of the sequences make"):
        read_captured(file)


OFFERS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(1, 50)), max_size=80)


def filled(reservoir: Reservoir, offers: Iterable[tuple[str, str, int]]) -> list[tuple[int, str, str]]:
    for number, (kind, source, size) in enumerate(offers):
        reservoir.offer((number, kind, source), kind=kind, source=source, size=size)
    return reservoir.items


@given(OFFERS, st.integers(1, 120), st.integers(1, 20))
def test_the_budget_holds_at_every_moment_and_every_item_is_accounted_for(offers, max_bytes, most):
    reservoir = Reservoir(max_bytes, most)
    sizes, kept = {}, set()
    for number, (kind, source, size) in enumerate(offers):
        sizes[number] = size
        gone = reservoir.offer(number, kind=kind, source=source, size=size)
        assert number not in gone or gone == [number]
        kept = (kept | {number}) - set(gone)
        assert set(reservoir.items) == kept
        assert reservoir.held == sum(sizes[each] for each in kept) <= max_bytes
        assert len(kept) <= most
    if sum(sizes.values()) <= max_bytes and len(offers) <= most:
        assert len(kept) == len(offers)


def test_layers_and_kinds_share_what_there_is():
    # A prompt of long calls in 8 layers, then 200 steps of small ones.
    prompt = [("prompt", f"layer {layer}", 10) for layer in range(8)]
    steps = [("step", f"layer {layer}", 1) for _ in range(200) for layer in range(8)]
    kept = filled(Reservoir(100, 16), prompt + steps)
    assert Counter(kind for _, kind, _ in kept) == {"prompt": 8, "step": 8}
    for kind in ("prompt", "step"):
        assert {source for _, each, source in kept if each == kind} == {f"layer {layer}" for layer in range(8)}


def test_late_calls_are_as_likely_to_stay_as_early_ones():
    kept = filled(Reservoir(100, 100), [("a", "x", 1)] * 2000)
    assert len(kept) == 100
    # The mean of 100 uniform numbers has a deviation of 0.029.
    assert abs(mean(number / 2000 for number, _, _ in kept) - 0.5) < 0.1
