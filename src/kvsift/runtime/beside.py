"""Other threads of this process: one that launches work for a device while the calling one works on the host, and one
that builds while the calling one launches.

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


def beside(run: Callable[[], T], thread: ThreadPoolExecutor | None = None) -> Future[T]:
    """Start a piece of work in a thread, by default in the one for short pieces, behind what was given to it before;
    ``result()`` waits, and raises what it raised."""
    inference = torch.is_inference_mode_enabled()  # a property of threads

    def there() -> T:
        with torch.inference_mode(inference):
            return run()

    return (thread or _short_work()).submit(there)


def new_thread() -> ThreadPoolExecutor:
    """A thread that ends once it has nothing left to do and nobody can give it more."""
    return ThreadPoolExecutor(1, "kvsift-beside")


@cache
def _short_work() -> ThreadPoolExecutor:
    return new_thread()
