"""Each kernel's evidence pattern matches its own GPU kernels and no other's."""

from __future__ import annotations

import re

import pytest

from attnbench.backends import flashinfer, sage, torch_fp8
from attnbench.backends.flash_attention import fa2, fa3
from attnbench.backends.sdpa import cudnn, efficient, flash, math
from attnbench.kernels.contract import ForwardKernel

KERNELS = {
    (kernel.name, "forward" if isinstance(kernel, ForwardKernel) else "backward"): kernel
    for module in (fa2, fa3, flashinfer, sage, torch_fp8, cudnn, efficient, flash, math)
    for kernel in module.BACKEND.kernels
}
FA2 = "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false>, false, true>"
FA3 = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::{}<flash::Collective<2, {}, float>>>>"
FORWARD, BACKWARD = "FlashAttnFwdSm90", "FlashAttnBwdSm90"
NAMES = {  # as the profiler writes them: torch 2.11, cuDNN 9, flash-attn 2.8, FlashAttention-3, SageAttention 2.2
    FA2: "fa2 forward",
    FA2.replace("flash::", "pytorch_flash::"): "sdpa-flash forward",
    "void pytorch_flash::flash_fwd_splitkv_kernel<pytorch_flash::Flash_fwd_kernel_traits>": "sdpa-flash forward",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash>": "sdpa-flash backward",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::Kernel<…>)": "sdpa-efficient forward",
    "fmha_cutlassB_bf16_aligned_128x64_k128_sm80(PyTorchMemEffAttention::Kernel…)": "sdpa-efficient backward",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128": "sdpa-cudnn forward",
    "cudnn_generated_fort_native_sdpa_sm90_knob_7_64x128x128_4x1x1_kernel0_0": "sdpa-cudnn forward",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_27_64x64x128": "sdpa-cudnn backward",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float>": "sdpa-math forward",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false>": "sdpa-math forward",
    "void (anonymous namespace)::softmax_warp_backward<float, float, float, 10, false>": "sdpa-math backward",
    FA3.format(FORWARD, "cutlass::float_e4m3_t, flash::Epilogue<cutlass::bfloat16_t>"): "fa3:fp8, torch-fp8 forward",
    FA3.format(FORWARD, "cutlass::bfloat16_t"): "fa3:bf16 forward",
    FA3.format(FORWARD, "cutlass::half_t"): "fa3:fp16 forward",
    FA3.format(BACKWARD, "cutlass::bfloat16_t"): "fa3 backward",
    "void qk_int8_sv_f8_attn_kernel<64u, 128u, 128u, 128u, (QuantGranularity)3, ...>": "sage:int8-fp8 forward",
    "_attn_fwd": "sage:int8 forward",
    "_attn_fwd_persistent": "",
    "void flashinfer::FP8PrefillWithKVCacheKernel<flashinfer::FP8CollectiveMainloop<...>>": "flashinfer forward",
    "void flashinfer::PrefillWithKVCacheKernel<flashinfer::FP8CollectiveMainloop<...>>": "",
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor0": "",
}


@pytest.mark.parametrize(("name", "owners"), NAMES.items(), ids=range(len(NAMES)))
def test_evidence_patterns_identify_each_cuda_kernel(name: str, owners: str) -> None:
    found = {key for key, kernel in KERNELS.items() if re.search(kernel.evidence.get("cuda", "$^"), name)}
    families, _, direction = owners.rpartition(" ")
    wanted = {
        key for key in KERNELS for owner in families.split(", ") if owner and key[1] == direction
        and owner in (key[0], key[0].partition(":")[0])
    }  # fmt: skip
    assert found == wanted
