"""What is no text, no whole number or no option is refused with what was given, not with an internal error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsift import LLM, InputError, Sampling


@pytest.fixture(scope="module")
def llm(llama: Path) -> LLM:
    return LLM(llama, device="cpu")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["Once"], {"max_tokens": 5}, r"unknown option 'max_tokens'; did you mean 'max_new_tokens'\?"),
        (["Once"], {"max_new_tokens": 4.5}, "max_new_tokens=4.5 must be a whole number, 1 or more"),
        (["Once"], {"max_new_tokens": True}, "max_new_tokens=True must be a whole number"),
        ([[1, 2]], {}, "the prompt is int, not text"),
        ([None], {}, "the prompt is NoneType, not text"),
        ([b"Once"], {}, "the prompt is bytes, not text"),
        ([[]], {}, "there is no prompt"),
        ([""], {}, "the prompt is empty"),
    ],
)
def test_a_prompt(llm: LLM, arguments: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        llm.generate(*arguments, **options)


def test_a_document_and_its_question(llm: LLM) -> None:
    with pytest.raises(InputError, match="the context is bytes, not text"):
        llm.read(b"abc")  # type: ignore[arg-type]
    document = llm.read("A text of some length, which nobody asks about yet.")
    with pytest.raises(InputError, match="the question is list, not text"):
        document.ask(["a", "b"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown option 'n'"):
        document.ask("Why?", n=2)  # type: ignore[call-arg]


def test_a_seed() -> None:
    with pytest.raises(InputError, match=r"seed=1.5 must be a whole number, 0 or more"):
        Sampling(1.0, seed=1.5)  # type: ignore[arg-type]
