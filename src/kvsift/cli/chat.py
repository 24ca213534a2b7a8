"""kvsift chat: a conversation about texts, in a terminal or line by line from a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from kvsift.cli import options as o
from kvsift.cli.chat_commands import ChatCommands, is_command, show
from kvsift.cli.chat_context import ChatContext
from kvsift.cli.chat_input import echoed, open_terminal, piped_lines, read_from_terminal, typed_lines
from kvsift.cli.conversation import Conversation, complain
from kvsift.cli.option_groups import EngineOptions, SamplingOptions, expand
from kvsift.cli.progress import ProgressBar
from kvsift.errors import KVSiftError

if TYPE_CHECKING:
    from kvsift.engine.options import Options

NO_CONTEXT = "There is no --context for it to find facts in; /context FILE gives one, or write facts in your question."
REFUSED = 2  # exit code if a line of a pipe was refused


@expand
def chat(
    model: Annotated[
        str | None, typer.Argument(help="Hugging Face directory or name; without it, the embedded model.")
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option("--context", help="Text file to talk about; - is stdin. May be repeated: files are joined."),
    ] = None,
    plan: o.PlanOption = "sketch:budget=1024",
    max_new_tokens: o.NewTokensOption = 512,
    stop: o.StopOption = None,
    system: Annotated[
        str | None, typer.Option("--system", help="System message, for models with a chat template.")
    ] = None,
    *,
    sampling: SamplingOptions,
    engine: EngineOptions,
    threads: o.ThreadsOption = None,
    quiet: o.QuietOption = False,
) -> None:
    """Talk with a model about texts. /help lists the commands; a pipe has a question or a command on each line.

    Below an answer is its density: the share of the conversation so far that its tokens read, in the mean.

    Answers to a pipe go to stdout; its questions and the numbers of answers go to stderr, or nowhere with --quiet. The
    context is read once, with the first question; turns then read only what is new.
    """
    spec, names = o.read_plan(plan), context or []
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
    dtype = str(llm.dtype).removeprefix("torch.")
    show(f"{llm.directory.name} on {llm.device} ({dtype}), {conversation.plan}; {about}.")
    if embedded and not conversation.num_tokens:
        show(NO_CONTEXT)
    show("/help lists the commands; Ctrl-D leaves.")
