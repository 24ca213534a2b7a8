"""Where twins are tested: compiled on a GPU, else in Triton's interpreter, which cannot do bfloat16."""

from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsift.kernels.triton_shim import HAVE_TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])]

needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed on this platform")


def _patch_the_language_once() -> None:
    """Triton's interpreter replaces its language anew for each function that a kernel calls, a third of all its time.

    Once in a launch is enough: replaced functions are not ``builtin`` until the launch restores them.
    """
    from triton.runtime import interpreter

    language, core = interpreter.tl, interpreter.tl.core
    replace = interpreter._patch_lang

    def replace_once(function: Any) -> Any:
        visible = (value for value in function.__globals__.values() if value is language or value is core)
        if any(core.is_builtin(module.load) for module in visible):
            return replace(function)
        return interpreter._LangPatchScope()  # nothing to restore

    interpreter._patch_lang = replace_once


if DEVICE == "cpu" and HAVE_TRITON:
    _patch_the_language_once()


def crossed(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise by several arguments: all combinations on a GPU; in the slow interpreter as few as it takes for any
    two values of two arguments to meet."""
    every = list(product(*(range(len(each)) for each in values.values())))
    if DEVICE == "cpu":
        every = _pairwise(every)
    chosen = [tuple(each[index] for each, index in zip(values.values(), numbers)) for numbers in every]
    ids = ["-".join(str(getattr(value, "__name__", value)) for value in combination) for combination in chosen]
    return pytest.mark.parametrize(tuple(values), chosen, ids=ids)


def _pairwise(every: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Combinations in which any two values of two arguments meet, each the one with the most pairs that are new."""

    def pairs(numbers: tuple[int, ...]) -> set[Any]:
        return set(combinations(enumerate(numbers), 2))

    missing, chosen = set().union(*map(pairs, every)), []
    while missing:
        chosen.append(max(every, key=lambda numbers: len(pairs(numbers) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def far_memory(folder: Path, size: int, dtype: torch.dtype) -> Tensor:
    """``size`` zeros, more than offsets of 32 bits reach.

    Off a GPU they lie in a sparse file, which takes no room, behind 2^31 others: an offset that has wrapped around
    reads these instead of crashing.
    """
    if DEVICE == "cuda":
        if torch.cuda.mem_get_info()[0] < 2 * size * dtype.itemsize:
            pytest.skip(f"needs {2 * size * dtype.itemsize >> 30} GiB of GPU memory")
        return torch.zeros(size, dtype=dtype, device=DEVICE)
    before = 1 << 31
    return torch.from_file(str(folder / "zeros"), shared=True, size=before + size, dtype=dtype)[before:]
