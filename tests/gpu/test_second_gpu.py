"""Every plan on a GPU that is not the current one: the same answer, and nothing left on the first."""

import pytest
import torch
from dense import dense_attention, dense_gradients, relative_l2

from attnbench import AttentionSpec, Mask, Plan, attention
from attnbench.choosing.budget import class_bound
from attnbench.kernels.devices import describe
from attnbench.kernels.registry import registry

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA GPUs")
SPEC = AttentionSpec.make(
    batch=2, heads=8, kv_heads=2, seqlen_q=384, head_dim=128, mask=Mask(None, 0), direction="training"
)


def plans() -> list[str]:
    if torch.cuda.device_count() < 2:
        return ["none"]
    second = describe(torch.device("cuda", 1))
    return [str(plan) for plan in registry().plans(SPEC) if registry().reasons(plan, SPEC, second)[0] == "ok"]


@pytest.mark.parametrize("plan", plans())
def test_the_current_device_does_not_matter(plan: str) -> None:
    second = torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    generator = torch.Generator(second).manual_seed(0)
    shapes = [(2, 8, 384, 128), (2, 2, 384, 128), (2, 2, 384, 128), (2, 8, 384, 128)]
    tensors = [torch.randn(shape, generator=generator, device=second).to(torch.bfloat16) for shape in shapes]
    leaves, grad_out = [x.requires_grad_() for x in tensors[:3]], tensors[3]
    before = torch.cuda.memory_allocated(0)
    out = attention(*leaves, is_causal=True, backend=plan)
    found = torch.autograd.grad(out, leaves, grad_out)
    torch.cuda.synchronize(second)
    assert {x.device for x in (out, *found)} == {second}
    assert torch.cuda.memory_allocated(0) == before
    bound = class_bound(Plan.parse(plan), SPEC)
    host = [x.detach().cpu() for x in (*leaves, grad_out)]
    assert relative_l2(out.detach().cpu(), dense_attention(*host[:3], SPEC)[0]) <= bound
    for each, truth in zip(found, dense_gradients(*host, SPEC), strict=True):
        assert relative_l2(each.cpu(), truth) <= bound
