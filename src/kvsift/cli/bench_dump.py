"""kvsift bench dump: queries and keys of a model over a document, for kvsift bench index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsift.cli import options as o
from kvsift.cli.bench import bench, lengths
from kvsift.cli.escaping import plain
from kvsift.cli.progress import prefill_progress
from kvsift.errors import InputError

if TYPE_CHECKING:
    from kvsift.engine.llm import LLM

DEFAULT_LENGTH = "32K"
SPARE_TOKENS = 16  # a text that is cut, decoded and encoded again may lose a few tokens

Asked = tuple[list[int], Callable[[str], list[int]], list[str]]  # the document, whole prompts, questions


@bench.command("dump")
def bench_dump(
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
    samples: Annotated[int, typer.Option("--samples", min=2, help="Prompt queries kept per head, at most.")] = 8192,
    max_new_tokens: o.NewTokensOption = 32,
    model: o.ModelOption = None,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
    chunk_size: o.ChunkOption = None,
) -> None:
    """Write queries, keys and values of a model over one document: what kvsift bench index --data P searches."""
    o.require_writable(output, "--out")
    if context is None and question:
        raise InputError("--question asks about a text; give it with --context, or leave it out.")
    if context is not None and not question:
        raise InputError("--context needs at least one --question: its tokens are what an index is searched for.")
    wanted = None if layers == "all" else layer_numbers(layers)
    given = None if length is None else lengths(length, "--length")
    if given is not None and len(given) != 1:
        raise InputError(f"--length {length}: give one number of tokens, for instance 32K.")
    text = None if context is None else o.read_text(context, "context")
    from safetensors import SafetensorError

    from kvsift.benchmarks.qk_dump import check_layers, dump
    from kvsift.engine.llm import LLM

    llm = LLM(model, "dense", device=device, dtype=dtype, chunk_size=chunk_size, path="composed", probe_every=0)
    check_layers(llm, wanted or ())
    if text is None:
        num_tokens = (given or lengths(DEFAULT_LENGTH, "--length"))[0]
        ids, encode, asked = _generated(llm, task, num_tokens, seed, questions)
        source = f"{task}, seed {seed}"
    else:
        ids, encode, asked = _read(llm, text, question or [], given[0] if given else None)
        source = str(context)
    with prefill_progress("reading") as progress, o.writing(output, SafetensorError):
        about = dump(
            llm, ids, encode, asked, output,
            source=source, layers=wanted, samples=samples, max_new_tokens=max_new_tokens, progress=progress,
        )  # fmt: skip
    print(plain(_summary(about, output)))


def layer_numbers(text: str) -> tuple[int, ...]:
    """Numbers from "0,3".

    Raises:
        InputError: for anything else.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise InputError(f"--layers {text}: give all, or numbers from 0 on, for instance 0,3.")
    return tuple(sorted({int(word) for word in words}))


def _generated(llm: LLM, task: str, length: int, seed: int, count: int) -> Asked:
    from kvsift.engine.prompt import question_text
    from kvsift.errors import unknown
    from kvsift.eval.tasks import TASKS, make_sample

    if task not in TASKS:
        raise unknown("task", task, TASKS)

    def encode(text: str) -> list[int]:
        ids: list[int] = llm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    bos = llm.tokenizer.bos_token_id
    try:
        sample = make_sample(task, length, seed, encode, count, [] if bos is None else [bos])
    except ValueError as error:
        raise InputError(f"a {task} document of {length} tokens cannot be made: {error}.") from error
    ids = list(sample.context_ids)
    return ids, lambda question: ids + encode(question_text(question)), [each.text for each in sample.questions]


def _read(llm: LLM, text: str, questions: list[str], length: int | None) -> Asked:
    if length is not None:
        ids = llm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) < length:
            raise InputError(
                f"--length {length}: the text has {len(ids)} tokens only. Leave it out, or give a longer one."
            )
        text = llm.tokenizer.decode(ids[: length + SPARE_TOKENS])
    document = llm.read(text)
    prompts = {each: document.check(each, 1) for each in questions}
    whole = document.num_tokens
    head = prompts[questions[0]][: min(length or whole, whole)]
    return head, lambda question: head + prompts[question][whole:], questions


def _summary(about: dict[str, Any], output: Path) -> str:
    layers = ", ".join(str(each["layer"]) for each in about["layers"])
    lines = [
        f"{output}: {about['length']:,} tokens of {about['source']} through {about['model']}, layers {layers}, "
        f"{output.stat().st_size / 2**20:.0f} MiB"
    ]
    if about["interleaved"] is None:
        lines.append("the model's rotation is not known: sampled queries cannot be turned to other positions")
    lines += [f"  {q} {a}" for q, a in zip(about["questions"], about["answers"], strict=True)]
    return "\n".join(lines)
