"""The emulated FP8 kernels against naive FP64 attention on their own operands."""

from __future__ import annotations

import pytest
import torch
from dense import dense_attention, dense_gradients, probabilities, relative_l2, visible
from emulated_passes import RECIPES, run_both_passes, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.backends.emulated import BACKEND, emulate
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import Operands, Saved
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec
from examples import every_pair, examples

CPU = Device("cpu", "CPU")
HALF_ULP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}


@st.composite
def specs(draw, softcap=True):
    queries = draw(st.one_of(st.integers(1, 20), st.integers(100, 300)))
    keys = draw(st.one_of(st.integers(1, 20), st.integers(100, 300), st.just(queries)))
    kv_heads = draw(st.integers(1, 2))
    reach = st.one_of(st.none(), st.integers(0, 150))
    return AttentionSpec.make(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        seqlen_q=queries,
        seqlen_kv=keys,
        head_dim=draw(st.integers(1, 40)),
        head_dim_v=draw(st.integers(1, 40)),
        dtype="fp32",
        scale=draw(st.sampled_from([None, 0.3, -0.2])),
        softcap=draw(st.sampled_from([0.0, 1.5])) if softcap else 0.0,
        mask=Mask(draw(reach), draw(reach), draw(st.sampled_from(["top-left", "bottom-right"]))),
        direction="training",
    )


@settings(max_examples=examples(40, 200), deadline=None)
@given(spec=specs(), recipe=st.sampled_from(RECIPES), seed=st.integers(0, 99), strided=st.booleans())
def test_both_passes_agree_with_exact_attention_up_to_the_rounding_of_p_and_ds(spec, recipe, seed, strided):
    if recipe.smoothing:
        spec = spec.replace(softcap=0.0)
    q, k, v, grad_out = tensors(spec, seed, strided)
    before = [x.clone() for x in (q, k, v, grad_out)]
    operands, out, lse, grads = run_both_passes(recipe, spec, q, k, v, grad_out)
    assert all(torch.equal(x, y) for x, y in zip(before, (q, k, v, grad_out), strict=True))
    seen_q, seen_k, seen_v = operands.tensors()
    (truth, true_lse), (p, _) = dense_attention(seen_q, seen_k, seen_v, spec), probabilities(seen_q, seen_k, spec)
    true_grads = dense_gradients(seen_q, seen_k, seen_v, grad_out, spec)
    assert out.shape == truth.shape
    assert out.dtype == torch.float32
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-4, atol=1e-3)
    # every P is rounded by half an ulp at most, of a subnormal number below 2^-14 of the row's peak
    ulp = HALF_ULP[recipe.format]
    mass = p @ seen_v.double().abs().repeat_interleave(spec.group, 1)
    floor = 2.0**-17 * spec.seqlen_kv * seen_v.abs().max().item()
    assert ((out.double() - truth).abs() <= 1.01 * ulp * mass + floor + 1e-5).all()
    empty = ~visible(spec).any(-1)
    assert (out[:, :, empty] == 0).all()
    assert (grads[0][:, :, empty] == 0).all()
    # dO, P, dP and dS are rounded in turn, so an error is a few half ulps of the sum of magnitudes
    values = seen_v.double().abs().repeat_interleave(spec.group, 1)
    dp = grad_out.double().abs() @ values.mT
    ds = p * (dp + (grad_out.double().abs() * mass).sum(-1, keepdim=True)) * abs(spec.scale)
    keys = seen_k.double().abs().repeat_interleave(spec.group, 1)
    if recipe.smoothing:
        keys = keys + seen_k.double().mean(2, keepdim=True).abs().repeat_interleave(spec.group, 1)
    grouped = (spec.batch, spec.kv_heads, spec.group, spec.seqlen_kv, -1)
    sums = (
        ds @ keys,
        (ds.mT @ seen_q.double().abs()).view(grouped).sum(2),
        (p.mT @ grad_out.double().abs()).view(grouped).sum(2),
    )
    for got, want, size in zip(grads, true_grads, sums, strict=True):
        assert got.shape == want.shape
        assert got.dtype == torch.float32
        # a Hadamard rotation spreads an error over the head dimension
        assert (got.double() - want).norm() <= 3 * ulp * size.norm() + 1e-4
        assert got.isfinite().all()


@pytest.mark.parametrize(("recipe", "masked"), every_pair(RECIPES, [False, True]))
def test_the_error_on_normal_inputs_is_close_below_the_declared_error(recipe, masked):
    mask = Mask(200, 0, "bottom-right") if masked else Mask()
    spec = AttentionSpec.make(
        batch=1, heads=2, kv_heads=1, seqlen_q=300, seqlen_kv=391, head_dim=64, mask=mask, direction="training",
        dtype="fp32", softcap=0.0 if recipe.smoothing else 20.0,
    )  # fmt: skip
    q, k, v, grad_out = tensors(spec)
    forward, backward = emulate(recipe)
    _, out, _, grads = run_both_passes(recipe, spec, q, k, v, grad_out)
    truth, true_grads = dense_attention(q, k, v, spec)[0], dense_gradients(q, k, v, grad_out, spec)
    assert 0.5 * forward.declared_error < relative_l2(out, truth) < forward.declared_error
    worst = max(relative_l2(x, y) for x, y in zip(grads, true_grads, strict=True))
    assert 0.4 * backward.declared_error < worst < backward.declared_error


@pytest.mark.parametrize("backward", ["fp8", "fp8-token-hadamard", "fp8-smooth"])
@pytest.mark.parametrize("outliers", [False, True])
def test_the_backward_follows_another_forward_with_normalised_probabilities(backward, outliers):
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=256, head_dim=64, dtype="fp32", direction="training")
    q, k, v, grad_out = tensors(spec)
    if outliers:
        q[0, :, ::50, 3] += 30.0
        k[0, :, ::40, 3] -= 25.0
    (truth, lse), true_grads = dense_attention(q, k, v, spec), dense_gradients(q, k, v, grad_out, spec)
    kernel = BACKEND.resolve(backward)[1]
    assert kernel.follows is None
    grads, same = (
        kernel.run(Saved(Operands(spec, q, k, v), truth.float(), given_lse), grad_out)
        for given_lse in (lse.float(), None)
    )
    assert max(relative_l2(x, y) for x, y in zip(grads, true_grads, strict=True)) < (0.6 if outliers else 0.12)
    # the LSE of the unquantised scores would not make P sum to one, so it must not matter
    assert all(torch.equal(x, y) for x, y in zip(grads, same, strict=True))
