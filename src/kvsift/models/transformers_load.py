"""Loading a Hugging Face directory: check what is there first, then the tokenizer, then the weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from kvsift.errors import InputError, unknown

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def embedded_model() -> Path:
    """The small long-context model that ships with kvsift."""
    return Path(str(files("kvsift") / "embedded"))


@dataclass(frozen=True)
class ModelDirectory:
    """A directory that holds a configuration, weights and a tokenizer.

    Attributes:
        path: the directory.
        config: its transformers configuration, of the text decoder.
        num_weight_bytes: size of the weight files.
    """

    path: Path
    config: Any
    num_weight_bytes: int

    @classmethod
    def check(cls, path: str | Path | None) -> ModelDirectory:
        """Look without loading. None is the embedded model.

        Raises:
            InputError: saying which file is missing.
        """
        directory = embedded_model() if path is None else Path(path)
        if not directory.is_dir():
            raise InputError(
                f"{directory} is not a directory. --model takes a Hugging Face model directory on disk (config.json, "
                "*.safetensors, tokenizer.json); download one first, or leave it out to use the embedded model."
            )
        if not (directory / "config.json").is_file():
            raise InputError(f"{directory} holds no config.json, so it is not a Hugging Face model directory.")
        weights = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("pytorch_model*.bin"))
        if not weights:
            raise InputError(f"{directory} holds no weights (*.safetensors). Is the download complete?")
        _require_shards(directory)
        if not any((directory / name).is_file() for name in TOKENIZER_FILES):
            raise InputError(f"{directory} holds no tokenizer (one of {', '.join(TOKENIZER_FILES)}).")
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
        except Exception as error:
            raise InputError(f"{directory}/config.json cannot be read: {error}") from error
        return cls(directory, config.get_text_config(decoder=True), sum(file.stat().st_size for file in weights))

    @property
    def max_positions(self) -> int | None:
        """Positions the model was made for, if it says so."""
        positions = getattr(self.config, "max_position_embeddings", None)
        return int(positions) if positions else None

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Keys and values of one token in all layers."""
        config = self.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer."""
        try:
            return AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        except Exception as error:
            raise InputError(f"the tokenizer in {self.path} cannot be loaded: {error}") from error

    def load(self, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
        """Load the weights, ready for inference."""
        transformers_logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(self.path, dtype=dtype, local_files_only=True)
        except Exception as error:
            raise InputError(f"the model in {self.path} cannot be loaded: {error}") from error
        return model.to(device).eval()


def choose_device(name: str) -> torch.device:
    """A torch device from "auto", "cpu", "cuda" or "cuda:1".

    Raises:
        InputError: if there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise unknown("device", name, ["auto", "cpu", "cuda"]) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {name!r} was asked for, but torch sees no NVIDIA GPU here. Use --device cpu.")
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not supported; choose cpu or cuda.")
    return device


def choose_dtype(name: str, device: torch.device, config: Any) -> torch.dtype:
    """A dtype by name; "auto" is the checkpoint's, or float32 on a CPU that is slow at 16-bit arithmetic.

    Raises:
        InputError: for an unknown name.
    """
    if name != "auto":
        if name not in DTYPES:
            raise unknown("dtype", name, ["auto", *DTYPES])
        return DTYPES[name]
    stored = getattr(config, "dtype", None)
    stored = (
        stored if isinstance(stored, torch.dtype) else DTYPES.get(str(stored).removeprefix("torch."), torch.float32)
    )
    if device.type == "cpu" and stored != torch.float32 and not cpu_has_fast_bf16():
        return torch.float32
    return torch.bfloat16 if device.type == "cpu" and stored == torch.float16 else stored


def cpu_has_fast_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware."""
    return any(
        getattr(torch.cpu, name, lambda: False)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )


def _require_shards(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{index} cannot be read: {error}") from error
    missing = sorted(shard for shard in shards if not (directory / shard).is_file())
    if missing:
        raise InputError(
            f"{directory} lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing[:3])} ..."
        )
