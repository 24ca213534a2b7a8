"""Perplexity over long prose: the prediction of the tokens after a context, one by one.

There is no question: ``Sample.targets`` are the tokens after the context. The score of a context is exp(-mean negative
log-likelihood of its targets), higher is better; tables have the perplexity beside it. The built-in prose is CPython's
documentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from kvsift.errors import TooShort
from kvsift.texts.layout import Draft, cut_tail, lay_out
from kvsift.texts.prose import prose
from kvsift_lab.eval.sample import Sample, SampleRequest, Task

NUM_TARGETS = 256
NAME = "perplexity"


def write(request: SampleRequest) -> Sample:
    return continued(NAME, request, prose(request.rng))


def continued(task: str, request: SampleRequest, pieces: Iterator[str], count: int = NUM_TARGETS) -> Sample:
    """Return a context from the pieces of a text with so many tokens after it.

    Raises:
        InputError: if the text is too short.
    """
    encode = request.encode
    try:
        layout = lay_out(Draft([], [], pieces, False), request.length, encode, encode, request.rng, request.prefix)
        context, ids = cut_tail(layout, request.length, encode)
        rest = "".join(layout.pieces)[len(context) :]
        targets: list[int] = []
        for piece in chain([rest] if rest else [], pieces):
            targets += encode(piece)
            if len(targets) >= count:
                return Sample(task, context, tuple(ids), (), tuple(targets[:count]))
    except StopIteration:  # the text ended inside the context
        pass
    raise TooShort(f"the text has less than {request.length + count} tokens; ask for a shorter context.")


_ABOUT = f"how well {NUM_TARGETS} tokens that follow the context are predicted"
TASKS = (Task(NAME, _ABOUT, write=write, max_questions=1, family=NAME, kind="perplexity"),)
