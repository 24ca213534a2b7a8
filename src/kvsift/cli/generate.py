"""kvsift generate: continue a text as it stands."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvsift.cli import files
from kvsift.cli import options as o
from kvsift.cli.comparison import Column, Reading, cut_mark, print_guard
from kvsift.cli.numbers_table import print_numbers
from kvsift.cli.printing import ProgressBar, plain
from kvsift.collector import collector_paused
from kvsift.errors import Conflict


@o.expand
def generate(
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue; - is stdin.")] = None,
    prompt_file: Annotated[
        str | None, typer.Option("--prompt-file", help="File with the text to continue; - is stdin.")
    ] = None,
    model: o.ModelOption = None,
    plan: o.PlanOption = "sketch:budget=1024",
    max_new_tokens: o.NewTokensOption = 128,
    stop: o.StopOption = None,
    schema: Annotated[
        Path | None, typer.Option("--schema", help="File with a JSON schema; the text is JSON that is valid under it.")
    ] = None,
    *,
    sampling: o.SamplingOptions,
    engine: o.EngineOptions,
    threads: o.ThreadsOption = None,
    strict: o.StrictOption = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "--output", help="Write the text, or what --json prints, to this file."),
    ] = None,
    printed: o.PrintOptions,
) -> None:
    """Continue a text, exactly as given: no template, no instructions added.

    In the table of numbers, TTFT is the time to the first token, TPOT the mean time of a token after it, density the
    share of the context that was read (visible tokens), and attention mass recovered the share of exact attention that
    was on it. docs/concepts.md explains all words.
    """
    if (prompt is None) == (prompt_file is None):
        raise Conflict("give the text to continue with either --prompt or --prompt-file.")
    spec = files.read_plan(plan)
    files.require_writable(out, "--out", [prompt_file])
    if prompt == "-":
        prompt, prompt_file = None, "-"
    text = files.read_texts([prompt_file], "prompt") if prompt_file is not None else str(prompt)
    definition = None if schema is None else files.read_text(schema, "schema")
    o.use_threads(threads)
    with ProgressBar(printed.quiet) as progress:
        from kvsift.plan.syntax import parse_unless_auto

        parsed, chosen = parse_unless_auto(spec), sampling.sampling()  # before transformers is imported
        with collector_paused():
            from kvsift.api.llm import LLM
            from kvsift.tokenization.grammar import Grammar

        progress.clear()  # a download draws bars of its own
        llm = LLM(model, parsed, **engine.keywords(sampling.exact))

        def show(piece: str) -> None:
            progress.clear()
            print(plain(piece) if to_terminal() else piece, end="", flush=True)

        progress.loading("loading the model")
        answer = llm.generate(
            text,
            max_new_tokens=max_new_tokens,
            sampling=chosen,
            stop=stop,
            grammar=None if definition is None else Grammar("json_schema", definition),
            exact=sampling.exact,
            skip_special_tokens=sampling.skip_special_tokens,
            progress=progress.reading,
            on_text=None if printed.as_json or out is not None else show,
        )
    column = Column(llm.plan, [answer], Reading(density=answer.stats["phases"]["prefill"]["density"]))
    content = answer.text
    if printed.as_json:
        fields = {
            "text": content,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "exact": answer.exact,
        }
        content = json.dumps({**column.summary(), **fields}, indent=2) + "\n"
    if out is not None:
        files.write_whole(out, content)
    else:
        print(content if printed.as_json else "", end="" if printed.as_json else "\n")
    if not printed.as_json and (mark := cut_mark(answer).strip()):
        print(mark, file=sys.stderr)
    if not printed.as_json and not printed.quiet:
        print_guard([column], to_stderr=True)
        print_numbers([column.summary()], printed.verbose, to_stderr=True)
    if model is None and not printed.quiet:
        print(f"kvsift: WARNING: {o.EMBEDDED_NOTE}", file=sys.stderr)
    column.check_skipped(strict)


def to_terminal() -> bool:
    """Whether stdout is a terminal; a file or another program gets the text unescaped."""
    return sys.stdout.isatty()
