"""The search for the plan that fits a model, a text and a machine.

Candidates are timed at the asked context, over keys and values that repeat those of a text, and tried from the fastest
on: each is scored against dense decoding on more and more tokens, until it misses the target beyond doubt or meets it
with confidence. Then layers that reuse the selections of others are tried on the plan that was found.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import inf, isfinite, isnan
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any, NamedTuple

from torch import Tensor

from kvsift.api.document import Document
from kvsift.atomic_files import write_atomically
from kvsift.calibration.anchor_search import choose
from kvsift.calibration.fidelity import DecodedText, FidelityScorer, Scores, bounds
from kvsift.calibration.layer_calibration import LayerOptions, compare
from kvsift.calibration.recipe import recipe_of, required_origin
from kvsift.engine.engine import Engine
from kvsift.errors import InvalidValue
from kvsift.methods.common.anchors import write as write_anchors
from kvsift.models.hf.contents import fill, numbers_of, tensors_of
from kvsift.models.hf.sparse import SparseCache
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import is_refused, parse_plan

# not streaming_llm: a text whose end needs little of its middle would choose it, and questions about the middle fail
METHODS = ("sketch", "sketch:bits=2", "quest", "quest:score_by=mean_std")
LAYERS = ("", ":dense_layers=none")
BUDGETS = (128, 256, 512, 1024, 2048, 4096)
BETWEEN = 0.75  # of the budget that was found, tried beside those
LARGEST_SHARE = 0.6  # of a context that a budget may be: beyond it dense decoding is as good
ROUNDS = {"cpu": 4, "cuda": 2}  # of times, of which the least counts: what else the machine does only adds to it
TIMED_TOKENS = 6
FIRST_TOKENS, GROWTH = 8, 4  # scored after each text at first, and how many times more each time after
CONFIDENCE, BEYOND_DOUBT = 0.9, 0.975  # of the bound that has to meet the target, and of that which ends a candidate
COMPARED_TEXTS, COMPARED_TOKENS = 2, 32  # whose layers are compared, and over so many tokens after each
RECOVERIES = (0.98, 0.95, 0.9, 0.8)  # least of layers that reuse selections, tried in this order
GAIN = 0.98  # of the time, which layers that reuse selections have to save to be kept
MEASURES = ("kl", "agreement", "recovery")


@dataclass(frozen=True)
class Target:
    """What a plan has to keep: at most so much KL to dense in nats, or at least so much agreement or recovery."""

    measure: str
    value: float

    @classmethod
    def of(cls, text: str) -> Target:
        """Read kl=0.02, agreement=0.97 or recovery=0.95 (``InputError``)."""
        measure, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if measure not in MEASURES or not 0 < number <= (inf if measure == "kl" else 1) or not isfinite(number):
            raise InvalidValue(f"the target {text!r} must be such as kl=0.02, agreement=0.97 or recovery=0.95.")
        return cls(measure, number)

    def __str__(self) -> str:
        return f"{self.measure}={self.value:g}"

    def misses(self, scores: Scores) -> bool:
        """Whether more tokens would hardly make a plan meet it: by the bound of the mean, or because no text does: one
        that is far beyond the others makes the bound wide."""
        values, sign = self._of(scores), 1 if self.measure == "kl" else -1
        lower, upper = bounds(values, BEYOND_DOUBT)
        all_do = all(sign * value > sign * self.value for value in values) and 0.5 ** len(values) <= 1 - BEYOND_DOUBT
        return all_do or (lower > self.value if self.measure == "kl" else upper < self.value)

    def is_met(self, scores: Scores) -> bool:
        """Whether the bound of a plan meets it."""
        lower, upper = bounds(self._of(scores), CONFIDENCE)
        return upper <= self.value if self.measure == "kl" else lower >= self.value

    def _of(self, scores: Scores) -> list[float]:
        found: list[float] = getattr(scores, self.measure)
        return found


class Tried(NamedTuple):
    """A candidate, its seconds per token at the asked context, and its scores so far."""

    plan: str
    tpot_s: float
    scores: Scores | None = None

    def summary(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        found: dict[str, Any] = {"plan": self.plan, "tpot_s": self.tpot_s}
        if self.scores is not None:
            found["tokens"] = self.scores.tokens * len(self.scores.kl)
            for measure in MEASURES:
                values = getattr(self.scores, measure)
                if not any(map(isnan, values)):  # recovery is, where nothing was probed
                    found |= {measure: fmean(values), f"{measure}_interval": bounds(values, CONFIDENCE)}
        return found


@dataclass
class Notebook:
    """What was measured, in a file that a later run goes on with.

    Attributes:
        path: path of the file; None keeps nothing.
        key: what the measurements hold for; a file of another key is replaced.
    """

    path: Path | None
    key: Mapping[str, Any]
    times: dict[str, list[float]] = field(default_factory=dict)
    scores: dict[str, Scores] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            found = json.loads(self.path.read_text()) if self.path is not None else {}
            if found["key"] == json.loads(json.dumps(self.key)):
                self.times = {plan: list(map(float, times)) for plan, times in found["times"].items()}
                self.scores = {plan: Scores(*scores) for plan, scores in found["scores"].items()}
        except (OSError, ValueError, TypeError, KeyError):
            pass  # there is none, or it is of another version: all is measured

    def remove(self) -> None:
        """Forget it: the search is over."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def save(self) -> None:
        """Write what was measured so far."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps({"key": self.key, "times": self.times, "scores": self.scores}))


def fill_repeatedly(cache: SparseCache, source: SparseCache, num_tokens: int, runner: Engine) -> None:
    """Fill an empty cache with so many tokens, which repeat those of a shorter one: for times, not for answers."""
    tensors, numbers, own = tensors_of(source), numbers_of(source), source.get_seq_length()
    for each in numbers:
        if "cumulative_length" in each:
            each["cumulative_length"] = num_tokens

    def read(index: int) -> dict[str, Tensor]:
        layer, repeats = f"layers.{index}.", -(-num_tokens // own)
        if "num_kv_heads" not in numbers[index]:  # a window, which is full, or a state
            return {name.removeprefix(layer): each() for name, each in tensors.items() if name.startswith(layer)}
        named = {name: tensors[layer + name]() for name in ("keys", "values")}
        return {name: each.repeat(1, repeats, 1)[:, :num_tokens] for name, each in named.items()}

    fill(cache, numbers, read, runner.device, runner.dtype, runner.chunk_size)


Progress = Callable[[str, int, int | None], None]  # what is done, how much of it, and of how much where that is known


class Tuner:
    """The search for the plan of a model.

    Args:
        runner: runner of the model, for instance an ``LLM`` with ``dense_below=0``; its plan is not used.
        texts: the ends of which are scored, all of one length.
        context: cached tokens at which plans are timed.
        notebook: notes of earlier runs.
        anchors: file beside which layers that reuse selections are written.
        progress: called with what is done, how much of it, and of how much.
    """

    def __init__(
        self, runner: Engine, texts: Sequence[DecodedText], context: int, notebook: Notebook, anchors: Path,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._runner, self._texts, self.context, self._notebook = runner, texts, context, notebook
        self._anchors, self._progress = anchors, progress
        self._scorer: FidelityScorer | None = None
        self._timed: Document | None = None

    def remove_anchors(self) -> None:
        """Remove the files of layers that reuse selections, which plans have tried."""
        for path in self._anchors.parent.glob(f"*-{self._anchors.name}"):
            path.unlink()

    def search(self, target: Target, tpot_s: float | None) -> dict[str, Any]:
        """Find the fastest plan that meets a target.

        Args:
            target: what it has to keep.
            tpot_s: the most seconds per token; of plans that take no longer, the closest to dense is found instead
                where none that meets the target is fast enough.

        Returns:
            The plan, its scores, the ``interval`` of what the target measures, and all candidates, ready for JSON.
        """
        dense, *tried = self._all_timed()
        chosen, tried = self._race(tried, target)
        if chosen is not None:
            chosen = self._between(chosen, target, tried)
            chosen = self._with_anchors(chosen, target, tried)
        is_met = chosen is not None
        if tpot_s is not None and (chosen is None or chosen.tpot_s > tpot_s):
            chosen, is_met = self._closest([each for each in tried if each.tpot_s <= tpot_s]), False
        found = chosen or dense
        summary, measure, exactly = found.summary(), target.measure, 0.0 if target.measure == "kl" else 1.0
        if found is dense:
            summary |= {measure: exactly, f"{measure}_interval": (exactly, exactly)}
        return {
            "plan": found.plan, "target": str(target), "met": is_met or found is dense, "context": self.context,
            **summary, "interval": summary.get(f"{measure}_interval"), "dense_tpot_s": dense.tpot_s,
            "candidates": [each.summary() for each in (dense, *tried)],
        }  # fmt: skip

    def _between(self, chosen: Tried, target: Target, tried: list[Tried]) -> Tried:
        """The plan with a budget between those that were tried, if it meets the target and takes less time."""
        family, budget = family_of(chosen.plan)
        plan = family.format(int(BETWEEN * budget))
        if is_refused(plan):
            return chosen
        candidate = self._beside(chosen, plan)
        if candidate.tpot_s < chosen.tpot_s:
            candidate = self._scored(candidate, target)
        tried.append(candidate)
        return candidate if self._meets(candidate, target) else chosen

    def _beside(self, chosen: Tried, plan: str) -> Tried:
        """Another plan with its time, both measured in turns: other work has taken its share of earlier times."""
        self._notebook.times.pop(chosen.plan, None)
        times = self._times([chosen.plan, plan])
        return Tried(plan, chosen.tpot_s * times[plan] / times[chosen.plan])

    def _meets(self, candidate: Tried, target: Target) -> bool:
        """Whether a candidate meets a target by all tokens that can be scored."""
        scores = candidate.scores
        return scores is not None and scores.tokens == self.num_tokens and target.is_met(scores)

    def _all_timed(self) -> list[Tried]:
        """Dense decoding and all candidates, by their times: three budgets of a method are timed, and the others lie on
        a line through these."""
        context = min(self.context, min(text.start for text in self._texts))
        budgets = [budget for budget in BUDGETS if budget <= LARGEST_SHARE * context]
        timed = sorted({budgets[0], budgets[len(budgets) // 2], budgets[-1]})
        families = [f"{method}:budget={{}}{layers}" for method, layers in product(METHODS, LAYERS)]
        times = self._times(["dense", *(family.format(budget) for family in families for budget in timed)])
        tried = [
            Tried(family.format(budget), seconds)
            for family in families
            for budget, seconds in zip(
                budgets, smoothed(timed, [times[family.format(budget)] for budget in timed], budgets)
            )
        ]
        return [Tried("dense", times["dense"]), *sorted(tried, key=lambda each: each.tpot_s)]

    def _times(self, plans: Sequence[str]) -> dict[str, float]:
        """Seconds per token of each plan: the least median of rounds over all of them."""
        kept, rounds = self._notebook.times, ROUNDS[self._runner.device.type]
        for number in range(rounds):
            for done, plan in enumerate(plans):
                self._progress("timing plans", number * len(plans) + done, rounds * len(plans))
                if len(kept.setdefault(plan, [])) <= number:
                    kept[plan].append(median(self._document.itl_s(parse_plan(plan), TIMED_TOKENS)))
            self._notebook.save()
        return {plan: min(kept[plan]) for plan in plans}

    def _race(self, tried: Sequence[Tried], target: Target) -> tuple[Tried | None, list[Tried]]:
        """The fastest candidate that meets the target, and all with their scores so far."""
        hopeless: dict[str, int] = {}  # of each family, the largest budget that is sure to miss
        found = None
        for candidate in tried:
            family, budget = family_of(candidate.plan)
            if family not in hopeless:
                plans = [each.plan for each in tried if family_of(each.plan)[0] == family]
                hopeless[family] = self._largest_that_misses(sorted(plans, key=lambda plan: family_of(plan)[1]), target)
            if budget > hopeless[family]:
                candidate = self._scored(candidate, target)
                if self._meets(candidate, target):
                    found = candidate
                    break
        return found, [each._replace(scores=self._notebook.scores.get(each.plan)) for each in tried]

    def _largest_that_misses(self, plans: Sequence[str], target: Target) -> int:
        """The largest of one family's budgets that is sure to miss the target by the first tokens, or 0.

        About three plans are scored for it: where a budget misses, a smaller one misses as well.

        Args:
            plans: plans of one family, by their budgets.
            target: what they have to keep.
        """
        found = bisect_left(
            plans, True, key=lambda plan: not target.misses(self._score(plan, min(FIRST_TOKENS, self.num_tokens)))
        )
        return family_of(plans[found - 1])[1] if found else 0

    def _scored(self, candidate: Tried, target: Target) -> Tried:
        """Score a candidate on more and more tokens, until it is sure to miss the target or all are scored."""
        tokens = FIRST_TOKENS
        while True:
            scores = self._score(candidate.plan, min(tokens, self.num_tokens))
            candidate = candidate._replace(scores=scores)
            if scores.tokens == self.num_tokens or target.misses(scores):
                return candidate
            tokens = GROWTH * scores.tokens

    def _score(self, plan: str, tokens: int) -> Scores:
        kept = self._notebook.scores
        if plan not in kept or kept[plan].tokens < tokens:
            scorer = self._scored_texts
            self._progress("comparing plans with dense", len(kept), None)
            kept[plan] = scorer.score(parse_plan(plan), tokens)
            self._notebook.save()
        return kept[plan]

    def _closest(self, tried: Sequence[Tried]) -> Tried | None:
        """The candidate that is closest to dense, by successive halving on more and more tokens."""
        tokens = FIRST_TOKENS
        while tried:
            scored = [each._replace(scores=self._score(each.plan, min(tokens, self.num_tokens))) for each in tried]
            scored.sort(key=lambda each: fmean(each.scores.kl))  # type: ignore[union-attr]
            if tokens >= self.num_tokens:
                return scored[0]
            tried, tokens = scored[: -(-len(scored) // GROWTH)], GROWTH * tokens
        return None

    def _with_anchors(self, chosen: Tried, target: Target, tried: list[Tried]) -> Tried:
        """The plan with layers that reuse the selections of others, if it meets the target in less time."""
        rule = parse_plan(chosen.plan).decode
        assert rule is not None
        if not hasattr(rule.method, "anchors"):
            return chosen
        self._progress("comparing layers", 0, 1)
        texts = [text._replace(ids=text.ids[: text.start + COMPARED_TOKENS]) for text in self._texts[:COMPARED_TEXTS]]
        budget = rule.budget
        options = LayerOptions(min(budget.tokens or 128, texts[0].start // 4), budget.dense_layers)
        pairs = compare(self._runner, texts, options, partial(self._progress, "comparing layers"))
        if not pairs.compared or not pairs.num_queries:
            return chosen
        origin, before, base = required_origin(self._runner), None, chosen.plan
        for recovery in RECOVERIES:
            choice = choose(pairs.gains(), None, recovery)
            if not choice.reuse or choice == before:
                continue
            before, path = choice, self._anchors.with_name(f"{len(choice.anchors)}-{self._anchors.name}")
            recipe = recipe_of(self._runner, {}, sum(len(text.ids) for text in texts))
            write_anchors(path, pairs.anchor_map(choice, origin, recipe))
            candidate = self._scored(self._beside(chosen, f"{base}:anchors={path}"), target)
            tried.append(candidate)
            if not self._meets(candidate, target):
                break  # still fewer layers that select would recover less
            if candidate.tpot_s < GAIN * chosen.tpot_s:
                chosen = candidate
        return chosen

    @property
    def num_tokens(self) -> int:
        """Scored after each text."""
        return min(len(text.ids) - text.start for text in self._texts)

    @property
    def _scored_texts(self) -> FidelityScorer:
        if self._scorer is None:
            self._scorer = FidelityScorer(self._runner, self._texts, partial(self._progress, "reading the texts"))
        return self._scorer

    @property
    def _document(self) -> Document:
        """The document over which plans are timed."""
        if self._timed is None:
            text = self._texts[0]
            ids = list(text.ids[: min(text.start, self.context)])
            source = Document(self._runner, ids, lambda question: ids, Plan())
            repeated = [ids[at % len(ids)] for at in range(self.context)]
            self._timed = Document(self._runner, repeated, lambda question: repeated, Plan())
            self._runner.load()
            cached = source.prefill(Plan())
            self._timed.restore(partial(fill_repeatedly, source=cached, num_tokens=self.context, runner=self._runner))
        return self._timed


def family_of(plan: str) -> tuple[str, int]:
    """A candidate's plan with ``{}`` in place of its budget, and the budget in tokens."""
    before, _, budget = plan.rpartition("budget=")
    number, _, after = budget.partition(":")
    return f"{before}budget={{}}{after and ':' + after}", int(number)


def digest(texts: Sequence[DecodedText]) -> str:
    """Name the texts and what is scored of them."""
    return hashlib.sha256(json.dumps([[text.start, *text.ids] for text in texts]).encode()).hexdigest()[:16]


def smoothed(timed: Sequence[int], seconds: Sequence[float], budgets: Sequence[int]) -> list[float]:
    """Times of one method at all budgets, on a line through those of some, which never falls: single ones differ by
    more than neighbours. Of fewer than three, each as it is; all are timed then."""
    if len(timed) < 3:
        return [*seconds]
    slope, first = linear_regression(timed, seconds)
    return [first + slope * budget for budget in budgets] if slope >= 0 else [fmean(seconds)] * len(budgets)
