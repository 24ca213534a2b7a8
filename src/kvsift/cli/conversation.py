"""A conversation in a terminal or a pipe: turns, and what a turn prints."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvsift.cli.chat_context import ChatContext
from kvsift.cli.chat_input import one_interrupt
from kvsift.cli.chat_markdown import SavedTurn
from kvsift.cli.comparison import counted, cut_mark
from kvsift.cli.escaping import cell, plain
from kvsift.cli.progress import ProgressBar
from kvsift.cli.stripped_text import StrippedText
from kvsift.errors import InputError

if TYPE_CHECKING:
    from kvsift.api.answer import Answer
    from kvsift.api.llm import LLM
    from kvsift.engine.options import Options
    from kvsift.plan.plan import Plan

BAR_AFTER_S = 0.3  # of reading
STOPPED = "stopped"


class Conversation:
    """Turns with a model about a context.

    Args:
        llm: the model; its plan is that of the first turns.
        context: the document; may be empty.
        options: of every turn.
        progress: shown while something is read.
        interactive: whether a person types: Ctrl-C then ends an answer alone.
        quiet: print answers and what is asked for only.
        system, stop: as in ``LLM.chat``.

    Attributes:
        plan: of the next turns.
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
    def turns(self) -> list[SavedTurn]:
        """Turns so far."""
        return [SavedTurn(*turn, numbers) for turn, numbers in zip(self._chat.turns, self._numbers, strict=True)]

    def undo(self) -> str:
        """Remove the last turn. Returns its question.

        Raises:
            InputError: if there is none.
        """
        if not self._chat.turns:
            raise InputError("there is no turn to undo.")
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
            "captured steps keep none. They are kept on a CPU." if self.llm.composed_reason(self.plan) is None else None
        )

    def ask(self, question: str) -> None:
        """Answer a question, and print the answer and its numbers.

        Raises:
            KVSiftError: if the turn is refused; the conversation is as it was.
            KeyboardInterrupt: unless a person types.
        """
        printer = TurnPrinter(self._progress)
        count = len(self._chat.turns)
        answer: Answer | None = None
        try:
            with one_interrupt() if self._interactive else nullcontext():
                answer = self._chat.ask(
                    question, progress=printer.reading, on_text=printer.write, **self._turn_options()
                )
        except KeyboardInterrupt:
            if not self._interactive:
                raise
        finally:
            self._progress.clear()
            printer.end(answer)
        self.last = answer
        if answer is None and len(self._chat.turns) == count and printer.text:
            self._chat.turns.append((question.strip(), printer.text))
        numbers = STOPPED if answer is None else numbers_of(answer)
        if len(self._chat.turns) > count:
            self._numbers.append(numbers)
        self._print_numbers(numbers)

    def _turn_options(self) -> Options:
        passages = bool(self.context.text) and self.why_no_passages is None
        return {**self._options, "plan": self.plan, "passages": passages}

    def _print_numbers(self, numbers: str) -> None:
        if self._quiet:
            return
        from rich.console import Console

        console = Console(stderr=not self._interactive, highlight=False)
        console.print(cell(numbers, "dim"), soft_wrap=not console.is_terminal)


class TurnPrinter:
    """Prints an answer while it is generated.

    Args:
        progress: shown while the prompt is read.
    """

    def __init__(self, progress: ProgressBar) -> None:
        self._progress, self._stripped, self._started = progress, StrippedText(), monotonic()

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._stripped.text.strip()

    def reading(self, done: int, total: int) -> None:
        """Show how far the prompt is read, if that takes time; it is told with every token of the answer, too."""
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


def complain(error: object) -> None:
    """Print why a line is refused, on stderr."""
    print(f"kvsift: {plain(str(error))}", file=sys.stderr, flush=True)
