"""What is no text, no whole number or no option is refused with what was given, not with an internal error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvsift
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
        (["Once"], {"m": 5}, "Known: .*on_text, "),
        (["Once"], {"sampling": {"temperature": 1}}, r"sampling is dict. Give a kvsift.Sampling"),
        (["Once"], {"stop": 5}, "stop=5 must be a text, or several texts"),
        (["Once"], {"stop": [None]}, r"stop=\[None\] must be a text, or several texts"),
        (["Once"], {"exact": "yes"}, "exact='yes' must be True or False"),
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
    with pytest.raises(InputError, match="the context is PosixPath, not text"):
        llm.read(Path("manual.txt"))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="stop=5 must be a text"):
        llm.read("A text.", stop=5)  # type: ignore[arg-type]
    document = llm.read("A text of some length, which nobody asks about yet.")
    with pytest.raises(InputError, match="the question is list, not text"):
        document.ask(["a", "b"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown option 'n'"):
        document.ask("Why?", n=2)  # type: ignore[call-arg]


def test_a_seed() -> None:
    with pytest.raises(InputError, match=r"seed=1.5 must be a whole number, 0 or more"):
        Sampling(1.0, seed=1.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"temperature='1' must be a number"):
        Sampling("1")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"top_p=None must be a number"):
        Sampling(1.0, None)  # type: ignore[arg-type]


def test_a_dtype_may_be_one_of_torch(llama: Path) -> None:
    assert LLM(llama, device="cpu", dtype=torch.float32).dtype == torch.float32  # type: ignore[arg-type]


def test_what_there_is_can_be_listed() -> None:
    assert {"LLM", "sparse", "Sampling"} <= set(dir(kvsift))
