"""Answers under a grammar: whatever is drawn, one that ends by itself is a text of the grammar."""

import json
import random
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine.tiny_directory import text_of, write_model
from jsonschema import Draft202012Validator
from refusals import refused

from kvsift import LLM, Grammar, Sampling

QUEST = "quest:budget=32:page_size=8:dense_layers=none:sinks=1:window=8"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def embedded() -> Iterator[LLM]:
    """The embedded model, on the CPU."""
    with LLM(device="cpu", plan="dense") as llm:
        yield llm


def drawn_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of what models are asked for: records, lists, choices and bounded texts and numbers."""
    kind = rng.choice(["string", "integer", "enum", "boolean"] if depth > 2 else KINDS)
    low = rng.randrange(-50, 50)
    if kind == "object":
        names = rng.sample(NAMES, rng.randint(1, 4))
        properties = {name: drawn_schema(rng, depth + 1) for name in names}
        required = [name for name in names if rng.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        least = rng.randrange(3)
        items = drawn_schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randrange(3)}
    if kind == "tuple":
        parts = [drawn_schema(rng, depth + 1) for _ in range(2)]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2}
    if kind == "anyOf":
        return {"anyOf": [drawn_schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]}
    if kind == "ref":
        node = {"type": "object", "properties": {"value": drawn_schema(rng, 3), "next": {"$ref": "#/$defs/node"}},
                "required": ["value"], "additionalProperties": False}  # fmt: skip
        return {"$ref": "#/$defs/node", "$defs": {"node": node}} if depth == 0 else {"type": ["null", "boolean"]}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice([r"^[A-Z]{2}\d{1,3}$", r"^(red|green)-[a-f]{2}$", r"^\d+$"])}
    if kind == "format":
        return {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4", "date-time"])}
    if kind == "number":
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.choice([1, 10, 0.5])}
    if kind == "integer":
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)}
    if kind == "enum":
        return {"enum": rng.sample(["red", "grün", 'a "b"', "\\", "日本", 3, -1.5, None, True, [], {"a": 1}], 3)}
    if kind == "const":
        return {"const": rng.choice([NAMES, 7, "é", {"a": [1, None]}])}
    if kind == "string":
        least = rng.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(12)}
    return {"type": kind}


KINDS = ["object"] * 4 + ["array", "tuple", "anyOf", "ref", "pattern", "format", "number", "integer", "enum", "const",
         "string", "boolean", "null"]  # fmt: skip
NAMES = [*string.ascii_lowercase[:8], "naïve", "a b", 'with "quotes"', "$x"]


def fault_in(answer: Any, schema: dict[str, Any]) -> str | None:
    """What is wrong with an answer that has ended by itself; None: nothing, or it has not."""
    if answer.finish_reason != "stop":
        return None
    try:
        Draft202012Validator(schema).validate(json.loads(answer.text))
    except Exception as error:
        return f"{answer.text!r} under {json.dumps(schema)}: {str(error)[:200]}"
    return None


def check_drawn(llm: LLM, seeds: range, **options: Any) -> None:
    """Let the model answer by a schema of each seed at temperature 1; nearly all answers are to end."""
    faults, num_ended = [], 0
    for seed in seeds:
        schema = drawn_schema(random.Random(seed))
        answer = llm.generate(
            f"Record {seed}:", grammar=Grammar.json(schema), sampling=Sampling(1.0, seed=seed), max_new_tokens=200,
            **options,
        )  # fmt: skip
        num_ended += answer.finish_reason == "stop"
        faults.append(fault_in(answer, schema))
    assert not list(filter(None, faults))
    assert num_ended > 0.8 * len(seeds)


def test_drawn_answers_are_valid_under_generated_schemas(embedded: LLM) -> None:
    check_drawn(embedded, range(24))


@pytest.mark.slow
def test_drawn_answers_are_valid_under_2000_generated_schemas(embedded: LLM) -> None:
    check_drawn(embedded, range(2000))


def test_exact_answers_are_those_of_dense_decoding_under_a_grammar(embedded: LLM) -> None:
    """Greedy and drawn; drafts that the grammar excludes are not accepted."""
    for seed in range(6):
        schema, sampling = drawn_schema(random.Random(seed)), Sampling(float(seed % 2), seed=seed)
        prompt = f"{json.dumps(schema)} " * 4
        dense, exact = (
            embedded.generate(prompt, grammar=Grammar.json(schema), sampling=sampling, plan=plan, exact=exact)
            for plan, exact in (("dense", False), ("sketch:budget=96", True))
        )
        assert (exact.token_ids, exact.finish_reason) == (dense.token_ids, dense.finish_reason)


def test_samples_and_neighbours_have_grammars_of_their_own(embedded: LLM) -> None:
    sampling = Sampling(1.5, seed=3)
    many = embedded.generate("Colour:", n=6, grammar=Grammar.choice(["red", "green", "dark red"]), sampling=sampling)
    assert {answer.text for answer in many} <= {"red", "green", "dark red"}
    assert len({answer.text for answer in many}) > 1
    assert {answer.finish_reason for answer in many} == {"stop"}
    prompts = ["A person:", "Another person:"]
    together = embedded.generate(prompts, grammar=Grammar.json(PERSON), sampling=sampling)
    alone = [embedded.generate(prompt, grammar=Grammar.json(PERSON), sampling=sampling) for prompt in prompts]
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert not any(fault_in(answer, PERSON) for answer in together)


@pytest.mark.parametrize("plan", ["dense", QUEST])
def test_a_model_that_never_ends_stops_where_nothing_may_follow(plan: str, tmp_path: Path) -> None:
    """Without eos, in composed steps too."""
    directory = write_model(tmp_path / "model")
    for path in ("auto", "composed"):
        llm = LLM(directory, plan, device="cpu", path=path)
        llm.tokenizer.eos_token = None
        answer = llm.generate(text_of(90), grammar=Grammar.regex(r"[a-c]{3}-\d"), max_new_tokens=40)
        assert re.fullmatch(r"[a-c]{3}-\d", answer.text)
        assert answer.finish_reason == "stop"


def test_a_stop_of_the_client_ends_an_answer_within_its_grammar(embedded: LLM) -> None:
    answer = embedded.generate("A person:", grammar=Grammar.json(PERSON), stop='"age"')
    assert answer.text.rstrip().endswith(",")


def test_grammars_of_pydantic_lark_and_llama_cpp(embedded: LLM) -> None:
    from pydantic import BaseModel

    class Point(BaseModel):
        x: int
        is_new: bool

    answer = embedded.generate("Point:", grammar=Grammar.json(Point), sampling=Sampling(1.0))
    assert answer.finish_reason == "length" or Point.model_validate_json(answer.text)
    for text in ('start: "a" | /[bc]{2}/', 'root ::= "a" | [bc] [bc]'):
        assert re.fullmatch("a|[bc]{2}", embedded.generate("x", grammar=Grammar("grammar", text)).text)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar.json({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar.json({"not": {"type": "string"}}), "not"),
        (Grammar.json({"if": {}, "then": {}}), "if"),
        (Grammar.json({"type": "strin"}), "strin"),
        (Grammar.json({"$ref": "https://example.com/a"}), "example.com"),
        (Grammar.json({"type": "integer", "minimum": 3, "maximum": 2}), "minimum"),
        (Grammar("json_schema", "{"), "EOF"),
        (Grammar.regex("(a"), "unclosed group"),
        (Grammar("grammar", "start = 3"), "Expected ::="),
        (Grammar.json({"$ref": "#"}), "no text is one"),
        (Grammar.regex(r"a[^\s\S]"), "no text is one"),
        (Grammar.json(False), "empty"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_its_keyword(embedded: LLM, grammar: Grammar, text: str) -> None:
    with refused("unsupported_prompt: of the answer cannot be compiled") as caught:
        embedded.generate("x", grammar=grammar)
    assert text in str(caught.value)


def test_formats_of_texts_that_are_not_known_are_no_rules(embedded: LLM) -> None:
    text = {"type": "string", "maxLength": 3}
    parts = {"format": {**text, "format": "path"}, "key": {**text, "format": "password"}}
    schema = {"type": "object", "properties": parts, "required": [*parts], "additionalProperties": False}
    assert list(json.loads(embedded.generate("x", grammar=Grammar.json(schema)).text)) == ["format", "key"]
    assert embedded.generate("x", grammar=Grammar("json_schema", " true"), max_new_tokens=3).text


def test_other_grammars_are_refused(embedded: LLM) -> None:
    with refused("invalid_value: Give a kvsift.Grammar"):
        embedded.generate("x", grammar=PERSON)  # type: ignore[arg-type]
    with refused("invalid_value: no JSON"):
        Grammar.json({"a": {1}})
    with refused("invalid_value: list of texts"):
        Grammar.choice([])
    with refused("invalid_value: logit_bias has token 4096"):
        embedded.generate("x", sampling=Sampling(logit_bias={4096: 1.0}))
    for wrong in ({"logit_bias": {5: 1e308}}, {"repetition_penalty": 1e-308}, {"presence_penalty": float("nan")}):
        with refused(f"invalid_value: {next(iter(wrong))}"):
            Sampling(**wrong)  # type: ignore[arg-type]
