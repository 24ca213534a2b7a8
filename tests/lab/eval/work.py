"""What workers of tests do; nothing here is slow to import."""

import os
import time
from collections.abc import Callable, Iterator

from kvsift.errors import InputError


def multiplying(by: int) -> Callable[..., Iterator[int]]:
    """Serves (number, count): count results from number * by on."""

    def serve(number: int, count: int) -> Iterator[int]:
        yield from range(number * by, number * by + count)

    return serve


def seeing() -> Callable[[], Iterator[str]]:
    """Serves (): the GPUs that the process sees."""

    def serve() -> Iterator[str]:
        time.sleep(0.5)  # so that every process has its job
        yield os.environ["CUDA_VISIBLE_DEVICES"]

    return serve


def sleeping() -> Callable[[float], Iterator[float]]:
    """Serves (seconds)."""

    def serve(seconds: float) -> Iterator[float]:
        time.sleep(seconds)
        yield seconds

    return serve


def dying() -> Callable[[], Iterator[None]]:
    """What the kernel does to a process when memory runs out."""
    return lambda: os._exit(9)


def refusing() -> Callable[[], Iterator[None]]:
    """An error meant for the user."""

    def refuse() -> Iterator[None]:
        raise InputError("not this")

    return refuse


def failing() -> Callable[[], Iterator[None]]:
    """A mistake of ours."""

    def fail() -> Iterator[None]:
        raise ZeroDivisionError

    return fail
