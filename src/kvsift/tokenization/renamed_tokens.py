"""Copies of tokenizers whose control tokens have secret names, which no text spells."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from secrets import randbelow
from typing import Any

from tokenizers import Tokenizer

Copy = tuple[Mapping[str, str], Tokenizer]  # the names, by token, and the tokenizer
PRIVATE = range(0xF0000, 0xFFFFE)  # characters that no tokenizer has pieces for
STRANGE = chr(PRIVATE[0])


def renamed(tokenizer: Any, control: Iterable[str]) -> Copy:
    """Return a copy of a fast tokenizer in which control tokens have secret names, each as long as the token.

    Raises:
        Exception: of any kind, if the tokenizer, or a part of it, is in Python.
    """
    names = {token: "".join(chr(PRIVATE[randbelow(len(PRIVATE))]) for _ in token) for token in control}
    stored, normalizer = json.loads(tokenizer.backend_tokenizer.to_str()), tokenizer.backend_tokenizer.normalizer
    for token in stored["added_tokens"]:
        if token["content"] in names:
            name = token["content"] = names[token["content"]]
            if normalizer is not None and name not in normalizer.normalize_str(name):
                token["normalized"] = False
    model = stored["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in model["vocab"].items()}
    else:  # Unigram
        model["vocab"] = [(names.get(piece, piece), score) for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("merges"):
        model["merges"] = [pair for pair in model["merges"] if names.keys().isdisjoint((*pair, "".join(pair)))]
    copy = Tokenizer.from_str(json.dumps(stored))
    copy.no_truncation()
    copy.no_padding()
    return names, copy


def with_names(text: str, tokens: Iterable[re.Match[str]], names: Mapping[str, str]) -> str:
    """A text in which tokens have other names."""
    parts, stop = list[str](), 0
    for match in tokens:
        parts += text[stop : match.start()], names[match[0]]
        stop = match.end()
    return "".join([*parts, text[stop:]])
