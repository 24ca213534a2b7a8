"""The compiler is stricter than the interpreter, and a GPU has only so much shared memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels.conftest import needs_triton

# bytes of shared memory of a block: the least since Ampere, an A100's, and Hopper's
SMALLEST, AMPERE, HOPPER = 99 << 10, 163 << 10, 227 << 10


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile every twin on this machine's GPU")
@pytest.mark.parametrize(
    ("of", "number", "most"), [("decode", 165, SMALLEST), ("decode wide", 16, AMPERE), ("prefill", 24, HOPPER)]
)
def test_kernels_compile_and_fit_into_shared_memory(of: str, number: int, most: int, tmp_path: Path) -> None:
    name, *arguments = of.split()
    script = Path(__file__).with_name(f"compile_{name}.py")
    paths = os.pathsep.join([str(script.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    run = subprocess.run([sys.executable, script, *arguments], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    launches = [line.split() for line in run.stdout.splitlines()]
    assert len(launches) == number
    for kernel, shared in launches:
        assert int(shared) <= most, kernel
