"""kvsift ask: questions about a long document, and what each answer read."""

from pathlib import Path
from typing import Annotated

import typer

from kvsift.api.saved_header import check_replaceable
from kvsift.cli import files
from kvsift.cli import options as o
from kvsift.cli.answers import Output, answer_all
from kvsift.errors import Conflict, UnusedOption, unknown


@o.expand
def ask(
    context: Annotated[
        list[str],
        typer.Option(
            "--context",
            help="Text file to ask about; - is stdin. May be repeated: files are joined in order. Or a document of "
            "--save.",
        ),
    ],
    question: Annotated[list[str] | None, typer.Option("--question", help="Question; may be repeated.")] = None,
    questions_file: Annotated[
        str | None,
        typer.Option(
            "--questions-file",
            help='JSONL file with a string or {"question": ...} per line; - is stdin. Each answer is a line of JSON, '
            "written when it is complete, to --out or stdout, with the other fields of its question.",
        ),
    ] = None,
    model: o.ModelOption = None,
    plan: o.PlanOption = "sketch:budget=1024",
    compare: Annotated[
        list[str] | None, typer.Option("--compare", help="Answer under this plan too, e.g. dense; may be repeated.")
    ] = None,
    question_phase: Annotated[
        str, typer.Option("--question-phase", help="prefill, or decode: the question too is attended sparsely.")
    ] = "prefill",
    max_new_tokens: o.NewTokensOption = 64,
    stop: o.StopOption = None,
    system: o.SystemOption = None,
    prompt_template: Annotated[
        str | None,
        typer.Option(
            "--prompt-template",
            help="Text with {context} and {question}, or a file with it, instead of the model's chat template.",
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No template: the context, a blank line, the question.")] = False,
    *,
    sampling: o.SamplingOptions,
    engine: o.EngineOptions,
    threads: o.ThreadsOption = None,
    strict: o.StrictOption = False,
    out: Annotated[
        Path | None, typer.Option("--out", "--output", help="Write what --json prints, or the lines, to this file.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", help="Save the document in this file once it is read; --context opens it again."),
    ] = None,
    printed: o.PrintOptions,
) -> None:
    """Ask questions about a long document.

    The document is read once. Every question is answered from the same cache, under the plan and under each plan to
    compare with.

    In the table of numbers, TTFT is the time to the first token, TPOT the mean time of a token after it, density the
    share of the context that was read (visible tokens), and attention mass recovered the share of exact attention that
    was on it. docs/concepts.md explains all words.
    """
    if questions_file == "-" and "-" in context:
        raise Conflict("standard input (-) cannot be both the context and the questions. Give one of them as a file.")
    items = files.read_questions(question or [], questions_file)
    specs = [files.read_plan(spec) for spec in (plan, *(compare or ()))]
    if question_phase not in ("prefill", "decode"):
        raise unknown("phase", question_phase, ("prefill", "decode"))
    template = files.read_template(prompt_template, raw)
    read = [*context, questions_file, prompt_template]
    files.require_writable(out, "--out", read)
    files.require_writable(save, "--save", read)
    if out is not None and save is not None and out.resolve() == save.resolve():
        raise Conflict(f"--out and --save are both {out}, and one would replace the other. Name two files.")
    if save is not None:
        check_replaceable(save)
    saved = files.saved_document(context)
    if saved is not None and (template is not None or system is not None):
        raise UnusedOption(
            f"{saved} is saved with its prompt. Leave out --system, --prompt-template and --raw, or give the text."
        )
    o.use_threads(threads)
    answer_all(
        files.read_texts(context, "context") if saved is None else saved,
        items,
        specs,
        Output(out, questions_file is not None, printed),
        model={"model": model, **engine.keywords(sampling.exact)},
        prompt={"template": template, "system": system, "stop": stop},
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        question_phase="decode" if question_phase == "decode" else "prefill",
        strict=strict,
        note=None if model else o.EMBEDDED_NOTE,
        save=save,
    )
