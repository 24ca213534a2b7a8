"""Tokenizers that transformers loads by other rules where mistral_common is installed; here it seems to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine.tiny_directory import write_tokenizer
from refusals import refused
from transformers import MistralConfig, PreTrainedTokenizerFast
from transformers.integrations.mistral import tokenizer as mistral_tokenizer
from transformers.models.auto import tokenization_auto

from kvsift.models.hf.model_directory import ModelDirectory


class MistralCommonBackend:
    """As in transformers: added tokens are no property."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> MistralCommonBackend:
        return cls()

    def added_tokens_decoder(self) -> None:
        raise NotImplementedError


@pytest.fixture
def mistral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelDirectory:
    """A directory with both kinds of tokenizer, as those of the Hub."""
    write_tokenizer(tmp_path)
    MistralConfig().save_pretrained(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    by_name = tokenization_auto.tokenizer_class_from_name
    backends = {MistralCommonBackend.__name__: MistralCommonBackend}
    monkeypatch.setattr(mistral_tokenizer, "is_mistral_common_available", lambda: True)
    monkeypatch.setitem(tokenization_auto.TOKENIZER_MAPPING_NAMES, "mistral", MistralCommonBackend.__name__)
    monkeypatch.setattr(
        tokenization_auto, "tokenizer_class_from_name", lambda name: backends.get(name) or by_name(name)
    )
    return ModelDirectory(tmp_path, None, 0)


def test_mistral_common_takes_the_place_of_no_tokenizer(mistral: ModelDirectory) -> None:
    assert isinstance(tokenization_auto.AutoTokenizer.from_pretrained(mistral.path), MistralCommonBackend)
    tokenizer = mistral.tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer.added_tokens_decoder


def test_a_tokenizer_that_tells_no_control_tokens_is_refused(mistral: ModelDirectory) -> None:
    (mistral.path / "tokenizer_config.json").write_text('{"tokenizer_class": "MistralCommonBackend"}')
    told = "unsupported_model: MistralCommonBackend"
    with refused(told):
        mistral.tokenizer()
