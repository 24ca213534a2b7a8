"""Files that commands read and write: texts, plans, templates and questions, answers and results."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kvsift.errors import (
    Conflict,
    EmptyText,
    InvalidText,
    InvalidValue,
    MissingFile,
    MissingInput,
    UnreadableFile,
    UnwritableFile,
    WrongFile,
    unknown,
)

if TYPE_CHECKING:
    from kvsift.api.answer import Answer

RAW = "{context}\n\n{question}"  # the prompt template of --raw


def read_template(template: str | None, raw: bool) -> str | None:
    """Return a prompt template, from a file unless the option is a template itself.

    Raises:
        InputError: if the file cannot be read, or both options are given.
    """
    if raw and template is not None:
        raise Conflict("--raw and --prompt-template are two prompts; give one of them.")
    if raw or template is None:
        return RAW if raw else None
    is_text = "{context}" in template or "{question}" in template
    return template if is_text else read_text(Path(template), "prompt template")


def read_texts(names: Sequence[str], what: str) -> str:
    """Return the text of files in order, with a blank line between them; - is standard input.

    Raises:
        InputError: as ``read_text``.
    """
    if "-" in names and sys.stdin is None:
        raise MissingInput(f"standard input is closed, and the {what} was to be read from it.")
    texts = [_decoded(sys.stdin.buffer.read(), f"{what} on", "standard input") if name == "-" else
             read_text(Path(name), what) for name in names]  # fmt: skip
    return texts[0] if len(texts) == 1 else "\n\n".join(text.strip("\n") for text in texts)


def saved_document(names: Sequence[str]) -> Path | None:
    """Return the file of a saved document; None if the files are texts.

    Raises:
        InputError: if there are other files with it.
    """
    from kvsift.api.saved_header import is_saved_document

    saved = [path for path in map(Path, names) if is_saved_document(path)]
    if saved and len(names) > 1:
        raise WrongFile(f"--context {saved[0]} is a saved document, which other files cannot be joined with.")
    return saved[0] if saved else None


def read_text(path: Path, what: str) -> str:
    """Return the text of a file.

    Raises:
        InputError: if it is missing, a directory, not text, or without anything but white space.
    """
    try:
        if not path.exists():
            raise MissingFile(f"the {what} file {path} does not exist.")
        if path.is_dir():
            raise WrongFile(
                f"the {what} {path} is a folder. Name the text files in it: --context and --text may be given several "
                "times, with a file each."
            )
        if not path.is_file() and not path.is_fifo():  # a pipe: --context <(pdftotext manual.pdf -)
            raise WrongFile(f"the {what} {path} is not a file.")
        data = path.read_bytes()
    except OSError as error:  # no permission, or a text instead of a file's name
        raise UnreadableFile(f"the {what} file {_shortened(path)} cannot be read: {error.strerror}.") from None
    return _decoded(data, f"{what} file", str(path))


def _decoded(data: bytes, what: str, path: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidText(
            f"the {what} {path} is not UTF-8 text (byte {error.start} is {data[error.start]:#04x}). Convert it to "
            "plain text first, for instance with pdftotext or iconv."
        ) from None
    if "\0" in text:
        raise InvalidText(f"the {what} {path} holds zero bytes: it is binary, not text.")
    if not text:
        raise EmptyText(f"the {what} {path} is empty.")
    if not text.strip():
        raise EmptyText(f"the {what} {path} has {len(text):,} characters, all of them white space.")
    return text


def _shortened(path: Path) -> str:
    return name if len(name := str(path)) <= 80 else name[:80] + "..."


def require_writable(path: Path | None, option: str, read: Sequence[str | Path | None] = ()) -> None:
    """Refuse a path that cannot be written, before the work whose result it is for.

    Args:
        path: file to write to.
        option: the option that names it.
        read: what the command reads: files, standard input, or text that is no name of a file.

    Raises:
        InputError: if its directory is missing, it is a directory, writing is not allowed, or it is read.
    """
    if path is None:
        return
    if any(_is_same(path, name) for name in read if name is not None):
        raise UnwritableFile(f"{option} {path} would replace a file that this command reads. Give it another name.")
    if not path.parent.is_dir():
        raise UnwritableFile(f"{option} {path}: the directory {path.parent} does not exist.")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UnwritableFile(f"{option} {path}: no file can be written there.")


def _is_same(path: Path, name: str | Path) -> bool:
    try:
        return path.samefile(name)
    except (OSError, ValueError):  # one of them is no file
        return False


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file, or the one that a link leads to, atomically; into a device or a pipe, write.

    Raises:
        InputError: if that fails, for instance because the disk is full; the old file stays.
    """
    from kvsift.atomic_files import write_atomically

    data = content if isinstance(content, bytes) else content.encode(errors="replace")  # names may hold surrogates
    with writing(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            write_atomically(path.resolve(), data)


@contextmanager
def writing(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Turn an OSError, or one of ``errors``, of a block that writes a file into a message, and remove the partial file.

    Raises:
        InputError: if the block raised such an error.
    """
    from kvsift.atomic_files import reason

    caught: tuple[type[Exception], ...] = (OSError, *errors)
    try:
        yield
    except caught as error:
        path.with_name(path.name + ".partial").unlink(missing_ok=True)
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise UnwritableFile(
            f"{path} is not written: {why}. Make room or name another place, and give the command again."
        ) from None


def read_plan(text: str) -> str | dict[str, Any]:
    """Return a plan of the command line: its text, or the [plan] table of a TOML file."""
    if text.endswith(".json") and "=" not in text:  # else a plan names a file
        raise WrongFile(
            f"{text} is no plan. What kvsift tune has found is taken by --plan auto: from the user's cache, or as "
            "kvsift-plan.json in the model's directory."
        )
    if not text.endswith(".toml"):
        _check_names(text)
        return text
    import tomllib

    try:
        tables = tomllib.loads(read_text(Path(text), "plan"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise WrongFile(f"{text} is not TOML: {error}") from None
    if "plan" not in tables:
        raise MissingInput(f"{text} has no plan; it needs plan = 'quest:budget=1024' or a [plan] table.")
    plan: str | dict[str, Any] = tables["plan"]
    return plan


def _check_names(plan: str) -> None:
    """Refuse unknown methods before torch is imported, which takes seconds; everything else is checked after it."""
    from kvsift.methods import catalogue

    if plan.strip() == "auto":
        return
    for rule in plan.split(","):
        phase, equals, name = (part.strip() for part in rule.partition(":")[0].rpartition("="))
        named = phase in ("prefill", "decode", "both") if equals else "," not in plan
        if named and name and name != "auto" and name not in catalogue():
            raise unknown("method", name, catalogue())


def read_questions(questions: Sequence[str], file: str | None) -> list[dict[str, Any]]:
    """Return questions of the command line, then those of a file with one per line: a string, or an object with
    "question", whose other fields are kept.

    Raises:
        InputError: if there is none, or a line has another format.
    """
    items: list[dict[str, Any]] = [{"question": question} for question in questions]
    lines = [] if file is None else read_texts([file], "questions").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError):
            item = None
        item = {"question": item} if isinstance(item, str) else item
        if not isinstance(item, dict) or not isinstance(item.get("question"), str):
            raise InvalidValue(
                f'line {number} of {file} is not a question; write a JSON string, or an object such as {{"question": '
                '"Why?"}, on each line.'
            )
        items.append(item)
    if not items:
        raise MissingInput("there is nothing to ask; give --question, --questions-file, or both.")
    return items


@contextmanager
def lines_to(path: Path | None) -> Iterator[TextIO]:
    """Open the file that receives answers line by line; stdout if there is none."""
    if path is None:
        yield sys.stdout
        return
    file = path.open("w")
    try:
        yield file
    finally:
        with suppress(OSError):  # every line is flushed when it is written
            file.close()


def write_line(file: TextIO, item: dict[str, Any], answer: Answer) -> None:
    """Write and flush an answer as one line of JSON: the question's fields, then those of the answer.

    Raises:
        InputError: if that fails, for instance because the disk is full.
    """
    try:
        print(json.dumps({**item, "plan": answer.plan, **answer.as_dict()}), file=file, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UnwritableFile(f"the answer cannot be written: {error.strerror}. Those before it are safe.") from None
