"""What methods want to know about a model beforehand: the directions in which its keys and queries lie.

Texts are read once, densely, while every layer's keys and queries are summed up; ``methods.calibration`` says what the
file holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvsift import __version__
from kvsift.engine.generation import Progress
from kvsift.errors import InputError
from kvsift.kernels.rerotate import rerotate
from kvsift.methods.base import Method, Phase
from kvsift.methods.calibration import write
from kvsift.models.transformers_origin import origin_of
from kvsift.runtime.plan import Plan, Rule
from kvsift.types import LayerShape, Rope

if TYPE_CHECKING:
    from kvsift.engine.llm import LLM

FEWEST_TOKENS = 512


class Moments:
    """Sums over vectors [num_heads, n, head_dim]: how many, of them, and of their products, in float64."""

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
        """Orthonormal columns along which most of the vectors lies, or of what sets them apart (``centred``), largest
        first; float32 [num_heads, head_dim, head_dim]."""
        assert isinstance(self._sum, Tensor)
        products = self._products
        if centred:
            products = products - self._sum.unsqueeze(2) * self._sum.unsqueeze(1) / self.count
        return torch.linalg.eigh(products).eigenvectors.flip(-1).float()  # eigenvalues come ascending


class LayerMoments:
    """Of one layer, over all texts."""

    def __init__(self, shape: LayerShape) -> None:
        self._shape = shape
        self._of = {kind: Moments() for kind in ("keys_after_rope", "keys_before_rope", "queries")}

    def observe(self, queries: Tensor, keys: Tensor, start: int) -> None:
        self._of["keys_after_rope"].add(keys)
        if self._shape.rope is not None:
            self._of["keys_before_rope"].add(turned_back(keys, start, self._shape.rope))
        self._of["queries"].add(queries.unflatten(0, (self._shape.num_kv_heads, -1)).flatten(1, 2))

    def directions(self) -> dict[str, Tensor]:
        return {kind: of.directions(kind != "queries") for kind, of in self._of.items() if of.count}

    def fork(self) -> LayerMoments:
        raise NotImplementedError("a text is read once, in one row")

    def crop(self, length: int) -> None:
        raise NotImplementedError("a text is read once, in one row")


@dataclass(frozen=True)
class Reader(Method):
    """Sees everything, and keeps the moments of what it sees."""

    phases: ClassVar[tuple[Phase, ...]] = ("prefill",)
    unbounded: ClassVar[bool] = True

    layers: dict[int, LayerMoments] = field(default_factory=dict, compare=False)

    def new_state(self, shape: LayerShape) -> LayerMoments:
        return self.layers.setdefault(shape.layer, LayerMoments(shape))

    def observe(
        self, state: Any, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        assert queries is not None
        state.observe(queries, keys, start)


def calibrate(
    llm: LLM, texts: Mapping[str, str], out: Path, *, tokens: int = 16384, length: int = 4096,
    progress: Progress | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Read texts and write what a model's layers make of them.

    Args:
        llm: the model; its plan does not matter.
        texts: by name.
        out: file to write.
        tokens: read at most so many.
        length: of a context; texts are cut into pieces of so many tokens.
        progress: called while they are read.

    Returns:
        What the file says of itself, ready for JSON.

    Raises:
        InputError: if there is too little text, or the model cannot read so much at once.
    """
    pieces = list(_pieces(llm, texts, tokens, length))
    total = sum(map(len, pieces))
    if total < FEWEST_TOKENS:
        raise InputError(
            f"the texts have {total} tokens; at least {FEWEST_TOKENS} are needed. Give more or longer ones."
        )
    llm.check(pieces, 1)
    llm.load()
    method, done = Reader(), 0
    for piece in pieces:
        cache = llm.new_cache(Plan(prefill=Rule(method)), len(piece))
        llm.prefill(cache, piece)
        done += len(piece)
        if progress is not None:
            progress(done, total)
    origin = origin_of(llm.model)
    if origin is None:
        raise InputError(f"{type(llm.model).__name__} has no token embedding to know it by; nothing was written.")
    recipe = {
        "texts": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
        "tokens": total, "length": length, "dtype": str(llm.dtype).removeprefix("torch."), "kvsift": __version__,
    }  # fmt: skip
    found = {
        f"{kind}.{layer}": tensor for layer, of in method.layers.items() for kind, tensor in of.directions().items()
    }
    write(out, found, origin, recipe)
    kinds = sorted({name.partition(".")[0] for name in found})
    return {"file": str(out), "model": origin.name, "layers": len(method.layers), "holds": kinds, "recipe": recipe}


def turned_back(keys: Tensor, start: int, rope: Rope) -> Tensor:
    """Keys at positions from ``start`` on, [num_heads, n, d], as they were before RoPE, in float32."""
    positions = torch.arange(start, start + keys.shape[1])
    return rerotate(keys.float(), positions, torch.zeros_like(positions), rope)


def _pieces(llm: LLM, texts: Mapping[str, str], tokens: int, length: int) -> Iterator[Sequence[int]]:
    left = tokens
    for text in texts.values():
        ids = llm.tokenizer(text, verbose=False)["input_ids"][:left]
        left -= len(ids)
        yield from (ids[first : first + length] for first in range(0, len(ids), length))
