"""Marks that skip tests on machines without a feature that they need."""

import pytest
import torch

needs_avx2 = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="FlexAttention's CPU kernel needs AVX2"
)
