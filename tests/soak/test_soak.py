"""Twenty seconds of the soak, with fewer clients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_short_soak_leaves_nothing_wrong() -> None:
    command = [sys.executable, "-m", "soak", "--minutes", "0.35", "--clients", "12", "--questions", "6"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.endswith("passed\n")
