from __future__ import annotations

import pytest
import torch

from mmgraph.bench.kernels import CLASSES, classify, kernel_times, shares
from mmgraph.bench.names import EAGER, EXACT
from mmgraph.bench.options import BenchOptions
from mmgraph.bench.run import run
from mmgraph.recipes import load_recipe

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matmul"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32", "matmul"),
        ("triton_tem_fused_addmm_3", "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<96, 128, 64>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        (
            "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90",
            "attention",
        ),
        ("void at::native::vectorized_layer_norm_kernel<c10::BFloat16, float>", "norm"),
        ("triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_2", "norm"),
        ("triton_red_fused_addmm_native_layer_norm_view_5", "norm"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, MeanOps<float>>>", "norm"),
        ("triton_poi_fused_addmm_gelu_view_4", "other"),
        (
            "void at::native::elementwise_kernel<128, 4, gpu_kernel_impl<GeluCUDAKernelImpl>>",
            "other",
        ),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<BFloat16>>", "other"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "copy"),
        ("void at::native::CatArrayBatchedCopy_contig<OpaqueType<2u>>", "copy"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("Memset (Device)", "copy"),
        ("aten::addmm", "matmul"),
        ("aten::bmm", "matmul"),
        ("aten::mkldnn_convolution", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::native_layer_norm", "norm"),
        ("aten::copy_", "copy"),
        ("aten::linear", "matmul"),
        ("void at::native::upsample_bilinear2d_out_frame<c10::BFloat16, float>", "other"),
        ("aten::gelu", "other"),
        ("aten::mul", "other"),
        ("aten::softmax", "other"),
    ],
)
def test_kernels_are_told_apart_by_name(name: str, expected: str) -> None:
    assert classify(name) == expected


def test_the_time_of_a_product_is_that_of_a_product() -> None:
    a = torch.randn(256, 256)
    times = kernel_times(lambda: torch.mm(a, a), CPU, calls=2)
    assert tuple(times) == CLASSES
    assert times["matmul"] > 0
    assert max(times, key=times.__getitem__) == "matmul"


def test_shares_sum_up_to_one() -> None:
    assert shares({"matmul": 3.0, "other": 1.0}) == {"matmul": 0.75, "other": 0.25}
    assert shares({"matmul": 0.0}) == {"matmul": 0.0}


def test_a_run_profiles_before_and_after_if_it_is_told_to() -> None:
    options = BenchOptions(
        device=CPU,
        dtype=torch.float32,
        recipes=(load_recipe("clip:tiny"),),
        images=(),
        batches=(1,),
        repeats=1,
        warmup=0,
        kernels=True,
    )
    (row,) = run(options).rows
    assert list(row.kernels) == [EAGER, EXACT]
    assert all(times["matmul"] > 0 and times["attention"] > 0 for times in row.kernels.values())
