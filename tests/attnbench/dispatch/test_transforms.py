"""attention beneath torch.func, and traced by torch.fx, torch.jit and make_fx."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from attnbench import attention
from attnbench.errors import InputError, RefusedError

PLANS = ["auto", "reference:fp64", "sdpa-math"]
Attend = Callable[..., Tensor]


def tensors(*lead: int, length: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = *lead, 1, 2, length, 8
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


def squares(f: Attend) -> Attend:
    return lambda *x: f(*x).square().sum()


ALL = (0, 1, 2)
TRANSFORMS: dict[str, Callable[[Attend], Any]] = {
    "vmap": lambda f: vmap(f)(*tensors(3)),
    "vmap of axes that differ": lambda f: vmap(f, (1, None, 0))(
        tensors(3)[0].movedim(0, 1), tensors()[1], tensors(3)[2]
    ),
    "vmap twice": lambda f: vmap(vmap(f))(*tensors(2, 3)),
    "grad": lambda f: grad(squares(f), ALL)(*tensors()),
    "gradients of each sample": lambda f: vmap(grad(squares(f), ALL))(*tensors(3)),
    "of shared keys": lambda f: vmap(grad(squares(f), ALL), (0, None, None))(tensors(3)[0], *tensors()[1:]),
    "grad of vmap": lambda f: grad(squares(vmap(f)), ALL)(*tensors(3)),
    "vjp": lambda f: vjp(f, *tensors())[1](tensors(seed=1)[0]),
    "jacrev": lambda f: jacrev(f, 1)(*tensors()),
    "backward through vmap": lambda f: torch.autograd.grad(
        squares(vmap(f))(*(leaves := [x.requires_grad_() for x in tensors(3)])), leaves
    ),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_agree_with_those_of_torchs_attention(name: str, plan: str) -> None:
    found = TRANSFORMS[name](lambda *x: attention(*x, is_causal=True, backend=plan))
    wanted = TRANSFORMS[name](lambda *x: F.scaled_dot_product_attention(*x, is_causal=True))
    for one, two in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_unsupported_transforms_raise_an_error() -> None:
    q, k, v = tensors()

    def attend(q: Tensor) -> Tensor:
        return attention(q, k, v)

    with pytest.raises(InputError, match="no forward-mode derivative"):
        jvp(attend, (q,), (q,))
    with pytest.raises(InputError, match="no forward-mode derivative"):
        hessian(lambda q: attend(q).sum())(q)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad(lambda q: grad(lambda x: attend(x).square().sum())(q).sum())(q)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(InputError, match="no forward-mode derivative"):
        attend(torch.autograd.forward_ad.make_dual(q, q))
    narrow, one = q[None].to(torch.float8_e4m3fn), torch.ones(1)
    with pytest.raises(InputError, match="FP8 tensors has no vmap"):
        vmap(lambda q: attention(q, q, q, q_descale=one, k_descale=one, v_descale=one))(narrow)
    with pytest.raises(RefusedError):
        vmap(lambda q: attention(q, q, q, backend="sdpa-flash:bf16"))(q[None])
    torch.testing.assert_close(attend(q), F.scaled_dot_product_attention(q, k, v))  # nothing of it stays


class Layer(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2, k, v, window=(2, 0), backend="emulated:fp8") + 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_symbolic_and_jit_traces_are_computed_at_run_time_for_other_values_and_lengths() -> None:
    symbolic = torch.fx.symbolic_trace(Layer())
    assert [node.target for node in symbolic.graph.nodes].count(attention) == 1
    traced = torch.jit.trace(Layer(), tuple(tensors(dtype=torch.bfloat16)))
    for length in (5, 9):
        x = tensors(length=length, dtype=torch.bfloat16, seed=1)
        assert torch.equal(symbolic(*x), Layer()(*x))
        assert torch.equal(traced(*x), Layer()(*x))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operator_and_not_a_kernels_results(mode: str) -> None:
    recorded = make_fx(lambda *x: Layer()(*x), tracing_mode=mode)(*tensors(dtype=torch.bfloat16))
    assert torch.ops.attnbench.attention.default in [node.target for node in recorded.graph.nodes]
    x = tensors(dtype=torch.bfloat16, seed=1)
    assert torch.equal(recorded(*x), Layer()(*x))


@pytest.mark.parametrize("within", [True, False])
def test_fake_tensors_have_the_outputs_shape(within: bool) -> None:
    mode = FakeTensorMode()
    fake = [mode.from_tensor(x) for x in tensors(dtype=torch.bfloat16)]
    with mode if within else nullcontext():
        out = attention(*fake, is_causal=True)
    assert (out.shape, out.dtype) == ((1, 2, 5, 8), torch.bfloat16)
    assert type(out) is type(fake[0])


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> None:
        return None


def test_a_later_function_may_return_no_gradient() -> None:
    leaves = [x.requires_grad_() for x in tensors()]
    out = attention(*leaves, backend="sdpa-math")
    assert isinstance(out, Tensor)
    found = torch.autograd.grad(_WithoutGradient.apply(out).sum(), leaves)
    assert not any(x.any() for x in found)
