"""Hugging Face model directories and GGUF files: checks of their files, the tokenizer, the weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from threading import main_thread
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer
from transformers.utils import logging as transformers_logging

from kvsift.checkpoint import weight_files
from kvsift.errors import (
    Conflict,
    DamagedFile,
    InputError,
    MissingFile,
    Unavailable,
    UnreadableFile,
    UnsupportedDevice,
    UnsupportedModel,
    one_line,
    unknown,
)
from kvsift.gguf_file import PART, GgufFile, is_gguf
from kvsift.methods import checks
from kvsift.models.embedded import embedded_model
from kvsift.models.hf.experts import take_experts
from kvsift.models.hf.float4_checkpoint import checkpoint_of
from kvsift.models.hf.generation_config import FILE as GENERATION
from kvsift.models.hf.gguf_codes import num_bytes
from kvsift.models.hf.gguf_model import config_of, weights_of
from kvsift.models.hf.gguf_tokenizer import tokenizer_of
from kvsift.models.hf.late_weight import LateWeight
from kvsift.models.hf.quantized_checkpoint import (
    DECODER_NAMES,
    EXPERT_TYPES,
    LINEAR_TYPES,
    OTHERS,
    QuantizedCheckpoint,
    has_head,
)
from kvsift.models.hf.state_snapshot import linear_states
from kvsift.models.packed_linear import can_stay_packed
from kvsift.models.quantized import FORMATS, GROUP, QUANTIZE, put_weights, round_linears

log = logging.getLogger("kvsift")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_GGUF = re.compile(r"(\w[\w.-]*/\w[\w.-]*):([\w. /-]+\.gguf)")  # name of a model: path of a file
HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "vocab.txt", "merges.txt"]
SEES = "gemma3", "gemma4", "mistral3"  # whose decoder alone is loaded, where transformers would load all of them
NOT_HUB_FILES = ["*/*", "consolidated*"]  # other formats of the same weights


@dataclass(frozen=True)
class LayerKV:
    """The keys and values that one layer of a model keeps.

    Attributes:
        layer: true index in the model.
        num_kv_heads, head_dim: shape of this layer; layers may differ.
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
        """Return the keys and values of all layers of a decoder that keep any; layers with a state, or that read the
        keys of others, keep none."""
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
    """A directory, or a GGUF file, with a configuration, weights and a tokenizer.

    Attributes:
        path: the directory or file.
        config: its transformers configuration, of the text decoder.
        num_weight_bytes: size of the weight files; of a GGUF file, of its weights once they are expanded.
        is_quantised: whether transformers loads weights that keep the format of the files, whatever the dtype.
        gguf: the opened file; None: it is a directory.
        stored: weights of 8 or 4 bits that kvsift reads itself, or None.
        quantize: one of ``QUANTIZE``, to which linear weights but the head's are rounded when they are loaded; with
            "fp8_head" the head's too.
        sees: whether the model has more than the decoder, which alone is loaded.
    """

    path: Path
    config: Any
    num_weight_bytes: int
    is_quantised: bool = False
    gguf: GgufFile | None = None
    stored: QuantizedCheckpoint | None = None
    quantize: str | None = None
    sees: bool = False

    @classmethod
    def check(cls, path: str | Path | None) -> ModelDirectory:
        """Check the files without loading them; a model of the Hub is downloaded first, unless it is in its cache. None
        is the embedded model.

        Raises:
            InputError: naming the missing file.
        """
        directory = _directory_of(path)
        if directory.is_file():
            return cls._of_gguf(GgufFile.open(directory))
        if not (directory / "config.json").is_file():
            raise MissingFile(f"{directory} holds no config.json, so it is not a Hugging Face model directory.")
        weights = weight_files(directory)
        if not any((directory / name).is_file() for name in TOKENIZER_FILES):
            raise MissingFile(f"{directory} holds no tokenizer (one of {', '.join(TOKENIZER_FILES)}).")
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            if "trust_remote_code" in str(error):
                raise UnsupportedModel(
                    f"{directory} brings its own modeling code (auto_map in config.json), which kvsift does not run. "
                    "It runs architectures of the installed transformers."
                ) from error
            raise UnreadableFile(f"{directory}/config.json cannot be used: {one_line(error)}.") from error
        num_bytes = sum(file.stat().st_size for file in weights)
        stored = checkpoint_of(config, weights, directory / "config.json")
        is_quantised = stored is None and getattr(config, "quantization_config", None) is not None
        text, sees = config.get_text_config(decoder=True), config.model_type in SEES and not is_quantised
        if sees:
            text.tie_word_embeddings = config.tie_word_embeddings and not has_head(weights)
        checked = cls(directory, text, num_bytes, is_quantised, stored=stored, sees=sees)
        checked._require_layers()
        return checked

    @classmethod
    def _of_gguf(cls, file: GgufFile) -> ModelDirectory:
        try:
            config = config_of(file)
        except InputError:
            raise
        except Exception as error:  # transformers checks what the settings say
            raise UnreadableFile(f"the settings in {file.path} cannot be used: {one_line(error)}.") from error
        num_numbers = sum(prod(tensor.shape) for tensor in file.tensors.values())
        checked = cls(file.path, config, num_numbers * config.dtype.itemsize, gguf=file)
        checked._require_layers()
        return checked

    def quantized(self, quantize: str | None) -> ModelDirectory:
        """The same directory, with its linear weights rounded when they are loaded.

        Raises:
            InputError: for an unknown format, or weights that are not rounded to it.
        """
        if quantize is None:
            return self
        if quantize not in QUANTIZE:
            raise unknown("quantize", str(quantize), QUANTIZE)
        if self.gguf is not None or self.stored is not None or self.is_quantised:
            raise Conflict(
                f"the weights in {self.path} are quantised already, and quantize={quantize!r} rounds plain ones. Leave "
                "it out."
            )
        types = LINEAR_TYPES + (EXPERT_TYPES if quantize in ("fp8", "fp8_head") else ())
        if self.config.model_type not in types:
            raise UnsupportedModel(
                f"quantize={quantize!r} takes models of the types {', '.join(types)}, and {self.name} is of "
                f"{self.config.model_type}. Leave it out."
            )
        of = partial(getattr, self.config)
        attended = (self.config.num_attention_heads * layer.head_dim for layer in self.kv_layers)
        linear = of("linear_num_value_heads", 0) * of("linear_value_head_dim", 0)
        inner = of("intermediate_size", 0), of("hidden_size_per_layer_input", 0)
        widths = self.config.hidden_size, *inner, *attended, linear
        odd = [width for width in widths if width % GROUP]
        if quantize in ("int4", "int8") and odd:
            raise UnsupportedModel(
                f"quantize={quantize!r} rounds weights in groups of {GROUP} inputs, and {self.name} has layers of "
                f"{odd[0]}. Take quantize='fp8', or leave it out."
            )
        return replace(self, quantize=quantize)

    def _require_layers(self) -> None:
        try:
            _ = self.kv_layers
        except Exception as error:
            raise UnsupportedModel(
                f"{self._config_file} describes no decoder of which kvsift can say what its layers cache: "
                f"{one_line(error)}."
            ) from error

    @property
    def _config_file(self) -> Path:
        return self.path / "config.json" if self.gguf is None else self.path

    @property
    def name(self) -> str:
        """Name of the directory or GGUF file, or of the model if the directory is in the Hub's cache."""
        if self.gguf is not None:
            return PART.sub("", self.path.name).removesuffix(".gguf")
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
        """Layers that keep every token."""
        return tuple(layer for layer in self.kv_layers if layer.window is None)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the size of one token's keys and values in the layers that keep every token; 0 without any."""
        return sum(layer.size for layer in self.full_layers) * dtype.itemsize

    def window_bytes(self, dtype: torch.dtype, num_tokens: int) -> int:
        """Return the size of what layers with a sliding window keep of a sequence."""
        windows = ((layer.size, layer.window) for layer in self.kv_layers if layer.window is not None)
        return sum(size * min(window, num_tokens) for size, window in windows) * dtype.itemsize

    def linear_state_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of the states of a sequence in linear-attention, Mamba and convolution layers of a model in
        this dtype; 0 without any. Delta nets keep theirs in float32 in any case."""
        sizes = ((each.numel(), dtype if each.dtype == torch.bfloat16 else each.dtype) for each in self._linear_states)
        return sum(number * kept.itemsize for number, kept in sizes)

    @cached_property
    def _linear_states(self) -> Sequence[torch.Tensor]:
        """The states of a sequence in linear layers, as a model in bfloat16 without memory has them."""
        cache, verbosity = DynamicCache(config=self.config), transformers_logging.get_verbosity()
        if not any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers):
            return ()
        config = copy(self.config)
        vars(config).pop("quantization_config", None)
        transformers_logging.set_verbosity_error()  # kernels that are not installed are of no interest here
        try:
            with torch.device("meta"), torch.inference_mode():
                tokens = torch.zeros(1, 2, dtype=torch.int64)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
                model(input_ids=tokens, position_ids=tokens, past_key_values=cache, use_cache=True)
        except Exception as error:  # whatever a model's code raises without memory
            log.warning("%s: the states of its linear layers are not counted: %s", self.path, one_line(error))
        finally:
            transformers_logging.set_verbosity(verbosity)
        return linear_states(cache.layers)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer.

        Raises:
            InputError: if it cannot be loaded, or is of a kind that names no control tokens.
        """
        try:
            if self.gguf is not None:
                return tokenizer_of(self.gguf.settings)
            tokenizer = AutoTokenizer.from_pretrained(
                self.path,
                local_files_only=True,
                trust_remote_code=False,
                mistral_format=False,  # or mistral_common, where it is installed, takes the place of tokenizer.json
            )
        except Exception as error:
            raise UnreadableFile(f"the tokenizer in {self.path} cannot be loaded: {one_line(error)}.") from error
        if not isinstance(getattr(tokenizer, "added_tokens_decoder", None), Mapping):  # that of mistral_common
            raise UnsupportedModel(
                f"the tokenizer in {self.path} is a {type(tokenizer).__name__}, which names no control tokens. "
                "Convert it to tokenizer.json, and name no other class in tokenizer_config.json; or, if there is a "
                "tokenizer.json, uninstall mistral_common."
            )
        return tokenizer

    def weight_bytes(self, device: torch.device, dtype: torch.dtype) -> int:
        """Return the size of the weights in memory."""
        if self.gguf is not None:
            packed = can_stay_packed(device, dtype)
            return sum(num_bytes(tensor, dtype, packed) for tensor in self.gguf.tensors.values())
        if self.is_quantised:
            return self.num_weight_bytes
        of_few_bits: float = dtype.itemsize  # bytes of a number
        if self.precision is not None and self.keeps_bits(device, dtype):
            of_few_bits = FORMATS[self.precision].held_bits / 8
        if self.stored is not None:
            others = (self.num_weight_bytes - self.stored.num_bytes) // 2
            return int(others * dtype.itemsize + self.stored.num_values * of_few_bits)
        stored = getattr(self.config, "dtype", None)
        numbers = self.num_weight_bytes // getattr(stored, "itemsize", dtype.itemsize)
        if self.quantize is None:
            return numbers * dtype.itemsize
        kept = embedding = self.config.vocab_size * self.config.hidden_size
        head = 0 if self.config.tie_word_embeddings else embedding
        rounded = numbers - head
        if self.quantize != "fp8_head":
            kept, rounded = kept + head, rounded - embedding
        return int(kept * dtype.itemsize + rounded * of_few_bits)

    @property
    def precision(self) -> str | None:
        """The format of weights of few bits, a key of ``FORMATS``, if kvsift multiplies them and all have one."""
        return (
            self.stored.format.name
            if self.stored is not None
            else self.quantize and self.quantize.removesuffix("_head")
        )

    def keeps_bits(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether weights of few bits stay so on a device, with rows of a dtype."""
        if self.stored is not None:
            return self.stored.stays(device, dtype)
        return self.precision is not None and FORMATS[self.precision].stays(device, dtype)

    def load(self, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
        """Load the weights, ready for inference.

        Raises:
            InputError: if they cannot be read, or some are missing: a weight that is not in the files would be random.
        """
        transformers_logging.disable_progress_bar()
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # its report is checked below
        options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            if self.gguf is not None:
                made = getattr(transformers, self.config.architectures[0])
                weights = weights_of(self.gguf, self.config, dtype, can_stay_packed(device, dtype))
                model, report = self._from_weights(made, self.config, weights, options)
            elif self.stored is not None:
                config = copy(self.config)
                if hasattr(config, "quantization_config"):  # or a model that also sees has it beside its decoder's
                    del config.quantization_config
                weights = self.stored.weights(device, dtype)
                model, report = self._from_weights(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, weights, options)
                self.stored.close()
            elif self.sees:
                made = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
                model, report = made.from_pretrained(
                    self.path, config=copy(self.config), key_mapping=DECODER_NAMES, local_files_only=True, **options
                )
            else:
                model, report = AutoModelForCausalLM.from_pretrained(
                    self.path,
                    local_files_only=True,
                    trust_remote_code=False,
                    # quantised weights cannot be moved or cast once they are loaded
                    device_map={"": device} if self.is_quantised else None,
                    **options,
                )
        except InputError:
            raise
        except Exception as error:
            if not main_thread().is_alive():
                raise Unavailable(
                    f"the model in {self.path} is loaded with the first request, and the main thread has ended. Ask "
                    "before that, or let the main thread wait."
                ) from error
            raise UnreadableFile(f"the model in {self.path} cannot be loaded: {one_line(error)}.") from error
        finally:
            transformers_logging.set_verbosity(verbosity)
        _check_report(self.path, self._config_file.name, report, OTHERS if self.sees else ())
        if self.is_quantised:
            log.warning("%s: its quantised weights are multiplied by transformers' own layers", self.path)
        name = self.precision
        if name is not None and not self.keeps_bits(device, dtype):
            why = f"They stay so on {FORMATS[name].where}" if self.stored is None else self.stored.why_expanded
            log.warning(
                "%s: %s weights are expanded to %s. %s", self.path, name, str(dtype).removeprefix("torch."), why
            )
        if self.quantize is not None:
            round_linears(model, device, dtype, self.quantize)
        if name is not None and self.keeps_bits(device, dtype) and self.config.model_type in EXPERT_TYPES:
            take_experts(model)
        for path, module in model.named_modules():
            if path.endswith("embed_tokens_per_layer") and module.num_embeddings < self.config.vocab_size:
                module.register_forward_pre_hook(_known_tokens)
        return model.eval() if self.is_quantised else model.to(device).eval()

    def _from_weights(
        self, made: Any, config: Any, weights: dict[str, Any], options: dict[str, Any]
    ) -> tuple[PreTrainedModel, dict[str, Any]]:
        """The model of these weights, and transformers' report."""
        model, report = made.from_pretrained(None, config=config, state_dict=weights, **options)
        model.config.name_or_path = str(self.path)
        late = {name: weight.held for name, weight in weights.items() if isinstance(weight, LateWeight)}
        put_weights(model, {name: held for name, held in late.items() if held is not None})
        if (self.path / GENERATION).is_file():
            model.generation_config = GenerationConfig.from_pretrained(self.path, local_files_only=True)
        return model, report


def _known_tokens(embedding: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Let tokens that an embedding lacks be token 0, as newer transformers do in Gemma3n; looked up on a GPU, they end
    the process."""
    return (given[0].where(given[0] < embedding.num_embeddings, 0),)


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
        raise UnsupportedDevice(f"device {name!r} is not available: torch finds no NVIDIA GPU. Use --device cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnsupportedDevice(
            f"device {name!r} is not available: there are {torch.cuda.device_count()} GPUs, from cuda:0."
        )
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedDevice(f"device {name!r} is not supported; choose cpu or cuda.")
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
    """Return the directory of a model's files, or its GGUF file; what is local is preferred to a model of the Hub of
    that name."""
    if model is None:
        return embedded_model()
    directory = checks.path_of("model", model)
    try:
        if directory.is_dir() or is_gguf(directory):
            return directory
        exists = directory.exists()
    except OSError:  # a text instead of a name
        exists = True
    if not exists and (named := HUB_GGUF.fullmatch(str(model))):
        return _download_gguf(*named.groups())
    if not exists and directory.suffix == ".gguf":
        raise MissingFile(f"there is no file {model!s:.200}.")
    if exists or not HUB_NAME.fullmatch(str(model)):
        raise MissingFile(
            f"{model!s:.200} is not a directory. Give a Hugging Face model directory (config.json, *.safetensors, "
            "tokenizer.json), a GGUF file, the name of a model on huggingface.co such as Qwen/Qwen3-4B, or nothing to "
            "use the embedded model."
        )
    return Path(_download(str(model)))


def _download_gguf(name: str, file: str) -> Path:
    """Return a GGUF file of a model of the Hub, with the other parts if it is split."""
    path = Path(_download(name, [PART.sub(r"-*-of-\2.gguf", file)], ())) / file
    if not path.is_file():
        raise MissingFile(
            f"{name} on huggingface.co has no file {file}, or it is not in the cache and cannot be fetched."
        )
    return path


def _download(name: str, wanted: Sequence[str] = HUB_FILES, unwanted: Sequence[str] = NOT_HUB_FILES) -> str:
    """Return the cached snapshot of a model of the Hub, completed if necessary; huggingface_hub prints progress."""
    try:
        return snapshot_download(name, allow_patterns=[*wanted], ignore_patterns=[*unwanted])
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
    raise MissingFile(f"there is no directory {name} here. As a model of huggingface.co: {why}.")


def _check_report(path: Path, config_file: str, report: dict[str, Any], left_out: tuple[str, ...]) -> None:
    """Refuse what is missing, and name what is not used, but for names that begin with one of ``left_out``."""
    if missing := sorted(report["missing_keys"]):
        raise DamagedFile(f"the weights in {path} lack what {config_file} calls for: {_some(missing)}.")
    if mismatched := sorted(report["mismatched_keys"]):
        _, stored, expected = mismatched[0]
        raise DamagedFile(
            f"the weights in {path} are not of the shape that {config_file} calls for: "
            f"{_some([name for name, _, _ in mismatched])}. The first is {list(stored)} and should be {list(expected)}."
        )
    if unused := sorted(name for name in report["unexpected_keys"] if not name.startswith(left_out)):
        log.warning("%s holds weights that the model does not use: %s", path, _some(unused))


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
