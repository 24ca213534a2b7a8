"""A model, and the thread that serves requests to it."""

from __future__ import annotations

from typing import Self

import torch

from kvsift.engine.loop import Loop
from kvsift.engine.model_runner import ModelRunner
from kvsift.engine.sequence_runner import SequenceRunner
from kvsift.models.hf.model_directory import ModelDirectory
from kvsift.plan.placement import Placement
from kvsift.plan.tuned_plan import ModelPlans

SEQUENCES, GPU_SEQUENCES = 8, 64  # that decode in one step, and in captured ones
GPU_GRID = 1024  # tokens: a second question reads fewer again than in chunks of 8,192, and other sequences wait less


class Engine(ModelRunner):
    """A model with its pools, prefix cache and scheduler.

    Args:
        directory, device, dtype, place, chunk_size, probe_every, dense_below, path, deterministic, plans: see
            ``ModelRunner``.
        keep_tokens: of prompts, that are kept for later ones.

    Attributes:
        loop: serves requests, in a thread of its own from the first one on. Chunks of prompts have ``chunk_size``
            tokens, or ``GPU_GRID``, in whole pages.
    """

    def __init__(
        self, directory: ModelDirectory, device: torch.device, dtype: torch.dtype, place: Placement, chunk_size: int,
        probe_every: int, dense_below: int | str, path: str, deterministic: bool, plans: ModelPlans,
        keep_tokens: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(
            directory, device, dtype, place, chunk_size, probe_every, dense_below, path, deterministic, plans
        )
        on_gpu = self.device.type == "cuda"
        most = GPU_SEQUENCES if on_gpu and self.fast_path.enabled and not deterministic else SEQUENCES
        runner = SequenceRunner(self, most)
        size = min(self.chunk_size, GPU_GRID) if on_gpu else self.chunk_size
        grid = max(size // runner.page_size, 1) * runner.page_size
        self.loop = Loop(runner, grid, most, keep_tokens=keep_tokens, turn=self.fast_path.turn)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all answers and the thread that computes them, and free the memory of the cache. Nothing can be asked
        afterwards."""
        self.loop.stop()

    def release(self) -> None:
        """Free the pools and graphs that no answer needs, and that are kept for later ones."""
        self.loop.release()
