"""Activation checkpointing in a block: what is computed again in the backward is computed by the block's attention."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from attnbench import use_backend
from attnbench.errors import AttnbenchWarning, InputError
from attnbench.integrations.sdpa import replaced

FP8 = {"backend": "emulated", "dtype": "fp8"}  # differs from torch by more than rounding, which shows who answered
WEIGHT = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))


def tensor(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def layer(q):
    x = q @ WEIGHT
    return F.scaled_dot_product_attention(x, x, x, is_causal=True).sin()


def plain(q):
    return layer(q) + layer(q)


def reentrant(q):
    return checkpoint(plain, q, use_reentrant=True)


def without(q):
    return checkpoint(plain, q, use_reentrant=False)


def nested(q):
    return checkpoint(
        lambda q: checkpoint(layer, q, use_reentrant=False) + checkpoint(layer, q, use_reentrant=False), q,
        use_reentrant=False,
    )  # fmt: skip


class Own(torch.autograd.Function):
    """A checkpoint as DeepSpeed and Megatron have their own."""

    @staticmethod
    def forward(ctx, function, q):
        ctx.run_function = function
        ctx.save_for_backward(q)
        with torch.no_grad():
            return function(q)

    @staticmethod
    def backward(ctx, grad):
        (q,) = ctx.saved_tensors
        q = q.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run_function(q)
        out.backward(grad)
        return None, q.grad


def own(q):
    return Own.apply(plain, q)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("how", [reentrant, without, nested, own])
def test_outputs_and_gradients_are_those_without_checkpointing(how, inside):
    q = tensor(1, 2, 32, 16)

    def step(function):
        with replaced(**FP8) as calls:
            out = function(q)
            if inside:
                out.square().sum().backward()
        if not inside:
            out.square().sum().backward()
        gradient, q.grad = q.grad, None
        return out.detach(), gradient, calls.served

    wanted, found = step(plain), step(how)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert wanted[2] == 2
    assert found[2] >= 4


def test_the_context_around_the_forward_holds_in_the_backward():
    q = tensor(1, 2, 32, 16)
    with replaced(**FP8):
        (wanted,) = torch.autograd.grad(plain(q).square().sum(), q)
    with replaced(), use_backend(**FP8):
        out = without(q)
    assert torch.equal(torch.autograd.grad(out.square().sum(), q)[0], wanted)
    assert not torch.equal(torch.autograd.grad(without(q).square().sum(), q)[0], wanted)


def test_an_autograd_function_that_may_compute_again_by_other_means_is_refused():
    class Unknown(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            return F.scaled_dot_product_attention(q, q, q)

        @staticmethod
        def backward(ctx, grad):
            return grad

    with replaced(), pytest.raises(InputError, match="an autograd function that may compute attention again"):
        Unknown.apply(tensor(1, 2, 8, 16))


def test_graphs_of_fx_hold_torchs_sdpa_and_traces_of_jit_are_refused():
    q = tensor(1, 2, 8, 16).detach()

    def program(q):
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    with replaced(**FP8) as calls:
        graph = torch.fx.symbolic_trace(program)
        assert calls.served == 0
        found = graph(q)
        assert calls.served == 1
        with pytest.raises(InputError, match=r"torch.jit.trace, which records no operator of attnbench"):
            torch.jit.trace(program, (q,))
    assert torch.equal(graph(q), program(q))
    assert not torch.equal(found, program(q))
    with pytest.warns(AttnbenchWarning, match=r"torch\.jit\.trace"), replaced(otherwise="torch"):
        traced = torch.jit.trace(program, (q,))
    assert torch.equal(traced(q), program(q))
