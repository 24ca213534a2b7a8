"""The compiler is stricter than the interpreter: twins are compiled for a GPU where there is none, too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels.conftest import needs_triton


@needs_triton
@pytest.mark.slow  # half a minute of one processor; on a GPU every test of kernels compiles them
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile every twin on this machine's GPU")
def test_step_kernels_compile_for_hopper_and_wait_for_their_predecessors_where_they_must(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_for_hopper.py")
    paths = os.pathsep.join([str(script.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    launches = [line.split() for line in run.stdout.splitlines()]
    assert len(launches) == 125
    for kernel, ahead, waits in launches:
        assert int(waits) == (ahead == "True"), kernel
