"""The machine of a measurement: its facts, its memory bandwidth, and its room for a point."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch

from kvsift import native
from kvsift.engine import provenance
from kvsift.engine.memory import available_bytes
from kvsift.errors import NotEnoughMemory, UnsupportedDevice
from kvsift_lab.bench.timing import gpu_seconds

H200_BANDWIDTH = 4.5e12  # bytes per second, read only: the best of several large reads
READ_BYTES = 8 << 30
READS = 15
GPU_FACTS = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.memory")


def require_gpu(bench: str) -> torch.device:
    """Return the first GPU.

    Raises:
        InputError: if there is no NVIDIA GPU.
    """
    if not torch.cuda.is_available():
        raise UnsupportedDevice(
            f"kvsift bench {bench} times an NVIDIA GPU, and torch sees none here. Run it on a machine with one; "
            "results of the H200 are in docs/speed.md."
        )
    return torch.device("cuda", 0)


def environment(device: torch.device) -> dict[str, Any]:
    """Return machine and versions for a result file, with the facts of a GPU."""
    facts = provenance.versions_and_machine(device)
    return facts | {"gpu": gpu_facts()} if device.type == "cuda" else facts


def gpu_environment(given: float | None) -> dict[str, Any]:
    """Return machine, versions and the bandwidth for floors; ``given`` replaces a measured one."""
    return environment(torch.device("cuda", 0)) | {"bandwidth": bandwidth(given)}


def host_environment() -> dict[str, Any]:
    """Return machine and versions, threads and the instruction set of the compiled core, "" without one."""
    level = native.level() if native.available() else ""
    return {"threads": torch.get_num_threads(), "level": level, **environment(torch.device("cpu"))}


def opening(result: dict[str, Any]) -> str:
    """Return the line printed before the first point; "" if there is none."""
    if "bandwidth" in result:
        return bandwidth_text(result["bandwidth"])
    return f"{result['threads']} threads, {result['level'] or native.why_missing()}" if "threads" in result else ""


def require_room(device: torch.device, num_bytes: float) -> None:
    """Refuse a point whose pools do not fit the device, before anything is allocated.

    Raises:
        InputError: with both sizes.
    """
    free = available_bytes(device)
    if free is not None and num_bytes > free:
        raise NotEnoughMemory(f"its pools need {num_bytes / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free")


def gpu_facts() -> dict[str, Any]:
    """Return name, memory, driver, power limit, highest clocks and libraries."""
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
    """Return the bytes per second for floors, with their source."""
    measured = read_bandwidth()
    torch.cuda.empty_cache()  # frees its memory for buffers
    if given is not None:
        return {"used": given, "measured": measured, "source": "given"}
    if "H200" in torch.cuda.get_device_name(0):
        return {"used": H200_BANDWIDTH, "measured": measured, "source": "the H200's, from large reads"}
    return {"used": measured, "measured": measured, "source": "measured"}


def bandwidth_text(rate: dict[str, Any]) -> str:
    """Render the bandwidth of floors in a line."""
    return (
        f"floors at {rate['used'] / 1e12:.2f} TB/s ({rate['source']}); a large read here reached "
        f"{rate['measured'] / 1e12:.2f} TB/s"
    )


def read_bandwidth() -> float:
    """Return the bytes per second of a sum over more memory than any cache holds."""
    num_bytes = min(READ_BYTES, torch.cuda.mem_get_info()[0] // 4)
    numbers = torch.ones(num_bytes // 4, device="cuda")
    numbers.sum()
    return 4 * len(numbers) / median(gpu_seconds(numbers.sum) for _ in range(READS))


def _driver_facts() -> dict[str, str]:
    """Return facts from nvidia-smi, where it is installed."""
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader", "--id=0"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(GPU_FACTS, map(str.strip, output.strip().split(","))))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
