"""Tensors that don't keep their memory.

What a graph writes lives in its pool, whether or not a tensor holds it. A graph that kept its
outputs would keep their memory from the graphs that are captured after it in the same pool.
"""

from __future__ import annotations

import torch

__all__ = ["weak_view"]

_SUPPORTED = hasattr(torch._C, "_construct_storage_from_data_pointer") and hasattr(
    torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata"
)


def weak_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory that doesn't own it.

    On the CPU, and where torch offers no such thing, this is `tensor` itself.
    """
    if not (_SUPPORTED and tensor.is_cuda and tensor.numel()):
        return tensor
    storage = tensor.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    metadata = {
        "size": tensor.shape,
        "stride": tensor.stride(),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "storage_offset": tensor.storage_offset(),
    }
    view: torch.Tensor = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(
        metadata, borrowed
    )
    return view
