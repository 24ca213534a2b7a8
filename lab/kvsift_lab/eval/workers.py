"""Jobs in parallel processes that return their results one by one.

``concurrent.futures`` returns a job's results at its end, so a killed run would lose whole contexts, and its processes
cannot be ended in the middle of one.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from signal import SIG_IGN, SIGINT, signal
from time import monotonic
from typing import Any

from kvsift.errors import FailedProcess, InputError, KVSiftError

Serve = Callable[..., Iterator[Any]]
"""Function from a job's arguments to its results."""

RESULT, DONE, REFUSED, FAILED = range(4)


def run_jobs(
    prepare: Callable[..., Serve], arguments: tuple[Any, ...], jobs: Iterable[tuple[Any, ...]], workers: int,
    stop_at: float | None = None, gpus: Sequence[str] = (),
) -> Iterator[Any]:  # fmt: skip
    """Yield the results of all jobs as they are made.

    Args:
        prepare: called once in every process with ``arguments``.
        arguments: must be picklable, as jobs and results.
        jobs: tuples of arguments.
        workers: number of processes.
        stop_at: ``time.monotonic`` at which the processes are terminated; unfinished results are lost.
        gpus: one for each process, in turns; if empty, all processes see the GPUs of this one.

    Raises:
        InputError: that of a worker, or if a worker dies.
        RuntimeError: any other error of a worker, with its traceback.
    """
    if stop_at is not None and monotonic() >= stop_at:
        return
    queue, context = iter(list(jobs)), get_context("spawn")
    processes: dict[Connection, BaseProcess] = {}
    try:
        for job in queue:
            pipe, process = _start(context, prepare, arguments, gpus[len(processes) % len(gpus)] if gpus else None)
            processes[pipe] = process
            pipe.send(job)
            if len(processes) == workers:
                break
        while processes:
            left = None if stop_at is None else max(stop_at - monotonic(), 0.0)
            ready = [pipe for pipe in wait(list(processes), left) if isinstance(pipe, Connection)]
            if not ready or (stop_at is not None and monotonic() >= stop_at):
                return
            for pipe in ready:
                yield from _receive(pipe, processes, queue, workers)
    finally:
        for pipe, process in processes.items():
            process.terminate()
            process.join()
            pipe.close()


def _start(
    context: SpawnContext, prepare: Callable[..., Serve], arguments: tuple[Any, ...], gpu: str | None
) -> tuple[Connection, BaseProcess]:
    pipe, remote = context.Pipe()
    process = context.Process(target=_work, args=(remote, prepare, arguments, gpu), daemon=True)
    process.start()
    remote.close()  # so that the pipe ends when the process dies
    return pipe, process


def _receive(
    pipe: Connection, processes: dict[Connection, BaseProcess], queue: Iterator[Any], workers: int
) -> Iterator[Any]:
    """Receive a message of a worker; send the next job after the last result of a job."""
    try:
        kind, content = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise FailedProcess(
            f"a worker died, probably for lack of memory. {workers} ran at a time; give fewer --workers."
        ) from None
    if kind == RESULT:
        yield content
    elif kind == REFUSED:
        raise InputError(content)
    elif kind == FAILED:
        raise RuntimeError(f"a worker failed:\n{content}")
    else:
        job = next(queue, None)
        pipe.send(job)
        if job is None:
            processes.pop(pipe).join()
            pipe.close()


def _work(pipe: Connection, prepare: Callable[..., Serve], arguments: tuple[Any, ...], gpu: str | None) -> None:
    signal(SIGINT, SIG_IGN)  # the parent terminates this process
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # read when CUDA starts, with the model
    try:
        serve = prepare(*arguments)
        while (job := pipe.recv()) is not None:
            for result in serve(*job):
                pipe.send((RESULT, result))
            pipe.send((DONE, None))
    except KVSiftError as error:
        pipe.send((REFUSED, str(error)))
    except (EOFError, BrokenPipeError):
        return  # the parent has died; it has stored the results so far
    except Exception:
        pipe.send((FAILED, traceback.format_exc()))
