"""Where and with what numbers were made."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvsift import __version__


def versions_and_machine(device: torch.device) -> dict[str, Any]:
    """Commit, versions and machine, ready for a result file."""
    return {
        "commit": _commit(),
        "versions": {
            "kvsift": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        },
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores",
    }


def _commit() -> str:
    """The commit that runs; KVSIFT_COMMIT names it where the code was copied without its repository."""
    if "KVSIFT_COMMIT" in os.environ:
        return os.environ["KVSIFT_COMMIT"]
    root = Path(__file__).parent
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return git.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")
