"""Within torch.autocast, attention takes and returns the types that scaled_dot_product_attention does."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnbench import attention, explain
from attnbench.errors import InputError

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def tensors(*dtypes: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(1, 2, 7, 16, generator=generator).to(dtype).requires_grad_() for dtype in dtypes)


def step(function, x: tuple[Tensor, ...]) -> list[Tensor]:
    out = function(*x)
    return [out, *torch.autograd.grad(out.float().square().sum(), x)]


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@given(st.tuples(*[st.sampled_from(TYPES)] * 3), st.sampled_from(TYPES[1:3]), st.booleans(), st.booleans())
def test_autocast_casts_as_torch_does(dtypes, to, enabled, nested) -> None:
    x = tensors(*dtypes)
    with torch.autocast("cpu", dtype=to), torch.autocast("cpu", dtype=to, enabled=enabled or not nested):
        try:
            wanted = step(F.scaled_dot_product_attention, x)
        except RuntimeError:  # fp64 beside others, or other types than one where nothing is cast
            for function in (attention, explain):
                with pytest.raises(InputError, match="must have one dtype"):
                    function(*x)
            return
        found = step(attention, x)
        assert explain(*x).spec.dtype == {torch.float64: "fp64", torch.float32: "fp32"}.get(
            found[0].dtype, "bf16" if found[0].dtype == torch.bfloat16 else "fp16"
        )
    for one, two in zip(found, wanted, strict=True):
        assert one.dtype == two.dtype
        assert (one - two).norm() <= 0.02 * two.norm()


@pytest.mark.parametrize("inside", [True, False])
def test_compiled_code_casts_as_eager_code_does(inside: bool) -> None:
    x = tensors(torch.float32, torch.float32, torch.bfloat16)
    torch._dynamo.reset()

    def block(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside or torch.is_autocast_enabled("cpu")):
            return attention(q, k, v, is_causal=True)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
        found, wanted = step(compiled(block), x), step(block, x)
    assert [each.dtype for each in found] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_compiled_code_is_recompiled_when_autocast_changes() -> None:
    x = tensors(torch.float32, torch.float32, torch.float32)
    torch._dynamo.reset()
    function = compiled(lambda *x: attention(*x))
    for enabled in (False, True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            assert function(*x).dtype == (torch.bfloat16 if enabled else torch.float32)
