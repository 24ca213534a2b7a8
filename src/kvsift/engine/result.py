"""What a run gives back: the text, and the proof of how it was made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsift.engine.generation import Generation


@dataclass
class Answer:
    """Generated text with its times and counters.

    Attributes:
        text: what was generated, stop excluded.
        token_ids: the generated tokens.
        prompt_tokens: tokens before them, document included.
        new_prompt_tokens: those that were not cached yet.
        ttft_s: seconds from submitting to the first token.
        itl_s: seconds between output tokens after the first; probing is not in them.
        stats: counters by phase and layer (``RunStats.report``).
        plan: the plan as it was resolved.
        kv_bytes: held by keys, values and summaries at the end, of all prompts that were decoded together.
        peak_memory_bytes: the most memory so far.
        path: how tokens were decoded: "captured", or "composed: " and why.
        dense_below: in contexts shorter than this a captured step showed everything.
        host: what attended on the host: the compiled core with its instruction set and threads, or torch and why; empty
            where nothing did.
        index: layer -> what the method's index is, for every row; empty for methods that have none.
        setup_s: seconds spent capturing steps and measuring the crossover; in no other time.
        build_s: seconds of ``ttft_s`` in which the plan's index, codes or summaries of a cached document were built.
        finish_reason: "stop" (an end-of-text token, or a stop) or "length" (``max_new_tokens`` reached).
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    new_prompt_tokens: int
    ttft_s: float
    itl_s: list[float]
    plan: str
    kv_bytes: int
    peak_memory_bytes: int
    stats: dict[str, Any] = field(default_factory=dict)
    path: str = "composed"
    dense_below: int = 0
    host: str = ""
    index: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    setup_s: float = 0.0
    build_s: float = 0.0
    finish_reason: str = "stop"

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None if there was only one."""
        return sum(self.itl_s) / len(self.itl_s) if self.itl_s else None

    def decode(self, key: str) -> Any:
        """One of the decode counters: density, visible_tokens, kv_bytes_read, recovery, ..."""
        return self.stats["phases"]["decode"][key]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        keys = ("visible_tokens", "density", "kv_bytes_read", "kv_bytes_dense", "recall", "recovery", "select_s")
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "new_prompt_tokens": self.new_prompt_tokens,
            "ttft_s": self.ttft_s,
            "build_s": self.build_s,
            "tpot_s": self.tpot_s,
            **{key: self.decode(key) for key in keys},
            "kv_bytes": self.kv_bytes,
            "peak_memory_bytes": self.peak_memory_bytes,
            "path": self.path,
            "host": self.host,
            "index": self.index,
            "dense_below": self.dense_below,
        }


class TextStream:
    """Pieces of a text as they are generated.

    Attributes:
        answer: the whole of it with its numbers, once the last piece has come; None until then.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._pieces = iter(generation)
        self.answer: Answer | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            return next(self._pieces)[1]
        except StopIteration:
            self.answer = self._generation.answers[0]
            raise
