"""What a measurement ran on, and how fast its memory can be read."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch

from kvsift.benchmarks.timing import gpu_seconds
from kvsift.errors import InputError

H200_BANDWIDTH = 4.5e12  # bytes per second, read only: what the best of several large reads reached
READ_BYTES = 8 << 30
READS = 15
GPU_FACTS = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.memory")


def require_gpu(what: str) -> None:
    """Refuse to time on anything else.

    Raises:
        InputError: if there is no NVIDIA GPU.
    """
    if not torch.cuda.is_available():
        raise InputError(
            f"kvsift bench {what} times an NVIDIA GPU, and torch sees none here. Run it on a machine with one; results "
            "of the H200 are in docs/speed.md."
        )


def gpu_facts() -> dict[str, Any]:
    """Name, memory, driver, power limit, highest clocks and libraries."""
    properties = torch.cuda.get_device_properties(0)
    libraries = {
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()),
        "triton": _version("triton"),
        "flashinfer": _version("flashinfer-python"),
    }
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        **_driver_facts(),
        "libraries": libraries,
    }


def bandwidth(given: float | None) -> dict[str, Any]:
    """Bytes per second that floors are computed with, and where they come from."""
    measured = read_bandwidth()
    torch.cuda.empty_cache()  # what it read is free for buffers again
    if given is not None:
        return {"used": given, "measured": measured, "source": "given"}
    if "H200" in torch.cuda.get_device_name(0):
        return {"used": H200_BANDWIDTH, "measured": measured, "source": "the H200's, from large reads"}
    return {"used": measured, "measured": measured, "source": "measured"}


def bandwidth_text(found: dict[str, Any]) -> str:
    """What floors are computed with, in a line."""
    return (
        f"floors at {found['used'] / 1e12:.2f} TB/s ({found['source']}); a large read here reached "
        f"{found['measured'] / 1e12:.2f} TB/s"
    )


def read_bandwidth() -> float:
    """Bytes per second of a sum over more memory than any cache holds."""
    num_bytes = min(READ_BYTES, torch.cuda.mem_get_info()[0] // 4)
    numbers = torch.ones(num_bytes // 4, device="cuda")
    numbers.sum()
    return 4 * len(numbers) / median(gpu_seconds(numbers.sum) for _ in range(READS))


def _driver_facts() -> dict[str, str]:
    """From nvidia-smi, where it is."""
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader", "--id=0"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(GPU_FACTS, map(str.strip, found.strip().split(","))))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
