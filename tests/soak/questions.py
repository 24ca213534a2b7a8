"""Questions whose answers are known: what ``kvsift.LLM`` answers alone, before anybody asks the server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvsift_lab.eval.tasks import make_sample

import kvsift
from kvsift import threads
from kvsift.server.schemas import TextRequest
from kvsift.tokenization.prompt import STOP, PromptFormat

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


@dataclass(frozen=True)
class Question:
    """A request and its answers.

    Attributes:
        route, body: of the request; it is asked as a stream, too.
        answers: text and finish reason of each choice.
        document, asked: of a chat, which may be asked about an uploaded document as well.
    """

    route: str
    body: dict[str, Any]
    answers: list[tuple[str, str]]
    document: str = ""
    asked: str = ""


def questions(count: int) -> list[Question]:
    """Return so many questions, answered one after the other."""
    threads.use(1)
    llm = kvsift.LLM(plan=PLANS[0], device="cpu", dense_below=0)  # as the server: logits agree to the last bit
    return [_question(llm, number) for number in range(count)]


def _question(llm: kvsift.LLM, number: int) -> Question:
    """Every other one is a chat, two of three are drawn, half of these so hot that they go on to the end, and
    many have two answers; four share a document. One of four is constrained, by a grammar or by penalties."""
    encode = partial(llm.tokenizer.encode, add_special_tokens=False)
    length = LENGTHS[number // 4 % len(LENGTHS)]
    sample = make_sample(TASKS[number // 4 % len(TASKS)], length, number // 4, encode, 4, [llm.tokenizer.bos_token_id])
    asked, plan, is_chat = sample.questions[number % len(sample.questions)].text, PLANS[number % 4], number % 2 == 1
    sampling = (kvsift.Sampling(), kvsift.Sampling(0.8, 0.95, number), kvsift.Sampling(3.0, 1.0, number))[number % 3]
    fields = CONSTRAINTS[number // 4 % len(CONSTRAINTS)] if number % 4 == number // 4 % 4 else {}
    sampling = replace(sampling, **{name: value for name, value in fields.items() if hasattr(sampling, name)})
    samples = 2 if number % 5 < 2 and sampling.temperature else 1
    most = 12 + 7 * (number % 7)
    text = PromptFormat(llm.tokenizer).text(sample.context, asked)
    options: dict[str, Any] = {"plan": plan, "max_new_tokens": most, "stop": STOP if is_chat else None}
    if (grammar := TextRequest(**fields).grammar) is not None:
        options |= {"grammar": kvsift.Grammar(**grammar)}
    if samples > 1:
        found = llm.generate(text, n=samples, sampling=sampling, **options)
    else:
        found = [llm.generate(text, sampling=sampling, **options)]
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed, "n": samples}
    body = {**(drawn if sampling.temperature else {}), "max_tokens": most, "sparsity": plan, **fields}
    if not is_chat:
        answers = [(each.text, each.finish_reason) for each in found]
        return Question("/v1/completions", {"prompt": text, **body}, answers)
    messages = [{"role": "user", "content": f"{sample.context}\n\n{asked}"}]
    answers = [(each.text.lstrip(), each.finish_reason) for each in found]
    return Question("/v1/chat/completions", {"messages": messages, **body}, answers, sample.context, asked)
