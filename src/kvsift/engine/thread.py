"""A thread that takes steps while there is work, and what other threads post to it.

What they ask for waits in an inbox until the present step ends, and ``KeyboardInterrupt``, which Python raises in the
main thread alone, never leaves a step half done.
"""

from __future__ import annotations

import atexit
import os
import signal
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread, get_ident, main_thread
from time import perf_counter
from typing import TypeVar

from kvsift.errors import Unavailable
from kvsift.models.inference import inference
from kvsift.threads import end_team

JOIN_S = 60.0  # for the step that runs when the process ends
Message = Callable[[], object]
T = TypeVar("T")


class EngineThread(ABC):
    """What takes steps in a thread of its own, from ``start`` to ``stop``, and without one where ``step`` is called.

    Args:
        turn: held during a step.

    Attributes:
        after_step: called in the thread after every step, and within one, where sequences decode in the middle of a
            chunk; None: nothing is.
        on_fault: called with an exception that no sequence explains; by default all sequences end with it.
        step_started: when the present step began, by ``perf_counter``; None between steps.
    """

    def __init__(self, turn: AbstractContextManager[object] | None = None) -> None:
        self._turn = nullcontext() if turn is None else turn
        self.after_step: Callable[[], None] | None = None
        self.on_fault: Callable[[BaseException], None] = self._fail
        self.step_started: float | None = None
        self._inbox: SimpleQueue[Message | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._process = os.getpid()
        self._is_closed = self._is_stepping = self._is_done = False

    @abstractmethod
    def step(self) -> None:
        """Carry out what clients have asked for, and take a step. Beside the thread: wait for one."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step has anything to do."""

    @abstractmethod
    def _fail(self, error: BaseException) -> None:
        """End all work after a fault."""

    @abstractmethod
    def _cancel_all(self) -> None:
        """End all work, because the thread ends."""

    def start(self) -> None:
        """Start the thread, unless it runs.

        Raises:
            InputError: in a process that was forked from the one that runs it, and after ``stop``.
        """
        self.require_open()
        if self._thread is not None and self._process != os.getpid():
            raise Unavailable(
                f"this LLM computes in a thread of process {self._process}, which a forked process does not have. Make "
                "the LLM in the process that uses it, or start that one with multiprocessing's method 'spawn'."
            )
        with _STARTING:
            if self._thread is None or self._thread.ident is None:  # or an interrupt came before it began
                self._process = os.getpid()
                self._thread = Thread(
                    target=_serve, args=(weakref.ref(self), self._inbox), name="kvsift engine", daemon=True
                )
                weakref.finalize(self, self._inbox.put, None).atexit = False
                _RUNNING.add(self)
                end_team()  # this thread has loaded the model, and waits from now on
                self._thread.start()

    def require_open(self) -> None:
        """Raise ``InputError`` after ``stop``."""
        if self._is_closed:
            raise Unavailable("this LLM is closed. Make another one.")

    def stop(self) -> None:
        """End all work, and the thread once the present step has ended. Nothing can be asked for afterwards."""
        self._is_closed = True
        if self._thread is None:
            self._cancel_all()
        elif self._process == os.getpid():
            self._inbox.put(None)
            if not self.is_own_thread:
                self._thread.join(JOIN_S)

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller runs in the thread."""
        return self._thread is not None and self._thread.ident == get_ident()

    def post(self, message: Message) -> None:
        """Have a message carried out before the next step; at once, if no thread takes steps. Safe in a finalizer."""
        if self._thread is None and not self._is_stepping:
            message()
        else:
            self._inbox.put(message)  # a single step of C: an interrupt comes before or after it
            if self._is_done:
                self._carry_out()

    def call(self, function: Callable[[], T]) -> T:
        """Run a function between two steps, in the thread if there is one; returns what it returns."""
        if self._thread is None or self.is_own_thread or self._is_closed:
            with self._turn, inference():
                return function()
        outcome: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
        self.start()  # or it is refused
        self.post(partial(_report, function, outcome))
        result, error = outcome.get()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """A step, before and after which messages are carried out."""
        with self._turn, inference() if self._thread is None else nullcontext():
            self._is_stepping, self.step_started = True, perf_counter()
            try:
                self._carry_out()
                yield
            finally:
                self._is_stepping, self.step_started = False, None
        if self.after_step is not None:
            self.after_step()
        if self._thread is None:
            self._carry_out()

    def _carry_out(self) -> None:
        """Carry out the messages that wait."""
        with suppress(Empty):
            while True:
                message = self._inbox.get_nowait()
                if message is None:
                    self._is_closed = True
                else:
                    message()

    def serve(self, message: Message | None) -> bool:
        """Carry out a message, and take steps while there is work; returns whether to wait for the next message. For
        the thread."""
        try:
            if message is not None and not self._is_closed:
                with self._turn:
                    message()
            while self.has_work and not self._is_closed:
                self.step()
        except BaseException as error:
            self.on_fault(error)
        if self._is_closed or message is None:
            self._is_closed = True
            with self._turn:
                self._cancel_all()
                self._is_done = True  # what comes from now on is carried out by whoever posts it
                self._carry_out()
        return not self._is_closed


_RUNNING: weakref.WeakSet[EngineThread] = weakref.WeakSet()
_STARTING = Lock()


def _report(function: Callable[[], T], outcome: SimpleQueue[tuple[T | None, BaseException | None]]) -> None:
    try:
        result = function()
    except BaseException as error:
        outcome.put((None, error))
    else:
        outcome.put((result, None))


def _serve(engine: weakref.ref[EngineThread], inbox: SimpleQueue[Message | None]) -> None:
    """Serve an engine in its thread. While it has nothing to do, the thread keeps no reference to it."""
    with inference():
        while True:
            message = inbox.get()
            present = engine()
            if present is None or not present.serve(message):
                return
            del present, message


@atexit.register
def _stop_all() -> None:
    """End the threads before the interpreter does, which would end them in the middle of a step; so would a second
    Ctrl-C, which counts no more."""
    if _RUNNING and current_thread() is main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for engine in list(_RUNNING):
        engine.stop()
