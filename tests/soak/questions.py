"""Questions whose answers are known: what ``kvsift.LLM`` answers alone, before anybody asks the server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvsift_lab.eval.tasks import make_sample

import kvsift
from kvsift import threads
from kvsift.models.embedded import embedded_model
from kvsift.server.answers import parser_of
from kvsift.server.schemas import ChatRequest, CompletionRequest
from kvsift.server.tool_calls import Dialect, blocks
from kvsift.tokenization.chat_template import ChatTemplate

PLANS = "sketch:budget=256", "dense", "quest:budget=256", "streaming_llm:budget=320"
LENGTHS = 120, 700, 1300, 1900  # tokens of documents
TASKS = "facts", "key_value", "needle"
SCHEMA = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "maxLength": 9},
        "count": {"type": "integer"},
        "sure": {"type": "boolean"},
    },
    "required": ["code", "count"],
    "additionalProperties": False,
}
CONSTRAINTS: tuple[dict[str, Any], ...] = (  # fields of requests
    {"response_format": {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA}}},
    {"frequency_penalty": 0.7, "presence_penalty": -0.2, "repetition_penalty": 1.2},
    {"structured_outputs": {"regex": r"[A-Z][a-z ]{5,40}\."}},
    {"response_format": {"type": "json_object"}, "presence_penalty": 0.5},
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {**SCHEMA, "properties": properties, "required": [*properties]}},
    }
    for name, properties in (
        ("find", {"code": {"type": "string", "maxLength": 9}, "kind": {"enum": ["ship", "bridge", "password"]}}),
        ("note", {"sure": {"type": "boolean"}}),
    )
]
CALLS: tuple[dict[str, Any], ...] = (
    {"tools": TOOLS, "tool_choice": "required"},  # several calls
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "find"}}},
    {"tools": TOOLS, **CONSTRAINTS[0]},  # JSON or calls
    {"tools": TOOLS, "parallel_tool_calls": False},  # text, in which calls are looked for
)
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}\n<tool_call>\n\n{% endif %}"
    "{% for message in messages %}{{ message.content }}\n{% endfor %}Answer:"
)


def write_chat_model(folder: Path) -> Path:
    """The embedded model in a new folder, with a chat template that writes tools."""
    folder.mkdir()
    for file in embedded_model().iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@dataclass(frozen=True)
class Question:
    """A request and its answers.

    Attributes:
        route, body: of the request; it is asked as a stream, too.
        answers: text, with calls as in ``call_text``, and finish reason of each choice.
        document, asked: of a chat, which may be asked about an uploaded document as well.
    """

    route: str
    body: dict[str, Any]
    answers: list[tuple[str, str]]
    document: str = ""
    asked: str = ""


def call_text(name: str, arguments: str) -> str:
    """A call as text; of a piece of one, either is empty."""
    return (f"[{name}]" if name else "") + arguments


def questions(model: Path, count: int) -> list[Question]:
    """Return so many questions, answered one after the other."""
    threads.use(1)
    llm = kvsift.LLM(model, plan=PLANS[0], device="cpu", dense_below=0)  # as the server: logits agree to the last bit
    return [_question(llm, number) for number in range(count)]


def _question(llm: kvsift.LLM, number: int) -> Question:
    """Every other one is a chat, two of three are drawn, half of these so hot that they go on to the end, and
    many have two answers; four share a document. One of four is constrained, by a grammar or by penalties; one of
    five has tools."""
    encode = partial(llm.tokenizer.encode, add_special_tokens=False)
    length = LENGTHS[number // 4 % len(LENGTHS)]
    sample = make_sample(TASKS[number // 4 % len(TASKS)], length, number // 4, encode, 4, [llm.tokenizer.bos_token_id])
    asked, plan, is_chat = sample.questions[number % len(sample.questions)].text, PLANS[number % 4], number % 2 == 1
    sampling = (kvsift.Sampling(), kvsift.Sampling(0.8, 0.95, number), kvsift.Sampling(3.0, 1.0, number))[number % 3]
    fields = CONSTRAINTS[number // 4 % len(CONSTRAINTS)] if number % 4 == number // 4 % 4 else {}
    if has_tools := number % 10 in (1, 3):
        fields = CALLS[(number // 10 + number % 10 // 3) % len(CALLS)]
    sampling = replace(sampling, **{name: value for name, value in fields.items() if hasattr(sampling, name)})
    samples = 2 if number % 5 < 2 and sampling.temperature else 1
    most = 12 + 7 * (number % 7) + 60 * has_tools
    if is_chat and not has_tools:
        fields = {"stop": "\n", **fields}
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed, "n": samples}
    body = {**(drawn if sampling.temperature else {}), "max_tokens": most, "sparsity": plan, **fields}
    asked = f"Question: {asked}"
    if is_chat:
        body["messages"] = [{"role": "user", "content": f"{sample.context}\n\n{asked}"}]
        request: Any = ChatRequest(**body)
        dialect = Dialect.of(TEMPLATE)
        text = ChatTemplate(llm.tokenizer).render(request.plain_messages(), False, request.template_variables(dialect))
        text = text.removeprefix(llm.tokenizer.bos_token)  # which generate adds
    else:
        body["prompt"] = text = f"{sample.context}\n\n{asked}\nAnswer:"
        request = CompletionRequest(**body)
    options: dict[str, Any] = {"plan": plan, "max_new_tokens": most, "stop": fields.get("stop")}
    if request.grammar is not None:
        options |= {"grammar": kvsift.Grammar(**request.grammar)}
    if samples > 1:
        found = llm.generate(text, n=samples, sampling=sampling, **options)
    else:
        found = [llm.generate(text, sampling=sampling, **options)]
    if not is_chat:
        return Question("/v1/completions", body, [(each.text, each.finish_reason) for each in found])
    answers = [_chat_answer(request, dialect, each) for each in found]
    return Question("/v1/chat/completions", body, answers, sample.context, asked)


def _chat_answer(request: ChatRequest, dialect: Dialect, answer: kvsift.Answer) -> tuple[str, str]:
    """Text and finish reason of an answer; the text as a whole, while the server splits it as it comes."""
    parser = parser_of(request, dialect, SimpleNamespace(begins_reasoning=False))
    found = blocks(parser.feed(answer.text.lstrip(), True))
    text = "".join(call_text(block.name, block.text) for block in found)
    return text, "tool_calls" if parser.num_calls and answer.finish_reason == "stop" else answer.finish_reason
