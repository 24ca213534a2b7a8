"""How far the predictions of plans are from those of dense decoding over the same texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from statistics import NormalDist, fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.api.document import Document
from kvsift.engine.engine import Engine
from kvsift.engine.graphs.feeds import Assignment
from kvsift.engine.graphs.session import STEADY_SLOTS
from kvsift.engine.graphs.slots import Slots, StepKind
from kvsift.engine.options import ProgressCallback
from kvsift.engine.sampling import Sampling
from kvsift.layer.paged_decode import rule_of
from kvsift.models.forward_pass import MAX_SEQUENCES
from kvsift.models.hf.sparse import SparseCache
from kvsift.models.inference import inference
from kvsift.plan.plan import Plan

STEPS_OF_A_CALL = 16  # captured ones, between which the engine serves others: their logits are a few hundred megabytes


class DecodedText(NamedTuple):
    """Token ids of a text, of which those from ``start`` on are decoded."""

    ids: Sequence[int]
    start: int


class Scores(NamedTuple):
    """Means over the first ``tokens`` predictions after each text, in the order of the texts.

    Attributes:
        tokens: scored after each text.
        kl: KL(dense || plan), in nats.
        agreement: how often both find the same token likeliest.
        nll: negative log-likelihood of the tokens that follow in the text.
        recovery: share of attention on what was read, where steps were probed; else NaN.
    """

    tokens: int
    kl: list[float]
    agreement: list[float]
    nll: list[float]
    recovery: list[float]


class _Decoded(NamedTuple):
    """What was decoded under a plan after each text.

    Attributes:
        plan, caches: the plan and the caches of the texts.
        kl, agreement, nll: as of ``Scores``, of each text the tensors [tokens] of each call.
    """

    plan: Plan
    caches: Sequence[SparseCache]
    kl: list[list[Tensor]]
    agreement: list[list[Tensor]]
    nll: list[list[Tensor]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.kl[0]))


class FidelityScorer:
    """Scores plans against dense decoding over the ends of texts, which are prefilled once.

    Args:
        runner: runner of the model, for instance an ``LLM``; its plan is not used.
        texts: as many tokens of each are scored as the shortest end has.
        progress: called with the prefilled tokens and all tokens to prefill.
    """

    def __init__(self, runner: Engine, texts: Sequence[DecodedText], progress: ProgressCallback | None = None) -> None:
        self._runner = runner
        self.num_tokens = min(len(text.ids) - text.start for text in texts)
        self._targets = [list(text.ids[text.start : text.start + self.num_tokens]) for text in texts]
        # a token is decoded to predict the next one, so the first that is decoded is the last before the targets
        self._fed = [list(text.ids[text.start - 1 : text.start - 1 + self.num_tokens]) for text in texts]
        self._documents = [Document(runner, list(text.ids[: text.start - 1]), _not_asked, Plan()) for text in texts]
        total, done = sum(document.num_tokens for document in self._documents), 0
        for document in self._documents:
            document.prefill(Plan(), self.num_tokens)
            done += document.num_tokens
            if progress is not None:
                progress(done, total)
        self._last: _Decoded | None = None
        self._dense = self._predicted_densely()

    @torch.inference_mode()
    def score(self, plan: Plan, tokens: int | None = None) -> Scores:
        """Compare a plan with dense decoding over the first so many tokens after each text, or all. Of a plan that was
        scored last, only more tokens are decoded."""
        tokens = self.num_tokens if tokens is None else tokens
        if self._last is None or self._last.plan != plan or self._last.tokens > tokens:
            caches = [document.prefill(plan, self.num_tokens) for document in self._documents]
            for cache in caches:
                cache.stats.clear()
            nothing = [[list[Tensor]() for _ in caches] for _ in range(3)]
            self._last = _Decoded(plan, caches, *nothing)
        last = self._last

        def note(number: int, logits: Tensor) -> None:
            place = sum(map(len, last.kl[number]))
            predicted, targets = logits.float().log_softmax(-1), self._targets[number][place : place + len(logits)]
            dense = self._dense[number][place : place + len(logits)].to(logits.device)
            last.kl[number].append((dense.exp() * (dense - predicted)).nan_to_num(0.0).sum(-1).cpu())
            last.agreement[number].append((predicted.argmax(-1) == dense.argmax(-1)).float().cpu())
            last.nll[number].append(-predicted.cpu().gather(1, torch.tensor(targets).unsqueeze(1)).squeeze(1))

        if last.tokens < tokens:
            decode_known(self._runner, last.caches, [each[last.tokens : tokens] for each in self._fed], note)
        kl, agreement, nll = ([float(torch.cat(each).mean()) for each in of_texts] for of_texts in last[2:])
        return Scores(tokens, kl, agreement, nll, [_recovery(cache.stats.report()) for cache in last.caches])

    @torch.inference_mode()
    def _predicted_densely(self) -> list[Tensor]:
        """Log-probabilities on the host, float32 [tokens, vocabulary] of each text."""
        found: list[list[Tensor]] = [[] for _ in self._documents]

        def note(number: int, logits: Tensor) -> None:
            found[number].append(logits.float().log_softmax(-1).cpu())

        caches = [document.prefill(Plan(), self.num_tokens) for document in self._documents]
        decode_known(self._runner, caches, self._fed, note)
        return [torch.cat(each) for each in found]


def decode_known(
    runner: Engine,
    caches: Sequence[SparseCache],
    tokens: Sequence[Sequence[int]],
    take: Callable[[int, Tensor], object],
) -> None:
    """Decode known tokens after several texts, each as if it had been generated.

    Between steps the engine serves others.

    Args:
        runner: runner of the model.
        caches: caches of the texts, under one plan.
        tokens: those of each text, equally many.
        take: called with the number of a text and the logits [some, vocabulary] after its next tokens.
    """
    plan, probes = caches[0].run.plan, any(cache.stats.probe_every for cache in caches)
    if runner.fast_path.enabled and not probes and runner.reason_uncaptured(plan) is None:
        for numbers in _side_by_side(caches):
            steps = list(zip(*(tokens[number] for number in numbers), strict=True))
            captured = _CapturedSteps(runner, [caches[number] for number in numbers], steps)
            while captured.remaining:
                for number, logits in zip(numbers, runner.loop.call(captured.some)):
                    take(number, logits)
        return
    for column in zip(*tokens, strict=True):
        for number, logits in enumerate(runner.loop.call(partial(_fed, runner, caches, column))):
            take(number, logits)


def _fed(runner: Engine, caches: Sequence[SparseCache], tokens: Sequence[int]) -> list[Tensor]:
    """The logits [1, vocabulary] after one more token of each text."""
    if caches[0].run.plan.wants_hidden or (forward_pass := runner.fast_path.forward_pass(runner.model)) is None:
        return [runner.feed(cache, [token], phase="decode")[0, -1:] for cache, token in zip(caches, tokens)]
    groups = [slice(start, start + MAX_SEQUENCES) for start in range(0, len(caches), MAX_SEQUENCES)]
    return [
        logits
        for group in groups
        for logits in forward_pass.decode(torch.tensor(tokens[group], device=runner.device), caches[group])
    ]


def _side_by_side(caches: Sequence[SparseCache]) -> list[list[int]]:
    """The numbers of the caches that may take captured steps together: of one pool, and rotated alike."""
    alike = defaultdict[object, list[int]](list)
    for number, cache in enumerate(caches):
        alike[id(cache.table.kv), cache.rotation].append(number)
    return [
        numbers[first : first + STEADY_SLOTS]
        for numbers in alike.values()
        for first in range(0, len(numbers), STEADY_SLOTS)
    ]


class _CapturedSteps:
    """``decode_known`` of texts side by side in captured steps. Composed ones of an 8B take 58 ms, mostly launches.

    Args:
        runner: runner of the model.
        caches: caches of the texts.
        tokens: for each step, one token of each text.
    """

    def __init__(self, runner: Engine, caches: Sequence[SparseCache], tokens: Sequence[Sequence[int]]) -> None:
        self._runner, self._caches, self.remaining = runner, caches, tokens
        self._slots: Slots | None = None
        self._moves = 0  # of the pool, when steps were last captured

    def some(self) -> list[Tensor]:
        """The logits [some, vocabulary] of each text after a few of the remaining tokens."""
        runner, caches, cache = self._runner, self._caches, self._caches[0]
        tokens, self.remaining = self.remaining[:STEPS_OF_A_CALL], self.remaining[STEPS_OF_A_CALL:]
        lengths, rule = [each.get_seq_length() for each in caches], rule_of(cache.run.plan)
        with runner.fast_path.turn, inference():
            if self._slots is None or self._moves != cache.table.kv.moves:
                self._slots = runner.fast_path.for_tokens(runner.model, caches, len(tokens) + len(self.remaining))
                self._moves = cache.table.kv.moves
            mode = "dense" if rule is None else self._slots.sparse_mode(rule)
            kind = StepKind(mode, None)
            self._slots.prepare(kind)
            below = 0 if rule is None else rule.budget.min_context
            self._slots.assign(
                [
                    Assignment(each.table.planned(0), length, token, Sampling(), 1, rule, below, each)
                    for each, length, token in zip(caches, lengths, tokens[0])
                ],
                len(tokens),
            )
            logits = self._slots.logits(tokens, kind)
            for slot, (each, length) in enumerate(zip(caches, lengths)):
                self._slots.save(slot, each, length + len(tokens))
                each.advance(0, length + len(tokens), length + len(tokens), None)
        return list(logits.unbind(1))


def bounds(means: Sequence[float], level: float = 0.9) -> tuple[float, float]:
    """One-sided bounds, each with this confidence, of the mean that independent texts share: Student's t."""
    if len(means) < 2:
        return float("-inf"), float("inf")
    margin = t_quantile(level, len(means) - 1) * stdev(means) / sqrt(len(means))
    return fmean(means) - margin, fmean(means) + margin


def t_quantile(level: float, freedom: int) -> float:
    """Student's t, by the expansion of Cornish and Fisher: within 0.5 % from 5 degrees of freedom on, to 0.99."""
    z = NormalDist().inv_cdf(level)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def _recovery(report: dict[str, Any]) -> float:
    found = report["phases"].get("decode", {}).get("recovery")
    return float("nan") if found is None else float(found)


def _not_asked(question: str) -> list[int]:
    raise NotImplementedError("texts that are scored are not asked")
