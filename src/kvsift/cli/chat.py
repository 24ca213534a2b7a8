"""kvsift chat: a conversation about texts, in a terminal or line by line from a pipe, with commands after a slash."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsift.cli import files
from kvsift.cli import options as o
from kvsift.cli.conversation import ChatContext, Conversation, passage_lines
from kvsift.cli.printing import ProgressBar, cell, console, counted, plain
from kvsift.collector import collector_paused
from kvsift.errors import (
    Conflict,
    InvalidValue,
    KVSiftError,
    MissingInput,
    Unavailable,
    UnsupportedPrompt,
    UnwritableFile,
    unknown,
)

if TYPE_CHECKING:
    from kvsift.engine.options import Options

NO_CONTEXT = "There is no --context for it to find facts in; /context FILE gives one, or write facts in your question."
REFUSED = 2  # exit code if a line of a pipe was refused
PROMPT = "> "
NO_TERMINAL = (
    "--context - takes standard input, and there is no terminal to type questions at. Name a file, or use kvsift ask "
    "with --question."
)
COMMAND = re.compile(r"/[a-z]*(?:\s|$)")  # not a path, which a question may begin with
MOST_PASSAGES = 5
HELP = {
    "/plan [SPEC]": "show the plan, or answer the next turns under another",
    "/passages [N]": "what the last answer read of the context, strongest first",
    "/context [FILE ...]": "show the context, or begin again about files",
    "/undo": "remove the last turn",
    "/save [--force] FILE": "write the conversation as Markdown",
    "/help": "this list",
    "/quit": "leave, as Ctrl-D does; Ctrl-C stops an answer",
}


@o.expand
def chat(
    model: o.ModelArgument = None,
    context: Annotated[
        list[str] | None,
        typer.Option("--context", help="Text file to talk about; - is stdin. May be repeated: files are joined."),
    ] = None,
    plan: o.PlanOption = "sketch:budget=1024",
    max_new_tokens: o.NewTokensOption = 512,
    stop: o.StopOption = None,
    system: o.SystemOption = None,
    *,
    sampling: o.SamplingOptions,
    engine: o.EngineOptions,
    threads: o.ThreadsOption = None,
    quiet: o.QuietOption = False,
) -> None:
    """Talk with a model about texts. /help lists the commands; a pipe has a question or a command on each line.

    Below an answer is its density: the share of the conversation so far that its tokens read, in the mean.

    Answers to a pipe go to stdout; its questions and the numbers of answers go to stderr, or nowhere with --quiet. The
    context is read once, with the first question; turns then read only what is new.
    """
    spec, names = files.read_plan(plan), context or []
    if from_stdin := "-" in names:
        os.close(open_terminal())  # refused before a long text is read
    about = ChatContext.read(names)
    if from_stdin:
        read_from_terminal()
    interactive = sys.stdin is not None and sys.stdin.isatty()
    o.use_threads(threads)
    with ProgressBar(quiet) as progress:
        from kvsift.plan.syntax import parse_unless_auto

        chosen, parsed = sampling.sampling(), parse_unless_auto(spec)  # before transformers is imported
        with collector_paused():
            from kvsift.api.llm import LLM

        progress.clear()  # a download draws bars of its own
        llm = LLM(model, parsed, **engine.keywords(sampling.exact))
        options: Options = {
            "max_new_tokens": max_new_tokens,
            "sampling": chosen,
            "exact": sampling.exact,
            "skip_special_tokens": sampling.skip_special_tokens,
        }
        conversation = Conversation(
            llm, about, options, progress, interactive=interactive, quiet=quiet, system=system, stop=stop
        )
        if model is None and not quiet:
            print(f"kvsift: {o.EMBEDDED_NOTE.replace('--model ', 'kvsift chat ')}", file=sys.stderr, flush=True)
        progress.loading("loading the model")
        llm.load()
        progress.clear()
        if interactive and not quiet:
            _welcome(conversation, model is None)
        lines = typed_lines() if interactive else piped_lines()
        refused = talk(conversation, lines if interactive or quiet else echoed(lines))
    if refused and not interactive:
        raise typer.Exit(REFUSED)


def talk(conversation: Conversation, lines: Iterable[str]) -> int:
    """Answer lines until they end or one is /quit. Returns how many were refused."""
    commands, refused = ChatCommands(conversation), 0
    for line in lines:
        if not line.strip():
            continue
        try:
            if not is_command(line):
                conversation.ask(line)
            elif not commands.run(line):
                break
        except KVSiftError as error:
            refused += 1
            complain(error)
        except MemoryError:
            refused += 1
            complain("there is not enough memory for this turn. Shorten the conversation: /undo, or another /context.")
    return refused


def _welcome(conversation: Conversation, embedded: bool) -> None:
    """Print what answers, and about what."""
    llm = conversation.llm
    about = f"{conversation.num_tokens:,} tokens of context" if conversation.num_tokens else "no context"
    show(f"{llm.directory.name} on {llm.device} ({llm.precision}), {conversation.plan}; {about}.")
    if embedded and not conversation.num_tokens:
        show(NO_CONTEXT)
    show("/help lists the commands; Ctrl-D leaves.")


class ChatCommands:
    """The commands of one conversation.

    Args:
        conversation: the conversation that they are about.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._refused: Path | None = None  # file that the last command would have replaced
        self._known: dict[str, Callable[[str], None]] = {
            "/plan": self._plan,
            "/passages": self._passages,
            "/context": self._context,
            "/undo": self._undo,
            "/save": self._save,
            "/help": self._help,
        }

    def run(self, line: str) -> bool:
        """Carry out a command. Returns whether the chat goes on.

        Raises:
            InputError: for an unknown command, or one that cannot be carried out.
        """
        name, _, rest = line.strip().partition(" ")
        refused, self._refused = self._refused, None
        if name == "/quit":
            return False
        if name not in self._known:
            raise unknown("command", name, [*self._known, "/quit"])
        if name == "/save":
            self._refused = refused
        self._known[name](rest.strip())
        return True

    def _plan(self, spec: str) -> None:
        conversation = self._conversation
        more = conversation.use(conversation.llm.plans.parse(files.read_plan(spec))) if spec else ""
        show(f"plan: {conversation.plan}")
        if more:
            show(more)

    def _passages(self, number: str) -> None:
        if number and not (number.isdecimal() and int(number)):
            raise InvalidValue(f"/passages {number}: give the number of lines to show, 1 or more.")
        conversation, most = self._conversation, int(number or MOST_PASSAGES)
        if not conversation.context.text:
            raise MissingInput("this chat has no context, so there are no passages of it. /context FILE gives one.")
        if conversation.last is None:
            raise MissingInput(
                "no answer has passages to show: none was given yet, or the last one was stopped. Ask something."
            )
        if conversation.last.passages is None:
            raise UnsupportedPrompt(f"there are no passages: {conversation.why_no_passages}")
        for line in passage_lines(conversation.context, conversation.last.passages, most):
            show(line)

    def _context(self, names: str) -> None:
        conversation = self._conversation
        if paths := _words(names):
            if "-" in paths:
                raise Conflict("/context -: standard input has the questions. Name files.")
            conversation.begin(ChatContext.read([*map(os.path.expanduser, paths)]))
        about = ", ".join(conversation.context.names)
        show(f"context: {about}, {conversation.num_tokens:,} tokens" if about else "there is no context.")

    def _undo(self, rest: str) -> None:
        show(f"removed: {self._conversation.undo()}")

    def _save(self, rest: str) -> None:
        words = _words(rest)
        names, force = [word for word in words if word != "--force"], "--force" in words
        if len(names) != 1:
            raise MissingInput("/save needs the name of one file, for instance /save chat.md.")
        conversation, path = self._conversation, Path(names[0]).expanduser()
        if not conversation.num_turns:
            raise MissingInput("there is nothing to save yet.")
        files.require_writable(path, "/save")
        if path.exists() and not force and self._refused != path:
            self._refused = path
            raise UnwritableFile(f"{path} exists. Give the command again to replace it, or /save --force {names[0]}.")
        self._refused = None
        files.write_whole(path, conversation.as_markdown())
        show(f"saved: {path}, {counted(conversation.num_turns, 'turn')}")

    def _help(self, rest: str) -> None:
        for usage, text in HELP.items():
            show(f"{usage}: {text}")


def is_command(line: str) -> bool:
    """Return whether a line is a command, and no question."""
    return COMMAND.match(line.strip()) is not None


def show(text: str) -> None:
    """Print what a command brings: wrapped at words in a terminal, a line each elsewhere."""
    out = console()
    out.print(cell(text), soft_wrap=not out.is_terminal)


def _words(text: str) -> Sequence[str]:
    import shlex

    try:
        return shlex.split(text)
    except ValueError as error:
        raise InvalidValue(f"{text}: {error}; close the quotation.") from None


def complain(error: object) -> None:
    """Print why a line is refused, on stderr."""
    print(f"kvsift: {plain(str(error))}", file=sys.stderr, flush=True)


def typed_lines() -> Iterator[str]:
    """Yield lines that are typed, until Ctrl-D; Ctrl-C drops the line. What was typed is listed by the arrow keys where
    Python has readline, and kept nowhere.
    """
    with suppress(ImportError):
        import readline  # noqa: F401  input uses it
    to_terminal = sys.stdout.isatty()
    while True:
        try:
            if not to_terminal:
                print(PROMPT, end="", file=sys.stderr, flush=True)
            yield input(PROMPT if to_terminal else "")
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit leaves.)", file=sys.stdout if to_terminal else sys.stderr)
        except EOFError:
            print(file=sys.stdout if to_terminal else sys.stderr)
            return


def piped_lines() -> Iterator[str]:
    """Yield the lines of standard input, which may be closed."""
    for number, line in enumerate(sys.stdin or ()):
        yield (line.removeprefix("\ufeff") if number == 0 else line).rstrip("\r\n")


def echoed(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines, and print each on stderr first, so that what is printed about it there follows its question."""
    for line in lines:
        if line.strip():
            sys.stdout.flush()  # what the line before it has brought
            print(f"{PROMPT}{plain(line.strip())}", file=sys.stderr, flush=True)
        yield line


def read_from_terminal() -> None:
    """Let questions come from the terminal, once standard input was read to its end.

    Raises:
        InputError: if there is none.
    """
    terminal = open_terminal()
    os.dup2(terminal, 0)
    os.close(terminal)
    sys.stdin = open(0, encoding=sys.stdin.encoding, errors="surrogateescape", closefd=False)  # noqa: SIM115


def open_terminal() -> int:
    """Return a descriptor of the terminal of this process.

    Raises:
        InputError: if there is none.
    """
    try:
        return os.open("/dev/tty", os.O_RDWR)
    except OSError:
        raise Unavailable(NO_TERMINAL) from None
