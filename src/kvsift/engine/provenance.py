"""Machine and versions recorded with each result."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvsift import __version__

IN_REPOSITORY = "src/kvsift/engine/provenance.py"  # this file, in kvsift's own repository


def versions_and_machine(device: torch.device) -> dict[str, Any]:
    """Return commit, versions and machine, ready for a result file."""
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
    """Return the commit of the running code; KVSIFT_COMMIT names it where the code was copied without its repository.
    The commit of another project's repository, inside which the package is installed, does not count."""
    if "KVSIFT_COMMIT" in os.environ:
        return os.environ["KVSIFT_COMMIT"]
    try:
        if _git("ls-files", "--full-name", "--", Path(__file__).name) != IN_REPOSITORY:
            return "unknown"
        return _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
