"""Jobs in parallel, a process each, whose results come back one by one as they are made."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from signal import SIG_IGN, SIGINT, signal
from time import monotonic
from typing import Any

from kvsift.errors import InputError, KVSiftError

Serve = Callable[..., Iterator[Any]]
"""Called with a job's arguments, gives its results."""

RESULT, DONE, REFUSED, FAILED = range(4)


def run_jobs(
    prepare: Callable[..., Serve], arguments: tuple[Any, ...], jobs: Iterable[tuple[Any, ...]], workers: int,
    stop_at: float | None = None, gpus: Sequence[str] = (),
) -> Iterator[Any]:  # fmt: skip
    """Results of all jobs, in the order they are made.

    Args:
        prepare: called once in every process with ``arguments``.
        arguments: can be pickled, as jobs and results can.
        jobs: arguments of each.
        workers: processes.
        stop_at: ``time.monotonic`` when processes are ended and what they have not given is given up.
        gpus: each process sees one of them, in turns; without any all processes see what this one does.

    Raises:
        InputError: as a worker did; or if one dies.
        RuntimeError: if a worker failed for a reason that is our mistake, with its traceback.
    """
    if stop_at is not None and monotonic() >= stop_at:
        return
    waiting, context = iter(list(jobs)), get_context("spawn")
    processes: dict[Connection, BaseProcess] = {}
    try:
        for job in waiting:
            here, there = context.Pipe()
            gpu = gpus[len(processes) % len(gpus)] if gpus else None
            process: BaseProcess = context.Process(target=_work, args=(there, prepare, arguments, gpu), daemon=True)
            process.start()
            there.close()  # so that the death of the process is the end of the pipe
            processes[here] = process
            here.send(job)
            if len(processes) == workers:
                break
        while processes:
            left = None if stop_at is None else max(stop_at - monotonic(), 0.0)
            ready = [each for each in wait(list(processes), left) if isinstance(each, Connection)]
            if not ready or (stop_at is not None and monotonic() >= stop_at):
                return
            for pipe in ready:
                yield from _received(pipe, processes, waiting, workers)
    finally:
        for pipe, process in processes.items():
            process.terminate()
            process.join()
            pipe.close()


def _received(
    pipe: Connection, processes: dict[Connection, BaseProcess], waiting: Iterator[Any], workers: int
) -> Iterator[Any]:
    """Take what a worker sent; give it the next job if it has done the last."""
    try:
        kind, content = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise InputError(
            f"a worker died, probably for lack of memory. {workers} ran at a time; give fewer --workers."
        ) from None
    if kind == RESULT:
        yield content
    elif kind == REFUSED:
        raise InputError(content)
    elif kind == FAILED:
        raise RuntimeError(f"a worker failed:\n{content}")
    else:
        job = next(waiting, None)
        pipe.send(job)
        if job is None:
            processes.pop(pipe).join()
            pipe.close()


def _work(pipe: Connection, prepare: Callable[..., Serve], arguments: tuple[Any, ...], gpu: str | None) -> None:
    signal(SIGINT, SIG_IGN)  # the parent ends us
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # heeded when CUDA starts, with the model
    try:
        serve = prepare(*arguments)
        while (job := pipe.recv()) is not None:
            for result in serve(*job):
                pipe.send((RESULT, result))
            pipe.send((DONE, None))
    except KVSiftError as error:
        pipe.send((REFUSED, str(error)))
    except (EOFError, BrokenPipeError):
        return  # the parent is gone, and what was given to it is kept
    except Exception:
        pipe.send((FAILED, traceback.format_exc()))
