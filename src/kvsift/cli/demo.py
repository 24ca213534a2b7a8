"""kvsift demo: questions about a generated document, answered by the embedded model."""

from pathlib import Path
from typing import Annotated

import typer

from kvsift.cli import files
from kvsift.cli import options as o
from kvsift.cli.answers import Output, answer_all
from kvsift.cli.printing import ProgressBar
from kvsift.errors import UnwritableFile

# (fact, depth in the document, question)
FACTS = (
    ("The access code of the north warehouse is 48213.", 0.07, "What is the access code of the north warehouse?"),
    ("The captain of the ship Aurora is Elena Voss.", 0.24, "Who is the captain of the ship Aurora?"),
    ("The password for the archive is velvet canyon.", 0.41, "What is the password for the archive?"),
    ("The bridge over the river Tarn was built in 1874.", 0.58, "When was the bridge over the river Tarn built?"),
    ("The price of the silver compass is 340 crowns.", 0.76, "What is the price of the silver compass?"),
    ("The serial number of the blue turbine is 905164.", 0.93, "What is the serial number of the blue turbine?"),
)
# not the default plan: on a CPU, decode steps of Quest take less time
PLAN = "quest:budget=1024:dense_layers=none"


def demo(
    tokens: Annotated[int, typer.Option("--tokens", min=1024, max=120_000, help="Length of the document.")] = 32_768,
    plan: o.PlanOption = PLAN,
    document: Annotated[
        Path | None, typer.Option("--document", "--out", "--output", help="Keep the document in this file.")
    ] = None,
    device: o.DeviceOption = "auto",
    quiet: o.QuietOption = False,
    verbose: o.VerboseOption = False,
    threads: o.ThreadsOption = None,
) -> None:
    """Hide facts in a long English document and ask for them, dense and sparse side by side."""
    files.require_writable(document, "--document")
    spec = files.read_plan(plan)
    with ProgressBar(quiet, "making a document"):
        text = make_document(tokens)
    if document is not None:
        if document.exists() and document.read_bytes() != text.encode():
            raise UnwritableFile(f"--document {document}: another file is there. Give another name, or remove it.")
        files.write_whole(document, text)
    if not quiet:
        print(
            f"A document of about {tokens:,} tokens, from the language reference and library documentation of Python, "
            "with these sentences hidden in it:"
        )
        for fact, depth, _ in FACTS:
            print(f"  {100 * depth:3.0f} % deep: {fact}")
        print(flush=True)
    o.use_threads(threads)
    answer_all(
        text,
        [{"question": question} for _, _, question in FACTS],
        [spec, "dense"],
        Output(printed=o.PrintOptions(quiet, verbose)),
        model={"device": device},
    )


def make_document(tokens: int) -> str:
    """Return English prose of at least this many tokens with the facts hidden in it."""
    from kvsift.models.hf.model_directory import ModelDirectory
    from kvsift.texts.prose import document

    tokenizer = ModelDirectory.check(None).tokenizer()
    facts, depths = [fact for fact, _, _ in FACTS], [depth for _, depth, _ in FACTS]
    return document(facts, depths, tokens, lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]))
