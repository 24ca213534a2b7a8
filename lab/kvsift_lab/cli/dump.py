"""kvsift bench dump: queries and keys of a model over a document, for kvsift bench index."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsift.cli import files
from kvsift.cli import options as o
from kvsift.cli.printing import ProgressBar, plain
from kvsift.errors import InvalidValue, MissingInput, TooShort, UnusedOption, unknown
from kvsift_lab.bench.recipe import token_counts

if TYPE_CHECKING:
    from kvsift.api.llm import LLM
    from kvsift_lab.bench.qk_dump import DumpInput

DEFAULT_LENGTH = 32 << 10
SPARE_TOKENS = 16  # a text that is cut, decoded and encoded again may lose a few tokens


def dump(
    output: Annotated[Path, typer.Option("--out", "--output", help="Write here, a safetensors file.")],
    context: Annotated[
        Path | None, typer.Option("--context", help="Text file to read; without it, a generated document.")
    ] = None,
    question: Annotated[
        list[str] | None, typer.Option("--question", help="About the text file; may be given more than once.")
    ] = None,
    task: Annotated[
        str, typer.Option("--task", help="Of the generated document: key_value, needle, ...")
    ] = "key_value",
    questions: Annotated[int, typer.Option("--questions", min=1, help="About the generated document.")] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Of the generated document.")] = 0,
    length: Annotated[
        str | None, typer.Option("--length", help="Tokens of the document; 32K, or the whole text file.")
    ] = None,
    layers: Annotated[str, typer.Option("--layers", help="all, or numbers such as 0,3.")] = "all",
    samples: Annotated[int, typer.Option("--samples", min=2, help="Prompt queries recorded per head, at most.")] = 8192,
    max_new_tokens: o.NewTokensOption = 32,
    model: o.ModelOption = None,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
    chunk_size: o.ChunkOption = None,
) -> None:
    """Write queries, keys and values of a model over one document: the data of kvsift bench index --data P."""
    files.require_writable(output, "--out", [context])
    tokens, numbers, text = _length(length), _layer_numbers(layers), _text(context, question)
    from kvsift.api.llm import LLM

    llm = LLM(model, "dense", device=device, dtype=dtype, chunk_size=chunk_size, path="composed", probe_every=0)
    if text is None:
        document = _generated(llm, task, tokens or DEFAULT_LENGTH, seed, questions)
    else:
        document = _read(llm, text, question or [], tokens, str(context))
    _write(llm, document, output, layers=numbers, samples=samples, max_new_tokens=max_new_tokens)


def _write(llm: LLM, document: DumpInput, output: Path, **limits: Any) -> None:
    from safetensors import SafetensorError

    from kvsift_lab.bench.qk_dump import dump_attention

    with ProgressBar(what="reading") as progress, files.writing(output, SafetensorError):
        about = dump_attention(llm, document, output, progress=progress.reading, **limits)
    layers = ", ".join(str(layer["layer"]) for layer in about["layers"])
    size = f"{output.stat().st_size / 2**20:.0f} MiB"
    source = f"{about['length']:,} tokens of {about['source']} through {about['model']}"
    lines = [f"{output}: {source}, layers {layers}, {size}"]
    if about["interleaved"] is None:
        lines.append("the model's rotation is unknown: sampled queries cannot be rotated to other positions")
    lines += [f"  {q} {a}" for q, a in zip(about["questions"], about["answers"], strict=True)]
    print(plain("\n".join(lines)))


def _text(context: Path | None, question: list[str] | None) -> str | None:
    if context is None:
        if question:
            raise UnusedOption("--question asks about a text; give it with --context, or leave it out.")
        return None
    if not question:
        raise MissingInput(
            "--context needs at least one --question: an index is searched for the queries of its tokens."
        )
    return files.read_text(context, "context")


def _length(text: str | None) -> int | None:
    if text is None:
        return None
    numbers = token_counts(text, "--length")
    if len(numbers) != 1:
        raise InvalidValue(f"--length {text}: give one number of tokens, for instance 32K.")
    return numbers[0]


def _layer_numbers(text: str) -> tuple[int, ...] | None:
    if text == "all":
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise InvalidValue(f"--layers {text}: give all, or numbers from 0 on, for instance 0,3.")
    return tuple(sorted({int(word) for word in words}))


def _generated(llm: LLM, task: str, length: int, seed: int, count: int) -> DumpInput:
    from kvsift.tokenization.prompt import question_text
    from kvsift_lab.bench.qk_dump import DumpInput
    from kvsift_lab.eval.tasks import TASKS, make_sample

    if task not in TASKS:
        raise unknown("task", task, TASKS)

    def encode(text: str) -> list[int]:
        return _encoded(llm, text)

    bos = llm.tokenizer.bos_token_id
    try:
        sample = make_sample(task, length, seed, encode, count, [] if bos is None else [bos])
    except ValueError as error:
        raise TooShort(f"a {task} document of {length} tokens cannot be made: {error}.") from error
    ids, questions = list(sample.context_ids), [question.text for question in sample.questions]
    return DumpInput(ids, lambda text: ids + encode(question_text(text)), questions, f"{task}, seed {seed}")


def _read(llm: LLM, text: str, questions: list[str], length: int | None, source: str) -> DumpInput:
    from kvsift_lab.bench.qk_dump import DumpInput

    if length is not None:
        ids = _encoded(llm, text)
        if len(ids) < length:
            raise TooShort(
                f"--length {length}: the text has only {len(ids)} tokens. Leave it out, or give a longer one."
            )
        text = llm.tokenizer.decode(ids[: length + SPARE_TOKENS])
    document = llm.read(text)
    prompts, total = {question: document.check(question, 1) for question in questions}, document.num_tokens
    head = prompts[questions[0]][: min(length or total, total)]
    return DumpInput(head, lambda question: head + prompts[question][total:], questions, source)


def _encoded(llm: LLM, text: str) -> list[int]:
    ids: list[int] = llm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
