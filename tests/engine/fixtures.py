"""Directories of tiny models, written once per session, and run on the CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from engine.apart import SIZES
from engine.tiny_directory import CHAT_TEMPLATE, write_model

from kvsift.engine.speculative.pace import Amount, Measured, Pace
from kvsift.models.hf.model_directory import ModelDirectory


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    """The same paths, dtypes and words on a machine with a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three full-attention layers."""
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer with a sliding window of 32 below one with full attention."""
    return write_model(tmp_path_factory.mktemp("gemma"), "Gemma3", num_hidden_layers=2)


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has a chat template."""
    return write_model(tmp_path_factory.mktemp("chatty"), chat_template=CHAT_TEMPLATE)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights may be loaded."""

    def load(*_: object) -> NoReturn:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(ModelDirectory, "load", load)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for keys and values that lie apart from it (``engine.apart``)."""
    return write_model(tmp_path_factory.mktemp("wide"), **SIZES)


@pytest.fixture
def eager_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of all lengths, whether they pay or not."""
    lengths: Iterator[int] = iter(())

    def choose(self: Pace, repeat: int, repeated: int, most: int) -> Amount:
        nonlocal lengths
        try:
            wanted = next(lengths)
        except StopIteration:
            lengths = iter((3, 0, 7, 1, 5, 2))
            return Amount(0.0, min(4, repeated), True) if repeated else Amount(0.0)
        return Amount(0.0, min(wanted, most))

    monkeypatch.setattr(Pace, "choose", choose)
    monkeypatch.setattr(Measured, "decide", lambda *_: None)
