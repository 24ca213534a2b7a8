"""Hugging Face directories of tiny random models, with a tokenizer that has a token per byte."""

from pathlib import Path
from typing import Any

from models.tiny import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvsift.methods.common import anchors
from kvsift.methods.common.anchors import AnchorMap, Reuse
from kvsift.models.hf.adapter import origin_of

SPECIAL = ("<bos>", "<eos>", "<pad>")
POSITIONS = 4096
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def write_tokenizer(directory: Path, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A token per byte of UTF-8, after <bos>."""
    entries = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={entry: index for index, entry in enumerate(entries)}, merges=[]))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    bos, eos, pad = SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, chat_template=chat_template
    )
    fast.save_pretrained(directory)
    return fast


def write_model(directory: Path, family: str = "Llama", chat_template: str | None = None, **changes: Any) -> Path:
    """A random model of a family that never ends by itself, and its tokenizer."""
    tokenizer = write_tokenizer(directory, chat_template)
    sizes = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 3,
        "max_position_embeddings": POSITIONS,
        "pad_token_id": 2,
    }
    model = tiny(family, **{**sizes, **changes})
    model.save_pretrained(directory)
    return directory


def text_of(num_bytes: int) -> str:
    """English of so many bytes, and so many tokens."""
    sentences = (f"The {n}th mill by the river grinds {n * 37 % 101} sacks of corn a day. " for n in range(num_bytes))
    text = ""
    while len(text) < num_bytes:
        text += next(sentences)
    return text[: num_bytes - 1] + "."


def write_anchors(folder: Path, model: Any) -> Path:
    """An anchor file for a model of three layers: the first selects; the heads of the second exchange its lists."""
    path, heads, origin = folder / "anchors.json", range(model.config.num_key_value_heads), origin_of(model)
    assert origin is not None
    reuse = {1: Reuse(0, tuple(reversed(heads)), 0.9), 2: Reuse(0, tuple(heads), 0.9)}
    anchors.write(path, AnchorMap.of(origin, [0], reuse, [], {}))
    return path
