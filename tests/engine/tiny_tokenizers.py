"""Tokenizers of every kind of decoder, trained on a few lines; those of published models, where their files are; and
models whose next token depends on the last one alone."""

import base64
import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from models.tiny import tiny
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

LINES = [
    "A lamp was lit in the mill; nobody had asked for it, and it didn't go out. ",
    "Wasn't that odd? They've said so! 'We're sure,' she said, 'that it's I'm ' and left .",
    "Grüße, déjà vu, señor \u2744 \u2600 猫 と 犬 emoji 🦉 👨‍👩‍👦 end",
    "for x in y:\n\tprint(x)\n\n\n    return None",
    "1 22 333 4,444.50 yes no maybe",
] * 4
SPACE = "▁"


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3 and Qwen: characters may be parts of tokens, and tokens parts of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|end|>", "<|im_start|>", "<|im_end|>", "<|note|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2, Mistral 7B and Phi 3: bytes are tokens of their own, and a text's first space is none of it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = _spaces_marked()
    latin = [line for line in LINES if "猫" not in line]  # other characters are bytes
    tokenizer.train_from_iterator(latin, trainers.BpeTrainer(vocab_size=160, max_token_length=7, show_progress=False))
    learned = json.loads(tokenizer.to_str())["model"]
    words = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    return _with_bytes(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words], learned["merges"])


def unigram(cleans: bool = False) -> PreTrainedTokenizerFast:
    """As T5 and XLNet."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=cleans
    )


def word_piece(cleans: bool = False) -> PreTrainedTokenizerFast:
    """As BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=cleans)
    trainer = trainers.WordPieceTrainer(vocab_size=190, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="[SEP]", unk_token="[UNK]", clean_up_tokenization_spaces=cleans
    )


def tekken() -> PreTrainedTokenizerFast:
    """The vocabulary of Mistral Nemo and later models, without its merges: to decode needs none."""
    stored = json.loads(_mistral("tekken_240911.json").read_text())
    num_special, size = stored["config"]["default_num_special_tokens"], stored["config"]["default_vocab_size"]
    letters = _letters_of_bytes()
    special = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{number}>" for number in range(3, num_special))]
    words = ["".join(letters[byte] for byte in base64.b64decode(entry["token_bytes"])) for entry in stored["vocab"]]
    words = [*special, *words[: size - num_special]]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def mistral() -> PreTrainedTokenizerFast:
    """The vocabulary of Mistral 7B, likewise."""
    return _with_bytes(_pieces_of_sentencepiece(_mistral("tokenizer.model.v1").read_bytes()), [])


def smollm2() -> PreTrainedTokenizerFast:
    """The tokenizer of SmolLM2, from its directory."""
    folder = os.environ.get("KVSIFT_SMOLLM2")
    if folder is None:
        pytest.skip("KVSIFT_SMOLLM2 names no directory of SmolLM2")
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "unigram": unigram,
    "unigram_cleaned": lambda: unigram(cleans=True),
    "word_piece": word_piece,
    "word_piece_cleaned": lambda: word_piece(cleans=True),
    "tekken": tekken,
    "mistral": mistral,
    "smollm2": smollm2,
}


def parrot(folder: Path, tokenizer: PreTrainedTokenizerFast, follows: Mapping[int, int]) -> Path:
    """Write a model whose likeliest token after each one is that of a table. Returns its directory."""
    size = len(tokenizer)
    model = tiny(
        "Llama", vocab_size=size, hidden_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        num_hidden_layers=1, tie_word_embeddings=False, max_position_embeddings=2048, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=None,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        for token in range(size):
            model.model.embed_tokens.weight[token, token] = 1.0
        for token, following in follows.items():
            model.lm_head.weight[following, token] = 1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def cycle(tokens: Sequence[int]) -> dict[int, int]:
    """A table in which different tokens follow each other, the first after the last."""
    return dict(zip(tokens, [*tokens[1:], tokens[0]]))


def _with_bytes(words: Sequence[str], merges: Sequence[Sequence[str]]) -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(words)}
    pairs = [tuple(merge) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = _spaces_marked()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _spaces_marked() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])


def _letters_of_bytes() -> list[str]:
    """The character that a byte-level vocabulary has for each byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]


def _mistral(name: str) -> Path:
    found = find_spec("mistral_common")
    if found is None or not found.submodule_search_locations:
        pytest.skip("mistral_common, which has the vocabularies of Mistral's models, is not installed")
    return Path(found.submodule_search_locations[0]) / "data" / name


def _pieces_of_sentencepiece(data: bytes) -> list[str]:
    """The vocabulary of a SentencePiece file: field 1 of the message, and in each entry field 1."""
    return [entry[1][0].decode() for entry in map(_fields, _fields(data)[1])]


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Fields of a protobuf message that have a length; others are skipped."""
    found: dict[int, list[bytes]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        key = number()
        field, wire = key >> 3, key & 7
        if wire == 2:
            size = number()
            found.setdefault(field, []).append(message[at : at + size])
            at += size
        elif wire == 0:
            number()
        else:
            at += 8 if wire == 1 else 4
    return found
