"""The engine of a server without it: the same prompts to an LLM in this process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from kvsift.engine.llm import LLM
from kvsift_lab.bench.serve import ServeRecipe
from kvsift_lab.bench.serve_documents import question
from kvsift_lab.bench.serve_numbers import TimedAnswer


class EndlessLLM(LLM):
    """An LLM whose answers do not end by themselves."""

    def _end_ids(self) -> frozenset[int]:
        return frozenset()


class DirectEngine:
    """An LLM that has read the documents of all clients.

    Args:
        recipe: of the bench.
        texts: of the clients.
    """

    def __init__(self, recipe: ServeRecipe, texts: Sequence[str]) -> None:
        self._texts, self._tokens = texts, recipe.tokens
        self._llm = EndlessLLM(recipe.model, plan="dense", keep_tokens=recipe.keep_tokens)
        for text in texts:
            self._llm.generate(text, max_new_tokens=1)

    def answers(self, plan: str, number: int) -> list[TimedAnswer]:
        """Return the answers of all clients to a question."""
        prompts = [text + question(number + index) for index, text in enumerate(self._texts)]
        answers = self._llm.generate(prompts, plan=plan, max_new_tokens=self._tokens)
        return [
            TimedAnswer(0.0, list(accumulate([answer.ttft_s, *answer.itl_s])), len(answer.token_ids))
            for answer in answers
        ]
