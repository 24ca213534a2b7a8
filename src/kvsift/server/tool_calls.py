"""Calls of tools, and reasoning, in the text of an answer, in the formats in which models write them.

A format is data: regular expressions for what begins calls, what stands before the arguments of one, and what ends
them. The text is searched as it comes; of its end, what may still become a match is held back.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import regex

SPACE = r"\s{0,99}+"
OBJECT = (
    r'\{_(?:"type"_:_"function"_,_)?(?:"function"_:_\{_)?'
    r'"name"_:_"(?P<name>[^"\\]{1,64})"_,_"(?:arguments|parameters)"_:_'
).replace("_", SPACE)
BARE = r"\A\s*(?:```(?:json)?\s*)?(?=[\[{])"  # the whole answer is calls
LIST = r'\A\s*(?=\[_\{_"name"_:_"[^"\\]{1,64}"_,_"arguments"_:)'.replace("_", SPACE)  # the same, of nothing else
NEVER = r"(?!)"
CHANNEL = r"(?:<\|start\|>assistant)?<\|channel\|>"


@dataclass(frozen=True)
class ToolFormat:
    """How models write calls.

    Attributes:
        template: is found in the chat templates of such models; templates of other formats have none of it.
        begin, end: begins calls anywhere in the text, and ends them; those without an end go on to the end of the text.
        header: stands before the arguments of a call, with its name.
        bare: an answer that begins so is calls, too, if it names a tool.
        pairs: finds the names and values of arguments that are no JSON but elements, up to ``close``.
        noise: is no part of the text.
    """

    template: str
    begin: str = NEVER
    header: str = OBJECT
    end: str = NEVER
    bare: str = NEVER
    pairs: str | None = None
    close: str = NEVER
    noise: str = NEVER


FORMATS = {
    "deepseek": ToolFormat(
        r"<｜tool▁calls▁begin｜>",
        begin=r"<｜tool▁calls▁begin｜>",
        header=r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^\n]{1,64})\n```json\n|(?P<name>[^<]{1,64})<｜tool▁sep｜>(?=\s*\{))",
        end=r"<｜tool▁calls▁end｜>",
    ),
    "mistral": ToolFormat(
        r"\[TOOL_CALLS\]",
        begin=r"\[TOOL_CALLS\]",
        header=OBJECT + r"|(?P<name>[\w.-]{1,64}+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)",
    ),
    "gpt-oss": ToolFormat(
        r"<\|channel\|>",
        begin=r"(?:<\|start\|>assistant(?:<\|channel\|>\w+)?|<\|channel\|>\w+|\A)\s*to=functions\.",
        header=r"(?P<name>[\w.-]{1,64}+)(?:[^<]|<\|(?:channel|constrain)\|>){0,99}+<\|message\|>",
        end=r"<\|(?:call|end)\|>",
        noise=CHANNEL + r"\w+(?:\s*<\|constrain\|>\w+)?<\|message\|>|<\|(?:end|return|call)\|>",
    ),
    "hermes": ToolFormat(
        r"\A(?!.*<(?:function=|arg_key>)).*<\|?tool_call\|?>",  # Qwen, Hermes, Granite, Phi
        begin=r"<\|?tool_call\|?>",
        end=r"<\|?/tool_call\|?>",
    ),
    "qwen3-coder": ToolFormat(
        r"<function=",
        begin=r"<tool_call>",
        header=r"<function=(?P<name>[^>\n]{1,64})>",
        end=r"</tool_call>",
        pairs=r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>",
        close=r"</function>",
    ),
    "glm": ToolFormat(
        r"<arg_key>",
        begin=r"<tool_call>",
        header=r"(?P<name>[\w.-]{1,64}+)\s{0,9}(?=<)",
        end=r"</tool_call>",
        pairs=r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
        close=r"(?=</tool_call>)",
    ),
    "llama3": ToolFormat(r"<\|python_tag\|>|ipython", begin=r"<\|python_tag\|>", bare=BARE),
    "json": ToolFormat(NEVER, bare=BARE),
    "json-list": ToolFormat(NEVER, bare=LIST),  # as grammars write them beside other JSON
}
REASONING = (  # found in templates, and the delimiters in answers
    (r"</think>", r"<think>", r"</think>"),
    (r"\[/THINK\]", r"\[THINK\]", r"\[/THINK\]"),
    (r"</seed:think>", r"<seed:think>", r"</seed:think>"),
    (r"<\|channel\|>", CHANNEL + r"analysis<\|message\|>", r"<\|end\|>"),
)
CHANNELS = len(REASONING) - 1


@dataclass(frozen=True)
class Dialect:
    """What the answers of a model have besides text, as its chat template shows.

    Attributes:
        has_tools: the template writes tools.
        tools: name of the format of calls; None: an unknown one, or none.
        reasoning: index in ``REASONING``; None: there is none.
        variables: the template reads these, of those that say how much to reason.
    """

    has_tools: bool = False
    tools: str | None = None
    reasoning: int | None = None
    variables: Collection[str] = ()

    @classmethod
    def of(cls, template: str) -> Dialect:
        """Return the dialect of a chat template; "" for a model without one."""
        has_tools = regex.search(r"\btools\b", template) is not None
        known = (name for name, form in FORMATS.items() if regex.search(form.template, template, regex.DOTALL))
        marked = (number for number, (mark, _, _) in enumerate(REASONING) if regex.search(mark, template))
        variables = [name for name in ("reasoning_effort", "enable_thinking") if name in template]
        return cls(has_tools, next(known, None) if has_tools else None, next(marked, None), variables)

    def begins_reasoning(self, prompt_end: str) -> bool:
        """Whether an answer to a prompt begins with reasoning, of which the prompt has the first delimiter."""
        return self.reasoning is not None and bool(
            regex.search(f"(?:{REASONING[self.reasoning][1]})$", prompt_end.rstrip())
        )


PLAIN = Dialect()
NO_NAMES: Mapping[str, Any] = MappingProxyType({})


class AnswerPart(NamedTuple):
    """Something new in an answer; the text of a call is its name."""

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str


class AnswerBlock(NamedTuple):
    """A part of a whole answer; of a call ``text`` is the arguments."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    name: str = ""


def blocks(parts: Iterable[AnswerPart]) -> list[AnswerBlock]:
    """Return the parts of an answer, those that belong together as one."""
    found = list[AnswerBlock]()
    for kind, text in parts:
        if kind == "call":
            found.append(AnswerBlock(kind, "", text))
        elif found and found[-1].kind == ("call" if kind == "arguments" else kind):
            found[-1] = found[-1]._replace(text=found[-1].text + text)
        else:
            found.append(AnswerBlock("content" if kind == "arguments" else kind, text))
    return found


def call_id() -> str:
    """Return an id for a call: nine letters and digits, as templates of Mistral demand."""
    return uuid4().hex[:9]


@lru_cache
def _between(tools: str | None, reasoning: int | None, is_first: bool) -> regex.Pattern[str] | None:
    """What may follow in the text of an answer; ``is_first`` if there was no text before."""
    form = None if tools is None else FORMATS[tools]
    found = {
        "reasoning": NEVER if reasoning is None else REASONING[reasoning][1],
        "calls": NEVER if form is None else form.begin,
        "bare": form.bare if form is not None and is_first else NEVER,
        "noise": FORMATS["gpt-oss"].noise if reasoning == CHANNELS else NEVER,
    }
    choices = [f"(?P<{name}>{pattern})" for name, pattern in found.items() if pattern != NEVER]
    return regex.compile("|".join(choices)) if choices else None


class AnswerParser:
    """Splits the text of an answer as it comes.

    Args:
        dialect: delimiters of reasoning.
        tools: format of calls; None: none are looked for.
        names: names of the tools, and the properties of their parameters.
        begins_reasoning: the answer begins with reasoning.
        most_calls: further calls are dropped.

    Attributes:
        num_calls: calls so far.
    """

    def __init__(
        self, dialect: Dialect, tools: str | None = None, names: Mapping[str, Any] = NO_NAMES,
        begins_reasoning: bool = False, most_calls: int | None = None,
    ) -> None:  # fmt: skip
        self._dialect, self._tools, self._names, self._most_calls = dialect, tools, names, most_calls
        self._state = "reasoning" if begins_reasoning else "content"
        self._rest = ""  # what was not understood yet
        self._opened: tuple[str, str] | None = None  # what began calls, and what followed until the first one
        self._kind, self._space, self._is_first = "", "", True  # of the last text, and white space after it
        self._name = ""  # of the last call
        self._value = JsonValue()
        self.num_calls = 0

    def feed(self, text: str, is_end: bool) -> list[AnswerPart]:
        """Return what is certain after more text."""
        self._rest += text
        parts = list[AnswerPart]()
        while self._rest or is_end:
            before = self._state, len(self._rest)
            parts += getattr(self, f"_read_{self._state}")(is_end)
            if before == (self._state, len(self._rest)):
                break
        if is_end and self._kind == "content" and not self.num_calls and self._space:
            parts.append(AnswerPart("content", self._space))
        return parts

    def _search(self, pattern: regex.Pattern[str] | None, is_end: bool) -> tuple[str, Any]:
        """Return the text before a match, which is removed with it, and the match, if it is one already."""
        found = None if pattern is None else pattern.search(self._rest, partial=not is_end)
        start = len(self._rest) if found is None else found.start()
        whole = None if found is None or found.partial else found
        before, self._rest = self._rest[:start], self._rest[start if whole is None else whole.end() :]
        return before, whole

    def _text(self, kind: Literal["reasoning", "content"], text: str) -> Iterator[AnswerPart]:
        """Text, without the white space around calls and reasoning."""
        text = (self._space if kind == self._kind else "") + text
        if kind != self._kind and (kind == "reasoning" or self._kind):
            text = text.lstrip()
        kept = len(text.rstrip()) if kind == "reasoning" or self._tools else len(text)
        if text[:kept]:
            self._kind, self._is_first = kind, self._is_first and kind == "reasoning"
            yield AnswerPart(kind, text[:kept])
        self._space = text[kept:] if kind == self._kind else ""

    def _read_content(self, is_end: bool) -> Iterator[AnswerPart]:
        before, found = self._search(_between(self._tools, self._dialect.reasoning, self._is_first), is_end)
        yield from self._text("content", before)
        if found is not None and found.lastgroup != "noise":
            self._state = "reasoning" if found.lastgroup == "reasoning" else "calls"
            self._opened, self._is_bare = (found[0], ""), found.lastgroup == "bare"

    def _read_reasoning(self, is_end: bool) -> Iterator[AnswerPart]:
        assert self._dialect.reasoning is not None
        before, found = self._search(regex.compile(REASONING[self._dialect.reasoning][2]), is_end)
        yield from self._text("reasoning", before)
        if found is not None:
            self._state, self._kind, self._space = "content", "reasoning", ""

    def _read_calls(self, is_end: bool) -> Iterator[AnswerPart]:
        assert self._tools is not None
        form = FORMATS[self._tools]
        before, found = self._search(regex.compile(f"(?P<header>{form.header})|(?P<end>{form.end})"), is_end)
        opened = None if self._opened is None else (self._opened[0], self._opened[1] + before)
        self._opened = opened
        name = None if found is None else found["name"]
        if name is not None and (opened is None or not self._is_bare or name in self._names):
            yield from self._call(name.strip())
        elif found is not None or is_end:
            self._state, self._opened = "content", None
            if opened is not None:
                yield from self._other(*opened, "" if found is None else found[0])

    def _call(self, name: str) -> Iterator[AnswerPart]:
        self._opened = None
        if self.num_calls == self._most_calls:
            self._state = "surplus"
            return
        assert self._tools is not None
        self._state, self._value = "arguments" if FORMATS[self._tools].pairs is None else "pairs", JsonValue()
        self._kind, self._space, self._is_first, self._name = "call", "", False, name
        self.num_calls += 1
        yield AnswerPart("call", name)

    def _other(self, begin: str, written: str, end: str) -> Iterator[AnswerPart]:
        """Calls that are JSON in another order, or without arguments; else text."""
        try:
            value, _ = json.JSONDecoder().raw_decode(written.lstrip())
        except (ValueError, RecursionError):
            value = None
        calls = value if isinstance(value, list) else [value]
        if calls and all(isinstance(call, dict) and call.get("name") in self._names for call in calls):
            for call in calls:
                yield from self._call(call["name"])
                if self._state == "arguments":
                    yield AnswerPart("arguments", json.dumps(call.get("arguments", call.get("parameters", {}))))
            self._state = "calls" if self._state == "arguments" and self._is_bare else "content"
        else:
            self._is_first = False
            yield from self._text("content", begin + written + end)

    def _read_arguments(self, is_end: bool) -> Iterator[AnswerPart]:
        if not self._value.has_begun:
            self._rest = self._rest.lstrip()
        count = self._value.extend(self._rest)
        new, self._rest = self._rest[:count], self._rest[count:]
        if text := self._value.text(new, is_end):
            yield AnswerPart("arguments", text)
        if self._value.is_ended or is_end:
            self._state = "calls"

    def _read_pairs(self, is_end: bool) -> Iterator[AnswerPart]:
        assert self._tools is not None
        form = FORMATS[self._tools]
        found = regex.search(form.close, self._rest)
        if found is None and not is_end:
            return
        stop, end = (len(self._rest),) * 2 if found is None else found.span()
        pairs = regex.findall(form.pairs, self._rest[:stop], regex.DOTALL)
        self._state, self._rest = "calls", self._rest[end:]
        properties = self._names.get(self._name)
        arguments = {name: _typed(value, properties, name) for name, value in pairs}
        yield AnswerPart("arguments", json.dumps(arguments, ensure_ascii=False))

    def _read_surplus(self, is_end: bool) -> Iterator[AnswerPart]:
        self._rest = ""
        yield from ()


def _typed(value: str, properties: Any, name: str) -> Any:
    """An argument as JSON, unless the properties of a tool say that it is a text."""
    given = properties.get(name) if isinstance(properties, dict) else None
    if not (isinstance(given, dict) and given.get("type") == "string"):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


class JsonValue:
    """Finds the end of a JSON value in text that comes in pieces.

    Attributes:
        has_begun: a character of it is known.
        is_ended: it is whole.
    """

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._string: str | None = None  # arguments that are JSON in a string
        self.has_begun = self.is_ended = False

    def extend(self, text: str) -> int:
        """Return how many characters of a text belong to the value."""
        for number, character in enumerate(text):
            if self.is_ended:
                return number
            if not self.has_begun:
                self.has_begun, self._string = True, "" if character == '"' else None
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = character == "\\", character != '"'
                self.is_ended = not self._in_string and not self._depth
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]" or (character == "," and not self._depth):
                if not self._depth:  # after null, or a number
                    self.is_ended = True
                    return number
                self._depth -= 1
                self.is_ended = not self._depth
        return len(text)

    def text(self, new: str, is_end: bool) -> str:
        """Return new arguments: those in a string once it has ended."""
        if self._string is None:
            return new
        self._string += new
        if not (self.is_ended or is_end):
            return ""
        try:
            return str(json.loads(self._string))
        except ValueError:
            return self._string
