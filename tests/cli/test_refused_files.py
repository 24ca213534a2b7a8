"""Context, prompt and model files that cannot be used, found before any weight is loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
from cli.watched import Refused, Run
from engine.tiny_directory import text_of
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from kvsift.cli.files import write_whole
from kvsift.engine.model_runner import PARTS

CONTEXTS: list[tuple[bytes, str]] = [
    (b"", "is empty."),
    (1000 * b"\n", "has 1,000 characters, all of them white space."),
    (b" \n\t\r\n ", "has 6 characters, all of them white space."),
    (b"\xef\xbb\xbf", "is empty."),  # a byte-order mark alone
    (bytes(range(256)), "is not UTF-8 text (byte 128 is 0x80). Convert it to plain text first, for instance with"),
    (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "is not UTF-8 text (byte 10 is 0xe2)"),
    ("naïve".encode("latin-1"), "is not UTF-8 text (byte 2 is 0xef)"),
    ("some text".encode("utf-16"), "is not UTF-8 text (byte 0 is 0xff)"),
    (b"MZ\0\0text", "holds zero bytes: it is binary, not text."),
]
COMMANDS = {"context": ("ask", "--question", "Why?", "--context"), "prompt": ("generate", "--prompt-file")}


MISSING = ["ask --question Why? --context", "ask --question Why? --raw --context", "chat --context",
           "ask --context manual.txt --questions-file", "generate --prompt-file",
           "calibrate --out axes.safetensors --text"]  # fmt: skip


@pytest.mark.parametrize("command", MISSING)
def test_a_missing_file_is_reported_at_once_and_not_after_torch_is_loaded(command: str, tmp_path: Path) -> None:
    (tmp_path / "manual.txt").write_text("A text.")
    without_torch = "import sys; sys.modules['torch'] = None; from kvsift.cli.main import main; main()"
    line = [sys.executable, "-c", without_torch, *command.split(), "nowhere.txt"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("nowhere.txt does not exist.\n")


def test_what_is_no_file_is_written_into_and_a_link_followed(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    os.mkfifo(pipe)
    read = list[bytes]()
    reader = Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_whole(pipe, "through")
    reader.join(timeout=30)
    assert read == [b"through"]
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "target"]


Damage = Callable[[Path], object]
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"


def without(name: str) -> Damage:
    return lambda directory: (directory / name).unlink()


def containing(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / name).write_bytes(data)


def cut(directory: Path) -> None:
    data = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(data[: len(data) // 2])


def indexed(*names: str) -> Damage:
    """An index that spreads weights over these files."""
    index = {"weight_map": {f"tensor {number}": name for number, name in enumerate(names)}}
    return containing("model.safetensors.index.json", json.dumps(index))


MODELS: dict[str, tuple[Damage, str]] = {
    "no config": (without(CONFIG), "holds no config.json, so it is not a Hugging Face model directory."),
    "no weights": (without(WEIGHTS), "holds no weights (*.safetensors). Is the download complete?"),
    "no tokenizer": (without(TOKENIZER), "holds no tokenizer (one of tokenizer.json, tokenizer.model,"),
    "a missing shard": (indexed("a.safetensors", WEIGHTS), "lacks 1 of 2 weight files: a.safetensors. Is the download"),
    "many missing shards": (indexed(*"abcde"), "lacks 5 of 5 weight files: a, b, c .... Is the download complete?"),
    "a broken index": (containing("model.safetensors.index.json", "{"), "model.safetensors.index.json cannot be read"),
    "an index of nothing": (containing("model.safetensors.index.json", "[]"), "index.json cannot be read"),
    "an empty index": (containing("model.safetensors.index.json", "{}"), "it has no 'weight_map'"),
    "a config that is not JSON": (containing(CONFIG, "{"), "config.json cannot be used: "),
    "a config that is a list": (containing(CONFIG, "[]"), "config.json cannot be used: "),
    "a config of nothing": (containing(CONFIG, "{}"), "Should have a `model_type` key in its config.json"),
    "an unknown architecture": (containing(CONFIG, '{"model_type": "llamma"}'), "has model type `llamma`"),
    "a size that is text": (containing(CONFIG, '{"model_type": "llama", "hidden_size": "wide"}'), "hidden_size"),
    "code of its own": (
        containing(CONFIG, '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}'),
        "brings its own modeling code (auto_map in config.json), which kvsift does not run.",
    ),
    "a tokenizer that is not JSON": (containing(TOKENIZER, "{"), "the tokenizer in"),
    "a tokenizer of nothing": (containing(TOKENIZER, "{}"), "the tokenizer in"),
    "half the weights": (cut, "model.safetensors is not a complete safetensors file"),
    "an empty weight file": (containing(WEIGHTS, b""), "model.safetensors is not a complete safetensors file"),
    "a pointer to the weights": (
        containing(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "model.safetensors is not a complete safetensors file",
    ),
}


def change_weights(directory: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A model directory to damage."""
    return shutil.copytree(model, tmp_path / "model")


@pytest.mark.parametrize("what", COMMANDS)
@pytest.mark.parametrize(("content", "says"), CONTEXTS)
def test_a_file_that_is_no_text_is_refused(
    refused: Refused, model: Path, tmp_path: Path, what: str, content: bytes, says: str
) -> None:
    path = tmp_path / "given.txt"
    path.write_bytes(content)
    assert refused(*COMMANDS[what], path, "--model", model).startswith(f"the {what} file {path} {says}")


@pytest.mark.parametrize("what", COMMANDS)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no.txt", "the {what} file no.txt does not exist."),
        (".", "the {what} . is a folder. Name the text files in it: --context and --text may be given several times, "
              "with a file each."),
    ],
)  # fmt: skip
def test_what_is_no_file_is_refused(refused: Refused, model: Path, what: str, name: str, says: str) -> None:
    assert refused(*COMMANDS[what], name, "--model", model) == says.format(what=what)


@pytest.mark.parametrize("what", COMMANDS)
def test_a_file_that_cannot_be_read_is_refused(
    refused: Refused, model: Path, text: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_bytes(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("kvsift.cli.files.Path.read_bytes", read_bytes)
    assert refused(*COMMANDS[what], text, "--model", model) == (
        f"the {what} file {text} cannot be read: Permission denied."
    )


@pytest.mark.parametrize("what", COMMANDS)
def test_a_text_in_place_of_its_files_name_is_refused(refused: Refused, model: Path, what: str) -> None:
    said = refused(*COMMANDS[what], "the text itself " * 400, "--model", model)
    assert said.startswith(f"the {what} file the text itself")
    assert said.endswith("... cannot be read: File name too long.")
    assert len(said) < 200


def test_a_byte_order_mark_is_not_part_of_the_text(run: Run, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "marked.txt"
    path.write_bytes(b"\xef\xbb\xbfOnce upon a time")
    command = ("generate", "--model", model, "--max-new-tokens", 2, "--plan", "dense", "--json")
    assert run(*command, "--prompt-file", path).document["prompt_tokens"] == 1 + len("Once upon a time")


@pytest.mark.parametrize("damage", MODELS)
def test_a_damaged_model_directory_is_refused(refused: Refused, copy: Path, text: Path, damage: str) -> None:
    harm, says = MODELS[damage]
    harm(copy)
    said = refused("ask", "--model", copy, "--context", text, "--question", "Why?")
    assert says in said
    assert str(copy) in said
    assert len(said) < 600


@pytest.mark.parametrize("name", ["nowhere", WEIGHTS])
def test_a_model_that_is_no_directory_is_refused(refused: Refused, model: Path, text: Path, name: str) -> None:
    given = model / name if name == WEIGHTS else name
    said = refused("ask", "--model", given, "--context", text, "--question", "Why?")
    assert said.startswith(f"{given} is not a directory. Give a Hugging Face model directory")
    assert "the name of a model on huggingface.co such as Qwen/Qwen3-4B, or nothing to use the embedded model" in said


def test_a_model_that_cannot_be_downloaded_is_refused(
    refused: Refused, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    said = refused("ask", "--model", "some-lab/Tiny-1B", "--context", text, "--question", "Why?")
    assert said.startswith("there is no directory some-lab/Tiny-1B here. As a model of huggingface.co: ")


def without_a_weight(tensors: dict) -> None:
    del tensors["model.layers.1.self_attn.q_proj.weight"]


def of_another_shape(tensors: dict) -> None:
    for layer in (0, 2):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        tensors[name] = tensors[name][:8].clone()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_a_weight, "lack what config.json calls for: model.layers.1.self_attn.q_proj.weight."),
        (
            of_another_shape,
            "are not of the shape that config.json calls for: model.layers.0.self_attn.q_proj.weight and 1 more. The "
            "first is [8, 32] and should be [64, 32].",
        ),
    ],
)
def test_weights_that_are_not_all_there_are_never_made_up(
    run: Run, copy: Path, text: Path, change: Callable[[dict], object], says: str
) -> None:
    change_weights(copy, change)
    outcome = run("ask", "--model", copy, "--context", text, "--question", "Why?", "--json")
    assert (outcome.code, outcome.out, outcome.err) == (2, "", f"kvsift: the weights in {copy} {says}\n")


def test_weights_that_the_model_does_not_use_are_mentioned(
    run: Run, copy: Path, text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_weights(copy, lambda tensors: tensors.update(extra=tensors["model.norm.weight"].clone()))
    command = ("ask", "--model", copy, "--context", text, "--question", "Why?", "--json", "--max-new-tokens", 1)
    assert run(*command).document["answers"]
    assert caplog.messages == [f"{copy} holds weights that the model does not use: extra"]


def test_weights_left_over_beside_the_ones_in_use_do_not_count(copy: Path, model: Path) -> None:
    from kvsift.models.hf.model_directory import ModelDirectory

    shutil.copy(copy / WEIGHTS, copy / "consolidated.safetensors")
    assert ModelDirectory.check(copy).num_weight_bytes == ModelDirectory.check(model).num_weight_bytes


@pytest.mark.parametrize("command", COMMANDS)
def test_a_text_longer_than_the_model_has_positions_is_refused(
    refused: Refused, model: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "long.txt").write_text(text_of(6000))
    said = refused(*COMMANDS[command], "long.txt", "--model", model, "--max-new-tokens", 10)
    prompt_tokens = 6001 + (len("\n\nQuestion: Why?\nAnswer:") if command == "context" else 0)
    assert said == (
        f"This model's maximum context length is 4096 tokens. The prompt has {prompt_tokens:,} tokens and up to 10 "
        f"will be generated. To go on: shorten the context by {prompt_tokens + 10 - 4096:,} tokens ({PARTS}), or use a "
        "model made for longer contexts."
    )


@pytest.mark.parametrize("command", ["context", "prompt", "chat"])
def test_a_large_log_is_refused_by_its_size_and_not_after_seconds_of_tokenizing(
    refused: Refused, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "large.log").write_text(2500 * text_of(400))
    tokenized = 0
    encode = PreTrainedTokenizerBase.__call__

    def counting(self: PreTrainedTokenizerBase, text: str, **options: object) -> object:
        nonlocal tokenized
        tokenized += len(text)
        return encode(self, text, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", counting)
    arguments = ("chat", model, "--context") if command == "chat" else (*COMMANDS[command], "large.log", "--model")
    said = refused(*arguments, "large.log" if command == "chat" else model)
    assert said == (
        "This model's maximum context length is 4096 tokens. The text has 1,000,000 characters, about 1,000,000 "
        f"tokens. Give a part of it ({PARTS}), or use a model made for longer contexts."
    )
    assert tokenized <= 8 * 4096


def test_no_more_advice_is_given_than_helps(refused: Refused, model: Path, text: Path) -> None:
    said = refused(*COMMANDS["prompt"], text, "--model", model, "--max-new-tokens", 10**8)
    assert "shorten" not in said
    assert " To go on: generate " in said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_does_not_fit_in_memory_is_refused(
    refused: Refused, model: Path, text: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsift.engine.memory.available_bytes", lambda device: 100 << 20)
    said = refused(*COMMANDS[command], text, "--model", model)
    assert said.startswith("this run needs about 0.5 GiB on cpu (")
    assert said.endswith(
        "0.1 GiB is free. Shorten the context, take a smaller model, use --dtype bfloat16, or "
        "keep KV in 8 bits with --kv-dtype int8."
    )


@pytest.mark.parametrize("given", [[], ["--prompt", "Once", "--prompt-file", "x.txt"]])
def test_the_text_to_continue_is_given_once(refused: Refused, model: Path, given: list[str]) -> None:
    assert refused("generate", "--model", model, *given) == (
        "give the text to continue with either --prompt or --prompt-file."
    )


def test_an_empty_prompt_is_refused(refused: Refused, model: Path) -> None:
    assert refused("generate", "--model", model, "--prompt", "") == "the prompt is empty."


@pytest.mark.parametrize("option", ["--save", "--out"])
@pytest.mark.parametrize("name", ["--context", "--questions-file", "--prompt-template"])
def test_what_is_read_is_never_replaced(
    refused: Refused, model: Path, text: Path, tmp_path: Path, option: str, name: str
) -> None:
    questions, template = tmp_path / "questions.jsonl", tmp_path / "template.txt"
    questions.write_text('"Why?"')
    template.write_text("{context} {question}")
    files = {"--context": text, "--questions-file": questions, "--prompt-template": template}
    (tmp_path / "link").symlink_to(files[name])
    before = files[name].read_bytes()
    given = [part for each in files.items() for part in each]
    said = refused("ask", "--model", model, *given, option, tmp_path / "link")
    assert said == f"{option} {tmp_path / 'link'} would replace a file that this command reads. Give it another name."
    assert files[name].read_bytes() == before


def test_a_document_is_saved_over_no_other_file(refused: Refused, model: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    command = ("ask", "--model", model, "--context", text, "--question", "Why?", "--save", tmp_path / "mine.txt")
    assert "a file that is not a saved document is there" in refused(*command)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_standard_input_is_read_for_one_thing(refused: Refused, model: Path) -> None:
    said = refused("ask", "--model", model, "--context", "-", "--questions-file", "-")
    assert said.startswith("standard input (-) cannot be both the context and the questions.")


def test_one_file_for_the_answers_and_the_document_is_refused(refused: Refused, model: Path, text: Path) -> None:
    command = ("ask", "--model", model, "--context", text, "--question", "Why?", "--out", "x", "--save", "./x")
    assert refused(*command) == "--out and --save are both x, and one would replace the other. Name two files."
