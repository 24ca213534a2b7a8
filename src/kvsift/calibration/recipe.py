"""Calibration of a model for methods: principal directions of its keys and queries.

Texts are prefilled once, densely, while moments of every layer's keys and queries are accumulated; the file format is
in ``methods.common.calibration``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvsift import __version__
from kvsift.engine.model_runner import ModelRunner
from kvsift.engine.options import ProgressCallback
from kvsift.errors import TooShort, UnsupportedModel
from kvsift.kernels.rerotate import rerotate
from kvsift.methods.base import Method, Phase
from kvsift.methods.common.calibration import write
from kvsift.methods.traits import Traits
from kvsift.models.hf.adapter import origin_of
from kvsift.plan.plan import Plan, Rule
from kvsift.types import LayerShape, Origin, Rope

FEWEST_TOKENS = 512


class Moments:
    """Count, sum and sum of outer products of vectors [num_heads, n, head_dim], in float64."""

    def __init__(self) -> None:
        self.count = 0
        self._sum: Tensor | float = 0.0
        self._products: Tensor | float = 0.0

    def add(self, vectors: Tensor) -> None:
        wide = vectors.double()
        self.count += wide.shape[1]
        self._sum = self._sum + wide.sum(1)
        self._products = self._products + wide.mT @ wide

    def directions(self, centred: bool) -> Tensor:
        """Principal directions of the vectors, or of their deviations from the mean (``centred``), as orthonormal
        columns, largest first; float32 [num_heads, head_dim, head_dim]."""
        assert isinstance(self._sum, Tensor)
        products = self._products
        if centred:
            products = products - self._sum.unsqueeze(2) * self._sum.unsqueeze(1) / self.count
        return torch.linalg.eigh(products).eigenvectors.flip(-1).float()  # eigenvalues come ascending


class LayerMoments:
    """Moments of one layer's keys and queries over all texts."""

    def __init__(self, shape: LayerShape) -> None:
        self._shape = shape
        self._moments = {kind: Moments() for kind in ("keys_after_rope", "keys_before_rope", "queries")}

    def observe(self, queries: Tensor, keys: Tensor, start: int) -> None:
        self._moments["keys_after_rope"].add(keys)
        if self._shape.rope is not None:
            self._moments["keys_before_rope"].add(before_rope(keys, start, self._shape.rope))
        self._moments["queries"].add(queries.unflatten(0, (self._shape.num_kv_heads, -1)).flatten(1, 2))

    def directions(self) -> dict[str, Tensor]:
        counted = {kind: moments for kind, moments in self._moments.items() if moments.count}
        return {kind: moments.directions(kind != "queries") for kind, moments in counted.items()}

    def fork(self) -> LayerMoments:
        raise NotImplementedError("a text is prefilled once, as one sequence")

    def crop(self, length: int) -> None:
        raise NotImplementedError("a text is prefilled once, as one sequence")


@dataclass(frozen=True)
class MomentsMethod(Method):
    """A dense prefill method that accumulates moments of every layer."""

    phases: ClassVar[tuple[Phase, ...]] = ("prefill",)
    traits: ClassVar[Traits] = Traits(unbounded=True)

    layers: dict[int, LayerMoments] = field(default_factory=dict, compare=False)

    def new_state(self, shape: LayerShape) -> LayerMoments:
        return self.layers.setdefault(shape.layer, LayerMoments(shape))

    def observe(
        self, state: Any, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        assert queries is not None
        state.observe(queries, keys, start)


def calibrate(
    runner: ModelRunner, texts: Mapping[str, str], out: Path, *, tokens: int = 16384, length: int = 4096,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Prefill texts and write the principal directions of each layer's keys and queries to a file.

    Args:
        runner: runner of the model, for instance an ``LLM``; its plan is not used.
        texts: texts by name.
        out: file to write.
        tokens: maximum number of tokens to prefill.
        length: tokens per context; longer texts are cut.
        progress: called while texts are prefilled.

    Returns:
        A summary of the file, ready for JSON.

    Raises:
        InputError: if there is too little text, or the model cannot read so much at once.
    """
    pieces = list(pieces_of_texts(runner, texts, tokens, length))
    total = sum(map(len, pieces))
    if total < FEWEST_TOKENS:
        raise TooShort(
            f"the texts have {total:,} tokens; at least {FEWEST_TOKENS:,} are needed. Give more or longer ones."
        )
    method, done = MomentsMethod(), 0
    plan = Plan(prefill=Rule(method))
    runner.check_prompts(pieces, 1, plan)
    for piece in pieces:
        cache = runner.new_cache(plan, len(piece))
        runner.feed(cache, piece)
        done += len(piece)
        if progress is not None:
            progress(done, total)
    origin, recipe = required_origin(runner), recipe_of(runner, texts, total) | {"length": length}
    directions = {
        f"{kind}.{layer}": tensor
        for layer, moments in method.layers.items()
        for kind, tensor in moments.directions().items()
    }
    write(out, directions, origin, recipe)
    kinds = sorted({name.partition(".")[0] for name in directions})
    return {"file": str(out), "model": origin.name, "layers": len(method.layers), "holds": kinds, "recipe": recipe}


def required_origin(runner: ModelRunner) -> Origin:
    """The identity of a model, without which no file is written (``InputError``)."""
    origin = origin_of(runner.model)
    if origin is None:
        raise UnsupportedModel(
            f"{type(runner.model).__name__} has no token embedding to identify it by; nothing was written."
        )
    return origin


def recipe_of(runner: ModelRunner, texts: Mapping[str, str], tokens: int) -> dict[str, Any]:
    """What a calibration was made from: digests of texts by name, the number of tokens and the versions."""
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    dtype = str(runner.dtype).removeprefix("torch.")
    return {"texts": digests, "tokens": tokens, "dtype": dtype, "kvsift": __version__}


def before_rope(keys: Tensor, start: int, rope: Rope) -> Tensor:
    """Return keys at positions from ``start`` on, [num_heads, n, d], as they were before RoPE, in float32."""
    positions = torch.arange(start, start + keys.shape[1])
    return rerotate(keys.float(), positions, torch.zeros_like(positions), rope)


def pieces_of_texts(runner: ModelRunner, texts: Mapping[str, str], tokens: int, length: int) -> Iterator[Sequence[int]]:
    """At most ``tokens`` token ids of texts, in pieces of at most ``length``."""
    left = tokens
    for text in texts.values():
        ids = runner.encode(text)[:left]
        left -= len(ids)
        yield from (ids[first : first + length] for first in range(0, len(ids), length))
