"""Commands of a chat: what begins with a slash and a word."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from kvsift.cli import options as o
from kvsift.cli.chat_context import ChatContext
from kvsift.cli.chat_markdown import as_markdown
from kvsift.cli.chat_passages import passage_lines
from kvsift.cli.comparison import counted
from kvsift.cli.conversation import Conversation
from kvsift.cli.escaping import cell
from kvsift.errors import InputError, unknown

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


class ChatCommands:
    """The commands of one conversation.

    Args:
        conversation: that they are about.
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
        more = conversation.use(conversation.llm.plans.parse(o.read_plan(spec))) if spec else ""
        show(f"plan: {conversation.plan}")
        if more:
            show(more)

    def _passages(self, number: str) -> None:
        if number and not (number.isdecimal() and int(number)):
            raise InputError(f"/passages {number}: give the number of lines to show, 1 or more.")
        conversation, most = self._conversation, int(number or MOST_PASSAGES)
        if not conversation.context.text:
            raise InputError("this chat has no context, so there are no passages of it. /context FILE gives one.")
        if conversation.last is None:
            raise InputError("there is no answer whose passages could be shown; ask something first.")
        if conversation.last.passages is None:
            raise InputError(f"there are no passages: {conversation.why_no_passages}")
        for line in passage_lines(conversation.context, conversation.last.passages, most):
            show(line)

    def _context(self, names: str) -> None:
        conversation = self._conversation
        if files := _words(names):
            if "-" in files:
                raise InputError("/context -: standard input has the questions. Name files.")
            conversation.begin(ChatContext.read([os.path.expanduser(file) for file in files]))
        about = ", ".join(conversation.context.names)
        show(f"context: {about}, {conversation.num_tokens:,} tokens" if about else "there is no context.")

    def _undo(self, rest: str) -> None:
        show(f"removed: {self._conversation.undo()}")

    def _save(self, rest: str) -> None:
        words = _words(rest)
        names, force = [word for word in words if word != "--force"], "--force" in words
        if len(names) != 1:
            raise InputError("/save needs the name of one file, for instance /save chat.md.")
        conversation, path = self._conversation, Path(names[0]).expanduser()
        if not conversation.turns:
            raise InputError("there is nothing to save yet.")
        o.require_writable(path, "/save")
        if path.exists() and not force and self._refused != path:
            self._refused = path
            raise InputError(f"{path} exists. Give the command again to replace it, or /save --force {names[0]}.")
        self._refused = None
        o.write_whole(
            path, as_markdown(conversation.llm.directory.name, conversation.context.names, conversation.turns)
        )
        show(f"saved: {path}, {counted(len(conversation.turns), 'turn')}")

    def _help(self, rest: str) -> None:
        for usage, text in HELP.items():
            show(f"{usage}: {text}")


def is_command(line: str) -> bool:
    """Return whether a line is a command, and no question."""
    return COMMAND.match(line.strip()) is not None


def show(text: str) -> None:
    """Print what a command brings: wrapped at words in a terminal, a line each elsewhere."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(cell(text), soft_wrap=not console.is_terminal)


def _words(text: str) -> Sequence[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"{text}: {error}; close the quotation.") from None
