"""The longest prompt that the served model has positions for."""

from __future__ import annotations

from dataclasses import dataclass

from kvsift.api.llm import LLM
from kvsift.errors import ContextLengthExceeded


@dataclass(frozen=True)
class PromptLimit:
    """The limit of a model. Messages begin as OpenAI's do, by which clients such as LiteLLM recognise the error.

    Attributes:
        positions: of the model; None: unlimited.
        longest_token: characters of the longest token of the vocabulary.
    """

    positions: int | None
    longest_token: int

    @classmethod
    def of(cls, llm: LLM) -> PromptLimit:
        """Return the limit of a model."""
        return cls(llm.directory.max_positions, max(map(len, llm.tokenizer.get_vocab())))

    def check_text(self, num_characters: int) -> None:
        """Refuse a text that has too many tokens however it is tokenized: to tokenize megabytes takes
        gigabytes and a minute, in which the thread does nothing else."""
        if self.positions is not None and num_characters > self.positions * self.longest_token:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.positions} tokens, and {num_characters} characters are "
                f"more, as its longest token has {self.longest_token}. Shorten the prompt."
            )

    def check_tokens(self, num_prompt: int, num_new: int) -> None:
        """Refuse a prompt that leaves no room for its answer (``ContextLengthExceeded``)."""
        if self.positions is not None and num_prompt + num_new > self.positions:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.positions} tokens. The prompt has {num_prompt} tokens "
                f"and up to {num_new} will be generated: {num_prompt + num_new} in all. Shorten the prompt, or "
                "generate fewer tokens."
            )
