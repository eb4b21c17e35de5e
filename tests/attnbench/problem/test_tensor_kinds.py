"""Tensors without plain memory: computed like equivalent plain tensors, or refused in one sentence."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from attnbench import attention, explain
from attnbench.errors import InputError


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 5, 8, generator=generator).to(dtype) for _ in range(3)]


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
