"""LLM: a model directory, ready to read long documents under a plan.

llm = kvsift.LLM(plan="quest:budget=1024")            # the embedded model
document = llm.read(Path("manual.txt").read_text())   # prefilled once, with the first question
answer = document.ask("What is the access code?")     # decoded under the plan
print(answer.text, answer.decode("density"))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any, TypedDict, Unpack, overload

import torch

from kvsift.engine.document import Document
from kvsift.engine.fast_path import FastPath
from kvsift.engine.generation import Generation, Progress
from kvsift.engine.memory import require_memory
from kvsift.engine.prompt import PromptFormat, require_text
from kvsift.engine.result import Answer, TextStream
from kvsift.engine.sampling import Sampling
from kvsift.engine.transcript import Request
from kvsift.errors import InputError
from kvsift.methods import knobs
from kvsift.methods.base import Phase
from kvsift.models.transformers import PlanSpec, SparseCache, feeding, make_cache
from kvsift.models.transformers_load import ModelDirectory, choose_device, choose_dtype
from kvsift.models.transformers_pinning import RopeLimits
from kvsift.runtime.paged_decode import rule_of
from kvsift.runtime.places import Place, Placement
from kvsift.runtime.plan import Plan
from kvsift.runtime.spec import parse_plan

DEFAULT_PLAN = "quest:budget=1024"
CHUNK_SIZES = 2048, 8192  # prompt tokens at a time: on a CPU, on a GPU
MOST_CHUNK = 65_536  # at most 2^31 numbers in an 8B model's MLP: kernels of libraries index them with 32 bits


class Options(TypedDict, total=False):
    """What ``LLM.generate`` takes beside the text."""

    plan: PlanSpec
    max_new_tokens: int
    sampling: Sampling | Sequence[Sampling] | None
    stop: str | Sequence[str] | None
    progress: Progress | None
    on_text: Callable[[str], None] | None


class LLM:
    """A model with its tokenizer and a default plan. Weights are loaded when they are first needed.

    Threads may share it: each answer has a state of its own. On a GPU they take turns, piece by piece in a stream.

    Args:
        model: a Hugging Face directory, or the name of a model on huggingface.co, which is downloaded at once into its
            cache if it is not there; None is the embedded model.
        plan: how to sift the KV cache; see ``kvsift.parse_plan``.
        device: "auto", "cpu", "cuda" or "cuda:N".
        dtype: "auto", "bfloat16", "float16" or "float32".
        chunk_size: prompt tokens per forward pass, at most 65,536; 8192 on a GPU and 2048 elsewhere by default.
        probe_every: compare every so many sparse decode steps with exact attention; 0 never.
        dense_below: in contexts shorter than this, decode shows everything; "auto": where that is measured to be
            faster, on a GPU whose decode steps are captured.
        path: "auto" captures decode steps in CUDA graphs where plan and model allow it; "captured" refuses where they
            do not; "composed" never does; "eager" runs the steps that would be captured as they are, for tests.
        placement: where KV lives: on the "device" of the model; "split": in host memory, with only what every query
            sees on the device; methods choose on the host, which attends what they chose meanwhile; "offload": in host
            memory, but what was chosen is brought to the device, which attends it; "host": model and KV on the CPU.
            With knobs, for instance "offload:device_cache=4096" or "split:host_values=int8" (``runtime.places``).

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
        chunk_size: int | None = None,
        probe_every: int = 16,
        dense_below: int | str = "auto",
        path: str = "auto",
        placement: Placement = "device",
    ) -> None:
        if chunk_size is not None:
            knobs.whole("chunk_size", chunk_size, 1, MOST_CHUNK)
        if probe_every < 0:
            raise InputError(f"probe_every={probe_every} must be 0 (never) or more.")
        if dense_below != "auto" and (not isinstance(dense_below, int) or dense_below < 0):
            raise InputError(f"dense_below={dense_below!r} must be 'auto' or a number of tokens, 0 (never) or more.")
        self.plan: Plan = parse_plan(plan)
        self.place = Place.of(placement)
        self.placement = self.place.name
        if self.place.name == "host":
            device = _cpu(device)
        self.directory = ModelDirectory.check(model)
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, self.device, self.directory.config)
        self.chunk_size = chunk_size or CHUNK_SIZES[self.device.type == "cuda"]
        self.probe_every = probe_every
        self.tokenizer = self.directory.tokenizer()
        self.dense_below = dense_below
        if (reason := self.place.reason_against(self.plan, self.device.type == "cuda")) is not None:
            raise InputError(reason)
        self.fast_path = FastPath(path, self.device, dense_below, self.placement if self.place.apart else "device")
        self._model: Any = None
        self._loading = Lock()

    @property
    def model(self) -> Any:
        """The transformers model, loaded on first use."""
        with self._loading:
            if self._model is None:
                self._model = self.directory.load(self.device, self.dtype)
            return self._model

    def load(self) -> float:
        """Load the weights if that has not happened yet; the seconds it took, which are no part of any answer."""
        started = perf_counter()
        _ = self.model
        return perf_counter() - started

    def check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, plan: PlanSpec = None) -> None:
        """Refuse prompts that the model has no embeddings or positions, or this machine no memory for under a plan.

        Raises:
            InputError: before the weights are loaded.
        """
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens={max_new_tokens} must be 1 or more.")
        name, vocabulary = self.directory.name, getattr(self.directory.config, "vocab_size", None)
        largest = max((max(ids, default=0) for ids in prompts), default=0)
        if vocabulary is not None and largest >= vocabulary:
            raise InputError(
                f"the tokenizer of {name} gives token {largest}, but the model has a vocabulary of {vocabulary}. They "
                "do not belong together."
            )
        longest = max(len(ids) for ids in prompts)
        positions, total = self.directory.max_positions, longest + max_new_tokens
        if positions is not None and total > positions:
            raise InputError(
                f"the prompt has {longest} tokens and {max_new_tokens} more are to come, but {name} was made for "
                f"{positions} positions. Shorten the context by {total - positions} tokens, generate fewer, or use a "
                "model made for longer ones."
            )
        plan = self.plan if plan is None else parse_plan(plan)
        plan.check_layers(range(self.directory.config.num_hidden_layers))
        if self._model is None:
            if self.fast_path.wanted:  # rows are cached together
                total = sum(len(ids) + max_new_tokens for ids in prompts)
            require_memory(self.directory, self.device, self.dtype, total, self.chunk_size, self.place, plan)

    def read(
        self, context: str, *, plan: PlanSpec = None, progress: Progress | None = None, template: str | None = None,
        system: str | None = None, stop: str | None = None,
    ) -> Document:  # fmt: skip
        """A document to ask about. It is prefilled with its first question, under that question's plan, and once.

        Args:
            context: the document.
            plan: instead of the default one.
            progress: called while the document is prefilled.
            template: text with {context} and {question}, instead of the chat template or kvsift's own format.
            system: a system message for the chat template.
            stop: end answers when this appears; by default at a line's end in kvsift's own format, else nowhere.

        Raises:
            InputError: if it is empty, or too long for the model or the machine.
        """
        if not context.strip():
            raise InputError("the context is empty; there is nothing to ask about.")
        require_text(context, "context")
        plan, form = self.plan if plan is None else parse_plan(plan), PromptFormat(self.tokenizer, template, system)
        # what every question's prompt begins with is the document
        ids = _common_prefix(form.encode(context, "a"), form.encode(context, "Which?"))
        return Document(self, ids, lambda question: form.encode(context, question), plan, progress, stop or form.stop)

    @overload
    def generate(self, text: str, **options: Unpack[Options]) -> Answer: ...

    @overload
    def generate(self, text: list[str], **options: Unpack[Options]) -> list[Answer]: ...

    def generate(
        self,
        text: str | list[str],
        *,
        plan: PlanSpec = None,
        max_new_tokens: int = 64,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: str | Sequence[str] | None = None,
        progress: Progress | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Answer | list[Answer]:
        """Continue a text, or several at once, as they stand (no template is applied).

        Args:
            text: the prompt, or a list of prompts of any lengths; where decoding is captured they share its steps.
            plan: instead of the default one.
            max_new_tokens: at most so many tokens are generated for each.
            sampling: how to choose tokens, for all prompts or for each; greedy by default. A prompt's draws come from
                its own seed, so its answer does not depend on its neighbours.
            stop: end when this, or one of these, appears; it is not part of the text.
            progress: called while prompts are prefilled.
            on_text: called with every new piece of the text; of one prompt only.

        Returns:
            An ``Answer``, or a list of them for a list of prompts.
        """
        if not isinstance(text, str) and on_text is not None:
            raise InputError("on_text follows one text; give one prompt, or leave it out.")
        texts = [text] if isinstance(text, str) else list(text)
        generation = self._generation(texts, plan, max_new_tokens, sampling, stop, progress, on_text is not None)
        for _, piece in generation:
            if on_text is not None:
                on_text(piece)
        return generation.answers[0] if isinstance(text, str) else generation.answers

    def stream(
        self,
        text: str,
        *,
        plan: PlanSpec = None,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] | None = None,
        progress: Progress | None = None,
    ) -> TextStream:
        """As ``generate``, for one text: an iterator over its pieces, whose ``answer`` is there at the end."""
        return TextStream(self._generation([text], plan, max_new_tokens, sampling, stop, progress, True))

    def _generation(
        self, texts: Sequence[str], plan: PlanSpec, max_new_tokens: int,
        sampling: Sampling | Sequence[Sampling] | None, stop: str | Sequence[str] | None, progress: Progress | None,
        streamed: bool,
    ) -> Generation:  # fmt: skip
        started = perf_counter()
        for text in texts:
            require_text(text, "prompt")
        prompts = [self.tokenizer(text, verbose=False)["input_ids"] if text else [] for text in texts]
        if not prompts or not all(prompts):
            raise InputError("the prompt is empty." if len(prompts) == 1 else "a prompt is empty.")
        samplings = _for_each(sampling, len(prompts))
        plan = self.plan if plan is None else parse_plan(plan)
        self.check(prompts, max_new_tokens, plan)
        before = perf_counter()
        self.load()
        self.fast_path.reason_against(plan, self.model)  # finds out by trying, the first time
        started += perf_counter() - before
        requests = [self.request(ids, max_new_tokens, each, stop, streamed) for ids, each in zip(prompts, samplings)]
        return Generation(self, plan, requests, started, progress)

    def request(
        self, ids: list[int], max_new_tokens: int, sampling: Sampling | None, stop: str | Sequence[str] | None,
        streamed: bool,
    ) -> Request:  # fmt: skip
        """A request that also ends where the model says so."""
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        ends = frozenset(self._end_ids())
        return Request(ids, max_new_tokens, sampling or Sampling(), ends, tuple(filter(None, stops)), streamed)

    def composed_plan(self, plan: Plan) -> Plan:
        """The plan with decode dense in contexts below ``dense_below``, where that is a number."""
        rule = rule_of(plan)
        if rule is None or not isinstance(self.dense_below, int) or rule.budget.min_context >= self.dense_below:
            return plan
        later = replace(rule, budget=replace(rule.budget, min_context=self.dense_below))
        return Plan(later if plan.evicts_prompt else plan.prefill, later)

    def rotation(self, length: int) -> int | None:
        """How RoPE rotates a sequence that ends with so many cached tokens (``models.transformers_pinning``); None if
        always alike. Dynamic NTK takes the next multiple of its original maximum, so that questions share a document.
        """
        limits = self._rope_limits
        return None if limits is None else limits.least(limits.stepped(length))

    @cached_property
    def _rope_limits(self) -> RopeLimits | None:
        return RopeLimits.of(self.model)

    def new_cache(self, plan: Plan, reserve: int, rows: Sequence[int] = (), length: int | None = None) -> SparseCache:
        """An empty cache for about ``reserve`` tokens, or for ``rows`` of these lengths that are fed one by one.

        ``length``, if it is not ``reserve``, is how many tokens will be cached in the end: RoPE may depend on it.
        """
        cache = make_cache(
            self.model, plan, probe_every=self.probe_every, reserve=reserve, rows=rows, placement=self.place
        )
        cache.pin(self.rotation(reserve if length is None else length))
        return cache

    @torch.inference_mode()
    def prefill(
        self, cache: SparseCache, ids: Sequence[int], progress: Progress | None = None, phase: Phase = "prefill"
    ) -> Any:
        """Feed prompt tokens in chunks; logits [1, 1, vocabulary] of the last one, None without tokens.

        With phase "decode" each is answered as if it had been generated. While the last chunk of a prompt is read,
        layers that are done with it may build what decode needs (``SparseCache.prepare_after_next``).
        """
        logits, first = None, cache.get_seq_length() == 0
        foreseeing = phase == "decode" and cache.run.plan.wants_hidden  # by hooks on transformers' modules
        fused = None if foreseeing else self.fast_path.fused(self.model)
        with feeding(cache, phase):
            for start in range(0, len(ids), self.chunk_size):
                if first and start + self.chunk_size >= len(ids):
                    cache.prepare_after_next()
                chunk = torch.tensor([ids[start : start + self.chunk_size]], device=self.device)
                if fused is not None:
                    logits = fused(chunk[0], cache, phase)
                else:
                    logits = self.model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                if progress is not None:
                    progress(min(start + self.chunk_size, len(ids)), len(ids))
        return logits

    def _end_ids(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else list(ends or [])
        return {*ends, *([] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id])}


def _cpu(device: str) -> str:
    if device not in ("auto", "cpu"):
        raise InputError(
            f"placement=host keeps the model and its KV on the CPU, and device={device} is none. Leave the device out, "
            "or use placement=split or placement=offload."
        )
    return "cpu"


def _for_each(sampling: Sampling | Sequence[Sampling] | None, count: int) -> list[Sampling | None]:
    if not isinstance(sampling, list | tuple):
        return [sampling] * count  # type: ignore[list-item]
    if len(sampling) != count:
        raise InputError(f"there are {len(sampling)} samplings for {count} prompts; give one for each, or one for all.")
    return list(sampling)


def _common_prefix(a: list[int], b: list[int]) -> list[int]:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]
