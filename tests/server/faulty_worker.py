"""An engine process in which requests fail: the seed of a request is the number of the place where it does.

Run as a script it is a ``kvsift.server.worker`` with these places; ``PLACES`` names them.
"""

from collections import Counter
from collections.abc import Callable
from math import inf, nan
from threading import local
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvsift.api import generation
from kvsift.engine.executor import Executor
from kvsift.engine.loop import Loop
from kvsift.engine.request import Request
from kvsift.engine.sampling import Chooser
from kvsift.engine.sequence import CacheReport
from kvsift.engine.speculative.decoder import ExactDecoder
from kvsift.engine.speculative.pace import Amount, Measured, Pace
from kvsift.engine.transcript import TokenLogprobs, Transcript
from kvsift.layer.selection_log import SelectionLog
from kvsift.server import frames, worker
from kvsift.server.frames import AnswerRequest
from kvsift.server.replies import Reply
from kvsift.server.worker import Worker

PLACES = (
    "the prompt is tokenized",
    "the sequence is made",
    "the loop takes the sequence",
    "memory is sought for the sequence",
    "the cache is opened",
    "how far the prompt is read",
    "a selection is recorded",
    "a draft is chosen",
    "a draft is learned from",
    "the sampler",
    "logits that are NaN",
    "a logit of infinity",
    "logits of minus infinity",
    "the transcript",
    "the text",
    "the log-probabilities",
    "the events",
    "the news of a step",
    "a log-probability that is NaN",
    "a text that is no text",
    "the frame",
    "the counters of the cache",
    "the ending",
    "the answer",
    "the passages",
    "the usage",
    "a usage that is NaN",
)
FAULT = "a fault"
working = local()  # the seed of the request that is worked on, where a place does not know it
times: Counter[str] = Counter()  # that places were passed by their requests


def seed_of(place: str) -> int:
    """The seed of a request that fails at a place."""
    return 1 + PLACES.index(place)


def replace(owner: Any, name: str, new: Callable[..., Any]) -> None:
    """Replace a function or method by one that takes it first."""
    old = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: new(old, *args, **options))


def know(owner: Any, name: str, seed: Callable[..., int]) -> None:
    """Know the request while this function runs."""

    def known(old: Callable[..., Any], *args: Any, **options: Any) -> Any:
        before, working.seed = getattr(working, "seed", 0), seed(*args)
        try:
            return old(*args, **options)
        finally:
            working.seed = before

    replace(owner, name, known)


def change(place: str, owner: Any, name: str, seed: Callable[..., int], new: Callable[..., Any], nth: int = 1) -> None:
    """Replace this function for the request of a place, from the n-th time on that it is called for it."""

    def changed(old: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if seed(*args) == seed_of(place):
            times[place] += 1
            if times[place] >= nth:
                return new(old, *args, **options)
        return old(*args, **options)

    replace(owner, name, changed)


def fail(place: str, owner: Any, name: str, seed: Callable[..., int], nth: int = 1) -> None:
    """Let this function fail for the request of a place, from the n-th time on that it is called for it."""

    def failing(*_: Any, **options: Any) -> Any:
        raise RuntimeError(FAULT)

    change(place, owner, name, seed, failing, nth)


def mark(owner: Any, name: str) -> None:
    """Let what this function makes of a request know its seed."""

    def marked(old: Callable[..., Any], *args: Any) -> Any:
        made = old(*args)
        if made is not None:
            [request] = [each for each in args if isinstance(each, Request)]
            made.seed = request.sampling.seed
        return made

    replace(owner, name, marked)


def of_request(_: Worker, *arguments: Any) -> int:
    [request] = [each for each in arguments if isinstance(each, AnswerRequest)]
    return int(request.sampling["seed"])


def of_sequence(_: Any, seq: Any, *others: Any) -> int:
    return of_reply(seq.output) if isinstance(seq.output, Reply) else 0


def of_reply(reply: Reply, *others: Any) -> int:
    return reply.transcript.request.sampling.seed


def of_opened(_: Worker, opened: Any, *others: Any) -> int:
    return of_reply(opened.reply)


def of_marked(made: Any, *others: Any) -> int:
    return getattr(made, "seed", 0)


def of_chooser(chooser: Chooser, *others: Any) -> int:
    return chooser._sampling.seed


def of_working(*_: Any) -> int:
    return getattr(working, "seed", 0)


def of_those_that_wait(loop: Loop, *_: Any) -> int:
    return max((of_sequence(None, seq) for seq in loop.seqs if seq.cache is None), default=0)


def event_with(number: int, value: object) -> Callable[..., Any]:
    """Spoil a part of the last event of a reply."""

    def new(old: Callable[..., Any], reply: Reply, *args: Any) -> Any:
        taken = old(reply, *args)
        reply.events[-1][number] = value
        return taken

    return new


def logits_of(value: float) -> Callable[..., Any]:
    """Spoil all logits."""
    return lambda old, chooser, logits, *given: old(chooser, logits * 0 + value, *given)


def every_second_time(old: Callable[..., Any], *args: Any) -> Any:
    """Fail, and not when it is said that it failed, which takes the same way."""
    if times["the frame"] % 2:
        raise RuntimeError(FAULT)
    return old(*args)


def install() -> None:
    """Make the places."""
    know(Worker, "_ending", of_opened)
    know(Worker, "_encode", of_opened)
    know(Loop, "_finish", of_sequence)
    know(Loop, "_room_to_admit", of_those_that_wait)
    know(Reply, "take", of_reply)
    mark(generation, "log_of")
    mark(generation, "exact_decoder")
    fail("the prompt is tokenized", Worker, "_prompts", of_request)
    fail("the sequence is made", Worker, "_open", of_request)
    fail("the loop takes the sequence", Loop, "_enter", of_sequence)
    fail("memory is sought for the sequence", Executor, "room", of_working)
    fail("the cache is opened", Executor, "open", of_sequence)
    fail("how far the prompt is read", Reply, "note_prefilled", of_reply)
    fail("a selection is recorded", SelectionLog, "after_segment", of_marked, nth=2)
    Pace.choose = lambda self, repeat, repeated, most: Amount(0.0, min(3, most))  # type: ignore[method-assign]
    Measured.decide = lambda *_: None  # type: ignore[method-assign]  # drafts, whether they pay or not
    fail("a draft is chosen", Reply, "foresee", of_reply)
    fail("a draft is learned from", ExactDecoder, "learn", of_marked, nth=2)
    fail("the sampler", Chooser, "__call__", of_chooser, nth=2)
    change("logits that are NaN", Chooser, "__call__", of_chooser, logits_of(nan), nth=2)
    change("a logit of infinity", Chooser, "__call__", of_chooser, logits_of(inf))
    change("logits of minus infinity", Chooser, "__call__", of_chooser, logits_of(-inf))
    fail("the transcript", Transcript, "take", lambda transcript, *_: transcript.request.sampling.seed, nth=2)
    fail("the text", PreTrainedTokenizerBase, "decode", of_working, nth=2)
    fail("the log-probabilities", TokenLogprobs, "of", of_working, nth=2)
    fail("the events", Reply, "take", of_reply, nth=2)
    fail("the news of a step", Worker, "_news", of_opened, nth=2)
    change("a log-probability that is NaN", Reply, "take", of_reply, event_with(2, ["a", nan, []]))
    change("a text that is no text", Reply, "take", of_reply, event_with(1, b"bytes"))
    change("the frame", frames, "encode", of_working, every_second_time)
    fail("the counters of the cache", CacheReport, "of", of_working)
    fail("the ending", Worker, "_ending", of_opened)
    fail("the answer", worker, "answer_of_sequence", of_sequence)
    fail("the passages", generation, "passages_of", of_working)
    fail("the usage", worker, "usage_of", of_working)
    change("a usage that is NaN", worker, "usage_of", of_working, lambda old, *args: {**old(*args), "density": nan})


if __name__ == "__main__":
    install()
    worker.main()
