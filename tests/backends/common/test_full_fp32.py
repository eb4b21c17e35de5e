"""FP32 products are computed in FP32 with any torch precision setting."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from attnbench.backends.common.full_fp32 import full_fp32

MATMUL = torch.backends.cuda.matmul


@pytest.fixture(params=["none", "ieee", "tf32"])
def program_setting(request: pytest.FixtureRequest) -> Iterator[str]:
    """The precision that the program has set."""
    default = MATMUL.fp32_precision
    MATMUL.fp32_precision = request.param
    yield request.param
    MATMUL.fp32_precision = default


def test_full_fp32_is_set_explicitly_on_a_gpu(program_setting: str) -> None:
    """The default follows environment variables there, such as TORCH_ALLOW_TF32_CUBLAS_OVERRIDE."""
    with full_fp32(SimpleNamespace(is_cuda=True)):
        assert MATMUL.fp32_precision == "ieee"
    assert MATMUL.fp32_precision == program_setting
