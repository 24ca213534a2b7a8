"""The compiled module and its instruction set.

The module is bound once, here: ``core`` is the module, or an object that says at its first use what is missing, and
``AVAILABLE`` is whether it is the module. The core has its kernels once per instruction set and starts with the widest
that the processor has. The environment variable ``KVSIFT_ISA`` names another; ``use_level`` changes it later, for the
whole process."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch  # first: its OpenMP runtime is then the one that the core uses too

from kvsift.errors import InvalidValue, MissingPackage, unknown

_PROCESS = os.getpid()
_failure = ""


class _MissingCore:
    """Stands for the compiled module where it is missing; every use raises InputError."""

    def __getattr__(self, name: str) -> Any:
        raise MissingPackage(why_missing())


core: Any = _MissingCore()
try:
    core = import_module("kvsift.native._core")
except ImportError as failure:
    _failure = str(failure)
AVAILABLE = not _failure


def available() -> bool:
    """Whether the compiled core can be used."""
    return AVAILABLE


def why_missing() -> str:
    """What is missing and what to do; empty if the core is available."""
    if AVAILABLE:
        return ""
    return (
        f"the compiled core of kvsift is missing ({_failure}). Install a C++ compiler and the headers of Python "
        "(Debian: apt-get install g++ python3-dev), then install kvsift again: pip install ."
    )


def levels() -> list[str]:
    """Instruction sets that both this build and this processor have, the narrowest first."""
    return list(core.levels())


def level() -> str:
    """The instruction set in use: "generic", "avx2", "avx512" or "avx512_bf16"."""
    return str(core.level())


def use_level(name: str) -> None:
    """Use an instruction set from now on, in the whole process; raises InputError unless it is in ``levels()``."""
    if name not in levels():
        raise unknown("instruction set", name, levels())
    core.use_level(name)


def num_threads(threads: int | None) -> int:
    """Threads of a call: the argument, else torch's; one in a forked process, because OpenMP's threads stay in the
    parent and a wait for them would never end."""
    if threads is not None and threads < 1:
        raise InvalidValue(f"threads={threads} must be at least 1, or None for torch.get_num_threads().")
    if os.getpid() != _PROCESS:
        return 1
    return torch.get_num_threads() if threads is None else threads


def _start() -> None:
    name = os.environ.get("KVSIFT_ISA", "")
    if name:
        if name not in levels():
            raise unknown("instruction set in KVSIFT_ISA", name, levels())
        core.use_level(name)


if AVAILABLE:
    _start()
