"""The command line: one command, one file. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys

import typer

from kvsift import __version__
from kvsift.cli import (  # noqa: F401, each adds itself to bench
    bench_attention,
    bench_chart,
    bench_decode,
    bench_dump,
    bench_host,
    bench_index,
    bench_prefill,
    bench_split,
)
from kvsift.cli.ask import ask
from kvsift.cli.bench import bench
from kvsift.cli.calibrate import calibrate
from kvsift.cli.demo import demo
from kvsift.cli.doctor import doctor
from kvsift.cli.eval import evaluate
from kvsift.cli.explain import explain
from kvsift.cli.generate import generate
from kvsift.cli.methods import methods
from kvsift.cli.report_page import report
from kvsift.errors import KVSiftError

app = typer.Typer(
    name="kvsift",
    help="Long-context inference that reads, for every query, only what it needs of the KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, ask, generate, explain, report, methods, calibrate, doctor):
    app.command()(command)
app.command("eval")(evaluate)
app.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvsift {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options of every command."""


def main() -> None:
    """Run the command line; errors meant for the user become one message and exit code 2."""
    try:
        app()
    except KVSiftError as error:
        print(f"kvsift: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("kvsift: interrupted", file=sys.stderr)
        sys.exit(130)
