"""Model for lm-eval (EleutherAI's harness), an extra: pip install lm-eval, then

    import lm_eval, kvsift_lab.eval.lm_eval                       # registers "kvsift"
    lm_eval.simple_evaluate(model="kvsift", model_args="pretrained=./Qwen3-4B,plan=sketch:budget=1024", tasks=[...])

Contexts are prefilled under the plan's prefill rule, once for all continuations that share them. Continuations are
decoded token by token under its decode rule, so their scores are those of generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import lm_eval.models  # noqa: F401, first: lm-eval registers its own models only while its registry is empty
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from kvsift.api.llm import DEFAULT_PLAN, LLM, Document
from kvsift.engine.sampling import Sampling
from kvsift.errors import UnsupportedPrompt
from kvsift.plan.syntax import is_auto, parse_plan
from kvsift.tokenization.chat_template import ChatTemplate

MAX_NEW_TOKENS = 256


@register_model("kvsift")
class KVSiftLM(TemplateLM):
    """An ``LLM`` under a plan.

    Args:
        pretrained: a model directory; the embedded model without it.
        plan: as on the command line; commas between phases are written ``;`` in ``model_args``.
        device, dtype: as in ``LLM``.
        batch_size, max_batch_size: of lm-eval, ignored; contexts are prefilled one at a time.
    """

    def __init__(
        self, pretrained: str | None = None, plan: str = DEFAULT_PLAN, device: str | None = "auto", dtype: str = "auto",
        batch_size: object = 1, max_batch_size: object = None,
    ) -> None:  # fmt: skip
        super().__init__()
        chosen = str(plan).replace(";", ",")
        probe_every = 16 if is_auto(chosen) or parse_plan(chosen).is_guarded else 0
        self.llm = LLM(pretrained, chosen, device=device or "auto", dtype=dtype, probe_every=probe_every, dense_below=0)
        self.tokenizer = self.llm.tokenizer
        self._document: tuple[tuple[int, ...], Document] | None = None

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        """The number of positions of the model."""
        return self.llm.directory.max_positions or 2048

    @property
    def tokenizer_name(self) -> str:
        """Part of the name of a file in lm-eval's cache of requests: a Hub name without its slash, as in its ``hf``."""
        return self.llm.directory.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text, with bos if the tokenizer adds it and the text does not begin with it."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        ids: list[int] = self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return turns in the model's chat format.

        Raises:
            InputError: if the model has no chat template, or it leaves out what a turn says.
        """
        if not self.tokenizer.chat_template:
            raise UnsupportedPrompt(f"{self.llm.directory.name} has no chat template; leave out --apply_chat_template.")
        return ChatTemplate(self.tokenizer).render(chat_history, continues=not add_generation_prompt)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return [self._score(context, continuation) for _, context, continuation in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of whole texts, in disjoint windows where a text exceeds the model's length. As in
        lm-eval's ``hf``, a bos token that the tokenizer adds is scored too, after the prefix token."""
        totals = []
        for (text,) in [request.args for request in requests]:
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            totals.append(sum((self._score(*make_disjoint_window(window))[0] for window in windows), 0.0))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return generated texts, up to the first stop of the request."""
        return [self._generate(context, options) for context, options in (request.args for request in requests)]

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        samples = options.get("do_sample", float(options.get("temperature") or 0.0) > 0)
        temperature = float(options.get("temperature") or 1.0) if samples else 0.0
        bos = self.tokenizer.bos_token_id
        if bos is not None and self.tokenizer(context, verbose=False)["input_ids"][:2] == [bos, bos]:
            context = context.removeprefix(self.tokenizer.bos_token)  # the chat template's; the tokenizer adds one
        answer = self.llm.generate(
            context or self.tokenizer.decode([self.prefix_token_id]),
            max_new_tokens=int(options.get("max_gen_toks", options.get("max_new_tokens", MAX_NEW_TOKENS))),
            sampling=Sampling(temperature=temperature, top_p=float(options.get("top_p", 1.0))),
            stop=stops,
        )
        return min((answer.text.partition(stop)[0] for stop in stops if stop), key=len, default=answer.text)

    @torch.inference_mode()
    def _score(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """Return the log-likelihood of a continuation, and whether greedy decoding generates it."""
        room = max(self.max_length + 1 - len(continuation), 1)  # the last token is predicted and never fed
        context = list(context)[-room:]
        self.llm.load()
        cache = self._prefilled(tuple(context[:-1]), len(continuation))
        return self.llm.loop.call(partial(self._scored, cache, context[-1], continuation))

    def _scored(self, cache: Any, token: int, continuation: Sequence[int]) -> tuple[float, bool]:
        total, greedy = 0.0, True
        for target in continuation:
            logits = self.llm.feed(cache, [token], phase="decode")[0, -1].float()
            total += float(logits.log_softmax(-1)[target])
            greedy = greedy and int(logits.argmax()) == target
            token = target
        return total, greedy

    def _prefilled(self, ids: tuple[int, ...], more: int) -> Any:
        """Return a cache that holds a context; the last context is kept."""
        plan = self.llm.plan
        if not ids:
            return self.llm.new_cache(plan, more)
        if self._document is None or self._document[0] != ids:
            self._document = None  # frees its memory before the next one takes any
            self._document = ids, Document(self.llm, list(ids), lambda text: list(ids), plan)
        return self._document[1].prefill(plan, more)
