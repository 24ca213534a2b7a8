"""CUDA C++ compiled on first use by NVRTC, through NVIDIA's Python bindings, which are part of torch's CUDA builds.

No compiler and no CUDA toolkit is needed. Compiled code is kept for the life of the process.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import torch

SHARED_BYTES = 228 << 10  # of a processor, which Hopper has and GPUs for desktops have not


@cache
def have_nvrtc() -> bool:
    """Whether this machine has a Hopper GPU or a newer one with as much shared memory, and what compiles CUDA C++ for
    it."""
    if not torch.cuda.is_available() or torch.version.cuda is None or torch.cuda.get_device_capability()[0] < 9:
        return False
    if torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_multiprocessor < SHARED_BYTES:
        return False
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a GPU lies in host memory, where kernels reach it over the bus."""
    from cuda.bindings import driver

    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    (kind,) = _check(driver.cuPointerGetAttribute(attribute, tensor.data_ptr()))
    return int(kind) == int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)


def arguments(pointers: str, longs: str = "", ints: str = "", floats: str = "") -> type[ctypes.Structure]:
    """Return the struct of a kernel's arguments: names of pointers, of integers of 64 and 32 bits, and of floats, in
    the order of ``Arguments`` of the source."""
    kinds = ((pointers, ctypes.c_void_p), (longs, ctypes.c_longlong), (ints, ctypes.c_int), (floats, ctypes.c_float))
    fields = [(name, kind) for names, kind in kinds for name in names.split()]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


class Kernel:
    """A compiled kernel that takes one struct of arguments by value.

    Args:
        function: the driver's handle.
        threads: per block.
        shared_bytes: most dynamic shared memory per block.
    """

    def __init__(self, function: Any, threads: int, shared_bytes: int) -> None:
        self._function, self._threads, self._shared_bytes = function, threads, shared_bytes

    def launch(
        self, blocks: int, arguments: ctypes.Structure, *, early: bool = False, shared_bytes: int | None = None,
        cluster: int = 1,
    ) -> None:  # fmt: skip
        """Queue on torch's current stream; ``early`` may start it while the kernel before is still running,
        ``shared_bytes`` are fewer than the most, and ``cluster`` neighbouring blocks read each other's."""
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes = self._shared_bytes if shared_bytes is None else shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        attributes = []
        if early:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        if cluster > 1:
            attributes.append(_of_cluster(cluster))
        config.attrs, config.numAttrs = attributes, len(attributes)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _check(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))

    def most_clusters(self, cluster: int) -> int:
        """Return how many clusters of blocks with the most shared memory run at once."""
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.attrs, config.numAttrs = [_of_cluster(cluster)], 1
        (clusters,) = _check(driver.cuOccupancyMaxActiveClusters(self._function, config))
        return int(clusters)


def _of_cluster(blocks: int) -> Any:
    """The attribute of a launch whose neighbouring blocks form clusters."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = blocks, 1, 1
    return attribute


@cache
def compile_kernel(
    sources: tuple[str, ...], name: str, defines: tuple[tuple[str, int | str], ...], threads: int, shared_bytes: int,
    device: int,
) -> Kernel:  # fmt: skip
    """A kernel of this package.

    Args:
        sources: files in this folder, compiled as one, in this order.
        name: name of the ``extern "C"`` function.
        defines: macros for these sources.
        threads: per block.
        shared_bytes: most dynamic shared memory.
        device: index of the GPU.

    Raises:
        RuntimeError: with the compiler's log.
    """
    from cuda.bindings import driver, nvrtc

    folder = files("kvsift.kernels")
    macros = [f"#define {key} {value}" for key, value in defines]
    text = "\n".join([*macros, *((folder / source).read_text() for source in sources)])
    (program,) = _check(nvrtc.nvrtcCreateProgram(text.encode(), sources[-1].encode(), 0, [], []))
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}".encode(), b"-std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        (size,) = _check(nvrtc.nvrtcGetProgramLogSize(program))
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{', '.join(sources)} do not compile with {dict(defines)}:\n{log.decode().strip()}")
    (size,) = _check(nvrtc.nvrtcGetCUBINSize(program))
    code = b" " * size
    _check(nvrtc.nvrtcGetCUBIN(program, code))
    with torch.cuda.device(device):
        torch.empty(1, device="cuda")  # creates torch's context, which the driver uses
        (module,) = _check(driver.cuModuleLoadData(code))
    (function,) = _check(driver.cuModuleGetFunction(module, name.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _check(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    return Kernel(function, threads, shared_bytes)


def _check(result: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"the CUDA driver or compiler failed: {status!r}")
    return tuple(values)
