"""The command line: one command, one file. torch and transformers are imported when a command runs."""

from __future__ import annotations

import codecs
import errno
import os
import sys
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from kvsift import __version__
from kvsift.cli.ask import ask
from kvsift.cli.calibrate import calibrate
from kvsift.cli.chat import chat
from kvsift.cli.demo import demo
from kvsift.cli.doctor import doctor
from kvsift.cli.generate import generate
from kvsift.cli.methods import methods
from kvsift.cli.printing import plain
from kvsift.cli.serve import serve
from kvsift.cli.tune import tune
from kvsift.collector import collector_paused
from kvsift.errors import KVSiftError, MissingPackage

LABORATORY = ("bench", "eval", "explain", "report")  # commands of the distribution kvsift-lab
NOTHING_HALF_WRITTEN = "No file was left half written."


class AnsweringLineByLine(TyperCommand):
    after_interrupt = "No file was left half written; answers to --questions-file so far are whole lines."


class GoingOn(TyperCommand):
    after_interrupt = "The same command goes on from what was measured so far."


class Commands(TyperGroup):
    """The commands of the package and those of installed distributions that have a Typer application in the entry
    points ``kvsift.commands``; after Ctrl-C, a line on stderr names what is saved (``after_interrupt`` of a command).
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *added_commands()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name) or added_commands().get(cmd_name)
        if found is None and cmd_name in LABORATORY:
            raise MissingPackage(
                f"kvsift {cmd_name} comes with kvsift-lab, which is not installed: {install_laboratory()}"
            )
        return found

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with collector_paused():  # typer imports what renders it
            if missing := [name for name in LABORATORY if name not in added_commands()]:
                self.epilog = f"{', '.join(missing)}: with kvsift-lab, {install_laboratory()}"
            super().format_help(ctx, formatter)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # before typer turns it into a silent exit code
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            safe = getattr(command, "after_interrupt", NOTHING_HALF_WRITTEN)
            print(f"\nkvsift: interrupted. {safe}", file=sys.stderr)
            raise typer.Exit(130) from None


@cache
def added_commands() -> dict[str, Any]:
    """Commands of other distributions by name."""
    from importlib.metadata import entry_points

    return {
        name: command
        for entry in entry_points(group="kvsift.commands")
        for name, command in get_command(entry.load()).commands.items()  # type: ignore[attr-defined]
    }


def install_laboratory() -> str:
    """Return the command that installs kvsift-lab: from the checkout that this package runs from, if it does."""
    checkout = Path(__file__).parents[3] / "lab"
    return f"pip install -e {checkout}" if checkout.is_dir() else "pip install 'kvsift[lab]'"


app = typer.Typer(
    name="kvsift",
    cls=Commands,
    help="Long-context inference that reads, for every query, only what it needs of the KV cache.",
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command(cls=AnsweringLineByLine)(ask)
app.command(cls=GoingOn)(tune)
for command in (chat, generate, methods, calibrate, doctor):
    app.command()(command)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)


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
        sys.exit(2 if error.errno == errno.ENOSPC else 1)  # the reader has closed the pipe: as typer ends
