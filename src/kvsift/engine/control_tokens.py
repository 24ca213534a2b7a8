"""Control tokens, such as ``<|im_end|>``, which a template writes and a document only spells: special tokens, and other
added tokens that the template writes.

A tokenizer finds them anywhere in a text, so a document, question or message that spells one would end its turn and
begin another in somebody else's name. To tell them apart, a prompt is rendered twice, the second time with characters
of its contents masked: a control token that is still whole is the template's. If contents spell any, the prompt is
encoded by a copy of the tokenizer in which control tokens have secret names, and only the template's are written so.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from secrets import randbelow
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from kvsift.errors import InputError

Mask = Callable[[str], str]
SURROGATES = range(0xD800, 0xE000)  # no text has them (``prompt.require_text``)
PRIVATE = range(0xF0000, 0xFFFFE)  # characters that no normalizer changes


class Masks:
    """Surrogates for the characters of tokens, except white space, which templates strip. Of more characters than there
    are surrogates, the last ones stay.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        visible = [character for character in dict.fromkeys("".join(tokens)) if not character.isspace()]
        self._pairs = [(character, chr(code)) for character, code in zip(visible, SURROGATES)]

    def mask(self, content: str) -> str:
        for character, surrogate in self._pairs:  # ten times faster than str.translate
            content = content.replace(character, surrogate)
        return content

    def mask_between(self, kept: re.Pattern[str], content: str) -> str:
        """The same, but for what a pattern of one group finds."""
        return "".join(part if odd % 2 else self.mask(part) for odd, part in enumerate(kept.split(content)))

    def unmask(self, text: str) -> str:
        for character, surrogate in self._pairs:
            text = text.replace(surrogate, character)
        return text


class Rendering(NamedTuple):
    """A prompt.

    Attributes:
        text: as it is.
        masked: of the same length, with masked contents.
        control: all control tokens and their ids.
    """

    text: str
    masked: str
    control: dict[str, int]

    def written(self) -> list[re.Match[str]]:
        """Return where the template has written control tokens."""
        return _found(self.masked, self.control)

    def is_spelled(self, token: str) -> bool:
        """Whether contents spell a token."""
        return self.text.count(token) != self.masked.count(token)


class ControlTokens:
    """The control tokens of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(self, build: Callable[[Mask], str]) -> Rendering:
        """Return the prompt that a function builds, which applies a mask to each content.

        Raises:
            InputError: of the function.
        """
        plain, added, special = build(str), self._added(), self._special()
        masks = Masks(sorted(added, key=lambda token: token not in special))  # first what matters most
        try:
            masked = build(masks.mask)
        except InputError as error:
            raise InputError(masks.unmask(str(error))) from None
        used = masked + self._sample()
        control = {token: number for token, number in added.items() if token in special or token in used}
        if masks.unmask(masked) == plain:
            return Rendering(plain, masked, control)
        # The template has compared contents with something. What it compares with is left unmasked; then all contents
        # are, if they add no control token. Else the prompt is one of contents that the template could not read.
        written = [match[0] for match in _found(masked, control)]
        kept = self._compared(written)
        for mask in (lambda content: masks.mask_between(kept, content), str):
            other = build(mask)
            if masks.unmask(other) == plain and [match[0] for match in _found(other, control)] == written:
                return Rendering(plain, other, control)
        return Rendering(masks.unmask(masked), masked, control)

    def encode(
        self, rendering: Rendering, special: bool, with_spans: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return a prompt as tokens and, if asked for, where each one stands in its text.

        Args:
            rendering: of the prompt.
            special: whether the tokenizer adds its special tokens.
            with_spans: asks for them.

        Raises:
            InputError: if contents spell control tokens, and the tokenizer cannot be copied.
        """
        tokens = [match[0] for match in rendering.written()]
        unknown = self._tokenizer.unk_token, self._tokenizer.unk_token_id
        numbers = {*rendering.control.values()} - {unknown[1]}  # which other texts have, too
        ids: list[int] = self._tokenizer("", add_special_tokens=special, verbose=False)["input_ids"]
        ids += [rendering.control[token] for token in tokens]
        expected = Counter(filter(numbers.__contains__, ids))
        if not any(map(rendering.is_spelled, filter(None, {*tokens, unknown[0]}))):
            options = {"add_special_tokens": special, "return_offsets_mapping": with_spans, "verbose": False}
            encoded = self._tokenizer(rendering.text, **options)
            if Counter(filter(numbers.__contains__, encoded["input_ids"])) <= expected:
                return encoded["input_ids"], encoded.get("offset_mapping", [])
            # contents spell others, or a normalizer makes control tokens of other characters
        found = self._encode_by_copy(rendering, special, numbers, expected.total())
        assert Counter(filter(numbers.__contains__, found.ids)) <= expected, "a text has guessed a secret name"
        return found.ids, found.offsets if with_spans else []

    def _encode_by_copy(self, rendering: Rendering, special: bool, numbers: set[int], expected: int) -> Encoding:
        try:
            names, copy = _copy(self._tokenizer, tuple(self._added()), tuple(rendering.control))
        except Exception as error:  # a tokenizer, or a part of it, in Python
            spelled = ", ".join(filter(rendering.is_spelled, rendering.control)) or "a control token"
            raise InputError(
                f"the text spells {spelled}, and {type(self._tokenizer).__name__} would read it as a control token of "
                "this model. Remove it from the text, or convert the tokenizer to tokenizer.json."
            ) from error
        written = rendering.written()
        found = copy.encode(_named(rendering.text, written, names), add_special_tokens=special)
        if sum(map(numbers.__contains__, found.ids)) == expected:
            return found
        # normalized tokens are not found everywhere; where the template's are not, they are text without spellings, too
        every = {*rendering.control.values()}
        spans = [span for number, span in zip(found.ids, found.offsets) if number in every]
        starts, stops = {start for start, _ in spans}, {stop for _, stop in spans}
        written = [match for match in written if match.start() in starts or match.end() in stops]
        return copy.encode(_named(rendering.text, written, names), add_special_tokens=special)

    def _added(self) -> dict[str, int]:
        """Added tokens and their ids, without white space, and without "!", with which some models pad."""
        added = {str(token): number for number, token in self._tokenizer.added_tokens_decoder.items()}
        return {token: number for token, number in added.items() if len(token) > 1 and not token.isspace()}

    def _special(self) -> set[str]:
        added = self._tokenizer.added_tokens_decoder.values()
        named = getattr(self._tokenizer, "chat_control_tokens", None) or ()  # of newer versions of transformers
        return {*(str(token) for token in added if token.special), *self._tokenizer.all_special_tokens, *named}

    def _sample(self) -> str:
        """What the chat template writes around messages, also if another template replaces it."""
        turns, texts = [{"role": role, "content": "?"} for role in ("system", "user", "assistant", "user")], list[str]()
        for messages in (turns, turns[1:]):
            with suppress(Exception):  # there is none, or none with a system message
                text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                texts.append(str(text))
        return "".join(texts)

    def _compared(self, written: Sequence[str]) -> re.Pattern[str]:
        """A pattern of the strings in the chat template that have none of these tokens."""
        from jinja2 import Environment

        tokens = Environment().lexer.tokenize(self._tokenizer.get_chat_template())
        strings = {token.value for token in tokens if token.type == "string" and token.value}
        strings = {string for string in strings if not any(token in string for token in written)}
        return re.compile(f"({'|'.join(map(re.escape, sorted(strings, key=len, reverse=True))) or '(?!)'})")


@lru_cache(maxsize=2)  # a second or two for a large vocabulary
def _copy(tokenizer: Any, added: Sequence[str], control: Sequence[str]) -> tuple[Mapping[str, str], Tokenizer]:
    """Return secret names of control tokens, each as long as the token, and a tokenizer that calls them so."""
    names = {token: "".join(chr(PRIVATE[randbelow(len(PRIVATE))]) for _ in token) for token in control}
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in stored["added_tokens"]:
        if token["content"] in names:
            token["content"] = names[token["content"]]
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


def _named(text: str, tokens: Iterable[re.Match[str]], names: Mapping[str, str]) -> str:
    """A text in which tokens have other names."""
    parts, stop = list[str](), 0
    for match in tokens:
        parts += text[stop : match.start()], names[match[0]]
        stop = match.end()
    return "".join([*parts, text[stop:]])


def _found(text: str, tokens: Iterable[str]) -> list[re.Match[str]]:
    """Where tokens are in a text: as tokenizers do, the longest of those that begin first."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return list(re.finditer("|".join(map(re.escape, longest_first)), text)) if longest_first else []
