"""Refusals of the vendors' kernels on a GPU in both passes, with their reasons."""

from __future__ import annotations

import pytest
import torch

from attnbench.errors import InputError
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import Inputs
from attnbench.kernels.registry import registry
from attnbench.problem.fp8 import Recipe, quantise
from attnbench.problem.lengths_kind import LengthsKind
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

H200, B200 = Device("cuda", "NVIDIA H200", (9, 0)), Device("cuda", "NVIDIA B200", (10, 0))
ADA, A100, V100 = (Device("cuda", "another", capability) for capability in ((8, 9), (8, 0), (7, 0)))
CPU = Device("cpu", "CPU")
SPEC = AttentionSpec.make(batch=1, heads=2, seqlen_q=256, head_dim=64)
CAUSAL, END, BEFORE = Mask(right=0), Mask(right=0, alignment="bottom-right"), Mask(left=5, right=0)
PACKED = LengthsKind(batch="packed", total_q=512, total_kv=512)
SQUARE = LengthsKind(batch="packed", square=True, total_q=512, total_kv=512)
FAR = {"heads": 64, "seqlen_kv": 270336, "head_dim": 128, "head_dim_v": 128}
WIDE = {"head_dim": 128, "head_dim_v": 128}
CUDNN_BF16 = [
    ({}, B200, "9.x only"),
    ({"softcap": 2.0}, H200, "softcap"),
    ({"seqlen_q": 257, "mask": Mask(left=90, right=20)}, H200, "as many keys as queries"),
    ({"seqlen_q": 257, "mask": Mask(right=5, alignment="bottom-right")}, H200, "as many keys as queries"),
    ({"seqlen_q": 257, "mask": END}, H200, "see no key"),
    ({"scale": -0.1}, H200, "a scale above 0"),
    ({"lengths": PACKED}, H200, "does not define rows that see no key"),
]
CUDNN_FP8 = [
    ({}, B200, "9.x only"),
    ({"head_dim": 272, "head_dim_v": 272}, H200, "head_dim 272 is outside 16 to"),
    ({"seqlen_q": 9, "mask": END}, H200, "no bottom-right alignment"),
    ({"head_dim": 72, "head_dim_v": 72}, H200, "no multiple of 16"),
    ({"scale": 0.0}, H200, "a scale above 0"),
    ({"lengths": SQUARE}, H200, "not a packed batch"),
]
REFUSED = {
    "cudnn:bf16": [*CUDNN_BF16, ({"lengths": SQUARE, "head_dim": 264, "head_dim_v": 264}, H200, "256")],
    "te:bf16": CUDNN_BF16,
    "cudnn:fp8": [*CUDNN_FP8, ({"seqlen_q": 257, "mask": Mask(90, 20)}, H200, "as many keys as queries")],
    "te:fp8": [*CUDNN_FP8, ({"mask": BEFORE}, H200, "no window mask")],
    "fa2:bf16": [
        ({"head_dim": 264, "head_dim_v": 264}, H200, "outside 1 to 256"),
        ({"seqlen_q": 999, "mask": CAUSAL}, H200, "beyond all"),
        ({"seqlen_q": 999, "mask": BEFORE}, H200, "last key"),
        ({"scale": -1.0}, H200, "positive scale"),
        ({"batch": 2**16}, H200, "takes at most"),
        ({"dtype": "fp32"}, H200, "takes bf16 tensors"),
        ({}, V100, "needs compute capability"),
    ],
    "fa3:bf16": [
        ({"seqlen_q": 999, "mask": BEFORE}, H200, "last key"),
        ({"scale": 0.0}, H200, "positive scale"),
        ({"head_dim": 257, "head_dim_v": 257}, H200, "outside"),
        ({}, B200, "exists only below"),
        ({}, ADA, "needs compute capability"),
        ({}, CPU, "runs on cuda, not on cpu"),
    ],
    "fa3:fp8": [
        ({"seqlen_q": 999, "mask": BEFORE}, H200, "last key"),
        ({"scale": 0.0}, H200, "positive scale"),
        ({"dtype": "e4m3", "descale": "token"}, H200, "not per token"),
        ({"lengths": PACKED, "mask": CAUSAL}, H200, "aligns masks at the last query"),
    ],
    "fa3-vllm:fp8": [
        ({"seqlen_q": 999, "mask": BEFORE}, H200, "last key"),
        ({"batch": 2**20, "seqlen_q": 2**11}, H200, "tokens"),
        ({"dtype": "e4m3", "descale": "block"}, H200, "not per block"),
    ],
    "fa4:bf16": [
        ({}, B200, "9.x only"),
        ({}, A100, "needs compute capability 9.0"),
        ({"head_dim": 20, "head_dim_v": 20}, H200, "no multiple of 8"),
        ({"head_dim": 264}, H200, "outside 8 to 256"),
        ({"dtype": "fp16"}, H200, "takes bf16"),
        ({"scale": -0.1}, H200, "must be positive"),
        ({"seqlen_q": 999, "mask": BEFORE}, H200, "cannot end before the last key"),
        ({"batch": 2**20, "seqlen_q": 2**10}, H200, "indexes at most"),
        ({"lengths": PACKED, "mask": CAUSAL}, H200, "aligns masks at the last query"),
    ],
    "fa4:fp8": [({}, H200, "needs compute capability 10.0, NVIDIA H200 has 9.0")],
    "flashinfer:fp8": [
        ({"softcap": 5.0}, H200, "no softcap"),
        ({"head_dim": 264, "head_dim_v": 264}, H200, "outside 1 to 256"),
        ({"mask": BEFORE}, H200, "no window mask"),
        ({"seqlen_q": 999, "mask": CAUSAL}, H200, "no top-left alignment for 999 queries"),
        ({"scale": -1.0}, H200, "positive scale"),
        ({"batch": 2**15}, H200, "takes at most 65535 heads"),
        ({"dtype": "e5m2", "descale": "head"}, H200, "not e5m2"),
        ({"dtype": "e4m3", "descale": "token"}, H200, "not per token"),
        ({}, A100, "compute capability"),
        ({}, B200, "exists only below"),
    ],
    "torch-fp8:fp8": [
        ({"softcap": 5.0}, H200, "no softcap"),
        ({"head_dim": 264, "head_dim_v": 264}, H200, "outside 1 to 256"),
        ({"seqlen_q": 999, "mask": BEFORE}, H200, "last key"),
        ({"scale": -1.0}, H200, "positive scale"),
        ({"dtype": "fp32"}, H200, "takes bf16, fp16, e4m3 tensors"),
        ({"dtype": "e4m3", "descale": "block"}, H200, "not per block"),
        ({}, A100, "compute capability"),
        ({}, B200, "exists only below"),
    ],
    "triton:fp8-token": [
        ({"head_dim": 264, "head_dim_v": 264}, H200, "outside 1 to 256"),
        ({"dtype": "fp64"}, H200, "takes bf16, fp16, fp32, e4m3 tensors"),
        ({"dtype": "e5m2", "descale": "head"}, H200, "not e5m2"),
        ({"batch": 2**21, "heads": 64, "kv_heads": 64, "seqlen_q": 2048}, H200, "programs"),
        ({}, A100, "compute capability"),
        ({}, B200, "compute capability"),
    ],
    "triton:fp8-onepass": [
        ({**WIDE, "softcap": 5.0}, H200, "has no softcap"),
        ({**WIDE, "scale": -0.1}, H200, "no negative scale"),
        ({**WIDE, "dtype": "fp32"}, H200, "fp32"),
        ({}, H200, "head_dim 64"),
    ],
    "sdpa-flash:bf16": [
        ({"head_dim": 264, "head_dim_v": 264}, H200, "outside 8 to 256"),
        ({"head_dim": 60, "head_dim_v": 60}, H200, "no multiple of 8"),
        ({"seqlen_q": 999, "mask": CAUSAL}, H200, "beyond all"),
        ({"scale": 0.0}, H200, "a scale above 0"),
        ({"batch": 2**16}, H200, "takes at most"),
        ({}, V100, "compute capability"),
    ],
    "sdpa-flash:fp32": [({}, H200, "runs on cpu, not on cuda")],
    "sdpa-cudnn:bf16": [
        ({"mask": BEFORE}, H200, "no window mask"),
        ({"seqlen_q": 7, "mask": END}, H200, "no bottom-right"),
        ({"seqlen_kv": 1}, H200, "single key"),
        ({"scale": -0.1}, H200, "a scale above 0"),
        ({"head_dim": 224, "head_dim_v": 224}, ADA, "above 128"),
    ],
    "sdpa-efficient:bf16": [
        ({"mask": Mask(left=5, right=3)}, H200, "diagonals"),
        ({"seqlen_q": 999, "mask": END}, H200, "no key"),
        ({**FAR, "kv_heads": 64}, H200, "elements of a batch entry"),
        ({**FAR, "kv_heads": 1}, H200, "elements of a batch entry"),
    ],
    "flex:bf16": [({**FAR, "kv_heads": 64}, H200, "elements of a batch entry")],
}
ROWS = [(name, *row) for name, rows in REFUSED.items() for row in rows]


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize(("name", "changes", "device", "sentence"), ROWS, ids=[f"{row[0]} {row[3]}" for row in ROWS])
def test_each_refusal_gives_its_reason(name: str, changes: dict[str, object], device: Device, sentence: str) -> None:
    known = registry()
    spec = SPEC.replace(**changes)
    for kernel in (known.forward(name), *([known.backward(name)] if name in known.backwards else [])):
        assert not changes or sentence not in "; ".join(kernel.refusals(SPEC, H200))
        assert sentence in "; ".join(kernel.refusals(spec, device))


@pytest.mark.parametrize("name", ["sdpa-flash:bf16", "sdpa-cudnn:bf16", "sdpa-efficient:bf16"])
def test_a_torch_without_cuda_serves_no_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in "; ".join(registry().forward(name).refusals(SPEC, H200))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("flex:bf16", {**FAR, "kv_heads": 1}),
        ("flex:bf16", {**FAR, "kv_heads": 64, "seqlen_kv": 2**17, "batch": 4}),
        ("sdpa-efficient:bf16", {**FAR, "kv_heads": 64, "seqlen_kv": 2**17, "batch": 4}),
        ("sdpa-flash:bf16", {**FAR, "kv_heads": 64}),
    ],
)
def test_long_calls_are_served_up_to_the_elements_that_a_kernel_counts(name: str, changes: dict[str, object]) -> None:
    """Of a batch entry: 4 of 2³⁰ elements each were right on an H200."""
    assert "elements" not in "; ".join(registry().forward(name).refusals(SPEC.replace(**changes), H200))


def test_the_sequences_of_a_packed_batch_are_one_entry() -> None:
    packed = SPEC.replace(lengths=LengthsKind(batch="packed", total_q=2**24, total_kv=2**24))
    assert "2147483648" in "; ".join(registry().forward("flex:bf16").refusals(packed, H200))


LEFT_OPEN = {"seqlen_q": 257, "mask": Mask(right=5)}


@pytest.mark.parametrize(
    ("refuses", "serves", "changes", "device", "sentence"),
    [
        *(
            (f"forward {backend}:fp8", f"forward {backend}:bf16", *row)
            for backend in ("cudnn", "te")
            for row in (({"seqlen_q": 1}, H200, "single query"), ({"head_dim_v": 80}, H200, "not its own"))
        ),
        ("forward te:bf16", "forward cudnn:bf16", {"lengths": SQUARE, "head_dim": 136}, H200, "up to 128 only"),
        *((f"{way} te:bf16", f"{way} cudnn:bf16", LEFT_OPEN, H200, "as many keys") for way in ("forward", "backward")),
        *(
            (f"backward {name}", f"forward {name}", *row)
            for name, *row in (
                ("sdpa-efficient:bf16", {"seqlen_q": 64, "mask": Mask(5, 0, "bottom-right")}, H200, "left side"),
                ("sdpa-flash:bf16", {"head_dim": 224, "head_dim_v": 224}, ADA, "backward"),
                ("fa3:bf16", {"lengths": PACKED}, H200, "not a packed batch"),
                ("te:bf16", {**WIDE, "lengths": SQUARE}, H200, "not a packed batch"),
            )
        ),
    ],
)
def test_a_refusal_does_not_apply_to_the_librarys_other_kernel_or_pass(
    refuses: str, serves: str, changes: dict[str, object], device: Device, sentence: str
) -> None:
    spec, kernels = SPEC.replace(**changes), {"forward": registry().forward, "backward": registry().backward}
    (way, name), (other, served) = refuses.split(), serves.split()
    assert kernels[other](served).refusals(spec, device) == []
    assert sentence in "; ".join(kernels[way](name).refusals(spec, device))


def test_forward_only_backends_have_no_backward() -> None:
    assert not [name for name in registry().backwards if name.startswith(("fa3-vllm", "flashinfer", "torch-fp8"))]


@pytest.mark.parametrize("name", ["fa3:fp8", "fa3-vllm:fp8", "flashinfer:fp8", "torch-fp8:fp8"])
@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe("head", "e5m2"), "e5m2"),
        (Recipe("token"), "per token"),
        (Recipe("head", rotation="hadamard"), "rotated"),
    ],
    ids=["e5m2", "token", "rotated"],
)
def test_tensors_that_are_not_plain_e4m3_are_an_error(name: str, recipe: Recipe, message: str) -> None:
    plain, other = (quantise(torch.randn(1, 1, 8, 16), each, rotate=True) for each in (Recipe("head"), recipe))
    spec = AttentionSpec.make(batch=1, heads=1, seqlen_q=8, head_dim=16, dtype="e4m3", descale="head")
    with pytest.raises(InputError, match=message):
        registry().forward(name).prepare(Inputs(plain, other, plain), spec)
