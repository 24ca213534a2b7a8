"""kvsift demo: the main job on the embedded model, on a document made on the spot."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kvsift.cli import options as o
from kvsift.cli.ask import ask

# (what is hidden, how deep in the document, what is asked)
FACTS = (
    ("The access code of the north warehouse is 48213.", 0.07, "What is the access code of the north warehouse?"),
    ("The captain of the ship Aurora is Elena Voss.", 0.24, "Who is the captain of the ship Aurora?"),
    ("The password for the archive is velvet canyon.", 0.41, "What is the password for the archive?"),
    ("The bridge over the river Tarn was built in 1874.", 0.58, "When was the bridge over the river Tarn built?"),
    ("The price of the silver compass is 340 crowns.", 0.76, "What is the price of the silver compass?"),
    ("The serial number of the blue turbine is 905164.", 0.93, "What is the serial number of the blue turbine?"),
)
PLAN = "quest:budget=1024:dense_layers=none"


def demo(
    tokens: Annotated[int, typer.Option("--tokens", min=1024, max=120_000, help="Length of the document.")] = 32_768,
    plan: o.PlanOption = PLAN,
    document: Annotated[Path | None, typer.Option("--document", help="Keep the document in this file.")] = None,
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
) -> None:
    """Hide facts in a long English document and ask for them, dense and sifted side by side."""
    o.require_writable(document, "--document")
    with tempfile.TemporaryDirectory() as folder:
        path = document or Path(folder) / "document.txt"
        path.write_text(make_document(tokens), encoding="utf-8")
        print(
            f"A document of about {tokens:,} tokens, from the language reference and library documentation of Python,"
        )
        print("with these sentences hidden in it:")
        for fact, depth, _ in FACTS:
            print(f"  {100 * depth:3.0f} % deep: {fact}")
        print()
        ask(
            context=path,
            question=[question for _, _, question in FACTS],
            plan=plan,
            compare="dense",
            device=device,
            threads=threads,
        )


def make_document(tokens: int) -> str:
    """English prose of at least so many tokens with the facts hidden in it."""
    from kvsift.eval.text import document
    from kvsift.models.transformers_load import ModelDirectory

    tokenizer = ModelDirectory.check(None).tokenizer()
    facts, depths = [fact for fact, _, _ in FACTS], [depth for _, depth, _ in FACTS]
    return document(facts, depths, tokens, lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]))
