"""Memory that kernels of the ``triton`` backend share and read: zeros that are asked for, places that loads allow."""

import pytest
import torch

pytest.importorskip("triton")

from attnbench.backends.triton.blocks import Block, Wanted
from attnbench.backends.triton.forward.matrices import loadable, matrix
from attnbench.backends.triton.forward.plan import Plan

CPU = torch.device("cpu")


@pytest.fixture
def _poisoned(monkeypatch):
    """Memory that nothing has written holds NaN."""
    monkeypatch.setattr(torch, "empty", lambda *sizes, **named: torch.full(sizes, 255, **named))


@pytest.mark.usefixtures("_poisoned")
def test_parts_begin_where_kernels_may_load_them_and_are_zero_where_asked():
    wanted = [
        Wanted((3, 5), torch.float8_e4m3fn),
        Wanted((7,), torch.float32, zeros=True),
        None,
        Wanted((2, 16), torch.int32, zeros=True, width=13),
        Wanted((1,), torch.float32),
    ]
    block = Block(wanted)
    memory = block.memory(CPU)
    assert block.parts[2] is None
    for each, part in zip(wanted, block.parts, strict=True):
        if each is None:
            continue
        tensor = memory.of(part)
        assert (tensor.dtype, tensor.shape) == (each.dtype, (*each.shape[:-1], each.width or each.shape[-1]))
        assert part.begin % 256 == 0
        assert tensor.data_ptr() == memory.address + part.begin
        if each.zeros:
            assert not tensor.any()
        tensor.copy_(torch.full(tensor.shape, 1.0))
    for part in filter(None, block.parts):  # none wrote into another's
        assert torch.equal(memory.of(part).float(), torch.ones(part.shape))


def test_what_tma_cannot_read_where_it_lies_is_copied():
    memory = torch.randn(2 * 4 * 8 * 16 + 1).to(torch.bfloat16)
    there, beside = (memory[at : at + 1024].view(2, 4, 8, 16) for at in (0, 1))
    assert loadable(there, 16) is there
    copy = loadable(beside, 16)
    assert copy.data_ptr() % 16 == 0
    assert matrix(copy.shape, copy.stride(), 16) is not None
    assert torch.equal(copy, beside)
    reads = Plan(None, (), layout=object()).reads  # Q in 16 bits, by the one-pass kernel
    assert (reads(there), reads(beside)) == (True, False)
