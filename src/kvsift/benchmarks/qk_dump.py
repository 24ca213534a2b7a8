"""Queries, keys and values of a real model over one document, in one safetensors file, for benchmarks of indexes.

The document is prefilled densely, questions about it are asked and answered, and everything attention was asked is
written down on the way: sampled queries of the prompt, and every query of question and answer tokens, which stand at
positions from ``length`` on and are what decoding asks.

Tensors of the file, bfloat16 and after RoPE, for every layer i that was wanted:

    {i}.keys, {i}.values     [num_kv_heads, length, head_dim]
    {i}.queries              [num_query_heads, num_samples, head_dim]
    {i}.decode_queries       [num_query_heads, num_decode, head_dim]
    positions                int64 [num_samples], of the sampled queries
    decode_positions         int64 [num_decode]; every question starts anew behind the document
    rope.inv_freq            float32 [rotary_dim / 2], where the model's rotation is known
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvsift.benchmarks.qk_record import Listener, sample_positions, stored
from kvsift.engine.document import Document
from kvsift.engine.llm import LLM
from kvsift.engine.prompt import PromptFormat
from kvsift.engine.provenance import versions_and_machine
from kvsift.errors import InputError
from kvsift.models.transformers_layer import SparseLayer
from kvsift.runtime.plan import Plan, Rule
from kvsift.types import LayerShape, Rope

KIND = "kvsift queries and keys"


def check_layers(llm: LLM, layers: Collection[int]) -> None:
    """Refuse layers that the model does not have, before its weights are loaded.

    Raises:
        InputError: naming the layers there are.
    """
    there = llm.directory.config.num_hidden_layers
    if missing := [layer for layer in layers if layer >= there]:
        raise InputError(f"layer {missing[0]} is not there: {llm.directory.name} has layers 0 to {there - 1}.")


def dump(
    llm: LLM,
    ids: Sequence[int],
    encode: Callable[[str], list[int]],
    questions: Sequence[str],
    output: Path,
    *,
    source: str,
    layers: Collection[int] | None = None,
    samples: int = 8192,
    max_new_tokens: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Prefill a document, ask, and write what attention saw.

    Args:
        llm: whose steps are composed (``path="composed"``).
        ids: tokens of the document.
        encode: the whole prompt of a question; begins with ``ids``.
        questions: asked one after the other, each of the document alone.
        output: the file.
        source: where the document comes from, for the reader of a result.
        layers: which to keep; all full-attention layers by default.
        samples: queries of the document kept per head, at most.
        max_new_tokens: generated for each question, at most.

    Returns:
        What the file says about itself, answers included.

    Raises:
        InputError: for a question that cannot be asked, before the weights are loaded; for layers that keep no keys.
    """
    check_layers(llm, layers or ())
    if samples < 2:
        raise InputError(f"{samples} sampled queries are too few; keep at least 2, or leave it out for 8192.")
    listener = Listener(sample_positions(len(ids), samples), len(ids))
    plan = Plan(decode=Rule(listener))
    document = Document(llm, list(ids), encode, plan, progress, PromptFormat(llm.tokenizer).stop)
    for question in questions:
        document.check(question, max_new_tokens)
    answers = [document.ask(question, max_new_tokens=max_new_tokens).text for question in questions]
    cache = document.prefill(plan)
    tensors: dict[str, Tensor] = {"positions": listener.wanted}
    shapes, rope = [], cache.run.rope
    for layer in cache.layers:
        if (
            not isinstance(layer, SparseLayer)
            or layer.attention is None
            or layer.layer not in (layers or [layer.layer])
        ):
            continue
        record, held = listener.records[layer.layer], layer.attention.store.row(0)
        shapes.append(record.shape)
        tensors["decode_positions"] = torch.cat(record.decode_positions)
        for name, tensor in (
            ("keys", held.keys(0, len(ids))),
            ("values", held.values(0, len(ids))),
            ("queries", torch.cat(record.queries, 1)),
            ("decode_queries", torch.cat(record.decode_queries, 1)),
        ):
            tensors[f"{record.shape.layer}.{name}"] = stored(tensor)
    if missing := sorted(set(layers or ()) - {shape.layer for shape in shapes}):
        raise InputError(f"layer {missing[0]} of {llm.directory.name} is no full-attention layer; leave it out.")
    if rope is not None:
        tensors["rope.inv_freq"] = rope.inv_freq
    about = {
        "kind": KIND,
        "model": llm.directory.name,
        "source": source,
        "length": len(ids),
        "layers": [{"layer": s.layer, "scale": s.scale, "softcap": s.softcap} for s in shapes],
        "interleaved": None if rope is None else rope.interleaved,
        "questions": list(questions),
        "answers": answers,
        **versions_and_machine(llm.device),
    }
    partial = output.with_name(output.name + ".partial")
    save_file(tensors, partial, {"kvsift": json.dumps(about)})
    partial.replace(output)
    return about


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
    """A file of ``dump``; tensors are read layer by layer.

    Args:
        path: the file.

    Attributes:
        about: what ``dump`` returned.

    Raises:
        InputError: if it is not such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise InputError(f"the dump {path} does not exist. kvsift bench dump --out {path} makes one.")
        try:
            with safe_open(path, framework="pt") as file:
                self.about: dict[str, Any] = json.loads((file.metadata() or {}).get("kvsift", "{}"))
        except (OSError, SafetensorError, ValueError, RecursionError) as error:
            raise InputError(f"{path} cannot be read as a dump of kvsift bench dump: {error}.") from None
        if self.about.get("kind") != KIND:
            raise InputError(f"{path} is no dump of kvsift bench dump; give a file that it wrote.")

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    @property
    def length(self) -> int:
        """Tokens of the document."""
        return int(self.about["length"])

    @property
    def layers(self) -> list[int]:
        """Layers in the file."""
        return [each["layer"] for each in self.about["layers"]]

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
        of = next(each for each in self.about["layers"] if each["layer"] == layer)
        sizes = layer, queries.shape[0], keys.shape[0], keys.shape[2]
        shape = LayerShape(*sizes, of["scale"], of["softcap"], rope)
        return LayerQK(shape, keys, values, queries, positions, decode_queries, decode_positions)
