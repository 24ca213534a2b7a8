"""Background threads: one launches work for a device while the calling thread works on the host, others build indexes.

The host's heavy work of a decode step stays in the calling thread: OpenMP gives every thread that uses it a team of its
own, and while there are more threads than processors, none of them waits for work without going to sleep.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")


def submit(run: Callable[[], T], thread: ThreadPoolExecutor | None = None) -> Future[T]:
    """Run a piece of work in a thread, by default in the one for short pieces, behind what was given to it before;
    ``result()`` waits, and raises what it raised."""
    inference = torch.is_inference_mode_enabled()  # a property of threads

    def in_thread() -> T:
        with torch.inference_mode(inference):
            return run()

    return (thread or _short_work()).submit(in_thread)


def new_thread() -> ThreadPoolExecutor:
    """A thread that ends once its work is done and no reference to it is left."""
    return ThreadPoolExecutor(1, "kvsift-background")


@cache
def _short_work() -> ThreadPoolExecutor:
    return new_thread()
