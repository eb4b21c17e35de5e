"""FP8 to 16 bits on a GPU: every number, exactly."""

import pytest
import torch

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float16, torch.float32])
def test_every_fp8_value_is_widened_exactly(narrow, wide):
    from attnbench.backends.common.widening import widened

    x = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(narrow).repeat(100)
    for factor in (1.0, 0.37, 2.0**-9, 3.0e4):
        found = widened(x, torch.tensor(factor, device=DEVICE), wide)
        assert torch.equal(found.nan_to_num(nan=7.0), (x.float() * factor).to(wide).nan_to_num(nan=7.0))
