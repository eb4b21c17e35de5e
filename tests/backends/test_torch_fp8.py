"""``torch-fp8``: torch's own code down to ``flash_attn_3::fwd``, which a dense FP64 operator of its schema answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import standins_fa as standins
import torch
from agreement import assert_quantised_attention_agrees
from hypothesis import assume, given, settings
from problems import Problem, problems
from torch import Tensor

from attnbench.backends import torch_fp8
from attnbench.backends.flash_attention import fa3_origins
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import Inputs
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

_fa3 = pytest.importorskip("torch.nn.attention._fa3", reason="this torch has no quantised attention")
H200 = Device("cuda", "NVIDIA H200", (9, 0))
KERNEL = torch_fp8.TorchFp8Forward()
NAMES = [part.split()[1].partition("=")[0] for part in standins.FWD["flash_attn_3"].replace(" = ", "=").split(", ")]
LAST: dict[str, object] = {}


def _fwd(*values: object) -> list[Tensor]:
    """What torch calls by position; it lets the library choose the number of splits, and names the lengths."""
    LAST.clear()
    LAST.update(zip(NAMES, values, strict=True))
    assert LAST["num_splits"] == 0
    assert (LAST["max_seqlen_q"], LAST["max_seqlen_k"]) == (LAST["q"].shape[1], LAST["k"].shape[1])
    assert LAST["softcap"] == 0
    assert LAST["q"].dtype == torch.float8_e4m3fn
    return standins.fa3_forward(**LAST)


@pytest.fixture(autouse=True, scope="module")
def torch_on_a_cpu() -> Iterator[None]:
    """torch's own functions, with the operator replaced and their check that tensors are on a GPU left out."""
    standins.define()
    torch_fp8._forward.cache_clear()
    with pytest.MonkeyPatch.context() as patch, standins.modules(flash_attn_interface={}):
        torch_fp8._forward()
        patch.setattr(_fa3, "_FA3_CUDA_FWD", _fwd)
        patch.setattr(_fa3, "_fa3_common_support_error", lambda *_: None)
        yield
    torch_fp8._forward.cache_clear()


@given(problems(("bf16", "fp16")))
@settings(max_examples=60, deadline=None)
def test_the_kernel_agrees_with_exact_attention_on_its_quantised_operands(problem: Problem) -> None:
    spec = problem.spec.replace(direction="forward")
    assume(not KERNEL.refusals(spec, H200))
    assert_quantised_attention_agrees(KERNEL, spec, problem)


def test_no_attention_implementation_is_activated_in_torch() -> None:
    """The operator behind scaled_dot_product_attention stays torch's own, also during a run."""
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=9, head_dim=64)
    q, k, v = (torch.randn(1, 2, 9, 64, dtype=torch.bfloat16) for _ in range(3))
    operators = ("aten::_flash_attention_forward", "aten::_flash_attention_forward.quantized")
    before = [torch._C._dispatch_dump(name) for name in operators]
    KERNEL.run(KERNEL.prepare(Inputs(q, k, v), spec))
    assert LAST  # torch's function ran
    assert torch.nn.attention.current_flash_attention_impl() is None
    assert [torch._C._dispatch_dump(name) for name in operators] == before


def test_features_missing_from_the_build_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=256, head_dim=64, mask=Mask(right=0))
    window = spec.replace(mask=Mask(left=3, right=0))
    flags = {"FLASHATTENTION_DISABLE_LOCAL": True, "FLASHATTENTION_DISABLE_FP8": False}
    with standins.modules(flash_attn_interface={}, flash_attn_config={"CONFIG": {"build_flags": flags}}):
        fa3_origins.interface.cache_clear()
        assert KERNEL.refusals(spec, H200) == []
        assert KERNEL.refusals(window, H200) == ["flash_attn_interface was built without windows"]
        flags["FLASHATTENTION_DISABLE_FP8"] = True
        assert KERNEL.refusals(spec, H200) == ["flash_attn_interface was built without FP8"]
    fa3_origins.interface.cache_clear()


def test_availability_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with standins.modules(flash_attn_interface={}):
        fa3_origins.interface.cache_clear()
        found = torch_fp8.BACKEND.availability()
        assert (found.version, found.origin) == (torch.__version__, "FlashAttention-3 unknown (official)")
        for name, lacks in (("_ENTRY", "_a_name_of_another_version"), ("_MODULE", "torch.nn.attention._none")):
            with monkeypatch.context() as patch:
                patch.setattr(torch_fp8, name, lacks)
                found = torch_fp8.BACKEND.availability()
            assert "has no quantised attention" in (found.reason or "")
            assert "torch" in (found.install or "")
    monkeypatch.setattr(torch_fp8, "interface", lambda: None)
    found = torch_fp8.BACKEND.availability()
    assert "flash_attn_interface, which is not installed" in (found.reason or "")
    assert found.install == fa3_origins.INSTALL
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in (torch_fp8.BACKEND.availability().reason or "")
