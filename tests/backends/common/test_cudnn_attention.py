"""What cuDNN's attention does not compute, refused by both backends that call it and by the kernel it is true of."""

from __future__ import annotations

import pytest

from attnbench.backends.cudnn import backend as cudnn
from attnbench.backends.te import backend as te
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import Backend, BackwardKernel, ForwardKernel
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

H200 = Device("cuda", "NVIDIA H200", (9, 0))
SPEC = AttentionSpec.make(batch=2, heads=4, kv_heads=2, seqlen_q=96, head_dim=64)
both = pytest.mark.parametrize("backend", [cudnn.BACKEND, te.BACKEND], ids=lambda backend: backend.name)


def forward_of(backend: Backend, precision: str) -> ForwardKernel:
    name = f"{backend.name}:{precision}"
    return next(k for k in backend.kernels if isinstance(k, ForwardKernel) and k.name == name)


def backward_of(backend: Backend, precision: str) -> BackwardKernel:
    name = f"{backend.name}:{precision}"
    return next(k for k in backend.kernels if isinstance(k, BackwardKernel) and k.name == name)


@both
def test_a_last_group_of_queries_that_is_not_whole_is_no_case_for_an_fp8_backward(backend: Backend) -> None:
    forward, backward = forward_of(backend, "fp8"), backward_of(backend, "fp8")
    odd, whole = (SPEC.replace(head_dim=128, head_dim_v=128, seqlen_q=queries) for queries in (328, 320))
    assert forward.refusals(odd, H200) == forward.refusals(whole, H200) == []
    assert "no multiple of 16" in "; ".join(backward.refusals(odd, H200))
    assert backward.refusals(whole, H200) == []


@both
def test_16_bits_go_beyond_256_in_the_forward_alone(backend: Backend) -> None:
    wide = SPEC.replace(head_dim=264, head_dim_v=2048, direction="training")
    assert forward_of(backend, "bf16").refusals(wide, H200) == []
    assert "outside 8 to 256" in "; ".join(backward_of(backend, "bf16").refusals(wide, H200))


@both
@pytest.mark.parametrize(
    ("changes", "reason"), [({"seqlen_q": 1}, "single query"), ({"head_dim_v": 80}, "not its own")]
)
def test_what_the_fp8_forward_alone_lacks(backend: Backend, changes: dict[str, object], reason: str) -> None:
    assert forward_of(backend, "fp8").refusals(SPEC, H200) == []
    assert reason in "; ".join(forward_of(backend, "fp8").refusals(SPEC.replace(**changes), H200))
    assert forward_of(backend, "bf16").refusals(SPEC.replace(**changes), H200) == []


def test_windows_without_a_left_side_have_more_queries_than_keys_with_the_front_end_alone() -> None:
    spec = SPEC.replace(seqlen_q=97, mask=Mask(right=5))
    for kernel_of in (forward_of, backward_of):
        assert kernel_of(cudnn.BACKEND, "bf16").refusals(spec, H200) == []
        assert "as many keys as queries" in "; ".join(kernel_of(te.BACKEND, "bf16").refusals(spec, H200))
