"""The core's own tests, csrc/tests/*.cpp, under the sanitizers: no Python in the process, threads that they can see."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent.parent / "csrc"
WIDE = ["-march=x86-64-v4", "-mprefer-vector-width=512"]
LEVELS: dict[str, list[str]] = {
    "generic": [],
    "avx2": ["-march=x86-64-v3"],
    "avx512": WIDE,
    "avx512_bf16": [*WIDE, "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni"],
}  # as in CMakeLists.txt
SANITIZERS = {"address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"], "thread": ["-fsanitize=thread"]}


def run(*command: str | Path) -> None:
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_core_is_clean_under(sanitizer: str, tmp_path: Path) -> None:
    # threads meet outside the kernels: one instruction set is enough to watch them
    every_level = sanitizer == "address" and platform.machine().lower() in ("x86_64", "amd64")
    # -O0: nothing is optimised away before it is watched, and compiling takes half the time
    common = ["g++", "-std=c++17", "-O0", "-g1", "-w", f"-I{CSRC}", *SANITIZERS[sanitizer]]
    common += ["-DKVSIFT_X86"] if every_level else []
    objects = [tmp_path / "isa.o"]
    run(*common, "-c", CSRC / "isa" / "isa.cpp", "-o", objects[0])
    for level in LEVELS if every_level else ["generic"]:
        objects.append(tmp_path / f"{level}.o")
        run(*common, *LEVELS[level], "-c", CSRC / "isa" / f"{level}.cpp", "-o", objects[-1])
    programs = sorted((CSRC / "tests").glob("*.cpp"))
    assert programs
    for source in programs:
        program = tmp_path / source.stem
        run(*common, source, *objects, "-o", program, "-pthread")
        run(program)
