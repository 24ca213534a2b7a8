"""Anchor files: layers that select, and layers that reuse their selections, head by head.

``kvsift calibrate --layers`` writes them as JSON for one model; a tuned plan (``plan.tuned_plan``) has the contents of
one inside, and can be named instead. A method with the knob ``anchors=FILE`` derives from
``AnchoredMethod``: a state is the layer's ``Reuse``, or None in layers that select.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvsift.atomic_files import write_atomically
from kvsift.errors import DamagedFile, InputError, MissingFile, OtherModel, UnreadableFile, WrongFile
from kvsift.methods.base import Method
from kvsift.methods.common.calibration import is_of
from kvsift.types import KVReader, LayerShape, Origin

FORMAT = "kvsift anchors 1"
AGAIN = "Write one with kvsift calibrate --layers --model DIRECTORY --out FILE."


@dataclass(frozen=True)
class Reuse:
    """Which selection a layer reuses.

    Attributes:
        anchor: true index of the layer that selects.
        heads: for each KV head of the layer, the KV head of the anchor whose selection it takes; the two layers have
            equally many.
        recovery: attention expected on what the layer sees, as a share of that with selections of its own.
    """

    anchor: int
    heads: tuple[int, ...]
    recovery: float

    def rows(self, selected: Tensor) -> Tensor:
        """What the heads of the layer take of the anchor's rows, one for all heads, for each KV or each query head:
        [num_heads, ...] -> the same shape."""
        if len(selected) == 1 or self.heads == tuple(range(len(self.heads))):
            return selected
        heads = torch.tensor(self.heads, device=selected.device)
        return selected.unflatten(0, (len(self.heads), -1))[heads].flatten(0, 1)

    def fork(self) -> Reuse:
        return self  # never written to

    def crop(self, length: int) -> None:
        """Nothing to forget: it depends on the model alone."""


@dataclass(frozen=True)
class AnchorMap:
    """What an anchor file holds.

    Attributes:
        model: its name and some of its weights (``Origin``).
        anchors: layers that select for others.
        reuse: the layers that do not select.
        dense: layers that were left out, which select for themselves where they are sparse.
        recipe: how it was computed, ready for JSON.
    """

    model: tuple[str, Sequence[float]]
    anchors: tuple[int, ...]
    reuse: Mapping[int, Reuse]
    dense: tuple[int, ...]
    recipe: Mapping[str, Any]

    @property
    def layers(self) -> list[int]:
        """All layers of the model that are attended by kvsift."""
        return sorted([*self.anchors, *self.reuse, *self.dense])

    @staticmethod
    def of(
        origin: Origin, anchors: Iterable[int], reuse: Mapping[int, Reuse], dense: Iterable[int],
        recipe: Mapping[str, Any],
    ) -> AnchorMap:  # fmt: skip
        """An anchor map for a model."""
        model = origin.name, [float(f"{number:.6g}") for number in origin.sample().tolist()]
        return AnchorMap(model, tuple(anchors), dict(reuse), tuple(dense), recipe)


@dataclass(frozen=True)
class AnchoredMethod(Method):
    """A method whose layers may reuse the selections of others.

    Attributes:
        anchors: file from kvsift calibrate --layers that says which layers select; without it the method decides.
    """

    anchors: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchors is not None:
            read("anchors", self.anchors)

    @property
    def reused(self) -> Mapping[int, int]:
        if self.anchors is None:
            return {}
        found = read("anchors", self.anchors)
        numbers = {layer: number for number, layer in enumerate(found.layers)}
        return {numbers[layer]: numbers[reuse.anchor] for layer, reuse in found.reuse.items()}

    def check_layers(self, layers: Sequence[int]) -> None:
        if self.anchors is not None:
            lacking = set(read("anchors", self.anchors).layers) - set(layers)
            if lacking:
                raise OtherModel(
                    f"{self.anchors} is for a model with layers {listed(lacking)}, which kvsift does not attend in "
                    f"this one. {AGAIN}"
                )

    def new_state(self, shape: LayerShape) -> Reuse | None:
        return None if self.anchors is None else reuse_in(self.anchors, shape)


def reuse_in(path: str, shape: LayerShape) -> Reuse | None:
    """Which selection a layer reuses by a file; None: it selects.

    Raises:
        InputError: if the file was made for another model.
    """
    return reuse_of(read("anchors", path), path, shape)


def reuse_of(found: AnchorMap, path: str, shape: LayerShape) -> Reuse | None:
    """As ``reuse_in``, of a file that has been read."""
    if shape.origin is not None and not is_of(shape.origin, found.model[0], torch.tensor(found.model[1])):
        raise OtherModel(f"{path} is for another model ({found.model[0]}); this one is {shape.origin.name}. "
                         f"{AGAIN}")  # fmt: skip
    if shape.peers and found.layers != sorted(shape.peers):
        raise OtherModel(
            f"{path} is for a model whose layers {listed(found.layers)} are attended by kvsift; in this one they are "
            f"{listed(shape.peers)}. {AGAIN}"
        )
    reuse = found.reuse.get(shape.layer)
    if reuse is not None and len(reuse.heads) != shape.num_kv_heads:
        raise OtherModel(
            f"{path} maps {len(reuse.heads)} KV heads in layer {shape.layer}, which has {shape.num_kv_heads} here. "
            f"{AGAIN}"
        )
    return reuse


def from_anchor(reuse: Reuse | None, reader: KVReader) -> Tensor | None:
    """The message of the layer whose selection a layer reuses, for its heads; None: the layer selects, and passes up
    its message with ``keep=True``. An anchor selects nothing where all candidates fit its own budget."""
    message = None if reuse is None else reader.from_layer(reuse.anchor)
    return None if reuse is None or message is None else reuse.rows(message)


def read(knob: str, path: object) -> AnchorMap:
    """Read an anchor file, for a knob of a method.

    Raises:
        InputError: if there is no such file, or it is of another kind, or contradicts itself.
    """
    if not isinstance(path, str) or not path:
        raise MissingFile(f"{knob}={path!r} must be the name of a file that kvsift calibrate --layers has written.")
    try:
        stat = Path(path).stat()
        return _parsed(path, stat.st_mtime_ns, stat.st_size)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise UnreadableFile(f"{knob}={path!r} cannot be read as an anchor file ({error}). {AGAIN}") from None


def write(path: Path, found: AnchorMap) -> None:
    """Write an anchor file; an existing one is replaced at once, as a whole."""
    reuse = {
        str(layer): {"anchor": one.anchor, "heads": list(one.heads), "recovery": round(one.recovery, 4)}
        for layer, one in sorted(found.reuse.items())
    }
    document = {
        "format": FORMAT, "model": {"name": found.model[0], "sample": list(found.model[1])},
        "anchors": list(found.anchors), "dense": list(found.dense), "reuse": reuse, "recipe": dict(found.recipe),
    }  # fmt: skip
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items())
    write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")


def contents(path: str | Path) -> Any:
    """What an anchor file holds, or a tuned plan has inside, as JSON."""
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    inside = document.get("anchors") if isinstance(document, dict) else None  # of an anchor file: a list
    return inside if isinstance(inside, dict) else document


@lru_cache(maxsize=4)
def _parsed(path: str, mtime_ns: int, num_bytes: int) -> AnchorMap:
    document = contents(path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise WrongFile(f"anchors={path!r} is JSON, but not an anchor file of this kvsift. {AGAIN}")
    try:
        found = _of_document(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFile(f"{path} is damaged: {type(error).__name__} {error}. {AGAIN}") from None
    if fault := _fault(found):
        raise DamagedFile(f"{path} is damaged: {fault}. {AGAIN}")
    return found


def _of_document(document: Mapping[str, Any]) -> AnchorMap:
    reuse = {
        int(layer): Reuse(int(one["anchor"]), tuple(map(int, one["heads"])), float(one["recovery"]))
        for layer, one in document["reuse"].items()
    }
    model = str(document["model"]["name"]), list(map(float, document["model"]["sample"]))
    anchors, dense = (tuple(map(int, document[key])) for key in ("anchors", "dense"))
    return AnchorMap(model, anchors, reuse, dense, dict(document["recipe"]))


def _fault(found: AnchorMap) -> str | None:
    """What a file contradicts itself in."""
    if len(set(found.layers)) < len(found.layers):
        return "a layer is named twice"
    for layer, reuse in found.reuse.items():
        if reuse.anchor not in found.anchors or reuse.anchor >= layer:
            return f"layer {layer} reuses the selection of layer {reuse.anchor}, which is no anchor below it"
        if not reuse.heads or not set(reuse.heads) <= set(range(len(reuse.heads))):
            return f"the heads of layer {layer}, {list(reuse.heads)}, are not those of layer {reuse.anchor}"
    return None


def listed(layers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(layers)))
