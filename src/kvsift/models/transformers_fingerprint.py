"""Fingerprints of a model directory: equal for copies of the same files, wherever they are.

Weights are sampled: in every tensor, SAMPLES pieces at even distances, so that a file of 5 GB is not read. Training,
merging and quantisation change all numbers of a tensor. A change of a few numbers may go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvsift.models.transformers_load import ModelDirectory, weight_files

SAMPLES, SAMPLE_BYTES = 8, 256
SAMPLES_OF_OTHERS = 1024  # of a file that is not of safetensors
NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")  # keys of config.json
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tekken.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def model_fingerprint(directory: ModelDirectory) -> str:
    """Return the fingerprint of configuration and weights."""
    config: dict[str, Any] = json.loads((directory.path / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in NOT_OF_THE_MODEL}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for file in weight_files(directory.path):
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        with file.open("rb") as opened:
            for start, num_bytes in _pieces(file):
                opened.seek(start)
                digest.update(opened.read(num_bytes))
    return digest.hexdigest()[:32]


def tokenizer_fingerprint(directory: ModelDirectory) -> str:
    """Return the fingerprint of the tokenizer with its chat template."""
    digest = hashlib.sha256()
    for file in (directory.path / name for name in TOKENIZER_FILES):
        if file.is_file():
            digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()[:32]


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
