"""The commands that the laboratory adds to ``kvsift``: one command, one file. They import torch when they run."""

import typer
from typer.core import TyperCommand

from kvsift_lab.cli.bench import bench
from kvsift_lab.cli.eval import evaluate
from kvsift_lab.cli.explain import explain
from kvsift_lab.cli.report import report


class Resumable(TyperCommand):
    after_interrupt = "The samples so far are safe; give the same command again to go on."


app = typer.Typer()
app.command("eval", cls=Resumable)(evaluate)
app.command()(explain)
app.command()(report)
app.add_typer(bench, name="bench")
