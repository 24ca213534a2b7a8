"""The entry point that every process of vLLM loads."""

from __future__ import annotations

CPU_BACKEND = "kvsift.vllm.cpu_backend.SparseCPUBackend"
GPU_BACKEND = "kvsift.vllm.gpu_backend.SparseFlashBackend"


def register() -> None:
    """Register the attention backend of the platform. vLLM may call this several times.

    vLLM ignores ``--attention-backend CUSTOM`` on a CPU, so its own entry is replaced there. Without settings
    (``kvsift.vllm.settings``) the backend is the stock one.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    elif current_platform.is_cuda():
        register_backend(AttentionBackendEnum.CUSTOM, GPU_BACKEND)
