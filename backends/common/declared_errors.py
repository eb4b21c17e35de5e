"""What kernels declare: the error of those that compute in the type of the tensors, and how that of FP8 ones grows."""

from __future__ import annotations

__all__ = ["DECLARED_ERROR", "DECLARED_GRADIENT_ERROR", "FIXED_SCALE", "SHORT_ACCUMULATOR", "STEADY"]

# Relative L2 of out, and of the worst of dq, dk and dv, of kernels that compute in the type of the tensors and add up
# in FP32 or wider.  Seen on normal inputs: on an H200 up to 0.0024 and 0.0035 in bf16, 1.4e-6 and 1.8e-6 in fp32 (with
# a head dimension of 256 and scores three times the usual size); on a CPU up to 0.00028 and 0.0004 in fp16, 4e-15 and
# 2e-15 in fp64, these two with 8192 keys.
DECLARED_ERROR = {"fp64": 1e-14, "fp32": 1.5e-6, "bf16": 0.003, "fp16": 0.0004}
DECLARED_GRADIENT_ERROR = {"fp64": 1e-14, "fp32": 2e-6, "bf16": 0.004, "fp16": 0.0005}

# ``error_growth``, seen on an H200 from 8k to 32k and to 128k keys of D 128, without a mask and causal.
# Products promoted to FP32 every block of tokens: 1.02 a doubling at most on normal inputs and on V with a mean.
STEADY = 1.0
# P·V summed in Hopper's FP8 accumulator of 13 mantissa bits loses in proportion to the number of additions: O was off
# by 0.057, 0.203 and 0.461 on V with a mean of 0.5.  dQ, made from that O, gets smaller with the root of the keys, and
# was off by 0.14, 1.03 and 4.36.
SHORT_ACCUMULATOR = 2**1.5
# P in e4m3, for dV, times 256 whatever the number of keys: P is about one by their number, and 256 by 16,384 is the
# smallest normal number.  dV was off by 0.056, 0.070 and 0.187 on normal inputs.
FIXED_SCALE = 2.0
