"""kvsift doctor: installed versions, the machine, and the code paths that run on it."""

import json
import os
import platform
import sys
from importlib.util import find_spec
from typing import Any

from kvsift.cli import options as o
from kvsift.cli.numbers_table import print_rows

PACKAGES = (
    "kvsift", "kvsift-lab", "torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "cuda-bindings",
    "fastapi", "uvicorn", "pypdf",
)  # fmt: skip


def doctor(
    model: o.ModelOption = None, device: o.DeviceOption = "auto", dtype: o.DtypeOption = "auto",
    as_json: o.JsonOption = False,
) -> None:  # fmt: skip
    """Report versions, device, memory and threads, the code path of each kind of attention on this machine, and what
    the layers of a model cache."""
    versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    facts = {"versions": versions, **_machine(device, dtype, model), **_vllm()}
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    rows = [
        (f"{group} {key}".strip(), str(value))
        for group, values in facts.items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
    ]
    print_rows([("", ""), *rows])


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _vllm() -> dict[str, Any]:
    """What the plugin finds in vLLM, where it is installed."""
    if find_spec("vllm") is None:
        return {}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it logs to standard output
    try:
        from kvsift.vllm.compat import findings
    except Exception as error:  # whatever a broken installation raises
        return {"vllm": f"cannot be imported: {type(error).__name__}: {error}"}
    return {"vllm": findings()}


def _machine(device_name: str, dtype_name: str, model: str | None) -> dict[str, Any]:
    import torch

    from kvsift import native, threads
    from kvsift.engine.memory import GIB, available_bytes
    from kvsift.kernels.attention import fused_runs
    from kvsift.models.hf.model_directory import ModelDirectory, choose_device, choose_dtype, cpu_has_fast_bf16
    from kvsift.models.quantized import FORMATS

    device = choose_device(device_name)
    directory = ModelDirectory.check(model)
    dtype = choose_dtype(dtype_name, device, directory.config)
    available = available_bytes(device)
    sample = torch.zeros(1, 1, 1, 64, dtype=dtype, device=device)
    fused = fused_runs(sample, sample, causal=False)
    return {
        "device": {
            "chosen": str(device),
            "name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
            "memory": "unknown" if available is None else f"{available / GIB:.1f} GiB available",
            "fast bfloat16": cpu_has_fast_bf16() if device.type == "cpu" else True,
        },
        "threads": threads.report(),
        "path": {
            "decode on the host": native.why_missing() or f"compiled core, {native.level()}",
            "dense attention": "torch's fused kernel" if fused else "plain torch, in float32",
            "soft-capped attention": "plain torch, in float32",
            "page scores": "one torch matrix product per layer",
            "selected pages": "gathered, then as dense attention",
            "decode steps": _decode_path(device.type == "cuda"),
            **{f"{name} weights": _weights_path(name, device) for name in FORMATS},
            "short contexts": "sparse steps can be slower than dense ones, which kvsift ask --compare dense times; "
            "--dense-below auto makes them dense where that is measured to be faster: on a GPU in CUDA graphs, on a "
            "CPU with the fused forward pass",
        },
        "model": {
            "path": str(directory.path),
            "dtype here": str(dtype).removeprefix("torch."),
            "weights": "of few bits, by transformers' own layers"
            if directory.is_quantised
            else directory.precision or "plain",
            "layers": _layers(directory),
            "keys and values": f"{directory.kv_bytes_per_token(dtype):,} bytes per token",
            "windows": f"{directory.window_bytes(dtype, sys.maxsize):,} bytes per sequence",
            "states": f"{directory.linear_state_bytes(dtype):,} bytes per sequence",
        },
    }


def _layers(directory: Any) -> str:
    """What the layers of a model keep of a sequence."""
    total, full = directory.config.num_hidden_layers, len(directory.full_layers)
    sliding = len(directory.kv_layers) - full
    others = f", {total - full - sliding} without keys and values of their own" if total > full + sliding else ""
    return f"{full} of {total} with full attention" + (f", {sliding} with sliding windows" if sliding else "") + others


def _weights_path(name: str, device: Any) -> str:
    import torch

    from kvsift.kernels.scaled_weight import multiplies_fp8
    from kvsift.models.quantized import FORMATS

    if not FORMATS[name].stays(device, torch.bfloat16):
        return f"expanded to --dtype when they are loaded; multiplied as they are on {FORMATS[name].where}"
    if device.type == "cpu":
        return "multiplied as they are, by inputs in 8 bits"
    rounds = name == "fp8" and multiplies_fp8(device)
    many = "rounded to 8 bits too" if rounds else "multiplied by expanded weights"
    return f"multiplied as they are; rows of more than 32 tokens are {many}"


def _decode_path(on_gpu: bool) -> str:
    from kvsift import native
    from kvsift.kernels.cuda_module import have_nvrtc
    from kvsift.kernels.triton_shim import HAVE_TRITON

    if not on_gpu or not HAVE_TRITON:
        needed = "Triton" if on_gpu else "an NVIDIA GPU"
        composed = f"composed, one operation after the other; captured ones, in a CUDA graph, need {needed}"
        is_native = not on_gpu and native.available()
        return f"native, in one call, where plan and model allow it; else {composed}" if is_native else composed
    if have_nvrtc():
        return "captured in a CUDA graph; page-sparse attention in one launch"
    return (
        "captured in a CUDA graph; page-sparse attention in three launches (one needs Hopper or "
        "newer, and cuda-bindings)"
    )
