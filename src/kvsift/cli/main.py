"""The command line: one command, one file. torch and transformers are imported when a command runs."""

from __future__ import annotations

import codecs
import errno
import os
import sys
from io import TextIOWrapper
from typing import Any

import typer
from typer.core import TyperGroup

from kvsift import __version__
from kvsift.cli.ask import ask
from kvsift.cli.bench import bench
from kvsift.cli.calibrate import calibrate
from kvsift.cli.chat import chat
from kvsift.cli.demo import demo
from kvsift.cli.doctor import doctor
from kvsift.cli.escaping import plain
from kvsift.cli.eval import evaluate
from kvsift.cli.explain import explain
from kvsift.cli.generate import generate
from kvsift.cli.methods import methods
from kvsift.cli.report import report
from kvsift.cli.serve import serve
from kvsift.errors import KVSiftError

NOTHING_HALF_WRITTEN = "No file was left half written."
SAFE = {
    "ask": "No file was left half written; answers to --questions-file so far are whole lines.",
    "eval": "The samples so far are safe; give the same command again to go on.",
}


class Commands(TyperGroup):
    """The commands; after Ctrl-C, a line on stderr names what is saved."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # before typer turns it into a silent exit code
            safe = SAFE.get(ctx.invoked_subcommand or "", NOTHING_HALF_WRITTEN)
            print(f"\nkvsift: interrupted. {safe}", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="kvsift",
    cls=Commands,
    help="Long-context inference that reads, for every query, only what it needs of the KV cache.",
    pretty_exceptions_enable=False,
)
for command in (demo, ask, chat, generate, explain, report, methods, calibrate, doctor):
    app.command()(command)
app.command("eval")(evaluate)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.add_typer(bench, name="bench")


def _version(given: bool) -> None:
    if given:
        print(f"kvsift {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Long-context inference that reads, for every query, only what it needs of the KV cache."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """What an encoding lacks as JSON has it, so that lines of JSON stay whole."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)), error.end


def main() -> None:
    """Run the command line; errors for the user become one message and exit code 2."""
    codecs.register_error("escaped", _escaped)
    for stream, errors in ((sys.stdout, "escaped"), (sys.stderr, "escaped"), (sys.stdin, "surrogateescape")):
        if isinstance(stream, TextIOWrapper):  # what is no text is refused where it is read, not by a traceback
            stream.reconfigure(errors=errors)
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:  # as it is where the caller has closed it
                sys.stdout.flush()
    except KVSiftError as error:
        print(f"kvsift: {plain(str(error))}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        if error.errno == errno.ENOSPC:
            print("kvsift: the output is cut: the disk that it goes to is full.", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed at exit
        sys.exit(2 if error.errno == errno.ENOSPC else 1)  # nobody reads on: as typer ends
