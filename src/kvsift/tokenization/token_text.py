"""The text of tokens: the one place that decodes what a model has generated.

The text of an answer is ``decode(prompt + answer)`` without ``decode(prompt)``, and its pieces add up to it. Of the
prompt only the end is decoded along, and of the answer only its last tokens with each new one.

Bytes that are no UTF-8 are U+FFFD, and the characters around them stay. Byte-level decoders do that by themselves;
decoders with ``ByteFallback`` replace a whole run of byte tokens, so they are given runs that are UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, proxy

from kvsift.tokenization.growing_text import common_length

INCOMPLETE = "\ufffd"  # at the end of a text: a character whose other bytes may follow
CONTEXT_TOKENS, CONTEXT_CHARACTERS = 8, 4  # that are decoded before new tokens, at least: decoders change first tokens
FOLD_TOKENS = 16  # after a context: then the next one begins
ROLES = "bos", "eos", "unk", "sep", "pad", "cls", "mask"  # of special tokens that are no part of what is said
# White space that ``clean_up_tokenization`` may remove once more text follows: around ', and before other marks.
UNCLEAN = re.compile(r"(?<! )(?: +')* +(?:' *[vr]? *|n *'? *)?\Z")


class TokenLabel(NamedTuple):
    """A token by itself.

    Attributes:
        text: what it adds to a text; of a part of a character its bytes, as ``bytes:\\xf0\\x9f``.
        data: its bytes; None if it is a part of a character and the tokenizer does not report which.
    """

    text: str
    data: list[int] | None


class TokenDecoder:
    """The decoder of a tokenizer.

    Args:
        tokenizer: a tokenizer of transformers; its users keep it alive.

    Attributes:
        special: ids of special tokens, which are text only if they are asked for.
        added: added tokens, special or not, and their ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = proxy(tokenizer)  # else ``_decoders`` would keep it alive
        tokens = tokenizer.added_tokens_decoder
        self.added: dict[str, int] = {str(token): number for number, token in tokens.items()}
        marked = {number for number, token in tokens.items() if token.special}
        self.special = frozenset(
            number
            for number in marked.union(tokenizer.all_special_ids)
            if not tokenizer.decode([number], skip_special_tokens=True)
        )
        self._roles = {getattr(tokenizer, f"{role}_token_id", None) for role in ROLES}
        self._byte_tokens = self._find_byte_tokens()
        self._bytes = {token: byte for byte, token in enumerate(self._byte_tokens)}
        self._cleans = self._finds_spaces()
        self._labels: dict[tuple[int, bool], TokenLabel] = {}

    @classmethod
    def of(cls, tokenizer: Any) -> TokenDecoder:
        """Return the decoder of a tokenizer; to make one takes a millisecond."""
        state = len(tokenizer), *tokenizer.all_special_tokens
        known = _decoders.get(tokenizer)
        if known is None or known[0] != state:
            known = _decoders[tokenizer] = state, cls(tokenizer)
        return known[1]

    def left_out(self, skip_special_tokens: bool | None, ends: Collection[int] = ()) -> frozenset[int]:
        """Return the tokens that are no text.

        Args:
            skip_special_tokens: True: all special tokens; False: none; None: those that begin, end, separate or pad
                texts or stand for unknown ones, so that control tokens within an answer are text.
            ends: tokens that end the text.
        """
        if skip_special_tokens is None:
            return self.special & {*self._roles, *ends}
        return self.special if skip_special_tokens else frozenset()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included, before white space is cleaned up."""
        ids = self._whole_characters(ids)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def cleaned(self, text: str) -> str:
        """Return a text with its white space cleaned up, if the tokenizer does so."""
        return self._tokenizer.clean_up_tokenization(text) if self._cleans else text

    def num_clean(self, text: str) -> int:
        """Return how many characters of a text are cleaned up alike whatever follows."""
        found = UNCLEAN.search(text) if self._cleans else None
        return len(text) if found is None else found.start()

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds, special ones included. A character of several tokens belongs to the
        last of them."""
        text = AnswerText(self, ())
        pieces = [text.add([token]) for token in ids]
        if pieces:
            pieces[-1] += text.rest()
        return pieces

    def label(self, token: int, is_first: bool = False) -> TokenLabel:
        """Return the text and the bytes of a token in the middle of a text, or of the first one of a text."""
        label = self._labels.get((token, is_first))
        if label is None:
            label = self._labels[token, is_first] = self._label(token, is_first)
        return label

    def without_special(self, text: str, ids: Collection[int]) -> str:
        """Return the text of tokens without the special ones among them."""
        special = self.special.intersection(ids)
        for name in (token for token, number in self.added.items() if number in special):
            text = text.replace(name, "")
        return text

    def _label(self, token: int, is_first: bool) -> TokenLabel:
        if token in self._bytes:
            return _label_of(bytes([self._bytes[token]]))
        before = [] if is_first else self._tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
        text = self.decode([*before, token])[len(self.decode(before)) :]
        if INCOMPLETE not in text:
            return TokenLabel(text, list(text.encode()))
        name: str = self._tokenizer.convert_ids_to_tokens(token)
        if all(character in _BYTE_LEVEL for character in name):
            data = bytes(_BYTE_LEVEL[character] for character in name)
            if data.decode(errors="replace") == text:
                return _label_of(data)
        return TokenLabel(text, list(text.encode()) if INCOMPLETE in name else None)

    def _whole_characters(self, ids: Sequence[int]) -> list[int]:
        """Return tokens of which the bytes of each run are UTF-8, U+FFFD in place of what is not."""
        if self._bytes.keys().isdisjoint(ids):
            return list(ids)
        whole: list[int] = []
        for are_bytes, run in groupby(ids, self._bytes.__contains__):
            if are_bytes:
                text = bytes(self._bytes[token] for token in run).decode(errors="replace")
                run = (self._byte_tokens[byte] for byte in text.encode())
            whole += run
        return whole

    def _find_byte_tokens(self) -> list[int]:
        """Return the tokens of the 256 bytes; none if the decoder does not make characters of them."""
        found = self._tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
        if None in found or len({*found}) < len(found):
            return []
        character = [found[byte] for byte in "é".encode()]
        return found if self._tokenizer.decode(character).endswith("é") else []

    def _finds_spaces(self) -> bool:
        """Whether ``decode`` cleans up white space. Of BPE it does so only if a setting of a long name demands it."""
        tokenizer = self._tokenizer
        is_bpe = type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__ == "BPE"
        forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
        return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)) and (forced or not is_bpe)


_decoders: WeakKeyDictionary[Any, tuple[tuple[Any, ...], TokenDecoder]] = WeakKeyDictionary()


class AnswerText:
    """The text that tokens add to a prompt, as they come.

    Args:
        decoder: decoder of the model's tokenizer.
        prompt: tokens before; of them only the end is read.
        left_out: tokens that are no text.

    Attributes:
        is_first: no token before was text.
    """

    def __init__(self, decoder: TokenDecoder, prompt: Sequence[int], left_out: Collection[int] = ()) -> None:
        self._decoder, self._left_out = decoder, left_out
        self._ids = self._context(prompt)  # what is decoded with the next token
        text = decoder.decode(self._ids)
        self.is_first = not self._ids
        begin = decoder.num_clean(_settled(text))
        # characters at the beginning of what is decoded that are in the text already; text after them that is no
        # longer decoded; text of the prompt that is still before the answer
        self._skip, self._kept, self._prompt = begin, "", decoder.cleaned(text[begin:])
        self._open = ""  # decoded text that may still change

    def add(self, tokens: Iterable[int]) -> str:
        """Add tokens. Returns the new text, which no later token changes."""
        decoder = self._decoder
        visible = [token for token in tokens if token not in self._left_out]
        if not visible:
            return ""
        self.is_first = False
        self._ids += visible
        decoded = decoder.decode(self._ids)
        text = self._kept + decoded[self._skip :]
        num_certain = decoder.num_clean(_settled(text))
        certain, self._open = text[:num_certain], text[num_certain:]
        if len(self._ids) < CONTEXT_TOKENS + FOLD_TOKENS:
            self._skip += num_certain - len(self._kept) if num_certain >= len(self._kept) else 0
            self._kept = self._kept[num_certain:]
        else:
            self._ids = self._context(self._ids)
            self._skip = len(_settled(decoder.decode(self._ids)))
            self._kept = _settled(self._open)
        return self._after_prompt(decoder.cleaned(certain))

    def rest(self) -> str:
        """Return the text after all that was returned, if no token follows."""
        text = self._decoder.cleaned(self._open)
        return text[common_length(text, self._prompt) :]

    def _after_prompt(self, text: str) -> str:
        """Return what of the next certain text is not the prompt's."""
        if not self._prompt:
            return text
        num_common = common_length(text, self._prompt)
        self._prompt = self._prompt[num_common:] if num_common == len(text) else ""
        return text[num_common:]

    def _context(self, ids: Sequence[int]) -> list[int]:
        """Return the last tokens with text, so many that what their decoder does to the first ones is over."""
        num_tokens = CONTEXT_TOKENS
        while True:
            context = [token for token in ids[-num_tokens:] if token not in self._left_out]
            is_enough = len(context) >= CONTEXT_TOKENS and len(self._decoder.decode(context)) >= CONTEXT_CHARACTERS
            if is_enough or num_tokens >= len(ids):
                return context
            num_tokens *= 2


def _settled(text: str) -> str:
    """Return a text without a character at its end of which bytes may be missing."""
    return text.removesuffix(INCOMPLETE)


def _label_of(data: bytes) -> TokenLabel:
    try:
        return TokenLabel(data.decode(), list(data))
    except UnicodeDecodeError:
        return TokenLabel("bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data))


def _byte_level() -> dict[str, int]:
    """Return the bytes for which byte-level tokenizers write characters: visible ones of Latin-1 stand for themselves,
    the others are numbered from U+0100 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level()
