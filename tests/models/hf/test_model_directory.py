"""Directories with more than a decoder, whose decoder is loaded; and tokenizers that transformers loads by other rules
where mistral_common is installed: here it seems to be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine.tiny_directory import write_tokenizer
from models.tiny import prompt, randomised
from refusals import refused
from transformers import MistralConfig, PixtralVisionConfig, PreTrainedTokenizerFast
from transformers.integrations.mistral import tokenizer as mistral_tokenizer
from transformers.models.auto import tokenization_auto

from kvsift.models.hf.model_directory import ModelDirectory

TEXT: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4,
                        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
IMAGES = {"image_size": 28, "patch_size": 14}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "sliding_window": 32}
SEEING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # text configuration; settings of it, and of the rest
    "Gemma3": ("Gemma3TextConfig", SLIDING, {"vision_config": VISION | IMAGES}),
    "Gemma4": ("Gemma4TextConfig", {**SLIDING, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99},
               {"vision_config": VISION, "audio_config": None}),
    "Mistral3": ("MistralConfig", {"num_hidden_layers": 2}, {"vision_config": PixtralVisionConfig(**VISION | IMAGES)}),
    "Mistral3 of Ministral3": ("Ministral3Config", {"num_hidden_layers": 2},
                               {"vision_config": PixtralVisionConfig(**VISION | IMAGES)}),
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", SEEING)
def test_the_decoder_of_a_model_that_also_sees_is_loaded_alone(
    name: str, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, settings, others = SEEING[name]
    family, decoder = name.split()[0], getattr(transformers, text)(**TEXT, **settings)
    config = getattr(transformers, f"{family}Config")(text_config=decoder, tie_word_embeddings=tied, **others)
    whole = randomised(getattr(transformers, f"{family}ForConditionalGeneration")(config))
    whole.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with caplog.at_level(logging.WARNING, "kvsift"):
        model = ModelDirectory.check(tmp_path).load(torch.device("cpu"), torch.float32)
    assert not [record for record in caplog.records if record.name.startswith("kvsift")]
    assert type(model).__name__ == text.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        torch.testing.assert_close(model(prompt(60)).logits, whole(input_ids=prompt(60)).logits, rtol=0, atol=1e-6)


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
