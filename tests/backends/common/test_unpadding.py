"""Packed and padded batches, with stand-ins of FlashAttention: rows as if computed alone, no writes to padding."""

from __future__ import annotations

import gc

import pytest
import standins_fa
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import Documents, answers, documents

from attnbench.backends.common import unpadding
from attnbench.backends.flash_attention import fa3, fa4
from attnbench.kernels.contract import ForwardKernel, Inputs
from attnbench.problem.fp8 import Quantised
from attnbench.problem.lengths import Lengths
from attnbench.problem.mask import Mask
from examples import examples

CAUSAL = Mask(right=0, alignment="bottom-right")
MASKS = st.sampled_from([Mask(), CAUSAL, Mask(5, 3, "bottom-right")])
FLASH = documents(
    70, MASKS, heads=(4, 2), head_dim=st.sampled_from([32, 40]), padding=st.sampled_from([None, "left", "right"])
)
FORWARDS = {each.name: each for each in (*fa3.BACKEND.kernels, *fa4.BACKEND.kernels) if isinstance(each, ForwardKernel)}


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    standins_fa.install_flash_attention(monkeypatch)


@given(FLASH, st.sampled_from(["fa3:fp8", "fa3:bf16", "fa4:bf16"]))
@settings(max_examples=examples(14, 200))
def test_each_row_has_the_result_of_its_tokens_alone(batch: Documents, name: str) -> None:
    forward, backward = FORWARDS[name], fa4.Fa4Backward("bf16")
    for found, alone in zip(answers(batch, forward, backward), batch.run_alone(forward, backward), strict=True):
        for x, y in zip(found, alone, strict=True):
            torch.testing.assert_close(x.float(), y.float(), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_quantised_rows_keep_the_layout_of_the_tensors(padding: str) -> None:
    """A backward of another backend reads them beside the lengths of the rows."""
    batch = Documents(((30, 30), (7, 7)), heads=(4, 2), padding=padding)
    whole, lengths, spec = batch.batched(batch.parts())
    operands = FORWARDS["fa3:fp8"].prepare(Inputs(*whole[:3], lengths), spec)
    for x, given_ in zip((operands.q, operands.k, operands.v), whole, strict=False):
        assert isinstance(x, Quantised)
        wide, padded = x.dequantised(torch.float32), given_.isnan()
        assert not wide[padded].any()
        torch.testing.assert_close(wide[~padded], given_[~padded].float(), rtol=0.07, atol=0.02)


def test_token_indices_are_computed_once_until_the_lengths_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made, find = [], unpadding._side_of
    monkeypatch.setattr(unpadding, "_side_of", lambda *given: made.append(given) or find(*given))
    batch = Documents(((30, 30), (7, 7)), padding="left")
    whole, lengths, spec = batch.batched(batch.parts())
    spec, forward = spec.replace(direction="forward"), FORWARDS["fa4:bf16"]

    def output_for(given: Lengths) -> torch.Tensor:
        return forward.run(forward.prepare(Inputs(*whole[:3], given), spec)).out

    before = output_for(lengths)
    assert torch.equal(output_for(lengths), before)
    assert len(made) == 2
    assert lengths.q is not None
    lengths.q[0] = 12
    assert not output_for(lengths)[0, :, :-12].any()
    assert len(made) == 3
    del lengths, made[:]
    gc.collect()
    assert not unpadding._sides
