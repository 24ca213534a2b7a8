"""LLM: a model directory, ready to read long documents under a plan.

llm = kvsift.LLM(plan="sketch:budget=1024")            # the embedded model
document = llm.read(Path("manual.txt").read_text())   # prefilled once, with the first question
answer = document.ask("What is the access code?")     # decoded under the plan
print(answer.text, answer.decode("density"))
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import Unpack, overload

from kvsift.api.answer import Answer
from kvsift.api.chat import Chat
from kvsift.api.document import Document
from kvsift.api.generation import Generation, TextStream
from kvsift.api.saved_document import SavedDocument
from kvsift.api.warm_up import WarmUp, warm_up
from kvsift.engine.engine import Engine
from kvsift.engine.loop import STATE_BYTES
from kvsift.engine.model_runner import require_tokens
from kvsift.engine.options import GenerateOptions, Options, ProgressCallback, Stop, stops_of
from kvsift.engine.sampling import Sampling
from kvsift.engine.speculative.exactness import check_exact
from kvsift.errors import Conflict, EmptyText, InvalidValue, UnsupportedDevice
from kvsift.methods import checks
from kvsift.models.hf.model_directory import ModelDirectory, choose_device, choose_dtype
from kvsift.models.hf.sparse import PlanSpec
from kvsift.plan.capabilities import NO_PROBES, PlanCase, check, check_placement
from kvsift.plan.placement import Placement, PlacementSpec
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import parse_unless_auto
from kvsift.plan.tuned_plan import DEFAULT_PLAN, ModelPlans
from kvsift.tokenization.prompt import DocumentPrompts, DocumentText, PromptFormat, require_text
from kvsift.tokenization.text_offsets import TextOffsets, offsets_of

CHUNK_SIZES = 512, 8192  # prompt tokens per forward pass: on a CPU, on a GPU
MOST_CHUNK = 65_536  # at most 2^31 numbers in an 8B model's MLP: kernels of libraries index them with 32 bits
LONGEST_NAME = 4096  # characters of a path
log = logging.getLogger("kvsift")


class LLM(Engine):
    """A model with its tokenizer and a default plan. Weights are loaded on first use.

    It computes in a thread of its own, which begins with the first request and ends with ``close``, a ``with`` block,
    the ``LLM`` itself or the process. Threads may share it: their answers are decoded together.

    Args:
        model: a Hugging Face directory, a GGUF file, or the name of a model on huggingface.co, which is downloaded at
            once into its cache if it is not there ("NAME:FILE.gguf": that file of it); None is the embedded model.
        plan: which part of the KV cache each query reads: text such as "quest:budget=1024", a table, or an object, a
            ``Plan``, a ``Rule`` or a method (``kvsift.parse_plan``), or "auto": the plan that ``kvsift tune`` found for
            this model, else the default one with a guard, which is logged; so is every ``plan`` below.
        device: "auto", "cpu", "cuda" or "cuda:N".
        dtype: "auto", "bfloat16", "float16" or "float32".
        quantize: to what linear weights but the head's are rounded when they are loaded (Llama, Mistral, Qwen2, Qwen3):
            "int4" and "int8", whole numbers of 4 and 8 bits in groups of 32 inputs, or "fp8", 8-bit floats with a scale
            per output, "fp8_head" the head's too (both also Qwen3-MoE, Mixtral, GLM-4.5 and MiniMax-M2). On a CPU int4
            and int8 stay so; on a GPU, in 16-bit dtypes, int4, and fp8 from Ada and Hopper on. Elsewhere they are
            expanded.
        kv_dtype: "int8": keys and values are kept in 8 bits beside the model, in about half the memory of 16 bits;
            "auto": in the dtype of the model.
        chunk_size: prompt tokens per forward pass, in whole pages, at most 65,536; 8192 on a GPU and 512 elsewhere.
        probe_every: compare every Nth sparse decode step with exact attention; 0 never.
        dense_below: decode is dense in contexts shorter than this; "auto": where dense decode is measured to be faster,
            on a GPU in captured steps, on a CPU with the fused forward pass. Answers with passages or ``exact`` select
            in all contexts.
        path: "auto" captures decode steps in CUDA graphs where plan and model allow it; "captured" refuses where they
            do not; "composed" launches one operation after the other, on a CPU too; "eager" runs the steps of captured
            graphs without capturing, for tests.
        keep_tokens: number of tokens of answered prompts that stay cached for prompts that share a prefix; weights must
            not change meanwhile. What a method remembers of them comes on top: for ``retrieval_attention:block=``
            about 1 KiB for each token and layer. The turns of a chat share in any case. Several prompts of one call
            share where steps are not captured; captured, they have pages of their own.
        state_bytes: bytes of host memory for the states of sliding-window and linear layers. Each state belongs to one
            length: a prompt begins with cached tokens up to a length whose state is kept. 0 keeps none, so that such
            models share no prefixes. Documents keep theirs in any case.
        placement: where KV lives. "device": with the model. "split": in host memory, with sinks and window on the
            device too; the host selects and attends the selection. "offload": in host memory, from which the device
            reads the selection and attends it. "host": model and KV on the CPU. With options, for instance
            "offload:device_cache=4096" or "split:host_values=int8" (``plan.placement``).
        deterministic: an answer has the same bits whatever is computed beside it, and ``exact=True`` can be asked for;
            ``dense_below="auto"`` is 0. On a CPU both hold without it, the first where ``dense_below`` is a number. On
            a GPU a single sequence decodes slower, and prompts are read in small chunks.

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
        quantize: str | None = None,
        kv_dtype: str = "auto",
        chunk_size: int | None = None,
        probe_every: int = 16,
        dense_below: int | str = "auto",
        path: str = "auto",
        keep_tokens: int = 0,
        state_bytes: int = STATE_BYTES,
        placement: PlacementSpec = "device",
        deterministic: bool = False,
    ) -> None:
        if chunk_size is not None:
            chunk_size = checks.whole("chunk_size", chunk_size, 1, MOST_CHUNK)
        keep_tokens = checks.whole("keep_tokens", keep_tokens, 0)
        state_bytes = checks.whole("state_bytes", state_bytes, 0)
        probe_every = checks.whole("probe_every", probe_every, 0)
        if dense_below != "auto":
            dense_below = checks.whole("dense_below", dense_below, 0, also=("auto",))
        checks.flag("deterministic", deterministic)
        spec = parse_unless_auto(plan)  # refused before the model is looked for
        place = Placement.of(placement)
        device = _cpu(device) if place.name == "host" else device
        directory = ModelDirectory.check(model).quantized(quantize)
        target = choose_device(device)
        place = _keeping(kv_dtype, place, target.type)
        on_gpu = target.type == "cuda"
        precision = choose_dtype(dtype, target, directory.config)
        plans = ModelPlans(directory.path, target.type, no_guard="" if probe_every else "probe_every=0 checks none")
        self.plan: Plan = plans.parse(spec)
        check_placement(self.plan, place, on_gpu)
        check(PlanCase(self.plan, probe_every=probe_every), NO_PROBES)
        chunk_size = chunk_size or CHUNK_SIZES[on_gpu]
        if 0 < keep_tokens < chunk_size:
            raise InvalidValue(
                f"keep_tokens={keep_tokens} keeps nothing: chunk_size={chunk_size}, and whole chunks are kept."
            )
        super().__init__(
            directory, target, precision, place, chunk_size, probe_every, dense_below, path, deterministic, plans,
            keep_tokens=keep_tokens, state_bytes=state_bytes,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<LLM {self.directory.name} on {self.device} ({self.precision}), {self.plan}>"

    def warm_up(self, plans: Sequence[PlanSpec] = (), num_tokens: int | None = None) -> WarmUp:
        """Allocate the memory of prompts, capture the steps of the default plan, and dense ones, and compile what reads
        prompts, before the first one comes; where no steps are captured nothing is done. The pool of pages then grows,
        and moves, no more, as long as prompts come one by one.

        Args:
            plans: further ones that prompts may have.
            num_tokens: tokens to reserve; by default what eight prompts of all positions need, or what is free.

        Returns:
            What was done.
        """
        if num_tokens is not None:
            num_tokens = checks.whole("num_tokens", num_tokens, 1)
        if not isinstance(plans, list | tuple):
            raise InvalidValue(f"plans={plans!r} must be a list of plans, such as ['dense'].")
        self.load()
        return warm_up(self, self.loop, [self.plan, *map(self.plans.parse, plans)], num_tokens)

    def check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, plan: PlanSpec = None) -> None:
        """As ``check_prompts``, under the default plan if none is given."""
        if not isinstance(prompts, list | tuple) or not prompts:
            raise InvalidValue(f"prompts={prompts!r:.40} must be a list of prompts, each a list of tokens.")
        for ids in prompts:
            require_tokens(ids)
        self.check_prompts(prompts, max_new_tokens, self.plan_of(plan, self.plan))

    def read(
        self, context: str, *, plan: PlanSpec = None, progress: ProgressCallback | None = None,
        template: str | None = None, system: str | None = None, stop: Stop = None,
    ) -> Document:  # fmt: skip
        """A document to ask about. It is prefilled once: with its first question, under that question's plan.

        Args:
            context: the document.
            plan: instead of the default one.
            progress: called while the document is prefilled.
            template: text with {context} and {question}, instead of the chat template or kvsift's own format.
            system: a system message for the chat template.
            stop: text, or several texts, that end an answer; by default the end of a line in kvsift's own format, else
                none.

        Raises:
            InputError: if it is empty, or too long for the model or the machine.
        """
        self.loop.require_open()
        require_text(context, "context")
        if not context.strip():
            raise EmptyText("the context is empty; there is nothing to ask about.")
        _warn_of_file_name(context)
        self.check_text(context)
        return self._document(DocumentText(context, template, system, stops_of(stop)), plan, progress)

    def open(
        self, path: str | Path, *, plan: PlanSpec = None, progress: ProgressCallback | None = None
    ) -> Document:  # fmt: skip
        """A document that ``Document.save`` has written. It answers as it did, and is not prefilled.

        Args:
            path: path of the file, which is not needed afterwards.
            plan: instead of the default one; with the rule of prefill under which the document was read.
            progress: called if a question makes the document be prefilled again (``Document.prefill``).

        Raises:
            InputError: if the file is not a whole saved document, or was read by another model, in another dtype, in
                chunks of another size or under another rule of prefill.
        """
        self.loop.require_open()
        with SavedDocument(checks.path_of("path", path)) as saved:
            saved.check(self, self.plan_of(plan, self.plan))
            document = self._document(saved.text, plan, progress, saved.ids)
            document.restore(partial(saved.fill, runner=self), saved.rotation, saved.read_s, saved.read_stats)
        return document

    def _document(
        self, text: DocumentText, plan: PlanSpec, progress: ProgressCallback | None, ids: list[int] | None = None
    ) -> Document:
        plan = self.plan_of(plan, self.plan)
        form = PromptFormat(self.tokenizer, text.template, text.system)
        prompts = DocumentPrompts(form, text.context, ids)
        return Document(self, prompts.ids, prompts, plan, progress, text.stop or form.stop, text)

    def chat(self, context: str = "", *, plan: PlanSpec = None, system: str | None = None, stop: Stop = None) -> Chat:
        """A conversation, with or without a document. Its turns share what is prefilled; arguments as for ``read``.

        Raises:
            InputError: for a document that is no text, or too long for the model.
        """
        require_text(context, "context")
        _warn_of_file_name(context)
        self.check_text(context)
        form, plan = PromptFormat(self.tokenizer, system=system), self.plan_of(plan, self.plan)

        def start(
            ids: list[int], options: Options, progress: ProgressCallback | None, streamed: bool,
            offsets: TextOffsets | None,
        ) -> Generation:  # fmt: skip
            chosen: Options = {"plan": plan, **options}
            found, started = None if offsets is None else [offsets], perf_counter()
            return self._continuing([ids], GenerateOptions.of(chosen), progress, streamed, started, True, found)

        return Chat(start, form, context, stops_of(stop))

    @overload
    def generate(
        self, text: str, *, progress: ProgressCallback | None = None, on_text: Callable[[str], None] | None = None,
        **options: Unpack[Options],
    ) -> Answer: ...  # fmt: skip

    @overload
    def generate(
        self, text: str, *, n: int, progress: ProgressCallback | None = None, **options: Unpack[Options]
    ) -> list[Answer]: ...

    @overload
    def generate(
        self, text: list[str], *, progress: ProgressCallback | None = None, **options: Unpack[Options]
    ) -> list[Answer]: ...

    def generate(
        self,
        text: str | list[str],
        *,
        n: int | None = None,
        progress: ProgressCallback | None = None,
        on_text: Callable[[str], None] | None = None,
        **options: Unpack[Options],
    ) -> Answer | list[Answer]:
        """Continue a text, or several at once, as they stand (no template is applied).

        Args:
            text: the prompt, or a list of prompts of any lengths, which share their decode steps.
            n: as many answers to one prompt, drawn with seeds that come from that of ``sampling``.
            progress: called while prompts are prefilled.
            on_text: called with every new piece of the text; of one prompt only.
            plan: instead of the default one.
            max_new_tokens: maximum number of tokens to generate for each prompt, 64 by default.
            sampling: how to choose tokens, for all prompts or one for each; greedy by default. A prompt's draws come
                from its own seed, so its answer does not depend on its neighbours.
            stop: text, or several texts, that end the answer and are not part of it; a special token of such a name
                ends it too.
            stop_token_ids: further tokens that do.
            skip_special_tokens: True leaves all special tokens out of the text, False none; by default those without a
                meaning of their own, such as bos and padding (``GenerateOptions``).
            logprobs: keep the log-probability of every token, and those of so many likeliest ones; captured steps
                cannot.
            timeout_s: end each answer after so many seconds, as it is then; they count from where ``Answer.ttft_s``
                does.
            grammar: what the text of the answer must be, such as ``kvsift.Grammar.json(schema)``; the answer ends where
                nothing may follow.
            exact: the answers of dense attention, token by token, sampled ones too: the plan drafts, and dense
                attention verifies several tokens in one pass. ``Answer.exact`` tells what was drafted.
            passages: keep which characters of the prompt were selected (composed steps).

        Returns:
            An ``Answer``, or a list of them for a list of prompts or for ``n``.

        Raises:
            InputError: for options or prompts that cannot be used, before anything runs.
            Exception: with which an answer has ended, for instance ``LogitsError`` where logits are NaN. Of several
                prompts the others go on to their ends: its attribute ``answers`` has theirs, None for one that failed.
        """
        if n is not None:
            return self._samples(text, n, on_text, progress, options)
        if not isinstance(text, str) and on_text is not None:
            raise Conflict("on_text follows one text; give one prompt, or leave it out.")
        checks.function("on_text", on_text)
        texts = list(text) if isinstance(text, list | tuple) else [text]
        generation = self._generation(
            texts, GenerateOptions.of(options, ("n", "on_text")), progress, streamed=on_text is not None
        )
        for _, piece in generation:
            if on_text is not None:
                on_text(piece)
        return generation.answers[0] if isinstance(text, str) else generation.answers

    def _samples(
        self, text: str | list[str], n: int, on_text: Callable[[str], None] | None,
        progress: ProgressCallback | None, options: Options,
    ) -> list[Answer]:  # fmt: skip
        n = checks.whole("n", n, 1)
        sampling = options.get("sampling")
        if not isinstance(text, str) or on_text is not None:
            raise Conflict("n answers are drawn to one text, and come at once; give one, and leave out on_text.")
        if not isinstance(sampling, Sampling) or sampling.temperature == 0:
            raise Conflict(f"n={n} greedy answers are the same one; give sampling=Sampling(temperature=...).")
        drawn = [sampling.nth(number) for number in range(n)]
        chosen: Options = {**options, "sampling": drawn}
        return self.generate([text] * n, progress=progress, **chosen)

    def stream(self, text: str, *, progress: ProgressCallback | None = None, **options: Unpack[Options]) -> TextStream:
        """As ``generate``, for one text: an iterator over its pieces, with the ``Answer`` as ``answer`` at the end."""
        return TextStream(self._generation([text], GenerateOptions.of(options), progress, streamed=True))

    def _generation(
        self, texts: Sequence[str], options: GenerateOptions, progress: ProgressCallback | None, streamed: bool
    ) -> Generation:
        started = perf_counter()
        for text in texts:
            require_text(text, "prompt")
            self.check_text(text)
        prompts = [self.encode(text) if text else [] for text in texts]
        if not prompts or not all(prompts):
            which = {0: "there is no prompt", 1: "the prompt is empty"}.get(len(prompts))
            raise EmptyText(f"{which or f'prompt {prompts.index([]) + 1} of {len(prompts)} is empty'}.")
        offsets = None
        if options.passages:
            found = [offsets_of(self.tokenizer, text) for text in texts]
            offsets = [each.shifted(len(ids) - each.num_tokens) for ids, each in zip(prompts, found)]
        return self._continuing(prompts, options, progress, streamed, started, offsets=offsets)

    def _continuing(
        self, prompts: Sequence[Sequence[int]], options: GenerateOptions, progress: ProgressCallback | None,
        streamed: bool, started: float, holds: bool = False, offsets: Sequence[TextOffsets] | None = None,
    ) -> Generation:  # fmt: skip
        prompt_options = options.split(len(prompts))
        plan = self.plan_of(options.plan, self.plan, options.exact)
        checks.function("progress", progress)
        self.check_prompts(prompts, options.max_new_tokens, plan)
        before = perf_counter()  # the first call may capture or time trial steps, which no answer's time includes
        self.load()
        check_exact(self, plan, options.exact)
        runs_as = self.executed_plan(plan, max(map(len, prompts)) + options.max_new_tokens, options)
        started += perf_counter() - before
        requests = [
            self.request(ids, runs_as, choice, streamed, where, started, asked=plan)
            for ids, choice, where in zip(prompts, prompt_options, offsets or repeat(None))
        ]
        return Generation(self, self.loop, requests, started, progress, holds)


def _keeping(kv_dtype: str, place: Placement, device: str) -> Placement:
    """The placement with this dtype of keys and values."""
    if kv_dtype == "auto":
        return place
    if place.in_host_memory:
        raise Conflict(
            f"kv_dtype={kv_dtype} is for keys and values beside the model, and with placement={place} they are in host "
            "memory. Leave the placement out, or kv_dtype."
        )
    return Placement("host" if device == "cpu" else "device", kv_dtype=kv_dtype)


def _cpu(device: str) -> str:
    if device not in ("auto", "cpu"):
        raise UnsupportedDevice(
            f"placement=host keeps the model and its KV on the CPU, not on {device}. Leave the device out, "
            "or use placement=split or placement=offload."
        )
    return "cpu"


def _warn_of_file_name(context: str) -> None:
    """Log a warning if the context is the name of a file. It is no error: whoever sends a text to a program that reads
    it here must not learn from a refusal which files there are."""
    try:
        is_name = 0 < len(context) <= LONGEST_NAME and Path(context).is_file()
    except (OSError, ValueError):  # no file can have this name
        return
    if is_name:
        log.warning(
            "the context %r is the name of a file, and is read as text itself. Give the text of the file, or open a "
            "saved document with llm.open.", context,
        )  # fmt: skip
