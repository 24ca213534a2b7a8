"""Options that several commands share, and reading what they name."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsift.errors import InputError

ModelOption = Annotated[
    Path | None, typer.Option("--model", help="Hugging Face model directory; without it, the embedded model.")
]
PlanOption = Annotated[
    str,
    typer.Option("--plan", help="How to sift, e.g. quest:budget=1024, or a TOML file with a [plan] table."),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, bfloat16, float16 or float32.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
StrictOption = Annotated[bool, typer.Option("--strict", help="Fail if a sparse plan skipped nothing.")]
NewTokensOption = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Generate at most so many tokens.")]
ChunkOption = Annotated[
    int | None, typer.Option("--chunk-size", min=1, help="Prompt tokens per forward pass; 8192 on a GPU, else 2048.")
]
ProbeOption = Annotated[
    int, typer.Option("--probe-every", min=0, help="Compare every so many decode steps with exact attention; 0 never.")
]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopPOption = Annotated[float, typer.Option("--top-p", help="Draw from the likeliest tokens that reach this share.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the draw, when the temperature is above 0.")]
DenseBelowOption = Annotated[
    str,
    typer.Option("--dense-below", help="Shorter contexts are decoded in full; auto: on a GPU, where that is faster."),
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads on the processor; as many as torch uses by default.")
]

PlacementOption = Annotated[
    str,
    typer.Option(
        "--placement",
        help="Where KV lives: device; split: in host memory, attended there; offload: in host memory, attended on the "
        "device; host: with the model on the CPU. Knobs: offload:device_cache=8192:host_values=int8.",
    ),
]


def dense_below(text: str) -> int | str:
    """A number of tokens, or the word as given."""
    return int(text) if text.isdecimal() else text


def use_threads(threads: int | None) -> None:
    """Let torch, and all that follows it, use so many threads from now on; None changes nothing."""
    if threads is not None:
        from kvsift.threads import use

        use(threads)


def read_text(path: Path, what: str) -> str:
    """A text file.

    Raises:
        InputError: if it is missing, empty, a directory, or not text.
    """
    try:
        if not path.exists():
            raise InputError(f"the {what} file {path} does not exist.")
        if not path.is_file():
            raise InputError(f"the {what} {path} is not a file.")
        data = path.read_bytes()
    except OSError as error:  # no permission, or a text where its file's name belongs
        raise InputError(f"the {what} file {_shortened(path)} cannot be read: {error.strerror}.") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"the {what} file {path} is not UTF-8 text (byte {error.start} is {data[error.start]:#04x}). Convert it to "
            "plain text first, for instance with pdftotext or iconv."
        ) from None
    if "\0" in text:
        raise InputError(f"the {what} file {path} holds zero bytes: it is binary, not text.")
    if not text.strip():
        raise InputError(f"the {what} file {path} is empty.")
    return text


def _shortened(path: Path) -> str:
    return name if len(name := str(path)) <= 80 else name[:80] + "..."


def require_writable(path: Path | None, option: str) -> None:
    """Refuse a place where no file can be written, before the work that is to go there.

    Raises:
        InputError: if its directory is missing, it is a directory itself, or writing is not allowed.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: the directory {path.parent} does not exist.")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{option} {path}: no file can be written there.")


def write_whole(path: Path, text: str) -> None:
    """A file that is the old one or the new one, never half of either."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def read_plan(text: str) -> str | dict[str, Any]:
    """A plan as given on the command line: itself, or the [plan] table of a TOML file."""
    if not text.endswith(".toml"):
        return text
    try:
        tables = tomllib.loads(read_text(Path(text), "plan"))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{text} is not TOML: {error}") from None
    if "plan" not in tables:
        raise InputError(f"{text} holds no plan; it needs plan = 'quest:budget=1024' or a [plan] table.")
    plan: str | dict[str, Any] = tables["plan"]
    return plan
