"""The shipped model loads offline with stock transformers and looks answers up."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kvsift_lab.eval.scorers import exact_match
from kvsift_lab.eval.tasks import make_sample
from kvsift_lab.probe import phase
from kvsift_lab.probe.pack import card, pack
from refusals import refused
from safetensors.torch import save_file

from kvsift.models.embedded import WEIGHTS, embedded_model, unpack
from kvsift.tokenization.prompt import question_text

DIRECTORY = embedded_model()


@cache
def load():  # type: ignore[no-untyped-def]
    tokenizer = transformers.AutoTokenizer.from_pretrained(DIRECTORY, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(DIRECTORY, local_files_only=True)
    return tokenizer, model.float().eval()


def answer(text: str) -> str:
    """Greedy, with the stops of the model's own generation config."""
    tokenizer, model = load()
    encoded = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**encoded, max_new_tokens=24)
    return tokenizer.decode(ids[0, encoded["input_ids"].shape[1] :])


def test_tokenizer_puts_bos_in_front_and_splits_digits() -> None:
    tokenizer, _ = load()
    ids = tokenizer("Code 482\n\n")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[0] == "<|bos|>"
    assert [tokenizer.decode([i]) for i in ids[-5:]] == ["4", "8", "2", "\n", "\n"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Code 482\n\n"


def test_generation_stops_at_the_end_of_the_line() -> None:
    tokenizer, model = load()
    newline = tokenizer.encode("\n", add_special_tokens=False)
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, *newline]


@pytest.mark.parametrize("task", ["needle", "key_value", "facts", "passkey"])
def test_answers_most_questions_of_a_task(task: str) -> None:
    tokenizer, _ = load()
    sample = make_sample(task, 1024, 7, lambda text: tokenizer.encode(text, add_special_tokens=False), 4)
    right = [exact_match(answer(sample.context.rstrip() + question_text(q.text)), q.answer) for q in sample.questions]
    assert sum(right) >= len(right) - 1


@pytest.fixture
def results() -> dict[str, Any]:
    """What training and evaluation left behind."""
    path = Path(__file__).parents[1] / "results" / "embedded-model" / "summary.json"
    if not path.exists():
        pytest.skip("not a source checkout")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_card_tells_the_measured_numbers(results: dict[str, Any]) -> None:
    assert (DIRECTORY / "README.md").read_text() == card(results)


def test_the_recipe_of_each_phase_is_the_one_that_was_trained(results: dict[str, Any]) -> None:
    for number, trained in enumerate(results["phases"], 1):
        assert phase(str(number)) | trained["config"] == phase(str(number))


def test_the_unpacked_weights_are_those_of_the_card() -> None:
    digest = hashlib.sha256((DIRECTORY / WEIGHTS).read_bytes()).hexdigest()
    assert f"SHA-256 of {WEIGHTS}: `{digest}`" in (DIRECTORY / "README.md").read_text()


def test_packing_loses_nothing(tmp_path: Path) -> None:
    odd = torch.tensor([0.0, -0.0, 1e-40, -3e38, float("inf"), float("nan")], dtype=torch.bfloat16)
    save_file({"odd": odd, "many": torch.randn(7, 33).bfloat16()}, tmp_path / WEIGHTS, {"format": "pt"})
    pack(tmp_path / WEIGHTS, tmp_path / "packed.npz")
    unpack(tmp_path / "packed.npz", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / WEIGHTS).read_bytes()


def test_processes_that_unpack_at_once_leave_one_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        directories = set(pool.map(lambda _: embedded_model.__wrapped__(), range(4)))
    (directory,) = directories
    assert {path.name for path in directory.parent.iterdir()} == {"embedded"}
    assert {path.name: path.stat().st_size for path in directory.iterdir()} == {
        path.name: path.stat().st_size for path in DIRECTORY.iterdir()
    }


def test_another_card_or_tokenizer_is_not_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("kvsift.models.embedded.files", lambda package: tmp_path / package)
    source = tmp_path / "kvsift" / "embedded"
    source.mkdir(parents=True)
    save_file({"odd": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / WEIGHTS)
    pack(tmp_path / WEIGHTS, source / "weights.npz")
    for text in ("older", "newer"):
        (source / "README.md").write_text(text)
        assert (embedded_model.__wrapped__() / "README.md").read_text() == text


def test_other_weights_of_the_same_size_are_not_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("kvsift.models.embedded.files", lambda package: tmp_path / package)
    source = tmp_path / "kvsift" / "embedded"
    source.mkdir(parents=True)
    sizes = set()
    for value in (0.5, 2.0):
        save_file({"odd": torch.full((64,), value, dtype=torch.bfloat16)}, tmp_path / WEIGHTS)
        pack(tmp_path / WEIGHTS, source / "weights.npz")
        sizes.add((source / "weights.npz").stat().st_size)
        assert (embedded_model.__wrapped__() / WEIGHTS).read_bytes() == (tmp_path / WEIGHTS).read_bytes()
    assert len(sizes) == 1


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with refused("unwritable_file: Not a directory"):
        embedded_model.__wrapped__()
