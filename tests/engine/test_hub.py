"""Models by their name on huggingface.co, without a network: what is downloaded, and what is said when it cannot be."""

import shutil
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from models.gguf_files import write_gguf
from refusals import refused

from kvsift import LLM
from kvsift.models.hf.model_directory import HUB_FILES, NOT_HUB_FILES

DOWNLOAD = "kvsift.models.hf.model_directory.snapshot_download"


@pytest.fixture
def snapshot(llama: Path, tmp_path: Path) -> Path:
    """A model where the Hub's cache keeps it."""
    return shutil.copytree(llama, tmp_path / "models--some-lab--Tiny-1B" / "snapshots" / "0a1b2c")


def test_a_name_is_downloaded_into_the_cache_and_kept_as_the_name(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(DOWNLOAD, lambda name, **options: asked.append((name, options)) or str(snapshot))
    llm = LLM("some-lab/Tiny-1B", "dense")
    assert asked == [("some-lab/Tiny-1B", {"allow_patterns": HUB_FILES, "ignore_patterns": NOT_HUB_FILES})]
    assert (llm.directory.path, llm.directory.name) == (snapshot, "some-lab/Tiny-1B")
    assert llm.generate("Once", max_new_tokens=2).token_ids


def test_only_what_a_model_needs_is_downloaded() -> None:
    def wanted(file: str) -> bool:
        kept = any(fnmatch(file, pattern) for pattern in HUB_FILES)
        return kept and not any(fnmatch(file, pattern) for pattern in NOT_HUB_FILES)

    needed = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json",
              "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "tekken.json")  # fmt: skip
    others = ("pytorch_model.bin", "model.gguf", "onnx/config.json", "original/consolidated.00.pth", "README.md",
              "consolidated.safetensors", "modeling_custom.py", "figure.png")  # fmt: skip
    assert all(map(wanted, needed))
    assert not any(map(wanted, others))


def test_a_local_directory_is_preferred_to_a_name(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shutil.copytree(llama, tmp_path / "some-lab" / "Tiny-1B").parents[1])
    monkeypatch.setattr(DOWNLOAD, lambda *args, **options: pytest.fail("downloaded"))
    assert LLM("some-lab/Tiny-1B", "dense").directory.name == "Tiny-1B"


RESPONSE: Any = SimpleNamespace(headers={}, request=None, status_code=404)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (lambda: GatedRepoError("403", response=RESPONSE), "its licence has to be accepted at"),
        (lambda: RepositoryNotFoundError("404", response=RESPONSE), "has no such model, or it is private; log in"),
        (lambda: LocalEntryNotFoundError("no"), "not completely in the cache, and huggingface.co cannot"),
        (lambda: OSError("No space left on device"), "it cannot be downloaded: No space left on device."),
    ],
)
def test_why_a_model_cannot_be_downloaded_is_said(monkeypatch: pytest.MonkeyPatch, error: Any, says: str) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error()

    monkeypatch.setattr(DOWNLOAD, fail)
    with refused("missing_file: some-lab/Tiny-1B") as refusal:
        LLM("some-lab/Tiny-1B")
    assert says in str(refusal.value)


def test_offline_a_model_that_is_not_cached_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with refused("missing_file") as refusal:
        LLM("some-lab/Tiny-1B")
    assert "unset HF_HUB_OFFLINE" in str(refusal.value)
    assert str(refusal.value).count("\n") == 0


PATHS = ["gpt2", "./some-lab/Tiny-1B", "/some-lab/Tiny-1B", "a/b/c", "some-lab/", "~/model"]
GGUF_PATHS = ["model.gguf", "some-lab/model.gguf", "/some-lab/model.gguf"]


@pytest.mark.parametrize("given", [*PATHS, *GGUF_PATHS])
def test_what_can_only_be_a_path_is_not_looked_up(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DOWNLOAD, lambda *args, **options: pytest.fail("downloaded"))
    with refused(f"missing_file: {given if given in GGUF_PATHS else 'such as Qwen/Qwen3-4B'}"):
        LLM(given)


def test_a_gguf_file_of_a_model_is_downloaded_with_its_other_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models--some-lab--Tiny-GGUF" / "snapshots" / "0a1b2c"
    (folder / "Q8_0").mkdir(parents=True)
    write_gguf(folder / "Q8_0" / "tiny.gguf", split=16)
    names, asked = sorted(path.name for path in (folder / "Q8_0").iterdir()), []
    monkeypatch.setattr(DOWNLOAD, lambda name, **options: asked.append((name, options)) or str(folder))
    llm = LLM(f"some-lab/Tiny-GGUF:Q8_0/{names[0]}", "dense", device="cpu")
    [(repository, options)] = asked
    assert repository == "some-lab/Tiny-GGUF"
    assert all(fnmatch(f"Q8_0/{name}", options["allow_patterns"][0]) for name in names)
    assert not fnmatch("Q4_0/tiny.gguf", options["allow_patterns"][0])
    assert llm.directory.name == "tiny"
    assert llm.generate("Once", max_new_tokens=2).token_ids
    with refused("missing_file: some-lab/Tiny-GGUF"):
        LLM("some-lab/Tiny-GGUF:Q9.gguf")
