"""Grammars: what the text of an answer must be, and which tokens may come next in it (llguidance)."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kvsift.errors import InvalidValue, MissingPackage, UnsupportedModel, UnsupportedPrompt
from kvsift.native.draw import exclude, takes_logits

GrammarKind = Literal["json_schema", "regex", "choice", "grammar"]
UNKNOWN_FORMAT = re.compile("Unknown format: (.+)")
MOST_FORMATS = 20  # unknown ones in a schema
# a space or an indented line between the parts of JSON: with any white space, a model may write that to the end
JSON_OPTIONS: Any = {"whitespace_pattern": r"( |\n[ \t]{0,32})?"}


@dataclass(frozen=True)
class Grammar:
    """What the text of an answer must be: only tokens that lead to such a text are chosen, and the answer ends only
    where it is one.

    Attributes:
        kind: what the definition is.
        text: a JSON schema; a regular expression of the whole answer, in the syntax of Rust's regex; a JSON list of
            texts; or a context-free grammar, in Lark's or llama.cpp's syntax.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InvalidValue(f"a grammar of kind {self.kind} is given as text; got {type(self.text).__name__}.")

    @classmethod
    def json(cls, schema: Any = None) -> Grammar:
        """Return the grammar of JSON.

        Args:
            schema: a JSON schema as a table, a class of pydantic, or None for any object.

        Raises:
            InputError: for anything else.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        try:
            return cls("json_schema", json.dumps({"type": "object"} if schema is None else schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidValue(f"the schema is no JSON: {error}. Give a dict, or a class of pydantic.") from None

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of texts that match a regular expression as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """Return the grammar of some texts (``InputError`` without any)."""
        is_list = (
            isinstance(texts, list | tuple) and len(texts) and all(isinstance(text, str) and text for text in texts)
        )
        if not is_list:
            raise InvalidValue(f"choice={texts!r:.80} must be a list of texts, each of at least a character.")
        return cls("choice", json.dumps([*texts]))


def grammar_tokens(tokenizer: Any, ends: Collection[int]) -> Any:
    """Return what llguidance knows of the tokens of a model; takes half a second.

    Args:
        tokenizer: a fast tokenizer of transformers.
        ends: tokens that end an answer.

    Raises:
        InputError: without llguidance, or for another tokenizer.
    """
    try:
        from llguidance.hf import from_tokenizer
    except ImportError:
        raise MissingPackage("grammars and JSON schemas need llguidance: pip install 'kvsift[serve]'.") from None
    try:
        return from_tokenizer(tokenizer, eos_token=min(ends, default=None))
    except ValueError as error:
        raise UnsupportedModel(
            f"the tokenizer of this model takes no grammar: {error}. Leave the grammar out."
        ) from None


class GrammarState:
    """Where the text of one answer is in its grammar.

    Args:
        grammar: the grammar.
        tokens: ``grammar_tokens`` of the model.
        ends: tokens that end the answer, where the grammar lets it.

    Attributes:
        num_tokens: tokens of the answer so far.

    Raises:
        InputError: if the grammar cannot be compiled, with what it has.
    """

    def __init__(self, grammar: Grammar, tokens: Any, ends: Collection[int]) -> None:
        from llguidance import LLMatcher, grammar_from

        text, fault = grammar.text, ""
        if grammar.kind == "json_schema":
            text = {"true": "{}", "false": '{"enum": []}'}.get(text.strip(), text)
        for _ in range(MOST_FORMATS):
            try:
                if grammar.kind == "json_schema":
                    compiled = LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
                else:
                    compiled = grammar_from(grammar.kind, text)
                self._matcher = LLMatcher(tokens, compiled, log_level=0)
                self._matcher.compute_logit_bias()  # fails if there is no such text
                fault = self._matcher.get_error()
            except ValueError as error:
                fault = str(error)
            if not (unknown := UNKNOWN_FORMAT.search(fault)):
                break
            # a format says what a text means; one that is not known need not be kept to
            drop = partial(_without, item=("format", unknown[1]))
            text = json.dumps(json.loads(text, object_hook=drop))
        if fault:
            kind = grammar.kind.replace("_", " ").replace("json", "JSON")
            raise UnsupportedPrompt(f"the {kind} of the answer cannot be compiled: {_said(fault)}.")
        self._ends, self.num_tokens = frozenset(ends), 0

    def copy(self) -> GrammarState:
        """Return a state of its own at the same place."""
        state = copy(self)
        state._matcher = self._matcher.deep_copy()
        return state

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow but the end."""
        return bool(self._matcher.is_stopped())

    def mask(self, logits: Tensor) -> None:
        """Set logits [vocabulary] of tokens that cannot come next to -inf."""
        bits = self.bits(len(logits))
        if takes_logits(logits):
            return exclude(logits, bits)
        may = np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")[: len(logits)]
        logits.masked_fill_(torch.from_numpy(may == 0).to(logits.device), -torch.inf)

    def bits(self, vocabulary: int) -> Tensor:
        """Return a bit for each token, 1 if it may come next; int32 [ceil(vocabulary / 32)], the first token's bit is
        the least."""
        size = -(-vocabulary // 32) * 4
        if self.is_complete and not self._ends:
            return torch.full([size // 4], -1, dtype=torch.int32)  # the answer has ended; this is a draft
        bits = bytearray(self._matcher.compute_bitmask()[:size])
        self._check()
        bits.extend(bytes(size - len(bits)))
        for token in self._ends:  # some may come as text too, such as the end of a line
            bits[token // 8] = bits[token // 8] & ~(1 << token % 8) | self._matcher.is_accepting() << token % 8
        return torch.frombuffer(bits, dtype=torch.int32)

    def takes(self, token: int) -> bool:
        """Return whether a token may come next."""
        return token in self._ends or self.is_complete or self._matcher.validate_tokens([token]) == 1

    def append(self, token: int) -> None:
        """Go on behind a token that ``mask`` has left."""
        if token in self._ends or self.is_complete:
            return
        self._matcher.consume_token(token)
        self._check()
        self.num_tokens += 1

    def crop(self, num_tokens: int) -> None:
        """Go back to the first tokens."""
        if self.num_tokens > num_tokens:
            self._matcher.rollback(self.num_tokens - num_tokens)
            self.num_tokens = num_tokens

    def _check(self) -> None:
        if self._matcher.is_error():
            fault = _said(self._matcher.get_error())
            raise UnsupportedPrompt(f"the grammar of the answer fails at its token {self.num_tokens + 1}: {fault}.")


def _said(fault: str) -> str:
    """What llguidance says, without the state of its parser that may follow."""
    text = " ".join(fault.split("<state>")[0].split())[:400]
    return "no text is one" if text == "NoExtensionBias" else text


def _without(table: dict[str, Any], item: tuple[str, str]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if (key, value) != item}
