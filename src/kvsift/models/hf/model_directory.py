"""Hugging Face model directories: checks of their files, the tokenizer, the weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging as transformers_logging

from kvsift.checkpoint import weight_files
from kvsift.errors import InputError, one_line, unknown
from kvsift.methods import checks
from kvsift.models.embedded import embedded_model

log = logging.getLogger("kvsift")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "vocab.txt", "merges.txt"]
NOT_HUB_FILES = ["*/*", "consolidated*"]  # other formats of the same weights


@dataclass(frozen=True)
class LayerKV:
    """The keys and values that one layer of a model keeps.

    Attributes:
        layer: true index in the model.
        num_kv_heads, head_dim: of this layer; layers may differ.
        window: the most recent tokens that it keeps; None: it keeps all.
    """

    layer: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def size(self) -> int:
        """Numbers in the key and the value of one token."""
        return 2 * self.num_kv_heads * self.head_dim

    @classmethod
    def of_layers(cls, config: Any) -> tuple[LayerKV, ...]:
        """Those of all layers of a decoder that keep any; layers with a state, or that read the keys of others, keep
        none."""
        kept = []
        for layer, (stored, own) in enumerate(zip(DynamicCache(config=config).layers, config.per_layer_config)):
            num_query_heads = getattr(own, "num_attention_heads", None)
            if isinstance(stored, DynamicLayer) and num_query_heads:
                head_dim = getattr(own, "head_dim", None) or own.hidden_size // num_query_heads
                num_kv_heads = getattr(own, "num_key_value_heads", None) or num_query_heads
                window = stored.sliding_window if stored.is_sliding else None
                kept.append(cls(layer, num_kv_heads, head_dim, window))
        return tuple(kept)


@dataclass(frozen=True)
class ModelDirectory:
    """A directory with a configuration, weights and a tokenizer.

    Attributes:
        path: the directory.
        config: its transformers configuration, of the text decoder.
        num_weight_bytes: size of the weight files.
        is_quantised: whether the weights keep the format of the files, whatever the dtype.
    """

    path: Path
    config: Any
    num_weight_bytes: int
    is_quantised: bool = False

    @classmethod
    def check(cls, path: str | Path | None) -> ModelDirectory:
        """Check the files without loading them; a model of the Hub is downloaded first, unless it is in its cache. None
        is the embedded model.

        Raises:
            InputError: naming the missing file.
        """
        directory = _directory_of(path)
        if not (directory / "config.json").is_file():
            raise InputError(f"{directory} holds no config.json, so it is not a Hugging Face model directory.")
        weights = weight_files(directory)
        if not any((directory / name).is_file() for name in TOKENIZER_FILES):
            raise InputError(f"{directory} holds no tokenizer (one of {', '.join(TOKENIZER_FILES)}).")
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            if "trust_remote_code" in str(error):
                raise InputError(
                    f"{directory} brings its own modeling code (auto_map in config.json), which kvsift does not run. "
                    "It runs architectures of the installed transformers."
                ) from error
            raise InputError(f"{directory}/config.json cannot be used: {one_line(error)}.") from error
        num_bytes = sum(file.stat().st_size for file in weights)
        is_quantised = getattr(config, "quantization_config", None) is not None
        checked = cls(directory, config.get_text_config(decoder=True), num_bytes, is_quantised)
        try:
            _ = checked.kv_layers
        except Exception as error:
            raise InputError(
                f"{directory}/config.json describes no decoder of which kvsift can say what its layers cache: "
                f"{one_line(error)}."
            ) from error
        return checked

    @property
    def name(self) -> str:
        """Name of the directory, or of the model if the directory is in the Hub's cache."""
        repository = self.path.parent.parent.name
        if self.path.parent.name == "snapshots" and repository.startswith("models--"):
            return repository.removeprefix("models--").replace("--", "/")
        return self.path.resolve().name

    @property
    def max_positions(self) -> int | None:
        """Maximum number of positions that the model was made for, if its configuration has one."""
        positions = getattr(self.config, "max_position_embeddings", None)
        if not positions or positions < 0:  # XLNet has -1
            return None
        rope, extended = getattr(self.config, "rope_parameters", None) or {}, 0
        if rope.get("rope_type") == "dynamic":  # max_position_embeddings is the original length
            extended = positions * rope.get("factor", 1)
        elif rope.get("rope_type") == "yarn":  # either the original length or the extended one
            extended = (rope.get("original_max_position_embeddings") or positions) * (rope.get("factor") or 1)
        return int(max(positions, extended))

    @cached_property
    def kv_layers(self) -> tuple[LayerKV, ...]:
        """The layers that keep the keys and values of tokens."""
        return LayerKV.of_layers(self.config)

    @property
    def mlp_width(self) -> int:
        """Intermediate size of the widest MLP; 0 if there is none."""
        widths = [getattr(own, "intermediate_size", None) or 0 for own in self.config.per_layer_config]
        return max((max(each) if isinstance(each, list | tuple) else each for each in widths), default=0)

    @property
    def full_layers(self) -> tuple[LayerKV, ...]:
        """Those that keep every token."""
        return tuple(layer for layer in self.kv_layers if layer.window is None)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the size of one token's keys and values in the layers that keep every token; 0 without any."""
        return sum(layer.size for layer in self.full_layers) * dtype.itemsize

    def window_bytes(self, dtype: torch.dtype, num_tokens: int) -> int:
        """Return the size of what layers with a sliding window keep of a sequence."""
        windows = ((layer.size, layer.window) for layer in self.kv_layers if layer.window is not None)
        return sum(size * min(window, num_tokens) for size, window in windows) * dtype.itemsize

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer.

        Raises:
            InputError: if it cannot be loaded, or is of a kind that names no control tokens.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self.path,
                local_files_only=True,
                trust_remote_code=False,
                mistral_format=False,  # or mistral_common, where it is installed, takes the place of tokenizer.json
            )
        except Exception as error:
            raise InputError(f"the tokenizer in {self.path} cannot be loaded: {one_line(error)}.") from error
        if not isinstance(getattr(tokenizer, "added_tokens_decoder", None), Mapping):  # that of mistral_common
            raise InputError(
                f"the tokenizer in {self.path} is a {type(tokenizer).__name__}, which names no control tokens. "
                "Convert it to tokenizer.json, and name no other class in tokenizer_config.json; or, if there is a "
                "tokenizer.json, uninstall mistral_common."
            )
        return tokenizer

    def load(self, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
        """Load the weights, ready for inference.

        Raises:
            InputError: if they cannot be read, or some are missing: a weight that is not in the files would be random.
        """
        transformers_logging.disable_progress_bar()
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # its report is checked below
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                self.path,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                # quantised weights cannot be moved or cast once they are loaded
                device_map={"": device} if self.is_quantised else None,
            )
        except Exception as error:
            raise InputError(f"the model in {self.path} cannot be loaded: {one_line(error)}.") from error
        finally:
            transformers_logging.set_verbosity(verbosity)
        _check_report(self.path, report)
        return model.eval() if self.is_quantised else model.to(device).eval()


def choose_device(name: str) -> torch.device:
    """Return a torch device from "auto", "cpu", "cuda" or "cuda:1".

    Raises:
        InputError: if this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError):
        raise unknown("device", name, ["auto", "cpu", "cuda"]) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {name!r} is not available: torch finds no NVIDIA GPU. Use --device cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {name!r} is not available: there are {torch.cuda.device_count()} GPUs, from cuda:0.")
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not supported; choose cpu or cuda.")
    return device


def choose_dtype(name: str, device: torch.device, config: Any) -> torch.dtype:
    """Return a dtype by name; "auto" is the checkpoint's, or float32 on a CPU with slow 16-bit arithmetic.

    Raises:
        InputError: for an unknown name.
    """
    name = str(name).removeprefix("torch.")
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


def _directory_of(model: str | Path | None) -> Path:
    """Return the directory of a model's files; a local directory is preferred to a model of the Hub of that name."""
    if model is None:
        return embedded_model()
    directory = checks.path_of("model", model)
    try:
        if directory.is_dir():
            return directory
        exists = directory.exists()
    except OSError:  # a text instead of a name
        exists = True
    if exists or not HUB_NAME.fullmatch(str(model)):
        raise InputError(
            f"{model!s:.200} is not a directory. Give a Hugging Face model directory (config.json, *.safetensors, "
            "tokenizer.json), the name of a model on huggingface.co such as Qwen/Qwen3-4B, or nothing to use the "
            "embedded model."
        )
    return Path(_download(str(model)))


def _download(name: str) -> str:
    """Return the cached snapshot of a model of the Hub, completed if necessary; huggingface_hub prints progress."""
    try:
        return snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=NOT_HUB_FILES)
    except GatedRepoError:
        why = f"its licence has to be accepted at https://huggingface.co/{name} first; then log in with hf auth login"
    except RepositoryNotFoundError:
        why = "huggingface.co has no such model, or it is private; log in with hf auth login if it is yours"
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        why = (
            "it is not completely in the cache, and huggingface.co cannot be reached; check the connection, or "
            "unset HF_HUB_OFFLINE if it is set"
        )
    except Exception as error:
        why = f"it cannot be downloaded: {one_line(error)}"
    raise InputError(f"there is no directory {name} here. As a model of huggingface.co: {why}.")


def _check_report(path: Path, report: dict[str, Any]) -> None:
    if missing := sorted(report["missing_keys"]):
        raise InputError(f"the weights in {path} lack what config.json calls for: {_some(missing)}.")
    if mismatched := sorted(report["mismatched_keys"]):
        _, stored, expected = mismatched[0]
        raise InputError(
            f"the weights in {path} are not of the shape that config.json calls for: "
            f"{_some([name for name, _, _ in mismatched])}. The first is {list(stored)} and should be {list(expected)}."
        )
    if unused := sorted(report["unexpected_keys"]):
        log.warning("%s holds weights that the model does not use: %s", path, _some(unused))


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
