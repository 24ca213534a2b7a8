"""kvsift explain: the passages attended for one token of an answer, and those that other methods would select."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsift.cli import files
from kvsift.cli import options as o
from kvsift.cli.demo import FACTS, make_document
from kvsift.cli.printing import ProgressBar, cell, plain
from kvsift.errors import InvalidValue, MissingInput

if TYPE_CHECKING:
    from kvsift.api.llm import LLM
    from kvsift_lab.eval.explain.explanation import Explanation

PLAN = "quest:budget=256:dense_layers=none"
METHODS = "sketch,quest,streaming_llm,random"


@o.expand
def explain(
    context: Annotated[
        str | None,
        typer.Option("--context", help="Text file to ask about; - is stdin. By default, the demo's document."),
    ] = None,
    question: Annotated[str | None, typer.Option("--question", help="Question about the text.")] = None,
    token: Annotated[
        str, typer.Option("--token", help="Tokens of the answer, from 0: one, several as 0,2, a range as 0-3, or all.")
    ] = "0",
    methods: Annotated[
        str, typer.Option("--methods", help="Methods to compare at one budget, with their settings; or none.")
    ] = METHODS,
    budget: Annotated[
        int | None,
        typer.Option("--budget", min=1, help="Budget of the compared methods; else the plan's, or 256."),
    ] = None,
    context_tokens: Annotated[
        int | None,
        typer.Option("--context-tokens", min=64, help="Use only this many tokens of the text; the demo's: 4096."),
    ] = None,
    passage_tokens: Annotated[int, typer.Option("--passage-tokens", min=1, help="Tokens per passage.")] = 64,
    html: Annotated[
        Path | None, typer.Option("--html", "--out", "--output", help="Write a page with heat maps and all passages.")
    ] = None,
    model: o.ModelOption = None,
    plan: o.PlanOption = PLAN,
    max_new_tokens: o.NewTokensOption = 32,
    *,
    engine: o.DeviceOptions,
    threads: o.ThreadsOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Explain one token of an answer: the passages that each layer and head read for it, and what other methods would
    have read, next to exact attention."""
    files.require_writable(html, "--html", [context])
    if context is not None and question is None:
        raise MissingInput("--context needs a --question: it is the answer that is explained.")
    names = [] if methods == "none" else [name.strip() for name in methods.split(",")]
    if not all(names):
        raise InvalidValue(f"--methods {methods}: a name is missing; write for instance quest,loki, or none.")
    tokens = _tokens(token)
    text = None if context is None else files.read_texts([context], "context")
    spec = files.read_plan(plan)
    o.use_threads(threads)
    with ProgressBar() as progress:
        from kvsift.plan.syntax import is_auto, parse_plan

        probe_every = 16 if is_auto(spec) or parse_plan(spec).is_guarded else 0  # before transformers is imported
        from kvsift.api.llm import LLM
        from kvsift_lab.eval.explain import explain_tokens

        progress.clear()  # a download draws bars of its own
        llm = LLM(model, spec, path="composed", probe_every=probe_every, dense_below=0, **engine.keywords())
        text = make_document(context_tokens or 4096) if text is None else _shortened(llm, text, context_tokens)
        explanations = explain_tokens(
            llm, text, question or FACTS[2][2], methods=names, budget=budget, tokens=tokens,
            max_new_tokens=max_new_tokens, passage_tokens=passage_tokens, progress=progress.reading,
        )  # fmt: skip
    if model is None and context is not None:
        print(f"kvsift: WARNING: {o.EMBEDDED_NOTE}", file=sys.stderr)
    if as_json:
        documents = [explanation.as_dict() for explanation in explanations]
        print(json.dumps(documents[0] if token.strip().isdecimal() else documents, indent=1))
    else:
        for explanation in explanations:
            _print(explanation, with_heads=html is None)
    if html is None:
        return
    from kvsift_lab.eval.explain.page import page

    files.write_whole(html, page(*explanations))  # last: a page that cannot be written loses no output
    if not as_json:
        print(plain(f"heat maps and all passages: {html}"))


def _tokens(text: str) -> list[int] | None:
    """Return the chosen tokens; None for all."""
    if text.strip() == "all":
        return None
    tokens: list[int] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not (first.isdecimal() and (last.isdecimal() if dash else True) and int(first) <= int(last or first)):
            raise InvalidValue(f"--token {text}: write a token such as 2, several as 0,2, a range as 0-3, or all.")
        tokens += range(int(first), int(last or first) + 1)
    return tokens


def _shortened(llm: LLM, text: str, num_tokens: int | None) -> str:
    if num_tokens is None:
        return text
    ids = llm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    shortened: str = llm.tokenizer.decode(ids[:num_tokens])
    return shortened


def _print(explanation: Explanation, with_heads: bool) -> None:
    """Print an explanation; a page has the table of heads, which may have hundreds of rows."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvsift_lab.eval.explain.explanation import TOP

    console = Console()
    console.print(cell(f"{explanation.question}  ({explanation.model}, {explanation.plan})"))
    styles = ["bold reverse" if index == explanation.token else "" for index in range(len(explanation.tokens))]
    console.print(Text.assemble(*map(cell, explanation.tokens, styles)))
    console.print(_passages(explanation, explanation.most_read(TOP), "parts of the document most read", True))
    if explanation.choices:
        console.print(_choices(explanation))
    if not with_heads:
        return
    heads = Table("layer", "head", "passages it read, with their share of its attention", title="by layer and head")
    named: set[int] = set()
    for reading in explanation.readings:
        for head, mass in enumerate(reading.mass):
            most = explanation.most_read_by(reading, head)
            read = ", ".join(f"{explanation.name(index)} {mass[index]:.0%}" for index in most)
            visible = explanation.visible_to(reading, head)
            heads.add_row(str(reading.layer), str(head), f"{read}  ({visible} visible)")
            named.update(most)
    console.print(heads)
    text = [index for index in sorted(named) if explanation.passages[index].kind == "text"]
    console.print(_passages(explanation, text, "the passages that layers and heads read", False))


def _passages(explanation: Explanation, indices: Sequence[int], title: str, whole: bool) -> object:
    """Return a table of passages with their text, ``whole`` or its beginning."""
    from rich.table import Table

    shares, table = explanation.attention(), Table(title=title, show_lines=whole)
    for name in ("passage", "line", "tokens", "attention"):
        table.add_column(name)
    table.add_column("text", no_wrap=not whole, overflow="fold" if whole else "ellipsis")
    for index in indices:
        passage = explanation.passages[index]
        words = cell(" ".join(passage.text.split()))
        tokens = f"{passage.start}-{passage.stop - 1}"
        table.add_row(str(index), str(passage.line), tokens, f"{shares[index]:.1%}", words)
    return table


def _choices(explanation: Explanation) -> object:
    from rich.table import Table

    title = f"what methods would have read, with {explanation.choices[0].plan.partition(':')[2]}"
    table = Table("method", "visible tokens", "top-10 recall", "mass recovered", "oracle overlap", title=cell(title))
    for choice in explanation.choices:
        shares = (choice.recall, choice.recovery, choice.overlap)
        table.add_row(cell(choice.name), f"{choice.visible_tokens:,.0f}", *(f"{share:.1%}" for share in shares))
    return table
