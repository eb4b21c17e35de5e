"""Tensors without plain memory are computed like plain ones or refused; autocast casts as it does for torch's SDPA."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from attnbench import attention, explain
from attnbench.errors import InputError


def tensors(*dtypes: torch.dtype) -> list[Tensor]:
    """q, k and v of one dtype, fp32 by default, or of three."""
    generator = torch.Generator().manual_seed(0)
    each = dtypes if len(dtypes) == 3 else (dtypes or (torch.float32,)) * 3
    return [torch.randn(1, 2, 5, 8, generator=generator).to(dtype) for dtype in each]


def jagged() -> Tensor:
    rows = [torch.randn(length, 2, 8) for length in (3, 4)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: tensors()[0].to_sparse(), "layout torch.sparse_coo.*to_dense"),
    "csr": (lambda: torch.ones(4, 4).to_sparse_csr(), "layout torch.sparse_csr"),
    "mkldnn": (lambda: tensors()[0].to_mkldnn(), "layout torch._mkldnn"),
    "nested": (lambda: torch.nested.nested_tensor([torch.randn(2, n, 8) for n in (3, 4)]), "is a nested tensor"),
    "jagged": (jagged, "must all be nested tensors"),
    "complex": (lambda: tensors(torch.complex64)[0], "dtype"),
    "integers": (lambda: tensors(torch.int64)[0], "dtype"),
    "quantised by torch": (lambda: torch.quantize_per_tensor(tensors()[0], 0.1, 0, torch.qint8), "dtype"),
    "meta": (lambda: tensors()[0].to("meta"), "on one device"),
    "none": (lambda: None, "must be a torch.Tensor"),
    "no queries": (lambda: tensors()[0][:, :, :0], "seqlen_q must be"),
    "no batch": (lambda: tensors()[0][:0], "agree in batch"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_unreadable_tensors_are_refused_even_after_a_cached_choice(name: str, place: int) -> None:
    make, words = REFUSED[name]
    x = tensors()
    attention(*x)  # of the same shape and dtype
    x[place] = make()
    for function in (attention, explain):
        if name == "no queries" and place == 2:
            words = "agree in length"
        with pytest.raises(InputError, match=words if name != "no batch" or place == 0 else "agree in batch"):
            function(*x)


class TensorSubclass(Tensor):
    """A subclass that torch functions preserve."""


def test_a_subclass_is_preserved_and_a_parameter_gives_a_tensor() -> None:
    x = tensors()
    out = attention(*(each.as_subclass(TensorSubclass) for each in x))
    assert type(out) is TensorSubclass
    assert torch.equal(out.as_subclass(Tensor), attention(*x))
    assert type(attention(*map(torch.nn.Parameter, x))) is Tensor


def test_a_subclass_that_overrides_operators_overrides_this_one() -> None:
    x, y = tensors(), [each * 2 for each in tensors()]
    out = attention(*map(TwoTensor, x, y))
    assert torch.equal(out.a, attention(*x))
    assert torch.equal(out.b, attention(*y))


def test_a_default_device_changes_nothing() -> None:
    x = tensors()
    with torch.device("meta"):
        assert torch.equal(attention(*x), attention(*x))


# --- autocast ---

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def step(function, x: list[Tensor]) -> list[Tensor]:
    out = function(*x)
    return [out, *torch.autograd.grad(out.float().square().sum(), x)]


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@given(st.tuples(*[st.sampled_from(TYPES)] * 3), st.sampled_from(TYPES[1:3]), st.booleans(), st.booleans())
def test_autocast_casts_as_torch_does(dtypes, to, enabled, nested) -> None:
    x = [each.requires_grad_() for each in tensors(*dtypes)]
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
    x = [each.requires_grad_() for each in tensors(torch.float32, torch.float32, torch.bfloat16)]
    torch._dynamo.reset()

    def block(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside or torch.is_autocast_enabled("cpu")):
            return attention(q, k, v, is_causal=True)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
        found, wanted = step(compiled(block), x), step(block, x)
    assert [each.dtype for each in found] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_compiled_code_is_recompiled_when_autocast_changes() -> None:
    x = [each.requires_grad_() for each in tensors()]
    torch._dynamo.reset()
    function = compiled(lambda *x: attention(*x))
    for enabled in (False, True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            assert function(*x).dtype == (torch.bfloat16 if enabled else torch.float32)
