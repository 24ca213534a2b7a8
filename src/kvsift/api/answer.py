"""The answer to a request: its text, its times and its counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvsift.api.passages import Passages
from kvsift.engine.transcript import TokenLogprobs
from kvsift.errors import unknown

LONGEST_SHOWN = 100  # characters of an answer in its ``repr``


@dataclass(repr=False)
class Answer:
    """Generated text with its times and counters; ``as_dict`` has all of them, and ``print`` shows a few.

    Attributes:
        text: the generated text, stop excluded.
        token_ids: the generated tokens.
        prompt_tokens: tokens of the prompt, document included.
        new_prompt_tokens: prompt tokens that were not cached yet.
        ttft_s: seconds from submission to the first token, or to the end of an answer without any.
        itl_s: seconds between output tokens after the first, probes excluded.
        stats: counters by phase and layer (``RunStats.report``).
        plan: the plan as it was resolved.
        kv_bytes: size of keys, values and summaries at the end, of all prompts that shared a cache or a pool of pages.
        peak_memory_bytes: peak memory so far.
        path: of the decode steps: "captured", "native" or "composed: " and the reasons; empty if there was none.
        dense_below: steps were dense in contexts shorter than this.
        host: attention on the host: the compiled core with its instruction set and threads, or torch and the reason;
            empty if the host attended nothing.
        index: layer -> index of the plan's method, for every sequence; empty for methods without an index.
        setup_s: seconds spent on capturing steps and measuring the crossover; not included in any other time.
        build_s: seconds of ``ttft_s`` spent on building the plan's index, codes or summaries of a cached document.
        guard: under a plan with ``min_recovery``, each time that its budget doubled: ``recovery`` of the probe that
            decided, ``lowest`` of the worst layer, budgets ``from`` and ``to``, and ``token``, so that ``token_ids``
            from this index on were chosen under the larger one.
        finish_reason: "stop" (an end-of-text token, or a stop), "length" (``max_new_tokens`` reached) or "deadline"
            (``timeout_s`` over).
        logprobs: log-probabilities of every token, if they were asked for.
        no_reuse: why the prompt shares nothing with others; empty if it may.
        exact: what was drafted and verified (``ExactReport``).
        passages: passages of the document that were selected, if they were asked for.
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
    path: str = ""
    dense_below: int = 0
    host: str = ""
    index: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    setup_s: float = 0.0
    build_s: float = 0.0
    finish_reason: str = "stop"
    guard: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    no_reuse: str = ""
    exact: dict[str, Any] | None = None
    passages: Passages | None = None

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= LONGEST_SHOWN else f"{self.text[:LONGEST_SHOWN]}..."
        parts = [repr(text), f"tokens={len(self.token_ids)}", f"finish_reason={self.finish_reason!r}"]
        if self.tpot_s is not None:
            parts.append(f"{1e3 * self.tpot_s:.1f} ms per token")
        if self.stats and (density := self.decode("density")) is not None:
            parts.append(f"density {100 * density:.1f} %")
        return f"Answer({', '.join([*parts, self.plan])})"

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None if there was only one."""
        return sum(self.itl_s) / len(self.itl_s) if self.itl_s else None

    def decode(self, key: str) -> Any:
        """Return one of the decode counters: density, visible_tokens, kv_bytes_read, recovery, ...

        Raises:
            InputError: if there is none of this name.
        """
        counters: dict[str, Any] = self.stats["phases"]["decode"]
        if key not in counters:
            raise unknown("decode counter", key, counters)
        return counters[key]

    def as_dict(self) -> dict[str, Any]:
        """Return the answer ready for JSON."""
        keys = ("visible_tokens", "density", "kv_bytes_read", "kv_bytes_dense", "recall", "recovery",
                "estimated_share", "select_s")  # fmt: skip
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
            "guard": self.guard,
            "logprobs": [each._asdict() for each in self.logprobs],
            "no_reuse": self.no_reuse,
            "exact": self.exact,
            "passages": None if self.passages is None else self.passages.as_dict(),
        }
