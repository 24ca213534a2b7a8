"""A conversation about texts: its context with the lines of files, its turns and what they print, and the passages that
an answer read."""

from __future__ import annotations

import signal
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsift.cli import files
from kvsift.cli.comparison import cut_mark
from kvsift.cli.printing import ProgressBar, StrippedText, cell, console, counted, plain
from kvsift.errors import MissingInput, WrongFile

if TYPE_CHECKING:
    from kvsift.api.answer import Answer
    from kvsift.api.llm import LLM
    from kvsift.api.passages import Passages
    from kvsift.engine.options import Options
    from kvsift.plan.plan import Plan

BETWEEN = "\n\n"  # files of a context, as files.read_texts joins them
MOST_CHARACTERS = 300  # of a line that is shown as one passage
BEFORE, AFTER = 40, 100  # characters of an excerpt around the strongest part of a line
BAR_AFTER_S = 0.3  # of prefill
STOPPED = "stopped"


class Place(NamedTuple):
    """A part of a line.

    Attributes:
        file: its name; empty if there is one file only.
        line: its number in the file, from 1.
        start, stop: its characters in the context.
    """

    file: str
    line: int
    start: int
    stop: int


class ChatContext:
    """What a chat is about.

    Args:
        named_texts: names of files and their texts.

    Attributes:
        text: text of all files.
    """

    def __init__(self, named_texts: Sequence[tuple[str, str]] = ()) -> None:
        self.names = [name for name, _ in named_texts]
        several = len(named_texts) > 1
        texts = [text.strip("\n") if several else text for _, text in named_texts]
        self.text = BETWEEN.join(texts)
        self._begins = list(accumulate((len(text) + len(BETWEEN) for text in texts[:-1]), initial=0))
        self._skipped = [len(text) - len(text.lstrip("\n")) if several else 0 for _, text in named_texts]

    @classmethod
    def read(cls, names: Sequence[str]) -> ChatContext:
        """Read files; - is standard input.

        Raises:
            InputError: if one is no text, or a saved document.
        """
        if (saved := files.saved_document(names)) is not None:
            raise WrongFile(f"{saved} is a saved document, and a chat reads texts. Give the text, or use kvsift ask.")
        return cls([(name, files.read_texts([name], "context")) for name in names])

    def places(self, start: int, stop: int) -> list[Place]:
        """Return the parts of lines that characters from ``start`` to ``stop`` are in."""
        places = []
        while start < stop:
            place = self._place(start)
            if self.text[place.start : place.stop].strip():
                places.append(place)
            start = place.stop + 1
        return places

    def _place(self, at: int) -> Place:
        """Return the line of a character, or the part of it if it is long."""
        number = bisect_right(self._begins, at) - 1
        begin = self._begins[number]
        first = max(self.text.rfind("\n", 0, at) + 1, begin)
        last = self.text.find("\n", at)
        last = len(self.text) if last < 0 else last
        first += (at - first) // MOST_CHARACTERS * MOST_CHARACTERS
        last = max(min(last, first + MOST_CHARACTERS - 1), at)
        line = self.text.count("\n", begin, at) + 1 + self._skipped[number]
        return Place(self.names[number] if len(self.names) > 1 else "", line, first, last)


class Conversation:
    """Turns with a model about a context.

    Args:
        llm: the model; its plan is that of the first turns.
        context: the document; may be empty.
        options: options of every turn.
        progress: shown during prefill.
        interactive: whether a person types: Ctrl-C then ends an answer alone.
        quiet: print only answers and what commands show.
        system, stop: as in ``LLM.chat``.

    Attributes:
        plan: plan of the next turns.
        last: the answer of the last turn; None if there is none, or it was stopped.
    """

    def __init__(
        self, llm: LLM, context: ChatContext, options: Options, progress: ProgressBar, *, interactive: bool = True,
        quiet: bool = False, system: str | None = None, stop: str | None = None,
    ) -> None:  # fmt: skip
        self.llm, self.plan = llm, llm.plan
        self._options, self._progress, self._interactive, self._quiet = options, progress, interactive, quiet
        self._system, self._stop = system, stop
        self.begin(context)

    def begin(self, context: ChatContext) -> None:
        """Begin again, about another context.

        Raises:
            InputError: if it is too long for the model.
        """
        chat = self.llm.chat(context.text, system=self._system, stop=self._stop)
        self.num_tokens = self._checked_length(context)
        self.context, self._chat = context, chat
        self.last: Answer | None = None
        self._numbers: list[str] = []  # of each turn

    def _checked_length(self, context: ChatContext) -> int:
        """Return the tokens of a context, which with a question and an answer fit the model."""
        from kvsift.tokenization.prompt import PromptFormat

        ids = PromptFormat(self.llm.tokenizer, system=self._system).encode(context.text, "?")
        self.llm.check([ids], self._options.get("max_new_tokens", 1), self.plan)
        return len(ids) if context.text else 0

    @property
    def num_turns(self) -> int:
        """Turns so far."""
        return len(self._chat.turns)

    def as_markdown(self) -> str:
        """Return the page that /save writes: questions as quotations, answers as they are, numbers below them."""
        about = f", about {', '.join(map(_code, self.context.names))}" if self.context.names else ""
        parts = [f"# Chat with {_code(self.llm.directory.name)}{about}"]
        for (question, answer), numbers in zip(self._chat.turns, self._numbers, strict=True):
            quoted = "\n".join(f"> {line}".rstrip() for line in question.splitlines())
            parts += [quoted, answer or "(nothing)", f"*{numbers}*"]
        return "\n\n".join(parts) + "\n"

    def undo(self) -> str:
        """Remove the last turn. Returns its question.

        Raises:
            InputError: if there is none.
        """
        if not self._chat.turns:
            raise MissingInput("there is no turn to undo.")
        self.last = None
        self._numbers.pop()
        return self._chat.turns.pop()[0]

    def use(self, plan: Plan) -> str:
        """Answer the next turns under a plan. Returns what changes with it, if it is more than that.

        Raises:
            InputError: if the model or its placement cannot follow it.
        """
        from kvsift.engine.prefill_sharing import prefill_key

        self.llm.check_plan(plan)
        before, self.plan = self.plan, plan
        if plan.not_shared:
            return f"Every turn reads the whole conversation: {plan.not_shared}."
        return "" if prefill_key(plan) == prefill_key(before) else "The next turn reads the whole conversation."

    @property
    def why_no_passages(self) -> str | None:
        """Why the next answer keeps no passages; None if it does."""
        if self._options.get("exact"):
            return "exact answers read everything. Leave out --exact to see what a plan selects."
        return (
            "captured steps keep none. They are kept on a CPU."
            if self.llm.reason_uncaptured(self.plan) is None
            else None
        )

    def ask(self, question: str) -> None:
        """Answer a question, and print the answer and its numbers.

        Raises:
            KVSiftError: if the turn is refused; the conversation is as it was.
            KeyboardInterrupt: unless a person types.
        """
        printer, count = TurnPrinter(self._progress), len(self._chat.turns)
        passages = bool(self.context.text) and self.why_no_passages is None
        options: Options = {**self._options, "plan": self.plan, "passages": passages}
        answer: Answer | None = None
        with one_interrupt() if self._interactive else nullcontext():
            try:
                answer = self._chat.ask(question, progress=printer.reading, on_text=printer.write, **options)
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
            finally:
                self._progress.clear()
                printer.end(answer)
            self._keep(question, answer, printer.text, count)

    def _keep(self, question: str, answer: Answer | None, text: str, count: int) -> None:
        """Note the end of a turn after ``count`` others, and print its numbers; without an answer it was stopped."""
        self.last = answer
        if answer is None and len(self._chat.turns) == count and text:
            self._chat.turns.append((question.strip(), text))
        numbers = STOPPED if answer is None else numbers_of(answer)
        if len(self._chat.turns) > count:
            self._numbers.append(numbers)
        if not self._quiet:
            out = console(stderr=not self._interactive)
            out.print(cell(numbers, "dim"), soft_wrap=not out.is_terminal)


class TurnPrinter:
    """Prints an answer while it is generated.

    Args:
        progress: shown during prefill.
    """

    def __init__(self, progress: ProgressBar) -> None:
        self._progress, self._stripped, self._started = progress, StrippedText(), monotonic()

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._stripped.text.strip()

    def reading(self, done: int, total: int) -> None:
        """Show how far prefill is, if it takes time; this is called with every token of the answer, too."""
        if done < total and monotonic() - self._started > BAR_AFTER_S:
            self._progress.reading(done, total)

    def write(self, piece: str) -> None:
        """Print a piece."""
        if new := self._stripped.add(piece):
            self._progress.clear()
            print(plain(new), end="", flush=True)

    def end(self, answer: Answer | None) -> None:
        """End the line of the answer; None: it was stopped, or refused."""
        if answer is not None and not self.text:
            print("(nothing)", end="")
        if answer is not None or self.text:
            print("" if answer is None else cut_mark(answer), flush=True)


def numbers_of(answer: Answer) -> str:
    """Return the numbers of an answer in a line."""
    parts: list[Any] = [counted(len(answer.token_ids), "token")]
    if answer.tpot_s is not None:
        parts.append(f"{1e3 * answer.tpot_s:.1f} ms per token")
    if (density := answer.decode("density")) is not None:
        parts.append(f"density {100 * density:.1f} %")
    cached = answer.prompt_tokens - answer.new_prompt_tokens
    parts.append(f"{cached:,} of {answer.prompt_tokens:,} prompt tokens cached")
    return ", ".join(parts)


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Let the first Ctrl-C of a block raise ``KeyboardInterrupt``; further ones would break its handling."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _code(name: str) -> str:
    return f"`{name}`" if "`" not in name else f"`` {name} ``"


class LinePassage(NamedTuple):
    """A line, or a part of a long one, that decode steps selected from.

    Attributes:
        place: its place in the context.
        share: the share of steps, heads and layers that selected its strongest part.
        weight: characters times shares.
        at: the first character of the strongest part.
    """

    place: Place
    share: float
    weight: float
    at: int


def strongest(context: ChatContext, passages: Passages) -> list[LinePassage]:
    """Return the lines that were selected from, those with the largest shares first."""
    found: dict[Place, LinePassage] = {}
    for start, stop, share in passages.all:
        for place in context.places(start, stop):
            first, last = max(start, place.start), min(stop, place.stop)
            known = found.get(place, LinePassage(place, 0.0, 0.0, first))
            at = first if share > known.share else known.at
            weight = known.weight + share * (last - first)
            found[place] = LinePassage(place, max(share, known.share), weight, at)
    return sorted(found.values(), key=lambda line: (-line.share, -line.weight, line.place.start))


def passage_lines(context: ChatContext, passages: Passages, most: int) -> Iterator[str]:
    """Yield the strongest lines with their numbers and excerpts, how many others there are, and what is left out."""
    lines = strongest(context, passages)
    if lines:
        yield "lines that were selected, each with the share of the steps, heads and layers that did:"
    for passage in lines[:most]:
        file = f"{passage.place.file}, " if passage.place.file else ""
        yield f"{file}line {passage.place.line:,}, {100 * passage.share:.0f} %: {excerpt(context.text, passage)}"
    if len(lines) > most:
        yield f"{len(lines) - most:,} other lines were read less; /passages {len(lines)} lists all."
    if passages.note:
        yield passages.note


def excerpt(text: str, passage: LinePassage) -> str:
    """Return the line around its strongest part, in whole words."""
    place = passage.place
    start, stop = max(place.start, passage.at - BEFORE), min(place.stop, passage.at + AFTER)
    if start > place.start:
        space = text.find(" ", start, passage.at)
        start = space + 1 if space >= 0 else start
    if stop < place.stop:
        space = text.rfind(" ", passage.at, stop)
        stop = space if space > passage.at else stop
    words = " ".join(text[start:stop].split())
    return f"{'... ' if start > place.start else ''}{words}{' ...' if stop < place.stop else ''}"
