"""Queries, keys and values of a real model over one document, in one safetensors file, for benchmarks of indexes.

The document is prefilled densely and questions about it are answered, while queries are recorded: a sample of those of
the prompt, and all of question and answer tokens, which are at positions from ``length`` on, as in decoding.

Tensors of the file, bfloat16 and after RoPE, for every recorded layer i:

    {i}.keys, {i}.values     [num_kv_heads, length, head_dim]
    {i}.queries              [num_query_heads, num_samples, head_dim]
    {i}.decode_queries       [num_query_heads, num_decode, head_dim]
    positions                int64 [num_samples], of the sampled queries
    decode_positions         int64 [num_decode]; every question starts behind the document
    rope.inv_freq            float32 [rotary_dim / 2], where the model's rotation is known
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvsift.api.document import Document
from kvsift.api.llm import LLM
from kvsift.engine.provenance import versions_and_machine
from kvsift.errors import InvalidValue, MissingFile, UnreadableFile, UnsupportedModel, WrongFile
from kvsift.methods.dense import Dense
from kvsift.models.hf.layer import SparseLayer
from kvsift.models.hf.sparse import SparseCache
from kvsift.plan.plan import Plan, Rule
from kvsift.tokenization.prompt import PromptFormat
from kvsift.types import LayerShape, Rope

KIND = "kvsift queries and keys"
RECENT = 256  # queries at the end of the document, always recorded


class DumpInput(NamedTuple):
    """A document and questions about it.

    Attributes:
        ids: tokens of the document.
        encode: returns the whole prompt of a question; starts with ``ids``.
        questions: answered one after the other, each behind the document alone.
        name: of the document, for the reader of a result.
    """

    ids: list[int]
    encode: Callable[[str], list[int]]
    questions: Sequence[str]
    name: str


def dump_attention(
    llm: LLM, source: DumpInput, output: Path, *, layers: Collection[int] | None = None, samples: int = 8192,
    max_new_tokens: int = 32, progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Prefill a document, answer questions, and write queries, keys and values of attention.

    Args:
        llm: with composed steps (``path="composed"``).
        source: the document and questions.
        output: the file.
        layers: to record; all full-attention layers by default.
        samples: queries of the document per head, at most.
        max_new_tokens: generated for each question, at most.
        progress: called with tokens prefilled and all tokens.

    Returns:
        The description in the file, with the answers.

    Raises:
        InputError: for a question that does not fit or a layer that does not exist, before the weights are loaded; for
            layers without keys.
    """
    num_layers = llm.directory.config.num_hidden_layers
    if missing := [layer for layer in layers or () if layer >= num_layers]:
        raise InvalidValue(f"there is no layer {missing[0]}: {llm.directory.name} has layers 0 to {num_layers - 1}.")
    if samples < 2:
        raise InvalidValue(f"{samples} sampled queries are too few; keep at least 2, or leave it out for 8192.")
    recorder = RecordingDense(sample_positions(len(source.ids), samples), len(source.ids))
    plan = Plan(decode=Rule(recorder))
    document = Document(llm, source.ids, source.encode, plan, progress, PromptFormat(llm.tokenizer).stop)
    for question in source.questions:
        document.check(question, max_new_tokens)
    answers = [document.ask(question, max_new_tokens=max_new_tokens).text for question in source.questions]
    tensors, about = _recorded(recorder, document.prefill(plan), layers, llm.directory.name)
    about = {
        "kind": KIND, "model": llm.directory.name, "source": source.name, "length": len(source.ids), **about,
        "questions": list(source.questions), "answers": answers, **versions_and_machine(llm.device),
    }  # fmt: skip
    partial = output.with_name(output.name + ".partial")
    save_file(tensors, partial, {"kvsift": json.dumps(about)})
    partial.replace(output)
    return about


def _recorded(
    recorder: RecordingDense, cache: SparseCache, layers: Collection[int] | None, model: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of the file, and the description of its layers."""
    tensors, rope, about = {"positions": recorder.positions}, cache.run.rope, []
    for layer in cache.layers:
        if not isinstance(layer, SparseLayer) or layer.attention is None or (layers and layer.layer not in layers):
            continue
        record, stored = recorder.records[layer.layer], layer.attention.store.reader(0)
        shape = record.shape
        about.append({"layer": shape.layer, "scale": shape.scale, "softcap": shape.softcap})
        tensors["decode_positions"] = torch.cat(record.decode_positions)
        keys, values = stored.keys(0, recorder.length), stored.values(0, recorder.length)
        queries, decode_queries = (torch.cat(chunks, 1) for chunks in (record.queries, record.decode_queries))
        layer_tensors = {"keys": keys, "values": values, "queries": queries, "decode_queries": decode_queries}
        tensors |= {f"{shape.layer}.{name}": file_copy(tensor) for name, tensor in layer_tensors.items()}
    if missing := sorted(set(layers or ()) - {layer["layer"] for layer in about}):
        raise UnsupportedModel(f"layer {missing[0]} of {model} has no full attention; leave it out.")
    if rope is not None:
        tensors["rope.inv_freq"] = rope.inv_freq
    return tensors, {"layers": about, "interleaved": None if rope is None else rope.interleaved}


def sample_positions(length: int, capacity: int) -> Tensor:
    """Return at most ``capacity`` positions of prompt queries: evenly spaced, then all recent ones; int64, sorted."""
    recent = min(RECENT, capacity // 2)
    if length <= capacity:
        return torch.arange(length)
    stride = -(-(length - recent) // (capacity - recent))
    return torch.cat([torch.arange(0, length - recent, stride), torch.arange(length - recent, length)])


class LayerRecord:
    """Recorded queries of one layer.

    Args:
        shape: of the layer.
        positions: int64, ascending; positions of the document to record.
        length: tokens of the document; all queries from there on are recorded.
    """

    def __init__(self, shape: LayerShape, positions: Tensor, length: int) -> None:
        self.shape, self._positions, self._length = shape, positions, length
        self.queries: list[Tensor] = []
        self.decode_queries: list[Tensor] = []
        self.decode_positions: list[Tensor] = []

    def take(self, queries: Tensor, start: int) -> None:
        """Record queries [num_query_heads, num_new, head_dim] of consecutive positions."""
        stop = start + queries.shape[1]
        first, last = torch.searchsorted(self._positions, torch.tensor([start, stop])).tolist()
        if first < last:
            self.queries.append(file_copy(queries[:, (self._positions[first:last] - start).to(queries.device)]))
        if stop > self._length:
            behind = max(self._length - start, 0)
            self.decode_queries.append(file_copy(queries[:, behind:]))
            self.decode_positions.append(torch.arange(start + behind, stop))

    def fork(self) -> LayerRecord:
        """Return the same record: all questions add to it."""
        return self

    def crop(self, length: int) -> None:
        """Keep all queries when the cache is rolled back."""


@dataclass(frozen=True)
class RecordingDense(Dense):
    """Dense attention that records queries.

    Attributes:
        positions, length: as in ``LayerRecord``.
        records: by layer.
    """

    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64), compare=False)
    length: int = 0
    records: dict[int, LayerRecord] = field(default_factory=dict, compare=False)

    def new_state(self, shape: LayerShape) -> LayerRecord:
        return self.records.setdefault(shape.layer, LayerRecord(shape, self.positions, self.length))

    def observe(
        self, state: LayerRecord, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        if queries is not None:  # None: the cache is only copied for the next question
            state.take(queries, start)


def file_copy(tensor: Tensor) -> Tensor:
    """Return a copy in the format of the file."""
    return tensor.to("cpu", torch.bfloat16, copy=True).contiguous()


class LayerQK(NamedTuple):
    """One layer of a dump."""

    shape: LayerShape
    keys: Tensor  # [num_kv_heads, length, head_dim]
    values: Tensor
    queries: Tensor  # [num_query_heads, num_samples, head_dim]
    positions: Tensor  # int64 [num_samples]
    decode_queries: Tensor  # [num_query_heads, num_decode, head_dim]
    decode_positions: Tensor  # int64 [num_decode]


class Dump:
    """A file of ``dump_attention``; tensors are read layer by layer.

    Attributes:
        about: the description that ``dump_attention`` returned.

    Raises:
        InputError: if ``path`` is not such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise MissingFile(f"the dump {path} does not exist. kvsift bench dump --out {path} makes one.")
        try:
            with safe_open(path, framework="pt") as file:
                self.about: dict[str, Any] = json.loads((file.metadata() or {}).get("kvsift", "{}"))
        except (OSError, SafetensorError, ValueError, RecursionError) as error:
            raise UnreadableFile(f"{path} cannot be read as a dump of kvsift bench dump: {error}.") from None
        if self.about.get("kind") != KIND:
            raise WrongFile(f"{path} is not a dump of kvsift bench dump; give a file that it wrote.")

    @property
    def name(self) -> str:
        """Name of the file without its suffix."""
        return self.path.stem

    @property
    def length(self) -> int:
        """Tokens of the document."""
        return int(self.about["length"])

    @property
    def layers(self) -> list[int]:
        """Layers in the file."""
        return [layer["layer"] for layer in self.about["layers"]]

    def layer(self, layer: int) -> LayerQK:
        """Read one of ``layers``."""
        with safe_open(self.path, framework="pt") as file:
            names = set(file.keys())
            keys, values, queries, decode_queries = (
                file.get_tensor(f"{layer}.{name}") for name in ("keys", "values", "queries", "decode_queries")
            )
            positions, decode_positions = file.get_tensor("positions"), file.get_tensor("decode_positions")
            rope = None
            if "rope.inv_freq" in names:
                rope = Rope(file.get_tensor("rope.inv_freq"), bool(self.about["interleaved"]))
        about = next(about for about in self.about["layers"] if about["layer"] == layer)
        sizes = layer, queries.shape[0], keys.shape[0], keys.shape[2]
        shape = LayerShape(*sizes, about["scale"], about["softcap"], rope)
        return LayerQK(shape, keys, values, queries, positions, decode_queries, decode_positions)
