"""A model of Llama-3-8B's attention shape, as wide as the real one: the whole road from the example to the answer."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from cli.watched import Run
from engine.tiny_directory import text_of

from kvsift.models.hf.model_directory import ModelDirectory

EXAMPLE = Path(__file__).parents[2] / "examples" / "real_width_model.py"
LAYERS, BUDGET, NEW_TOKENS = 1, 256, 6


@pytest.fixture
def example() -> ModuleType:
    spec = spec_from_file_location("real_width_model", EXAMPLE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def write(example: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *map(str, arguments)])
    example.main()


def test_a_text_is_sifted_at_real_width(
    run: Run, example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "wide"
    write(example, monkeypatch, directory, "--layers", LAYERS, "--mlp", 256)
    config = ModelDirectory.check(directory).config
    shape = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert shape == (4096, 32, 8, 128)
    encode = ModelDirectory.check(directory).tokenizer()
    text = text_of(2000)
    while len(encode(text)["input_ids"]) < 1500:
        text += "\n" + text_of(1000)
    (tmp_path / "manual.txt").write_text(text)
    asked = run(
        "ask", "--model", directory, "--context", "manual.txt", "--question", "How many sacks?", "--json",
        "--plan", f"quest:budget={BUDGET}:dense_layers=none", "--max-new-tokens", NEW_TOKENS, "--dtype", "bfloat16",
    )  # fmt: skip
    document = asked.document
    assert [line for line in asked.err.splitlines() if "reading:" not in line] == []  # progress, on a slow machine
    assert 1500 < document["prompt_tokens"] < 2100
    assert BUDGET - 32 <= document["visible_tokens"] <= BUDGET
    assert document["density"] == pytest.approx(document["visible_tokens"] / document["prompt_tokens"], rel=0.01)
    steps = len(document["answers"][0]["token_ids"]) - 1
    per_token = LAYERS * 2 * 8 * 128 * 2  # keys and values of 8 heads of 128 in bfloat16
    assert document["kv_bytes_dense"] == pytest.approx(steps * per_token * document["prompt_tokens"], rel=0.01)
    assert document["kv_bytes_read"] < 0.3 * document["kv_bytes_dense"]  # a sixth attended, a sixteenth to choose
    assert 0.1 < document["recovery"] < 1


def test_a_directory_that_holds_something_is_left_alone(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        write(example, monkeypatch, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_its_help_says_how_to_ask(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        write(example, monkeypatch, "--help")
    told = capsys.readouterr().out
    assert all(option in told for option in ("--layers", "--mlp", "--vocab", "kvsift ask --model"))


def test_without_the_embedded_tokenizer_there_is_a_token_per_byte(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "embedded_model", lambda: tmp_path / "nothing")
    assert example.write_tokenizer(tmp_path) == 256
    tokenizer = ModelDirectory(tmp_path, None, 0).tokenizer()
    assert len(tokenizer("wörld")["input_ids"]) == 6
    assert tokenizer.decode(tokenizer("wörld")["input_ids"]) == "wörld"
