"""Calibration of layers that reuse selections: which layer's best tokens recover how much of another's attention.

Texts are prefilled and their ends decoded, densely. Every decoded query ranks the tokens between sinks and window by
the attention of each KV head (the mean of its query heads). The best of each earlier layer's heads are compared with
the head's own: the attention on them over that on its own best, sinks and window included in both, summed over all
queries.

Attention is measured rather than the overlap of the two sets of tokens, because what a head hardly attends to hardly
matters. Sinks and window count for the same reason: a layer that attends little else loses little by any selection.
On the embedded model the tokens of layer 0 hold a fifth of what those of layer 4 would beside sinks and window, and the
answers are right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from kvsift.calibration.anchor_search import Choice, choices, choose
from kvsift.calibration.fidelity import DecodedText
from kvsift.calibration.recipe import recipe_of, required_origin
from kvsift.engine.engine import Engine
from kvsift.engine.options import ProgressCallback
from kvsift.errors import TooShort
from kvsift.layer.probe import exact_shares
from kvsift.methods.base import Method, Phase
from kvsift.methods.common.anchors import AnchorMap, Reuse, write
from kvsift.methods.traits import Traits
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.types import KVReader, LayerShape, Origin


@dataclass(frozen=True)
class LayerOptions:
    """How layers are compared, and how many select.

    Attributes:
        selected: tokens that a head selects.
        dense_layers: as in ``Budget``; they are left out, because plans leave them dense.
        anchors: how many layers select; None: as few as ``min_recovery`` allows.
        min_recovery: the least that a layer may be expected to recover, as a share of what it would by itself.
    """

    selected: int = 128
    dense_layers: tuple[int, ...] = (0, 1)
    anchors: int | None = None
    min_recovery: float = 0.85


class LayerPairs:
    """Sums over decoded queries, by layer, and by pair of an earlier layer and a later one.

    Attributes:
        always: attention on sinks and window, float64 [num_kv_heads].
        own: attention on the best tokens of the layer itself, float64 [num_kv_heads].
        recovered: attention of the later layer's heads on the best tokens of the earlier one's, float64 [num_kv_heads,
            num_kv_heads].
        num_queries: compared.
    """

    def __init__(self, selected: int, dense_layers: Sequence[int]) -> None:
        self.always: dict[int, Tensor] = {}
        self.own: dict[int, Tensor] = {}
        self.recovered: dict[tuple[int, int], Tensor] = {}
        self.num_queries = 0
        self.layers: dict[int, tuple[int, int]] = {}  # query and KV heads
        self._selected, self._budget = selected, Budget(dense_layers=tuple(dense_layers))
        self._dense: set[int] = set()  # true indices
        self._best: dict[int, dict[int, Tensor]] = defaultdict(dict)  # by position and layer, of the present text

    def begin(self) -> None:
        """Another text begins."""
        self._best.clear()

    def add(self, shape: LayerShape, start: int, queries: Tensor, keys: Tensor) -> None:
        """Compare the query at ``start`` in a layer, [num_query_heads, 1, head_dim], with those of the layers below."""
        layer = shape.layer
        self.layers[layer] = heads = shape.num_query_heads, shape.num_kv_heads
        candidates = self._budget.candidates(start, 1)
        if self._budget.is_dense(shape):
            self._dense.add(layer)
        if candidates.count <= self._selected or layer in self._dense:
            return
        shares = exact_shares(shape, queries, keys).unflatten(0, (shape.num_kv_heads, -1)).mean(1)
        shares = shares[:, candidates.units]
        mass, best = shares.topk(self._selected, -1)
        below = self._best[start]
        self.num_queries += not below
        self._sum(self.own, layer, mass.sum(-1))
        self._sum(self.always, layer, 1 - shares.sum(-1))
        for other, tokens in below.items():
            if self.layers[other] == heads:
                self._sum(self.recovered, (other, layer), shares[:, tokens].sum(-1))
        below[layer] = best

    def gain(self, anchor: int, layer: int) -> tuple[float, tuple[int, ...]]:
        """(what a layer recovers with the best head of the anchor for each of its own, as a share of what it would by
        itself; those heads). -inf if they cannot share."""
        if (anchor, layer) not in self.recovered:
            return -inf, ()
        best, heads = self.recovered[anchor, layer].max(-1)
        always = self.always[layer].sum()
        return float((always + best.sum()) / (always + self.own[layer].sum())), tuple(heads.tolist())

    @property
    def compared(self) -> list[int]:
        """The layers that may select or reuse."""
        return [layer for layer in sorted(self.layers) if layer not in self._dense]

    def gains(self) -> list[list[float]]:
        """The table of ``anchor_search`` for the compared layers."""
        return [[1.0 if a == b else self.gain(a, b)[0] for b in self.compared] for a in self.compared]

    def anchor_map(self, choice: Choice, origin: Origin, recipe: Mapping[str, Any]) -> AnchorMap:
        """The contents of the file for a choice among the compared layers."""
        layers, reuse = self.compared, {}
        for index, (anchor, _) in choice.reuse.items():
            recovery, heads = self.gain(layers[anchor], layers[index])
            reuse[layers[index]] = Reuse(layers[anchor], heads, recovery)
        dense = set(self.layers) - set(layers)
        return AnchorMap.of(origin, [layers[anchor] for anchor in choice.anchors], reuse, sorted(dense), recipe)

    def summary(self, choice: Choice) -> dict[str, Any]:
        """The anchors of a choice, and what is expected of them, ready for JSON."""
        anchors = [self.compared[anchor] for anchor in choice.anchors]
        return {"anchors": anchors, "mean_recovery": choice.mean, "least_recovery": choice.least}

    @staticmethod
    def _sum(sums: dict[Any, Tensor], key: Any, terms: Tensor) -> None:
        sums[key] = sums.get(key, 0) + terms.double().cpu()


@dataclass
class LastQueries:
    """Queries of the newest tokens of a sequence."""

    queries: Tensor | None = None

    def fork(self) -> LastQueries:
        raise NotImplementedError("a text is decoded once, as one sequence")

    def crop(self, length: int) -> None:
        raise NotImplementedError("a text is decoded once, as one sequence")


@dataclass(frozen=True)
class ComparingDense(Method):
    """Dense decode that compares the attention of layers."""

    traits: ClassVar[Traits] = Traits(unbounded=True, follows=True)

    pairs: LayerPairs = field(default_factory=lambda: LayerPairs(1, ()), compare=False)

    def new_state(self, shape: LayerShape) -> LastQueries:
        return LastQueries()

    def observe(
        self, state: Any, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        state.queries = queries

    def follow(self, state: Any, shape: LayerShape, start: int, stop: int, phase: Phase, reader: KVReader) -> None:
        if phase == "decode":
            self.pairs.add(shape, start, state.queries, reader.keys())


def calibrate_layers(
    runner: Engine, texts: Sequence[DecodedText], sources: Mapping[str, str], out: Path, options: LayerOptions, *,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Decode the ends of texts and write which layers select, and which reuse their selections, to a file.

    Args:
        runner: runner of the model, for instance an ``LLM``; its plan is not used.
        texts: what is decoded.
        sources: where it is from, by name, for the file's recipe.
        out: file to write.
        options: how layers are compared, and how many select.
        progress: called after each text.

    Returns:
        The anchors found, in the file and for every other number, ready for JSON.

    Raises:
        InputError: if the texts are too short to compare anything, or the model cannot read them.
    """
    pairs = compare(runner, texts, options, progress)
    if not pairs.compared or not pairs.num_queries:
        raise TooShort(
            f"there is nothing to compare: selecting {options.selected} of a context needs longer texts than the "
            f"{max(len(text.ids) for text in texts)} tokens of these, and a layer besides the dense "
            f"{list(options.dense_layers)}. Give longer texts, --length, fewer --selected or fewer --dense-layers."
        )
    gains = pairs.gains()
    choice = choose(gains, options.anchors, options.min_recovery)
    recipe = recipe_of(runner, sources, sum(len(text.ids) for text in texts))
    recipe |= {"queries": pairs.num_queries, "selected": options.selected}
    found = pairs.anchor_map(choice, required_origin(runner), recipe)
    write(out, found)
    return {
        "file": str(out), "model": found.model[0], **pairs.summary(choice), "dense": list(found.dense),
        "reuse": {layer: asdict(reuse) for layer, reuse in found.reuse.items()},
        "choices": [pairs.summary(each) for each in choices(gains)], "recipe": recipe,
    }  # fmt: skip


def compare(
    runner: Engine, texts: Sequence[DecodedText], options: LayerOptions, progress: ProgressCallback | None = None
) -> LayerPairs:
    """Decode the ends of texts, and compare the attention of the layers."""
    runner.check_prompts([text.ids for text in texts], 1, Plan())
    pairs = LayerPairs(options.selected, options.dense_layers)
    plan = Plan(decode=Rule(ComparingDense(pairs), Budget(dense_layers=())))
    for done, text in enumerate(texts, 1):
        pairs.begin()
        cache = runner.new_cache(plan, len(text.ids))
        runner.feed(cache, text.ids[: text.start])
        runner.feed(cache, text.ids[text.start :], phase="decode")
        if progress is not None:
            progress(done, len(texts))
    return pairs
