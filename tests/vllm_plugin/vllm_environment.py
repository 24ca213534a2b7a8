"""The environment of processes that run vLLM on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

import kvsift

SOURCES = [str(Path(kvsift.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {  # without a GPU the interpreter of Triton is on in tests, and vLLM must not see it
    **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "PYTHONPATH": os.pathsep.join(SOURCES),
}
