"""Calibration files: directions of the keys and queries of one model, by layer and KV head.

``kvsift calibrate`` writes them, a safetensors file with a tensor ``KIND.LAYER`` [num_kv_heads, head_dim, head_dim] of
orthonormal columns for each kind and layer, largest first:

- keys_after_rope, keys_before_rope: principal axes of the keys (Loki);
- queries: right singular vectors of the queries of a group after RoPE, not centred (InfiniGen's skewing).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from kvsift.errors import MissingFile, OtherModel, UnreadableFile, WrongFile
from kvsift.types import LayerShape, Origin

FORMAT = "kvsift calibration 1"
SAMPLE = "model.sample"  # a few weights, which distinguish the model from others of its architecture


class Contents(NamedTuple):
    """Contents of a calibration file."""

    about: Mapping[str, str]  # format, model, recipe (JSON) and recipe_sha256
    tensors: Mapping[str, Tensor]


def write(path: Path, directions: Mapping[str, Tensor], origin: Origin, recipe: Mapping[str, Any]) -> None:
    """Write a calibration file; an existing one is replaced at once, as a whole.

    Args:
        path: path of the file.
        directions: float32, by KIND.LAYER.
        origin: the model.
        recipe: how they were computed, ready for JSON.
    """
    text = json.dumps(recipe, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    about = {"format": FORMAT, "model": origin.name, "recipe": text, "recipe_sha256": digest}
    tensors = {name: tensor.float().cpu().contiguous() for name, tensor in directions.items()}
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(save({**tensors, SAMPLE: origin.sample()}, about))  # save_file would let only its owner read it
    partial.replace(path)


def check(knob: str, path: object) -> None:
    """Refuse anything but a calibration file, for a knob of a method.

    Raises:
        InputError: if there is no such file, or it is of another kind.
    """
    if not isinstance(path, str) or not path:
        raise MissingFile(f"{knob}={path!r} must be the name of a file that kvsift calibrate has written.")
    _about(knob, path)


def directions(path: str, kind: str, shape: LayerShape) -> Tensor:
    """Read the directions of one layer, float32 [num_kv_heads, head_dim, head_dim], largest first; on the host.

    Raises:
        InputError: if the file was made for another model, or lacks this kind.
    """
    check("calibration", path)  # the file may have changed since the plan was parsed
    stat = Path(path).stat()
    about, tensors = _contents(path, stat.st_mtime_ns, stat.st_size)
    again = f"Write one with kvsift calibrate --model DIRECTORY --out {path}."
    if shape.origin is not None and not is_of(shape.origin, about["model"], tensors[SAMPLE]):
        raise OtherModel(
            f"{path} was calibrated on another model ({about['model']}); this one is {shape.origin.name}. {again}"
        )
    columns = tensors.get(f"{kind}.{shape.layer}")
    if columns is None:
        kinds = sorted({name.partition(".")[0] for name in tensors} - {"model"})
        raise OtherModel(f"{path} has no {kind.replace('_', ' ')} of layer {shape.layer}; it holds {kinds}. {again}")
    if columns.shape != (shape.num_kv_heads, shape.head_dim, shape.head_dim):
        raise OtherModel(
            f"{path} is of layers with {columns.shape[0]} KV heads of {columns.shape[1]} channels; layer {shape.layer} "
            f"here has {shape.num_kv_heads} of {shape.head_dim}. {again}"
        )
    return columns


def is_of(origin: Origin, name: str, sample: Tensor) -> bool:
    """Whether a file with this name and sample of weights was made for a model."""
    own = origin.sample()
    near = own.shape == sample.shape and torch.allclose(own, sample, rtol=0.02, atol=1e-3 * float(sample.abs().max()))
    return near and origin.name == name  # near: the same weights may be rounded to another dtype


def _about(knob: str, path: str) -> dict[str, str]:
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UnreadableFile(
            f"{knob}={path!r} cannot be read as a calibration file ({error}). Write one with kvsift calibrate --out "
            f"{path}."
        ) from None
    if about.get("format") != FORMAT:
        raise WrongFile(f"{knob}={path!r} is a safetensors file, but not one that this kvsift calibrate has written.")
    return about


@lru_cache(maxsize=2)
def _contents(path: str, mtime_ns: int, num_bytes: int) -> Contents:
    return Contents(_about("calibration", path), load_file(path))
