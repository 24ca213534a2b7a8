"""The files of a model, a directory or a GGUF file, without loading them: its weights, and fingerprints that are equal
for copies of the same files, wherever they are.

Weights are sampled: in every tensor, SAMPLES pieces at even distances, so that a file of 5 GB is not read. Training,
merging and quantisation change all numbers of a tensor. A change of a few numbers may go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open

from kvsift.errors import DamagedFile, MissingFile, UnreadableFile, one_line
from kvsift.gguf_file import GgufFile, is_gguf
from kvsift.types import Origin

SAMPLES, SAMPLE_BYTES = 8, 256
SAMPLES_OF_OTHERS = 1024  # of a file that is not of safetensors
NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")  # keys of config.json
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")  # ends of names
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tekken.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def fingerprint(directory: Path) -> str:
    """Return the fingerprint of configuration and weights: 32 hexadecimal digits.

    Raises:
        InputError: if there is no whole checkpoint.
    """
    if directory.is_file():
        return _of_gguf(GgufFile.open(directory))
    file = directory / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        kept = {key: value for key, value in config.items() if key not in NOT_OF_THE_MODEL}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UnreadableFile(f"{file} cannot be read: {one_line(error)}.") from error
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for file in weight_files(directory):
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        with file.open("rb", buffering=0) as opened:
            for start, num_bytes in _pieces(file):
                opened.seek(start)
                digest.update(opened.read(num_bytes))
    return digest.hexdigest()[:32]


def local_directory(model: str, revision: str | None = None) -> Path | None:
    """Return the directory of a model that is named by its path, or by its name on huggingface.co, or the GGUF file of
    this path; None if neither is on this machine's disk."""
    if Path(model).is_dir() or is_gguf(Path(model)):
        return Path(model)
    try:
        file = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:  # a path that has been moved
        return None
    return Path(file).parent if isinstance(file, str) else None


def embedding_sample(directory: Path) -> list[float]:
    """Return some numbers of the token embedding, those that ``types.Origin`` takes; none where no file of safetensors
    has it in floating point.

    Raises:
        InputError: if the checkpoint is not whole.
    """
    if directory.is_file() or not any(directory.glob("*.safetensors")):
        return []
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                weights = opened.get_slice(name)
                if name.endswith(EMBEDDINGS) and "F" in weights.get_dtype() and len(weights.get_shape()) == 2:
                    rows, width = weights.get_shape()
                    places = (divmod(place, width) for place in range(0, rows * width, Origin.step(rows * width)))
                    return [float(weights[row, column]) for row, column in places]
    return []


def tokenizer_fingerprint(directory: Path) -> str:
    """Return the fingerprint of the tokenizer with its chat template."""
    if directory.is_file():
        settings = GgufFile.open(directory).settings
        tokenizer = {name: value for name, value in settings.items() if name.startswith("tokenizer.")}
        return hashlib.sha256(json.dumps(tokenizer, sort_keys=True).encode()).hexdigest()[:32]
    digest = hashlib.sha256()
    for file in (directory / name for name in TOKENIZER_FILES):
        if file.is_file():
            digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()[:32]


def weight_files(directory: Path) -> list[Path]:
    """Return the files of the weights, each complete.

    Raises:
        InputError: if there are none, or one is missing or cut off.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = _shards(index)
    elif (directory / "model.safetensors").is_file():
        files = [directory / "model.safetensors"]
    else:
        files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("pytorch_model*.bin"))
    if not files:
        raise MissingFile(f"{directory} holds no weights (*.safetensors). Is the download complete?")
    for file in files:
        if file.suffix == ".safetensors":
            _require_whole(file)
    return files


def _of_gguf(model: GgufFile) -> str:
    """Return the fingerprint of a GGUF file, which is the same however it is split."""
    kept = {name: value for name, value in model.settings.items() if not name.startswith("split.")}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for name, tensor in sorted(model.tensors.items()):
        digest.update(f"{name} {tensor.type} {tensor.shape} ".encode())
        packed = tensor.packed.reshape(-1)
        for start, num_bytes in _samples(0, packed.size, SAMPLES):
            digest.update(packed[start : start + num_bytes].tobytes())
    return digest.hexdigest()[:32]


def _shards(index: Path) -> list[Path]:
    try:
        files = sorted({index.parent / name for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UnreadableFile(f"{index} cannot be read: {one_line(error)}.") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        names = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise MissingFile(
            f"{index.parent} lacks {len(missing)} of {len(files)} weight files: {names}. Is the download complete?"
        )
    return files


def _require_whole(file: Path) -> None:
    try:
        with safe_open(file, framework="pt"):
            pass
    except Exception as error:
        raise DamagedFile(
            f"{file} is not a complete safetensors file ({one_line(error)}). Is the download complete?"
        ) from error


def _pieces(file: Path) -> Iterator[tuple[int, int]]:
    """Yield start and size of the pieces of a file that are part of the fingerprint."""
    if file.suffix != ".safetensors":
        yield from _samples(0, file.stat().st_size, SAMPLES_OF_OTHERS)
        return
    with file.open("rb") as opened:
        data = 8 + int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(data - 8))
    yield 0, data
    for name, entry in sorted(header.items()):
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            yield from _samples(data + start, data + stop, SAMPLES)


def _samples(start: int, stop: int, count: int) -> Iterator[tuple[int, int]]:
    step = max((stop - start) // count, SAMPLE_BYTES)
    yield from ((first, min(SAMPLE_BYTES, stop - first)) for first in range(start, stop, step))
