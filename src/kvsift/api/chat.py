"""A conversation: every turn begins with the earlier ones, which are not read again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

from kvsift.api.answer import Answer
from kvsift.engine.options import Options, ProgressCallback, Stop
from kvsift.engine.uncopied import Uncopied
from kvsift.errors import EmptyText, InvalidValue, Unavailable
from kvsift.methods import checks
from kvsift.tokenization.growing_text import GrowingText
from kvsift.tokenization.prompt import PromptFormat, Turn, require_text
from kvsift.tokenization.token_text import TokenDecoder

if TYPE_CHECKING:
    from kvsift.api.generation import Generation


class Chat(Uncopied):
    """Turns of a conversation, about a document or about nothing.

    What the turns have in common is kept in whole chunks while the chat exists, so a turn reads its question, the
    answer before it and less than a chunk (``loop.grid``). Every turn selects anew: what an early one was about is as
    near as what was said last.

    Args:
        start: begins to generate after the tokens of a prompt.
        form: format of the prompts.
        context: the document; may be empty.
        stop: text, or several texts, that end an answer; by default the end of a line in kvsift's own format, else
            none.

    Attributes:
        turns: questions and their answers so far, without special tokens, which templates may refuse; may be changed
            between turns.
    """

    INSTEAD = "Begin another one with llm.chat, and give it these turns: other.turns = list(chat.turns)."

    def __init__(self, start: Callable[..., Generation], form: PromptFormat, context: str, stop: Stop = None) -> None:
        self._start, self._form, self._context, self._stop = start, form, context, stop or form.stop
        self._answered: Generation | None = None  # of the last turn, which holds what it has read
        self._tried: Generation | None = None  # of an interrupted one after it, likewise
        self._answering, self._growing = dict[str, object](), GrowingText()  # the turn, while there is one
        self.turns: list[Turn] = []

    def __repr__(self) -> str:
        about = f"{len(self._context):,} characters" if self._context else "nothing"
        return f"<Chat about {about}, turns: {len(self.turns)}>"

    def ask(
        self, question: str, *, progress: ProgressCallback | None = None, on_text: Callable[[str], None] | None = None,
        **options: Unpack[Options],
    ) -> Answer:  # fmt: skip
        """Answer the next turn. A turn that fails, or ends before its first token, leaves the conversation as it was.

        Args:
            question: a question in plain words.
            progress: called while what is new is prefilled.
            on_text: called with every new piece of text.
            options: as for ``LLM.generate``.

        Raises:
            InputError: if the question is empty, the conversation too long, or another turn is being answered.
        """
        require_text(question, "question")
        if not question.strip():
            raise EmptyText("the question is empty.")
        checks.function("on_text", on_text)
        _require_turns(self.turns)
        earlier, generation, turn = self._tried, None, object()
        try:
            if self._answering.setdefault("turn", turn) is not turn:
                raise Unavailable("this chat is answering a turn; ask the next one after it.")
            ids = self._form.encode(self._context, question, self.turns, self._growing)
            chosen: Options = {"stop": self._stop, **options}
            offsets = self._form.offsets(self._context, question, self.turns) if chosen.get("passages") else None
            generation = self._start(ids, chosen, progress, on_text is not None, offsets)
            self._tried = generation  # it begins with what the earlier one holds until then
            for _, piece in generation:
                if on_text is not None:
                    on_text(piece)
            answer = generation.answers[0]
            answer.text = answer.text.strip()
            self._answered, self._tried = generation, None
            if answer.token_ids or answer.finish_reason == "stop":
                said = TokenDecoder.of(self._form.tokenizer).without_special(answer.text, answer.token_ids)
                self.turns.append((question.strip(), said.strip()))
            return answer
        finally:
            del earlier, generation  # they let go now, whoever keeps a traceback
            if self._answering.get("turn") is turn:
                self._answering.clear()


def _require_turns(turns: object) -> None:
    """Refuse turns that a client has changed into something else (``InputError``)."""
    if not isinstance(turns, list):
        raise InvalidValue(f"chat.turns is {type(turns).__name__}. Give a list of questions with their answers.")
    for turn in turns:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise InvalidValue(f"a turn is a question and its answer; chat.turns has {turn!r:.80}.")
        for text, what in zip(turn, ("question", "answer")):
            require_text(text, f"{what} of an earlier turn")
