"""Tokens drawn from logits in one launch of CUDA C++ (``draw_tokens.cu``): Hopper and later.

By torch a draw is a dozen launches, and a sort where top_p, top_k or min_p limit it.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvsift.kernels.cuda_module import arguments, compile_kernel, have_nvrtc

MEMBERS, THREADS = 8, 1024  # of a cluster, which draws one token; of a block
SHARED_BYTES = 160 << 10  # of a block, for its share of the logits
DTYPES = {torch.float32: "float", torch.bfloat16: "bfloat16", torch.float16: "float16"}  # of logits, in the source

_DrawArguments = arguments("logits temperature noise limits tokens best", "row limit_row", "vocabulary share")


def draws(logits: Tensor) -> bool:
    """Whether ``draw_tokens`` takes logits [sequences, vocabulary]."""
    return (
        logits.is_cuda
        and logits.dtype in DTYPES
        and logits.stride(1) == 1
        and 0 < logits.shape[1] <= MEMBERS * SHARED_BYTES // 4
        and have_nvrtc()
    )


def draw_tokens(
    logits: Tensor, temperature: Tensor, noise: Tensor, limits: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draw a token for each sequence: see ``engine.sampling.draw``, but that NaN among the logits may give any token.

    Args:
        logits: [sequences, vocabulary], which ``draws``.
        temperature: float64 [sequences].
        noise: int64 [sequences], 0 or more.
        limits: float64 [3, sequences], or None.
        out: what is written and returned, contiguous; by default new tensors.
    """
    sequences, vocabulary = logits.shape
    if out is None:
        out = noise.new_empty(sequences), temperature.new_empty(sequences)
    assert temperature.is_contiguous()
    assert noise.is_contiguous()
    assert limits is None or limits.stride(1) == 1
    assert [each.dtype for each in out] == [torch.int64, torch.float64]
    share = -(-vocabulary // (8 * MEMBERS)) * 8  # so that shares begin where 16 bytes are loaded at once
    tensors = (logits, temperature, noise, limits, *out)
    given = _DrawArguments(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        logits.stride(0), 0 if limits is None else limits.stride(0), vocabulary, share,
    )  # fmt: skip
    defines = {
        "LOGIT": DTYPES[logits.dtype], "MEMBERS": MEMBERS, "THREADS": THREADS,
        "ARGUMENT_BYTES": ctypes.sizeof(_DrawArguments),
    }  # fmt: skip
    kernel = compile_kernel(
        ("draw_tokens.cu",), "draw_tokens", tuple(defines.items()), THREADS, SHARED_BYTES, logits.device.index or 0
    )
    kernel.launch(sequences * MEMBERS, given, shared_bytes=4 * share, cluster=MEMBERS, early=True)
    return out
