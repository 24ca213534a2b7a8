"""The tokenizer that a GGUF file describes by its tokens, their types and scores or merges.

transformers converts them too: in 5.17 with other ends and splits than the model was trained with, and in 4 to 16
seconds, since it reads the file several times.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
AFTER_NUMBERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + AFTER_NUMBERS
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + AFTER_NUMBERS
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# how text is split before merges, by the file's name for it; None: as GPT-2 does
SPLITS: dict[str, str | None] = {
    "gpt-2": None, "smollm": None, "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "smaug-bpe": LLAMA3,
    "qwen2": QWEN2, "deepseek-r1-qwen": QWEN2, "tekken": TEKKEN,
}  # fmt: skip
WHOLE_WORDS = (LLAMA3, TEKKEN)  # a word that is a token is not merged; a text begins with BOS


def tokenizer_of(settings: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Return the tokenizer with its chat template.

    Raises:
        ValueError: for one of an unknown kind, or with settings that contradict each other.
    """
    tokens, types = settings["tokenizer.ggml.tokens"], settings["tokenizer.ggml.token_type"]
    if not len(tokens) == len(types) == len(set(tokens)):
        raise ValueError(f"it has {len(types)} types of {len(tokens)} tokens, {len(set(tokens))} of which differ")
    kind, unknown_id = settings["tokenizer.ggml.model"], settings.get("tokenizer.ggml.unknown_token_id")
    if kind == "gpt2":
        core, has_bos = _byte_level(settings, tokens)
    elif kind == "llama":
        core, has_bos = _sentencepiece(settings, tokens, types, unknown_id), True
    else:
        raise ValueError(f"its tokenizer is of the kind {kind!r:.40}, and gpt2 and llama can be read")
    special = [token for token, type_ in zip(tokens, types) if type_ in (UNKNOWN, CONTROL)]
    plain = [token for token, type_ in zip(tokens, types) if type_ == USER_DEFINED]
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    core.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: settings.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        add_bos_token=settings.get("tokenizer.ggml.add_bos_token", has_bos) and ids["bos_token"] is not None,
        add_eos_token=settings.get("tokenizer.ggml.add_eos_token", False) and ids["eos_token"] is not None,
        chat_template=settings.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: None if number is None else tokens[number] for name, number in ids.items()},
    )


def _byte_level(settings: dict[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return merges of bytes, and whether a text begins with BOS if the file does not say."""
    name = settings.get("tokenizer.ggml.pre", "nothing")
    if name not in SPLITS:
        raise ValueError(f"it splits words as {name!r:.40}; {', '.join(SPLITS)} can be read")
    split = SPLITS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in settings["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    core = Tokenizer(BPE(vocabulary, merges, ignore_merges=split in WHOLE_WORDS))
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    before: list[pre_tokenizers.PreTokenizer] = []
    if split is not None:
        before.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    elif name == "smollm":
        before.append(pre_tokenizers.Digits(individual_digits=True))
    core.pre_tokenizer = pre_tokenizers.Sequence([*before, bytes_alone])
    core.decoder = decoders.ByteLevel()
    if split == QWEN2:
        core.normalizer = normalizers.NFC()
    return core, split in WHOLE_WORDS


def _sentencepiece(settings: dict[str, Any], tokens: list[str], types: list[int], unknown_id: int | None) -> Tokenizer:
    """Return merges of characters; the token with the higher score is merged first."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    scored = zip(tokens, settings["tokenizer.ggml.scores"], types, strict=True)
    merges = generate_merges(vocabulary, {token: score for token, score, type_ in scored if type_ == NORMAL})
    unknown = None if unknown_id is None else tokens[unknown_id]
    core = Tokenizer(BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    begins = settings.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if begins else []
    core.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    first = [decoders.Strip(" ", 1, 0)] if begins else []
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *first])
    return core
