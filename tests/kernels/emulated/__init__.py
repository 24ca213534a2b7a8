"""CUDA kernels on the host, for machines without a GPU: their sources, compiled as C++ against ``cuda.hpp``.

PTX becomes calls of functions of the same names, so that what is missing there does not compile.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from kvsift.kernels import sifted_attention, sketch_launch

HEADER = Path(__file__).parent / "cuda.hpp"
OLDEST_COMPILER = 12  # of GCC: the first with float16 on x86
FOOTER = """
static const Arguments *arguments;
static void run() { KERNEL(*arguments), current->ended = true, give_way(); }

// Runs some neighbouring blocks at once; returns how many bytes behind their shared memory were written.
extern "C" int launch(const Arguments *given, int first, int count, int dynamic_bytes) {
    constexpr int GUARD = 4096;
    constexpr char UNTOUCHED = 0x5a;
    int offset = (sizeof(Static) + 127) / 128 * 128, bytes = offset + dynamic_bytes, touched = 0;
    std::vector<Block> blocks(count);
    std::vector<std::unique_ptr<Fiber>> fibers;
    arguments = given;
    for (int i = 0; i < count; ++i) {
        Block &block = blocks[i];
        block.index = {first + i, 0, 0}, block.threads = THREADS, block.warps.resize(WARPS), block.offset = offset;
        block.shared = (char *)std::aligned_alloc(128, (bytes + GUARD + 127) / 128 * 128);
        std::memset(block.shared, UNTOUCHED, bytes + GUARD);
        for (int t = 0; t < THREADS; ++t) {
            fibers.push_back(std::make_unique<Fiber>());
            Fiber &fiber = *fibers.back();
            fiber.block = &block, fiber.thread = {t, 0, 0}, fiber.stack.reset(new char[STACK_BYTES]);
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = STACK_BYTES;
            fiber.context.uc_link = &scheduler;
            makecontext(&fiber.context, run, 0);
        }
    }
    for (bool going = true; going;) {
        going = false;
        for (auto &fiber : fibers)
            if (!fiber->ended) going = true, current = fiber.get(), swapcontext(&scheduler, &fiber->context);
    }
    for (Block &block : blocks) {
        for (int i = 0; i < GUARD; ++i) touched += block.shared[bytes + i] != UNTOUCHED;
        std::free(block.shared);
    }
    return touched;
}
"""


class EmulatedKernel:
    """As ``cuda_module.Kernel``, of blocks of which so many neighbours wait for each other."""

    def __init__(self, library: Any, shared_bytes: int) -> None:
        self._library, self._shared_bytes = library, shared_bytes

    def launch(self, blocks: int, arguments: ctypes.Structure, *, early: bool = False) -> None:
        assert blocks % arguments.members == 0  # type: ignore[attr-defined]
        for first in range(0, blocks, arguments.members):  # type: ignore[attr-defined]
            given = ctypes.byref(arguments), first, arguments.members, self._shared_bytes  # type: ignore[attr-defined]
            assert self._library.launch(*given) == 0, "written behind shared memory"


@cache
def reason_against() -> str:
    """Return why kernels cannot be emulated here; empty if they can."""
    if sys.platform != "linux" or shutil.which("g++") is None:
        return "needs g++ on Linux"
    version = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, check=True).stdout
    return "" if int(version.split(".")[0]) >= OLDEST_COMPILER else f"needs g++ {OLDEST_COMPILER} or newer"


@contextmanager
def emulated(processors: int, over_bus: bool = False) -> Iterator[None]:
    """Let the single launches of pages and of sketches run on the host, as on a GPU of so many processors, and as if
    they read keys and values over the bus or not."""
    properties = SimpleNamespace(multi_processor_count=processors)
    with (
        patch.object(sketch_launch, "compile_kernel", compile_kernel),
        patch.object(sifted_attention, "compile_kernel", compile_kernel),
        patch.object(sketch_launch, "in_host_memory", lambda tensor: over_bus),
        patch.object(torch.cuda, "get_device_properties", lambda device: properties),
    ):
        yield


@cache
def compile_kernel(
    sources: tuple[str, ...], name: str, defines: tuple[tuple[str, int | str], ...], threads: int, shared_bytes: int,
    device: int,
) -> EmulatedKernel:  # fmt: skip
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-w"]
    with TemporaryDirectory() as folder:
        source, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        source.write_text(translated(sources, name, defines))
        subprocess.run(["g++", *options, "-o", library, source], check=True)
        return EmulatedKernel(ctypes.CDLL(str(library)), shared_bytes)


def translated(sources: tuple[str, ...], name: str, defines: tuple[tuple[str, int | str], ...]) -> str:
    """Return the sources as C++."""
    code = "\n".join((files("kvsift.kernels") / source).read_text() for source in sources)
    code = _without_ptx(code)
    kernel = re.compile(
        r'extern "C" __global__ void __launch_bounds__\([^)]*\) ' + name + r"\(const __grid_constant__ "
    )
    code, count = kernel.subn(f"static void {name}(const ", code)
    assert count == 1
    code = re.sub(
        r"extern __shared__ (__align__\(\d+\) )?char (\w+)\[\];",
        r"char *\2 = current->block->shared + current->block->offset;",
        code,
    )
    statics = re.findall(r"__shared__ (\w+) (\w+);", code)
    assert len(statics) == 1, statics
    ((kind, variable),) = statics
    code = code.replace(f"__shared__ {kind} {variable};", f"{kind} &{variable} = *({kind} *)current->block->shared;")
    macros = [f"#define {key} {value}" for key, value in defines]
    own = [f"#define KERNEL {name}", f"typedef {kind} Static;", "constexpr int STACK_BYTES = 1 << 17;"]
    return "\n".join([HEADER.read_text(), *macros, code, *own, FOOTER])


def _without_ptx(code: str) -> str:
    done, parts = 0, []
    for found in re.finditer(r"\basm( volatile)?\(", code):
        end = _closing(code, found.end() - 1)
        parts += [code[done : found.start()], _call(code[found.end() : end])]
        done = end + 1
    return "".join([*parts, code[done:]])


def _closing(code: str, opening: int) -> int:
    """Return the place of the parenthesis that closes the one at ``opening``; none is within a string."""
    depth = 0
    for place in range(opening, len(code)):
        depth += {"(": 1, ")": -1}.get(code[place], 0)
        if depth == 0:
            return place
    raise ValueError("a parenthesis is not closed")


def _call(statement: str) -> str:
    """Return the call that stands for one PTX instruction: outputs, inputs, then numbers of the instruction itself."""
    instruction = re.match(r'\s*"([^"]*);"', statement)
    assert instruction, statement
    opcode, _, given = instruction[1].partition(" ")
    operands = []
    for constraint in re.finditer(r'"[=+]?[a-z]"\s*\(', statement):
        operands.append(statement[constraint.end() : _closing(statement, constraint.end() - 1)])
    numbers = re.findall(r"(?:^|, )(\d+(?:\.\d+)?)(?=,|$)", given)
    return f"{re.sub(r'[^A-Za-z0-9]', '_', opcode)}({', '.join([*operands, *numbers])})"
