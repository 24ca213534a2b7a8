"""Control tokens, such as ``<|im_end|>``, which a template writes and a document only spells: special tokens, and other
added tokens that the template writes.

A tokenizer finds them anywhere in a text, so a document, question or message that spells one would end its turn and
begin another in somebody else's name. To distinguish them, a prompt is rendered twice, the second time with characters
of its contents masked: a control token that is still whole is the template's. If contents spell any, the prompt is
encoded by a copy of the tokenizer in which control tokens have secret names, and only the template's are written so.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from secrets import randbelow
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from tokenizers import Encoding, Tokenizer

from kvsift.errors import InputError, UnsupportedPrompt
from kvsift.tokenization.chat_template import ChatTemplate
from kvsift.tokenization.growing_text import GrowingText

Mask = Callable[[str], str]
SURROGATES = range(0xD800, 0xE000)  # no text has them (``prompt.require_text``)
MOST_COPIES = 2  # of one tokenizer
Copy = tuple[Mapping[str, str], Tokenizer]  # the names, by token, and the tokenizer
PRIVATE = range(0xF0000, 0xFFFFE)  # characters that no tokenizer has pieces for
STRANGE = chr(PRIVATE[0])


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

    def mask_between(self, kept: re.Pattern[str]) -> Mask:
        """The same, but for what a pattern of one group finds."""
        return lambda content: "".join(
            part if odd % 2 else self.mask(part) for odd, part in enumerate(kept.split(content))
        )

    def unmask(self, text: str) -> str:
        for character, surrogate in self._pairs:
            text = text.replace(surrogate, character)
        return text


class Rendering(NamedTuple):
    """A prompt.

    Attributes:
        text: the text as it is.
        masked: a text of the same length, with masked contents.
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


@dataclass
class Known:
    """What a tokenizer was found to have, as long as nothing of it changes.

    Attributes:
        state: what would change.
        added: added tokens and their ids, without white space, and without "!", with which some models pad.
        special: tokens that are special.
        sample: what the chat template writes around messages, also if another template replaces it.
        unknown: tokens that stand for characters without one of their own.
        masks: masks for the characters of all these.
        copies: copies by the control tokens that have other names.
    """

    state: tuple[Any, ...]
    added: dict[str, int]
    special: set[str]
    sample: str
    unknown: set[str]
    masks: Masks
    copies: dict[tuple[str, ...], Copy] = field(default_factory=dict)


_known: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()  # to ask a tokenizer takes longer than a short prompt


class ControlTokens:
    """The control tokens of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(self, build: Callable[[Mask], str]) -> Rendering:
        """Return the prompt that a function builds, which applies a mask to each content.

        Raises:
            InputError: of the function.
        """
        plain, known = build(str), self._ask()
        masks = known.masks
        try:
            masked = build(masks.mask)
        except InputError as error:
            raise UnsupportedPrompt(masks.unmask(str(error))) from None
        used = masked + known.sample
        control = {
            token: number
            for token, number in known.added.items()
            if token in known.special or (token in used and not token.isalnum())  # else a word
        }
        if masks.unmask(masked) == plain:
            return Rendering(plain, masked, control)
        return self._compare(build, plain, masked, control, masks)

    def _compare(
        self, build: Callable[[Mask], str], plain: str, masked: str, control: dict[str, int], masks: Masks
    ) -> Rendering:
        """Return a prompt of which the template has compared contents with something.

        What it compares with is left unmasked where no control token could be made of it; then all of it is, and then
        all contents, if that adds no control token. Else the prompt is one of contents that the template could not
        read.
        """
        compared, written = set(self._compared()), [match[0] for match in _found(masked, control)]
        apart = {string for string in compared if not any(_touch(string, token) for token in control)}
        for strings in (apart, compared, None):
            with suppress(InputError):  # the template refuses what it is shown
                other = build(str if strings is None else masks.mask_between(_any_of(strings)))
                is_safe = strings is apart or [match[0] for match in _found(other, control)] == written
                if is_safe and masks.unmask(other) == plain:
                    return Rendering(plain, other, control)
        return Rendering(masks.unmask(masked), masked, control)

    def encode(
        self, rendering: Rendering, special: bool, with_spans: bool = False, growing: GrowingText | None = None
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return a prompt as tokens and, if asked for, where each one stands in its text.

        Args:
            rendering: rendering of the prompt.
            special: whether the tokenizer adds its special tokens.
            with_spans: asks for them.
            growing: common text of the prompts that begin like this one.

        Raises:
            InputError: if contents spell control tokens, and the tokenizer cannot be copied.
        """
        tokens, unknown = [match[0] for match in rendering.written()], self._ask().unknown
        numbers = {
            number for token, number in rendering.control.items() if token not in unknown
        }  # others are in any text
        ids: list[int] = self._tokenizer("", add_special_tokens=special, verbose=False)["input_ids"]
        ids += [rendering.control[token] for token in tokens]
        expected = Counter(filter(numbers.__contains__, ids))
        if not any(map(rendering.is_spelled, {*tokens, *unknown})):
            encoded, spans = self._encode(rendering.text, special, with_spans, growing)
            if Counter(filter(numbers.__contains__, encoded)) <= expected:
                return encoded, spans
            # contents spell others, or a normalizer makes control tokens of other characters
        found = self._encode_by_copy(rendering, special, numbers, expected.total())
        if not Counter(filter(numbers.__contains__, found.ids)) <= expected:
            raise self._refused(rendering)
        return found.ids, found.offsets if with_spans else []

    def _encode(
        self, text: str, special: bool, with_spans: bool, growing: GrowingText | None
    ) -> tuple[list[int], list[tuple[int, int]]]:
        if growing is not None and not with_spans:
            return growing.encode(self._tokenizer, text, special), []
        options = {"add_special_tokens": special, "return_offsets_mapping": with_spans, "verbose": False}
        encoded = self._tokenizer(text, **options)
        return encoded["input_ids"], encoded.get("offset_mapping", [])

    def _encode_by_copy(self, rendering: Rendering, special: bool, numbers: set[int], expected: int) -> Encoding:
        try:
            names, copy = self._copy(tuple(rendering.control))
        except Exception as error:  # a tokenizer, or a part of it, in Python
            raise self._refused(rendering) from error
        written = rendering.written()
        found = copy.encode(with_names(rendering.text, written, names), add_special_tokens=special)
        if sum(map(numbers.__contains__, found.ids)) == expected:
            return found
        # normalized tokens are not found everywhere; where the template's are not, they are text without spellings, too
        every = {*rendering.control.values()}
        spans = [span for number, span in zip(found.ids, found.offsets) if number in every]
        starts, stops = {start for start, _ in spans}, {stop for _, stop in spans}
        written = [match for match in written if match.start() in starts or match.end() in stops]
        return copy.encode(with_names(rendering.text, written, names), add_special_tokens=special)

    def _refused(self, rendering: Rendering) -> InputError:
        spelled = ", ".join(filter(rendering.is_spelled, rendering.control)) or "a control token"
        return UnsupportedPrompt(
            f"the text spells {spelled}, and {type(self._tokenizer).__name__} would read it as a control token of "
            "this model. Remove it from the text, or convert the tokenizer to tokenizer.json."
        )

    def _ask(self) -> Known:
        tokenizer = self._tokenizer
        state = (len(tokenizer), tokenizer.chat_template, *tokenizer.all_special_tokens)
        known = _known.get(tokenizer)
        if known is None or known.state != state:
            known = _known[tokenizer] = self._found_out(state)
        return known

    def _found_out(self, state: tuple[Any, ...]) -> Known:
        tokenizer, tokens = self._tokenizer, self._tokenizer.added_tokens_decoder
        added = {str(token): number for number, token in tokens.items()}
        added = {token: number for token, number in added.items() if len(token) > 1 and not token.isspace()}
        named = getattr(tokenizer, "chat_control_tokens", None) or ()  # of newer versions of transformers
        special = {*(str(token) for token in tokens.values() if token.special), *tokenizer.all_special_tokens, *named}
        strange = tokenizer(STRANGE, add_special_tokens=False, verbose=False)["input_ids"]
        unknown = {token for token, number in added.items() if number in strange}
        masks = Masks(sorted(added, key=lambda token: token not in special))  # first what matters most
        return Known(state, added, special, self._sample(), unknown, masks)

    def _sample(self) -> str:
        turns, texts = [{"role": role, "content": "?"} for role in ("system", "user", "assistant", "user")], list[str]()
        for messages in (turns, turns[1:]):
            with suppress(Exception):  # there is none, or none with a system message
                texts.append(ChatTemplate(self._tokenizer).render(messages))
        return "".join(texts)

    def _compared(self) -> Iterator[str]:
        """Yield the strings with which the chat template may compare contents: those that it does not write, and those
        that it gives to operators and functions."""
        from jinja2 import Environment, nodes

        template = self._tokenizer.get_chat_template()
        written = [token for token in self._ask().added if token in template]
        strings = (token.value for token in Environment().lexer.tokenize(template) if token.type == "string")
        yield from (string for string in strings if string and not any(token in string for token in written))
        with suppress(Exception):  # tags of an extension
            for node in Environment().parse(template).find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
                values = (each.value for each in node.find_all(nodes.Const))
                yield from (value for value in values if isinstance(value, str) and value)

    def _copy(self, control: tuple[str, ...]) -> Copy:
        """Return a copy of the tokenizer; to make one takes a second or two for a large vocabulary."""
        copies = self._ask().copies
        copy = copies.get(control)
        if copy is None:
            copy = copies[control] = renamed(self._tokenizer, control)
            for old in list(copies)[:-MOST_COPIES]:
                copies.pop(old, None)  # another thread may have dropped it
        return copy


def _any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """A pattern of one group for any of these strings, the longest first."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(strings, key=len, reverse=True))) or '(?!)'})")


def _touch(string: str, token: str) -> bool:
    """Whether a string could be a part of a token, or one of its ends an end of the token."""
    ends = range(1, len(string) + 1)
    return (
        string in token
        or token in string
        or any(token.startswith(string[-end:]) or token.endswith(string[:end]) for end in ends)
    )


def _found(text: str, tokens: Iterable[str]) -> list[re.Match[str]]:
    """Where tokens are in a text: as tokenizers do, the longest of those that begin first."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return list(re.finditer("|".join(map(re.escape, longest_first)), text)) if longest_first else []


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
