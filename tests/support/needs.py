"""What some tests need of the machine, as marks that skip them where it is missing."""

import pytest
import torch

needs_avx2 = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="FlexAttention's CPU kernel needs AVX2"
)
