"""The kernels of prefill under the real compiler, which is stricter than the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels.conftest import needs_triton

SHARED_BYTES = 227 << 10  # what Hopper gives a block


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile every twin on this machine's GPU")
def test_prefill_kernels_compile_and_fit_into_shared_memory(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_prefill.py")
    paths = os.pathsep.join([str(script.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    launches = [line.split() for line in run.stdout.splitlines()]
    assert len(launches) == 18
    for kernel, shared in launches:
        assert int(shared) <= SHARED_BYTES, kernel
