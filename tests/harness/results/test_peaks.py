"""Shares of the peak: right by hand, and impossible ones refused."""

import pytest

from attnbench import AttentionSpec, Mask, Plan
from attnbench.harness.results.peaks import peak_share

SPEC = AttentionSpec.make(batch=4, heads=16, seqlen_q=4096, head_dim=128)
FLOPS = 4 * 4 * 16 * 4096**2 * 128


def test_an_h200_row_by_hand():
    # 5.5e11 operations in 0.9 ms are 611 TFLOPS; the datasheet says 989 in bf16 and twice that in FP8.
    assert peak_share(Plan("a:bf16"), SPEC, {"kernel": [0.9]}, "NVIDIA H200") == pytest.approx(FLOPS / 0.9e9 / 989.4)
    assert peak_share(Plan("a:fp8-token"), SPEC, {"kernel": [0.9]}, "NVIDIA H200") == pytest.approx(
        FLOPS / 0.9e9 / 1978.9
    )


def test_passes_count_each_at_its_own_precision():
    spec = SPEC.replace(direction="training", mask=Mask(None, 0))
    forward = spec.replace(direction="forward").flops
    found = peak_share(
        Plan("a:fp8", "b:bf16"), spec, {"kernel": [0.5], "backward": [1.5], "call": [9.0]}, "NVIDIA H200"
    )
    assert found == pytest.approx((forward / 1978.9 + 2.5 * forward / 989.4) / 1e9 / 2.0)


@pytest.mark.parametrize(
    ("plan", "times", "device"),
    [
        ("a:bf16", {"kernel": [1.0]}, "A CPU"),
        ("a:int4", {"kernel": [1.0]}, "NVIDIA H200"),
        ("a:fp8", {"kernel": [1.0]}, "NVIDIA A100-SXM4-80GB"),
        ("a:bf16", {"call": [1.0]}, "NVIDIA H200"),
        ("a:bf16>b:bf16", {"kernel": [1.0]}, "NVIDIA H200"),
    ],
)
def test_what_is_not_known_has_no_share(plan, times, device):
    assert peak_share(Plan.parse(plan), SPEC, times, device) is None
