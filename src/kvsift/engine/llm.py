"""LLM: a model directory, ready to read long documents under a plan.

llm = kvsift.LLM(plan="quest:budget=1024")            # the embedded model
document = llm.read(Path("manual.txt").read_text())   # prefilled once
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

from kvsift.engine.memory import peak_bytes, require_memory
from kvsift.engine.prompt import STOP, prompt
from kvsift.engine.result import Answer
from kvsift.engine.sampling import Sampling
from kvsift.errors import InputError
from kvsift.methods.base import Phase
from kvsift.models.transformers import PlanSpec, SparseCache, feeding, make_cache
from kvsift.models.transformers_load import ModelDirectory, choose_device, choose_dtype
from kvsift.runtime.plan import Plan
from kvsift.runtime.spec import parse_plan

DEFAULT_PLAN = "quest:budget=1024"
Progress = Callable[[int, int], None]  # tokens prefilled so far, tokens to prefill


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

    def check_length(self, num_tokens: int, max_new_tokens: int) -> None:
        """Refuse what the model has no positions or this machine no memory for.

        Raises:
            InputError: before the weights are loaded.
        """
        positions, total = self.directory.max_positions, num_tokens + max_new_tokens
        if positions is not None and total > positions:
            name, room = self.directory.path.name, positions - max_new_tokens
            raise InputError(
                f"the prompt has {num_tokens} tokens and {max_new_tokens} more are to come, but {name} was made for "
                f"{positions} positions. Cut the context to {room} tokens, or use a model made for longer ones."
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
        ids = self.tokenizer(text)["input_ids"]
        if not ids:
            raise InputError("the prompt is empty.")
        self.check_length(len(ids), max_new_tokens)
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
            if on_text is not None and not text.endswith("\ufffd"):
                on_text(text[len(shown) :])
                shown = text
            if found >= 0 or len(new_ids) >= max_new_tokens:
                break
            step = torch.tensor([[token]], device=self.device)
            logits = self.model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
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
            ids: list[int] = self.tokenizer(prompt(context, question))["input_ids"]
            return ids
        turn = [{"role": "user", "content": f"{context.rstrip()}\n\n{question.strip()}"}]
        text = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        templated: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return templated

    def _end_ids(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else list(ends or [])
        return {*ends, *([] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id])}


class Document:
    """A prefilled context. Every question starts from the same cache and leaves it as it was.

    Args:
        llm: the model that reads it.
        ids: the tokens that all questions share.
        encode: the whole prompt of a question, which begins with ``ids``.
        plan: unless a question brings its own.
        progress: called while the document is prefilled, which happens with the first question.
    """

    def __init__(
        self,
        llm: LLM,
        ids: list[int],
        encode: Callable[[str], list[int]],
        plan: Plan,
        progress: Progress | None = None,
    ) -> None:
        self._llm, self._ids, self._encode, self._plan, self._progress = llm, ids, encode, plan, progress
        self._cache: SparseCache | None = None
        self.read_s = 0.0
        self.read_stats: dict[str, Any] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens that all questions share."""
        return len(self._ids)

    def check(self, question: str, max_new_tokens: int) -> None:
        """Refuse a question that cannot be asked, before the weights are loaded.

        Raises:
            InputError: if it is empty, longer than the document, or makes the prompt too long.
        """
        if not question.strip():
            raise InputError("the question is empty.")
        ids = self._encode(question)
        if len(ids) - self.num_tokens > self.num_tokens:
            raise InputError(
                f"the question has {len(ids) - self.num_tokens} tokens and the context only {self.num_tokens}. Were "
                "they swapped? The long text is the context."
            )
        self._llm.check_length(len(ids), max_new_tokens)

    def prefill(self, plan: Plan, reserve: int = 256) -> SparseCache:
        """The cache of the document under a plan; read again only if the plan prefills differently."""
        cache = self._cache
        if cache is not None and cache.run.plan.prefill == plan.prefill:
            cache.rewind()
            cache.replan(plan)
            return cache
        started = perf_counter()
        self._cache = cache = self._llm.new_cache(plan, self.num_tokens + reserve)
        self._llm.prefill(cache, self._ids, self._progress)
        self.read_s, self.read_stats = perf_counter() - started, cache.stats.report()
        cache.stats.clear()
        cache.mark()
        return cache

    def ask(
        self,
        question: str,
        *,
        plan: PlanSpec = None,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        on_text: Callable[[str], None] | None = None,
        question_phase: Phase = "prefill",
    ) -> Answer:
        """Answer a question about the document.

        Args:
            question: in plain words.
            plan: instead of the document's.
            max_new_tokens: at most so many tokens are generated.
            sampling: how to choose tokens; greedy by default.
            on_text: called with every new piece of text.
            question_phase: "decode" answers the question's own tokens under the decode rule too, one by one: the
                harder protocol of Quest's evaluation.

        Returns:
            The answer; its ``ttft_s`` counts from the cached document, see ``read_s`` for the document itself.
        """
        self.check(question, max_new_tokens)
        cache = self.prefill(self._plan if plan is None else parse_plan(plan))
        stop = None if self._llm.tokenizer.chat_template else STOP
        answer = self._llm.decode(
            cache, self._encode(question), perf_counter(), max_new_tokens, sampling, stop, on_text, question_phase
        )
        answer.text = answer.text.strip()
        return answer


def _common_prefix(a: list[int], b: list[int]) -> list[int]:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]
