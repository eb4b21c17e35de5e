"""``fa3`` and vLLM's: results through operators with each origin's schema, and the choice of the origin."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import standins_fa as standins
import torch
from agreement import assert_both_passes_agree, assert_descales_are_used, assert_quantised_attention_agrees
from dense import dense_attention, dense_gradients, distance, relative_l2
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from problems import Problem, problems, tensors_of

from attnbench.backends.flash_attention import fa3, fa3_origins, fa3_vllm
from attnbench.backends.flash_attention.fa3_operands import dimensions
from attnbench.backends.flash_attention.fa3_operator import FORWARD, OperatorError, bound
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec
from examples import examples

H200 = Device("cuda", "NVIDIA H200", (9, 0))
FORWARDS = {kernel.name: kernel for kernel in fa3.BACKEND.kernels if isinstance(kernel, ForwardKernel)}
BACKWARDS = {kernel.name: kernel for kernel in fa3.BACKEND.kernels if isinstance(kernel, BackwardKernel)}
SGLANG = {"sgl_kernel": {}, "sgl_kernel__flash_ops": {}}
CONFIG = {f"FLASHATTENTION_DISABLE_{part}": False for part in ("BACKWARD", "FP8", "FP16", "LOCAL", "SOFTCAP")}


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[None]:
    monkeypatch.delenv(fa3_origins.VARIABLE, raising=False)
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    standins.define()
    forget()
    yield
    sys.modules.pop("flash_attn_interface", None)
    forget()


def forget() -> None:
    fa3_origins._chosen.cache_clear()
    fa3_origins.interface.cache_clear()
    fa3_origins._loaded.cache_clear()


def official_modules(**flags: bool) -> dict[str, dict[str, object]]:
    changed = {f"FLASHATTENTION_DISABLE_{name}": off for name, off in flags.items()}
    return {"flash_attn_interface": {}, "flash_attn_config": {"CONFIG": {"build_flags": CONFIG | changed}}}


@given(problems(("bf16", "fp16")), st.booleans(), st.booleans())
@settings(max_examples=examples(20, 200), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_sixteen_bit_kernels_agree_with_dense_fp64(problem: Problem, foreign: bool, sglang: bool) -> None:
    """Forward through both schemas, backward through the official one, after its own and an exact forward."""
    spec = problem.spec
    forget()
    with standins.modules(**(SGLANG if sglang else official_modules())):
        forward, backward = FORWARDS[f"fa3:{spec.dtype}"], BACKWARDS[f"fa3:{spec.dtype}"]
        assume(not forward.refusals(spec, H200))
        served = assert_both_passes_agree(forward, backward, problem, H200, foreign)
        assert served != sglang
        assert not sglang or backward.refusals(spec, H200) == ["the build from sglang has no backward"]


@given(problems(("bf16", "fp16")))
@settings(max_examples=examples(20, 200), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_fp8_agrees_with_exact_attention_on_its_quantised_operands(problem: Problem) -> None:
    spec = problem.spec.replace(direction="forward")
    forward = FORWARDS["fa3:fp8"]
    with standins.modules(**SGLANG):
        assume(not forward.refusals(spec, H200))
        operands = assert_quantised_attention_agrees(forward, spec, problem)
    for given_, stands in zip(tensors_of(problem), operands.tensors(torch.float64), strict=False):
        assert distance(stands, given_.double()) <= 0.05
    grouped = operands.q.descale.view(spec.batch, spec.kv_heads, spec.group)
    assert torch.equal(grouped, grouped[..., :1].expand_as(grouped))


@given(problems(("bf16", "fp16")), st.booleans())
@settings(max_examples=examples(20, 200), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_vllms_operator_agrees_with_exact_attention_on_its_inputs(problem: Problem, fp8: bool) -> None:
    """Its schema accepts only packed sequences."""
    spec, name = problem.spec.replace(direction="forward"), "fp8" if fp8 else problem.spec.dtype
    kernel = next(each for each in fa3_vllm.BACKEND.kernels if each.name == f"fa3-vllm:{name}")
    assume(not kernel.refusals(spec, H200))
    with standins.modules(vllm={}, vllm__vllm_flash_attn={}, vllm__vllm_flash_attn___vllm_fa3_C={}):
        assert_quantised_attention_agrees(kernel, spec, problem)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_given_descales_are_applied_to_each_head(granularity: str, kv_heads: int) -> None:
    spec = AttentionSpec.make(
        batch=2, heads=6, kv_heads=kv_heads, seqlen_q=20, seqlen_kv=33, head_dim=40, dtype="e4m3",
        descale=granularity, mask=Mask(right=0),
    )  # fmt: skip
    with standins.modules(**SGLANG):
        assert FORWARDS["fa3:fp8"].refusals(spec, H200) == []
        assert_descales_are_used(FORWARDS["fa3:fp8"], spec, 3)


@given(st.integers(1, 256), st.integers(1, 256), st.booleans(), st.booleans())
def test_padded_head_dimensions_match_the_library(d: int, dv: int, fp8: bool, backward: bool) -> None:
    """Equal but for one pair of ranges, which random problems do not reach."""
    wide, wide_v = dimensions(d, dv, fp8, backward)
    step = 16 if fp8 else 8
    assert wide % step == wide_v % step == 0
    assert d <= wide <= 256
    assert dv <= wide_v <= 256
    assert wide == wide_v or (not backward and 128 < wide <= 192 and 96 < wide_v <= 128)
    assert d != dv or wide < d + step


@pytest.mark.parametrize(
    ("flag", "name", "changes"),
    [
        ("FP8", "fa3:fp8", {}),
        ("FP16", "fa3:fp16", {"dtype": "fp16"}),
        ("LOCAL", "fa3:bf16", {"mask": Mask(left=3)}),
        ("SOFTCAP", "fa3:bf16", {"softcap": 3.0}),
        ("BACKWARD", "fa3:bf16", {"direction": "training"}),
    ],
)
def test_features_missing_from_the_build_are_refused(flag: str, name: str, changes: dict[str, object]) -> None:
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=16, head_dim=64).replace(**changes)
    kernel = BACKWARDS[name] if flag == "BACKWARD" else FORWARDS[name]
    with standins.modules(**official_modules()):
        assert kernel.refusals(spec, H200) == []
    forget()
    with standins.modules(**official_modules(**{flag: True})):
        assert "the build from official has no" in kernel.refusals(spec, H200)[0]


def test_the_first_installed_origin_is_used_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fa3.BACKEND.availability()
    assert (found.ok, found.install) == (False, fa3_origins.INSTALL)
    with standins.modules(**SGLANG, **official_modules()):
        forget()
        assert fa3.BACKEND.availability().origin == "official"
        monkeypatch.setenv(fa3_origins.VARIABLE, "sglang")
        assert fa3.BACKEND.availability().origin == "sglang"
        monkeypatch.setenv(fa3_origins.VARIABLE, "hub")
        assert "hub" in (fa3.BACKEND.availability().reason or "")
        monkeypatch.setenv(fa3_origins.VARIABLE, "somewhere")
        assert "must be one of official, repackaged, sglang, fa3-fwd, hub" in (fa3.BACKEND.availability().reason or "")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv(fa3_origins.VARIABLE)
    assert "without CUDA" in (fa3.BACKEND.availability().reason or "")


def install_wheel(folder: Path, name: str, module: str, source: str) -> None:
    """Installs the files of a wheel with one module."""
    (folder / f"{module}.py").write_text(source)
    facts = folder / f"{name.replace('-', '_')}-3.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.1\n")
    (facts / "top_level.txt").write_text(f"{module}\n")


@pytest.mark.parametrize(
    ("distribution", "origin"), [("flash_attn_3", "official"), ("tokenspeed-fa3", "tokenspeed-fa3")]
)
def test_a_renamed_distribution_is_not_official(
    distribution: str, origin: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_wheel(tmp_path, distribution, "flash_attn_interface", "")
    monkeypatch.syspath_prepend(tmp_path)
    found = fa3.BACKEND.availability()
    assert (found.ok, found.version, found.origin) == (True, "3.1", origin), found.reason
    assert fa3_origins.chosen() == fa3_origins.interface()
    monkeypatch.setenv(fa3_origins.VARIABLE, "repackaged")
    forget()
    assert fa3.BACKEND.availability().ok == (origin != "official")


def test_a_prebuilt_wheel_that_does_not_fit_this_cuda_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lacking = "libcudart.so.13: cannot open shared object file"
    install_wheel(tmp_path, "tokenspeed-fa3", "flash_attn_interface", f"raise ImportError({lacking!r})")
    monkeypatch.syspath_prepend(tmp_path)
    found = fa3.BACKEND.availability()
    assert not found.ok
    assert found.reason == f"tokenspeed-fa3 3.1 could not be loaded: ImportError: {lacking}"


def test_the_forward_only_wheel_names_its_own_module_and_configuration() -> None:
    """``fa3-fwd`` 0.0.3 is built without windows, fp16 and backward, under names of its own."""
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=16, head_dim=64)
    flags = {"FLASHATTENTION_DISABLE_LOCAL": True, "FLASHATTENTION_DISABLE_BACKWARD": True}
    with standins.modules(fa3_fwd={}, fa3_fwd___C={}, fa3_fwd_config={"CONFIG": {"build_flags": flags}}):
        assert fa3.BACKEND.availability().origin == "fa3-fwd"
        forward = FORWARDS["fa3:fp8"]
        assert forward.refusals(spec, H200) == []
        assert forward.refusals(spec.replace(mask=Mask(left=3, right=0)), H200) == [
            "the build from fa3-fwd has no windows"
        ]
        q, k, v, _ = Problem(spec, "bhsd", False, 0).tensors()
        operands = forward.prepare(Inputs(q, k, v), spec)
        truth, _ = dense_attention(*operands.tensors(torch.float64), spec)
        assert relative_l2(forward.run(operands).out, truth) <= 0.004


def test_the_hub_is_used_only_if_its_kernel_is_cached_or_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    asked: list[tuple[str, int]] = []

    def get_kernel(name: str, version: int) -> object:
        asked.append((name, version))
        raise OSError("no network")

    with standins.modules(kernels={"get_kernel": get_kernel}):
        assert fa3.BACKEND.availability().reason
        assert asked == []
        forget()
        monkeypatch.setenv(fa3_origins.VARIABLE, "hub")
        assert "no network" in (fa3.BACKEND.availability().reason or "")
        assert asked == [("kernels-community/flash-attn3", 1)]


def test_an_operator_with_another_schema_is_an_error() -> None:
    library = torch.library.Library("attnbench_test_fa3", "FRAGMENT")
    library.define(f"lacks({standins.FWD['sgl_kernel'].replace('softcap', 'cap')}) -> Tensor[]")
    library.define(f"adds({standins.FWD['sgl_kernel']}, int mode) -> Tensor[]")
    with pytest.raises(OperatorError, match="no argument softcap"):
        bound(torch.ops.attnbench_test_fa3.lacks.default, FORWARD)
    with pytest.raises(OperatorError, match="mode"):
        bound(torch.ops.attnbench_test_fa3.adds.default, FORWARD)
    library.define(f"fits({standins.FWD['sgl_kernel']}) -> Tensor[]")
    with pytest.raises(TypeError, match="15 arguments, not 11"):
        bound(torch.ops.attnbench_test_fa3.fits.default, FORWARD)(*range(11))


def test_a_backward_after_fp8_uses_the_quantised_operands() -> None:
    spec = AttentionSpec.make(batch=1, heads=4, kv_heads=2, seqlen_q=24, head_dim=32, direction="training")
    q, k, v, grad = Problem(spec, "bhsd", False, 0).tensors()
    with standins.modules(**official_modules()):
        operands = FORWARDS["fa3:fp8"].prepare(Inputs(q, k, v), spec)
        result = FORWARDS["fa3:fp8"].run(operands)
        found = BACKWARDS["fa3:bf16"].run(Saved(operands, *result), grad)
    exact = dense_gradients(*operands.tensors(torch.float64), grad, spec)
    assert all(relative_l2(x, y) < 0.02 for x, y in zip(found, exact, strict=True))
    assert all(x.dtype == TO_TORCH[spec.dtype] for x in found)
