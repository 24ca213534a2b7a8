"""The language model of these tests, loaded once by each process, and the texts that it reads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from real.smollm2 import Unavailable, smollm2
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvsift import LLM

EXCERPTS = {
    "compound_statements": "5c0b6204c3b8f62f116533a3b67f016d0c262264321d0100a975c03e710efc0f",
    "special_method_names": "64411df6fb713fd8325ce602df80ff8bbcf21d12808122977e59961de4283d56",
}
PLAN = "sketch:budget=128"  # skips most of what is read here


def excerpt(name: str) -> str:
    """A text of about 4,300 tokens, whose licence lies beside it; numbers measured on it hold for its checksum."""
    content = (Path(__file__).parent / "texts" / f"{name}.txt").read_bytes()
    assert hashlib.sha256(content).hexdigest() == EXCERPTS[name], f"{name}.txt was changed"
    return content.decode()


@pytest.fixture(scope="session")
def smol() -> Path:
    """The directory of SmolLM2-135M-Instruct."""
    try:
        return smollm2()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def llm(smol: Path) -> LLM:
    return LLM(smol, PLAN, device="cpu", dtype="float32", probe_every=0)


@pytest.fixture(scope="session")
def stock(smol: Path) -> PreTrainedModel:
    """The model as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32).eval()
