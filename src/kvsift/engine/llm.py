"""LLM: a model directory, ready to read long documents under a plan.

llm = kvsift.LLM(plan="quest:budget=1024")            # the embedded model
document = llm.read(Path("manual.txt").read_text())   # prefilled once, with the first question
answer = document.ask("What is the access code?")     # decoded under the plan
print(answer.text, answer.decode("density"))
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from kvsift.engine.document import Document, Progress
from kvsift.engine.memory import peak_bytes, require_memory
from kvsift.engine.prompt import prompt
from kvsift.engine.result import Answer
from kvsift.engine.sampling import Sampling
from kvsift.errors import InputError
from kvsift.methods.base import Phase
from kvsift.models.transformers import PlanSpec, SparseCache, feeding, make_cache
from kvsift.models.transformers_load import ModelDirectory, choose_device, choose_dtype
from kvsift.runtime.plan import Plan
from kvsift.runtime.spec import parse_plan

DEFAULT_PLAN = "quest:budget=1024"


class LLM:
    """A model with its tokenizer and a default plan. Weights are loaded when they are first needed.

    Args:
        model: a Hugging Face directory; None is the embedded model.
        plan: how to sift the KV cache; see ``kvsift.parse_plan``.
        device: "auto", "cpu", "cuda" or "cuda:N".
        dtype: "auto", "bfloat16", "float16" or "float32".
        chunk_size: prompt tokens per forward pass.
        probe_every: compare every so many sparse decode steps with exact attention; 0 never.

    Raises:
        InputError: for a bad directory, plan, device or dtype, before anything is loaded.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        plan: PlanSpec = DEFAULT_PLAN,
        *,
        device: str = "auto",
        dtype: str = "auto",
        chunk_size: int = 2048,
        probe_every: int = 16,
    ) -> None:
        if chunk_size < 1:
            raise InputError(f"chunk_size={chunk_size} must be 1 or more.")
        if probe_every < 0:
            raise InputError(f"probe_every={probe_every} must be 0 (never) or more.")
        self.plan: Plan = parse_plan(plan)
        self.directory = ModelDirectory.check(model)
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, self.device, self.directory.config)
        self.chunk_size, self.probe_every = chunk_size, probe_every
        self.tokenizer = self.directory.tokenizer()
        self._model: Any = None

    @property
    def model(self) -> Any:
        """The transformers model, loaded on first use."""
        if self._model is None:
            self._model = self.directory.load(self.device, self.dtype)
        return self._model

    def load(self) -> float:
        """Load the weights if that has not happened yet; the seconds it took, which are no part of any answer."""
        started = perf_counter()
        _ = self.model
        return perf_counter() - started

    def check(self, ids: list[int], max_new_tokens: int) -> None:
        """Refuse a prompt that the model has no embeddings or positions, or this machine no memory for.

        Raises:
            InputError: before the weights are loaded.
        """
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens={max_new_tokens} must be 1 or more.")
        name, vocabulary = self.directory.path.name, getattr(self.directory.config, "vocab_size", None)
        if vocabulary is not None and max(ids, default=0) >= vocabulary:
            raise InputError(
                f"the tokenizer of {name} gives token {max(ids)}, but the model has a vocabulary of {vocabulary}. They "
                "do not belong together."
            )
        positions, total = self.directory.max_positions, len(ids) + max_new_tokens
        if positions is not None and total > positions:
            raise InputError(
                f"the prompt has {len(ids)} tokens and {max_new_tokens} more are to come, but {name} was made for "
                f"{positions} positions. Shorten the context by {total - positions} tokens, generate fewer, or use a "
                "model made for longer ones."
            )
        if self._model is None:
            require_memory(self.directory, self.device, self.dtype, total, self.chunk_size)

    def read(self, context: str, *, plan: PlanSpec = None, progress: Progress | None = None) -> Document:
        """Prefill a document once; ask as often as you like.

        Raises:
            InputError: if it is empty, or too long for the model or the machine.
        """
        if not context.strip():
            raise InputError("the context is empty; there is nothing to ask about.")
        plan = self.plan if plan is None else parse_plan(plan)
        # what every question's prompt begins with is the document
        ids = _common_prefix(self._encode(context, "a"), self._encode(context, "Which?"))
        return Document(self, ids, lambda question: self._encode(context, question), plan, progress)

    def generate(
        self,
        text: str,
        *,
        plan: PlanSpec = None,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: str | None = None,
        progress: Progress | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Answer:
        """Continue a text as it stands (no template is applied).

        Args:
            text: the prompt.
            plan: instead of the default one.
            max_new_tokens: at most so many tokens are generated.
            sampling: how to choose tokens; greedy by default.
            stop: end when this appears; it is not part of the text.
            progress: called while the prompt is prefilled.
            on_text: called with every new piece of text.
        """
        started = perf_counter()
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        if not text or not ids:
            raise InputError("the prompt is empty.")
        self.check(ids, max_new_tokens)
        started += self.load()
        cache = self.new_cache(self.plan if plan is None else parse_plan(plan), len(ids) + max_new_tokens)
        self.prefill(cache, ids[:-1], progress)
        return self.decode(cache, ids, started, max_new_tokens, sampling, stop, on_text)

    def new_cache(self, plan: Plan, reserve: int) -> SparseCache:
        """An empty cache for about ``reserve`` tokens."""
        return make_cache(self.model, plan, probe_every=self.probe_every, reserve=reserve)

    @torch.inference_mode()
    def prefill(
        self, cache: SparseCache, ids: list[int], progress: Progress | None = None, phase: Phase = "prefill"
    ) -> Any:
        """Feed prompt tokens in chunks; logits [1, 1, vocabulary] of the last one, None without tokens.

        With phase "decode" each is answered as if it had been generated.
        """
        logits = None
        with feeding(self.model, phase):
            for start in range(0, len(ids), self.chunk_size):
                chunk = torch.tensor([ids[start : start + self.chunk_size]], device=self.device)
                logits = self.model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                if progress is not None:
                    progress(min(start + self.chunk_size, len(ids)), len(ids))
        return logits

    @torch.inference_mode()
    def decode(
        self,
        cache: SparseCache,
        ids: list[int],
        started: float,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop: str | None = None,
        on_text: Callable[[str], None] | None = None,
        question_phase: Phase = "prefill",
    ) -> Answer:
        """Feed what the cache lacks of ``ids`` in ``question_phase``, then generate."""
        cached = cache.get_seq_length()
        choose = (sampling or Sampling()).chooser(self.device)
        ends = self._end_ids()
        new_ids: list[int] = []
        times: list[float] = []
        text, shown = "", ""
        logits = self.prefill(cache, ids[cached:], phase=question_phase)
        while True:
            token = choose(logits[0, -1])
            times.append(perf_counter() - cache.stats.probe_s)
            if token in ends:
                break
            new_ids.append(token)
            text = self.tokenizer.decode(new_ids, skip_special_tokens=True)
            # A stop counts only after something was said: formats differ in the white space an answer begins with.
            found = text.find(stop, len(text) - len(text.lstrip())) if stop and text.strip() else -1
            if found >= 0:
                text = text[:found]
            if found >= 0 or len(new_ids) >= max_new_tokens:
                break
            ready = text[: len(text) - _undecided(text, stop)]
            if on_text is not None and len(ready) > len(shown):
                on_text(ready[len(shown) :])
                shown = ready
            step = torch.tensor([[token]], device=self.device)
            logits = self.model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        if on_text is not None and len(text) > len(shown):
            on_text(text[len(shown) :])
        return Answer(
            text=text,
            token_ids=new_ids,
            prompt_tokens=len(ids),
            new_prompt_tokens=len(ids) - cached,
            ttft_s=times[0] - started,
            itl_s=[after - before for before, after in pairwise(times)],
            plan=str(cache.run.plan),
            kv_bytes=cache.num_bytes,
            peak_memory_bytes=peak_bytes(self.device),
            stats=cache.stats.report(),
        )

    def _encode(self, context: str, question: str) -> list[int]:
        if not self.tokenizer.chat_template:
            ids: list[int] = self.tokenizer(prompt(context, question), verbose=False)["input_ids"]
            return ids
        turn = [{"role": "user", "content": f"{context.rstrip()}\n\n{question.strip()}"}]
        text = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        templated: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return templated

    def _end_ids(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else list(ends or [])
        return {*ends, *([] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id])}


def _undecided(text: str, stop: str | None) -> int:
    """How many characters at the end of a text may still change or turn out to begin the stop."""
    broken = len(text) - len(text.rstrip("\ufffd"))  # a character whose bytes have not all come
    stop = stop or ""
    begun = next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
    return max(broken, begun)


def _common_prefix(a: list[int], b: list[int]) -> list[int]:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]
