"""The model runner: a model on its device, its caches, its prefill and its captured decode steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from inspect import signature
from threading import Lock
from time import perf_counter
from typing import Any, ClassVar

import torch

from kvsift.engine.graphs.fast_path import FastPath
from kvsift.engine.memory import require_memory
from kvsift.engine.options import GenerateOptions
from kvsift.engine.request import Request
from kvsift.engine.sampling import Sampling
from kvsift.engine.speculative.pace import Paces
from kvsift.engine.uncopied import Uncopied
from kvsift.errors import Conflict, ContextLengthExceeded, InvalidValue, OtherModel
from kvsift.layer.layer_cache import DEFAULT_PAGE_SIZE
from kvsift.methods import checks
from kvsift.methods.base import Phase
from kvsift.models.hf.generation_config import FILE, GenerationSettings
from kvsift.models.hf.model_directory import ModelDirectory
from kvsift.models.hf.rope import RopeLimits
from kvsift.models.hf.sparse import SparseCache, feeding, make_drafting_cache
from kvsift.models.inference import inference
from kvsift.plan.capabilities import NO_PROBES, PlanCase, check, check_placement, reason
from kvsift.plan.placement import Placement
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import PlanSpec
from kvsift.plan.tuned_plan import ModelPlans
from kvsift.stores.kv_pool import KVPool
from kvsift.tokenization.grammar import GrammarState, grammar_tokens
from kvsift.tokenization.text_offsets import TextOffsets
from kvsift.tokenization.token_text import TokenDecoder
from kvsift.types import Objections

CHARACTERS_PER_TOKEN = 8  # more than languages and code have, so that the first part of a long text decides
PARTS = "for instance its end, as tail gives it, lines that grep finds, or one part after the other"
log = logging.getLogger("kvsift")


class ModelRunner(Uncopied):
    """A model with its tokenizer on one device. Weights are loaded on first use.

    Args:
        directory: files of the model.
        device: device of the model.
        dtype: dtype of its weights and its KV.
        place: where KV lives.
        chunk_size: prompt tokens per forward pass.
        probe_every, dense_below, path, deterministic: see ``LLM``.
        plans: reads plans.

    Attributes:
        tokenizer: tokenizer of the model.
        fast_path: captured decode steps and forward pass.
        paces: how far exact answers draft.
    """

    not_pooled: ClassVar[Objections] = (
        (lambda case: case.place.in_host_memory, "keys and values are in host memory, in a pool of its own"),
        (lambda case: next((rule for rule in case.plan.rules if rule.evicts), None),
         "{found.name} drops tokens for good"),
        (lambda case: case.plan.page_size not in (None, DEFAULT_PAGE_SIZE) and DEFAULT_PAGE_SIZE,
         "its pages have {it.plan.page_size} tokens, and those that are shared {found}"),
    )  # fmt: skip
    INSTEAD = "Make another one there; each loads its own weights."

    def __init__(
        self, directory: ModelDirectory, device: torch.device, dtype: torch.dtype, place: Placement, chunk_size: int,
        probe_every: int, dense_below: int | str, path: str, deterministic: bool, plans: ModelPlans,
    ) -> None:  # fmt: skip
        self.directory, self.device, self.dtype = directory, device, dtype
        self.place, self.placement = place, place.name
        self.chunk_size, self.probe_every, self.dense_below = chunk_size, probe_every, dense_below
        self.tokenizer = directory.tokenizer()
        self.deterministic, self.plans = deterministic, plans
        self.fast_path = FastPath(path, device, dense_below, place, deterministic)
        self.paces = Paces()
        self._model: Any = None
        self._settings: GenerationSettings | None = None  # of the model, once it is loaded
        self._loading = Lock()
        self._has_left_out_bos = False

    def load(self) -> float:
        """Load the weights unless they are loaded. Returns the seconds it took, which no answer includes.

        Raises:
            InputError: if they cannot be loaded, or kvsift cannot run the model.
        """
        started = perf_counter()
        with self._loading:
            if self._model is None:
                model = self.directory.load(self.device, self.dtype)
                with inference():
                    make_drafting_cache(model, Plan())  # refuses it now, and not with the first request
                self._settings = _settings_of(model, self.tokenizer)
                self._model = model
        return perf_counter() - started

    @property
    def model(self) -> Any:
        """The transformers model, loaded on first use."""
        self.load()
        return self._model

    @property
    def precision(self) -> str:
        """Name of the dtype, and the format of weights that have been rounded to another."""
        name, dtype = self.directory.precision, str(self.dtype).removeprefix("torch.")
        return dtype if name is None else f"{dtype}, {name} weights"

    @property
    def generation_settings(self) -> GenerationSettings:
        """What the model's generation_config.json asks for."""
        model = self.model
        if self._settings is None:  # of a model that was made, not loaded
            self._settings = _settings_of(model, self.tokenizer)
        return self._settings

    def plan_of(self, spec: PlanSpec, default: Plan, exact: bool = False) -> Plan:
        """Return the plan that a call names, ``default`` for None; ``exact``: of an exact answer."""
        plan = default if spec is None else self.plans.parse(spec)
        return self.plans.verified(plan) if exact else plan

    def check_plan(self, plan: Plan) -> None:
        """Refuse a plan that cannot run on the model, or under its placement (``InputError``)."""
        check_placement(plan, self.place, self.device.type == "cuda")
        check(PlanCase(plan, probe_every=self.probe_every), NO_PROBES)
        plan.check_layers(range(self.directory.config.num_hidden_layers))

    def check_text(self, text: str) -> None:
        """Refuse a text whose first part has too many tokens already: all of it would take seconds to tokenize.

        Raises:
            InputError: with an estimate of its tokens, in words by which clients such as LiteLLM recognise it.
        """
        positions = self.directory.max_positions
        if positions is None or len(text) <= CHARACTERS_PER_TOKEN * positions:
            return
        head = text[: CHARACTERS_PER_TOKEN * positions]
        count = len(self.tokenizer(head, add_special_tokens=False, verbose=False)["input_ids"])
        if count > positions:
            estimate = float(f"{count * len(text) / len(head):.2g}")
            raise ContextLengthExceeded(
                f"This model's maximum context length is {positions} tokens. The text has {len(text):,} characters, "
                f"about {estimate:,.0f} tokens. Give a part of it ({PARTS}), or use a model made for longer contexts."
            )

    def check_prompts(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, plan: Plan) -> None:
        """Refuse prompts that do not fit the model's embeddings or positions, or the memory of this machine.

        Raises:
            InputError: before the weights are loaded.
        """
        checks.whole("max_new_tokens", max_new_tokens, 1)
        name, vocabulary = self.directory.name, getattr(self.directory.config, "vocab_size", None)
        largest = max((max(ids, default=0) for ids in prompts), default=0)
        if vocabulary is not None and largest >= vocabulary:
            raise OtherModel(
                f"the tokenizer of {name} gives token {largest:,}, but the model has a vocabulary of {vocabulary:,}. "
                "They do not belong together."
            )
        longest = max(len(ids) for ids in prompts)
        positions, total = self.directory.max_positions, longest + max_new_tokens
        if positions is not None and total > positions:
            ways = ["use a model made for longer contexts"]
            if total - positions < longest:
                ways.insert(0, f"shorten the context by {total - positions:,} tokens ({PARTS})")
            if longest < positions:
                ways.insert(0, f"generate {positions - longest:,} at most")
            raise ContextLengthExceeded(
                f"This model's maximum context length is {positions} tokens. The prompt has {longest:,} tokens and up "
                f"to {max_new_tokens:,} will be generated. To go on: {', or '.join(ways)}."
            )
        check(PlanCase(plan, probe_every=self.probe_every), NO_PROBES)
        plan.check_layers(range(self.directory.config.num_hidden_layers))
        if self._model is None:
            require_memory(  # of the longest prompt: others wait until there is memory for them
                self.directory, self.device, self.dtype, total, self.chunk_size, self.place, plan,
                self.fast_path.enabled,
            )  # fmt: skip

    def request(
        self, ids: Sequence[int], plan: Plan, options: GenerateOptions, streamed: bool = False,
        offsets: TextOffsets | None = None, started: float | None = None, ignores_ends: bool = False, client: str = "",
        salt: str = "", asked: Plan | None = None,
    ) -> Request:  # fmt: skip
        """The request of one prompt, which runs under ``plan``, by default the one that was ``asked`` for.

        The settings of the model's generation_config.json hold for it, and it ends at the model's end-of-text tokens
        and stop strings unless it ignores them. ``offsets`` are for passages. Its time begins at ``started``, or now.
        """
        assert offsets is None or offsets.num_tokens == len(ids), "they are those of the prompt"
        sampling = options.sampling or Sampling()
        assert not isinstance(sampling, Sequence), "one prompt has one sampling"
        started = perf_counter() if started is None else started
        deadline = None if options.timeout_s is None else started + options.timeout_s
        settings = self.generation_settings
        ends, stops = (frozenset[int](), ()) if ignores_ends else (settings.ends, settings.stops)
        stop_ids = self._stop_ids(options, ends, stops)
        vocabulary = getattr(self.directory.config, "vocab_size", None)
        if vocabulary is not None and (largest := max(sampling.logit_bias, default=0)) >= vocabulary:
            raise InvalidValue(f"logit_bias has token {largest}, and the vocabulary {vocabulary} tokens, from 0 on.")
        grammar = None
        if options.grammar is not None:
            grammar = GrammarState(options.grammar, self._grammar_tokens, {*ends, *stop_ids})
        return Request(
            ids,
            options.max_new_tokens,
            plan,
            sampling,
            ends,
            stop_ids,
            (*options.stops, *stops),
            streamed,
            options.logprobs,
            deadline,
            options.exact,
            offsets,
            options.skip_special_tokens,
            settings,
            client,
            salt,
            asked,
            grammar,
        )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt as it stands. A bos token that the text begins with is not doubled."""
        ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        bos = self.tokenizer.bos_token_id
        if bos is None or ids[:2] != [bos, bos]:
            return ids
        if not self._has_left_out_bos:
            self._has_left_out_bos = True
            log.warning(
                "the prompt begins with %s, which the tokenizer adds by itself; it is fed once, here and in prompts to "
                "come. Leave it out of the text.", self.tokenizer.bos_token,
            )  # fmt: skip
        return ids[1:]

    def reason_uncaptured(self, plan: Plan) -> str | None:
        """Why decode steps under a plan are not captured; None: they are. The first call may capture a trial step.

        Raises:
            InputError: if captured steps are required.
        """
        self.load()
        return self.fast_path.reason_plan_uncaptured(plan, self._model, self.generation_settings)

    def reason_apart(self, plan: Plan) -> str | None:
        """Why a sequence under a plan has pages of its own; None if they may be in a pool with those of others."""
        return reason(PlanCase(plan, self.place), self.not_pooled)

    def rotation(self, length: int) -> int | None:
        """How RoPE rotates a sequence that will have ``length`` cached tokens (``models.hf.pinning``); None
        if the rotation never depends on the length. For dynamic NTK, ``length`` is rounded up to a multiple of the
        original maximum, so that questions share a document.
        """
        limits = self._rope_limits
        return None if limits is None else limits.least(limits.stepped(length))

    def new_cache(self, plan: Plan, reserve: int, length: int | None = None) -> SparseCache:
        """An empty cache for about ``reserve`` tokens.

        ``length`` is the final number of cached tokens, if it is not ``reserve``: RoPE may depend on it.
        """
        cache = make_drafting_cache(
            self.model, plan, probe_every=self.probe_every, reserve=reserve, placement=self.place
        )
        cache.run.kv = KVPool(steady=True) if self.deterministic else None
        cache.rotation = self.rotation(reserve if length is None else length)
        return cache

    @inference()
    def feed(
        self, cache: SparseCache, ids: Sequence[int], phase: Phase = "prefill",
        pause: Callable[[], bool] | None = None, score: Callable[[torch.Tensor], None] | None = None,
    ) -> Any:  # fmt: skip
        """Feed prompt tokens in chunks; logits [1, 1, vocabulary] of the last one, None without tokens.

        With phase "decode" each token is answered as if it had been generated. During the last chunk of a prompt,
        layers that have attended it may build what decode needs (``SparseCache.prepare_after_next``).
        ``pause`` is called between layers of a ``ForwardPass``, ``score`` with logits [tokens, vocabulary]
        of all tokens in their order, some at a time.
        """
        logits, first = None, cache.get_seq_length() == 0
        foreseeing = phase == "decode" and cache.run.plan.wants_hidden  # by hooks on transformers' modules
        own = None if foreseeing else self.fast_path.forward_pass(self.model)
        size = 1 if phase == "decode" and cache.run.plan.is_guarded else self.chunk_size  # it decides token by token
        with feeding(cache, phase):
            for start in range(0, len(ids), size):
                if first and start + size >= len(ids):
                    cache.prepare_after_next()
                chunk = torch.tensor([ids[start : start + size]], device=self.device)
                logits = (
                    own.prefill(chunk[0], cache, phase, pause, score)
                    if own is not None
                    else self._forward(chunk, cache, score)
                )
        return logits

    def _forward(
        self, tokens: torch.Tensor, cache: SparseCache, score: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """Logits [1, 1, vocabulary] of the last of the next tokens [1, num_new], by transformers' forward pass.

        It gets the positions that generate() gives: some models number the tokens of every pass from 0 without them.
        """
        start, options = cache.get_seq_length(), {}
        if self._takes_positions:
            options["position_ids"] = torch.arange(start, start + tokens.shape[1], device=self.device).unsqueeze(0)
        kept = 1 if score is None else 0  # 0: of all
        output = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=kept, **options)
        logits: torch.Tensor = output.logits
        if score is not None:
            score(logits[0])
        return logits[:, -1:]

    @cached_property
    def _grammar_tokens(self) -> Any:
        return grammar_tokens(self.tokenizer, self.generation_settings.ends)

    @cached_property
    def _takes_positions(self) -> bool:
        return "position_ids" in signature(self.model.forward).parameters

    @cached_property
    def _rope_limits(self) -> RopeLimits | None:
        return RopeLimits.of(self.model)

    def _stop_ids(self, options: GenerateOptions, ends: Collection[int], stops: Sequence[str]) -> frozenset[int]:
        """Return the tokens that end an answer by an option, or as special tokens among the model's own stops.

        Raises:
            InputError: for a stop that no text can have, since a token in it is left out of the text, and for tokens
                that the model does not have.
        """
        decoder, vocabulary = TokenDecoder.of(self.tokenizer), getattr(self.directory.config, "vocab_size", None)
        left_out = decoder.left_out(options.skip_special_tokens, ends) - {*ends}
        unseen = [token for token, number in decoder.added.items() if number in left_out]
        for stop in options.stops:
            found = next((token for token in unseen if token in stop and token != stop), None)
            if found is not None:
                raise Conflict(
                    f"stop={stop!r} has the special token {found!r} in it, which is left out of the text. Stop at "
                    f"{found!r}, or give skip_special_tokens=False."
                )
        named = {*(options.stop_token_ids or ())}
        if vocabulary is not None and max(named, default=0) >= vocabulary:
            raise InvalidValue(f"stop_token_ids has {max(named)}, and the vocabulary {vocabulary} tokens, from 0 on.")
        return decoder.special.intersection(map(decoder.added.get, (*options.stops, *stops))) | named


def _settings_of(model: Any, tokenizer: Any) -> GenerationSettings:
    """The generation settings of a model that was just loaded; those that will not be applied are logged."""
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else {*(ends or ())}
    settings = GenerationSettings(model.generation_config, ends | ({tokenizer.eos_token_id} - {None}))
    if settings.ignored:
        log.warning("%s asks for %s, which kvsift does not apply: it generates without.", FILE, settings.ignored)
    return settings


def require_tokens(ids: object) -> None:
    """Refuse what are no tokens (``InputError``)."""
    if not isinstance(ids, list | tuple):
        raise InvalidValue(f"a prompt of tokens is a list of whole numbers; got {type(ids).__name__}.")
    if set(map(type, ids)) <= {int} and min(ids, default=0) >= 0:
        return  # one by one, 32K tokens would take 26 ms
    for token in ids:
        checks.whole("token", token, 0)
