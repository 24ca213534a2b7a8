"""The work of kvsift ask and kvsift demo: prefill a document, answer questions under plans, print the answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvsift.cli import files
from kvsift.cli import options as o
from kvsift.cli.comparison import Column, Reading, cut_mark, print_answers, print_guard, print_reading, print_slower
from kvsift.cli.numbers_table import print_numbers
from kvsift.cli.printing import ProgressBar, StrippedText, cell, console, plain
from kvsift.collector import collector_paused
from kvsift.errors import Conflict

if TYPE_CHECKING:
    from kvsift.api.answer import Answer
    from kvsift.api.llm import LLM, Document
    from kvsift.engine.options import Options

Item = dict[str, Any]  # a question with the other fields of its line

NO_PROMPT: Mapping[str, str | None] = {}  # kvsift's own
GREEDY, ALL_PRINTED = o.SamplingOptions(), o.PrintOptions()


class Output(NamedTuple):
    """Where answers go, and in which form.

    Attributes:
        file: instead of stdout for JSON; None: nothing is written.
        by_line: every answer is written at once, as a line of JSON.
        printed: progress, tables and JSON on stdout.
    """

    file: Path | None = None
    by_line: bool = False
    printed: o.PrintOptions = ALL_PRINTED

    @property
    def lines(self) -> bool:
        """Whether lines of JSON are written."""
        return self.by_line and (self.file is not None or not self.printed.as_json)


def answer_all(
    context: str | Path,
    items: Sequence[Item],
    specs: Sequence[Any],
    output: Output,
    *,
    model: Mapping[str, Any],
    prompt: Mapping[str, str | None] = NO_PROMPT,
    sampling: o.SamplingOptions = GREEDY,
    max_new_tokens: int = 64,
    question_phase: Literal["prefill", "decode"] = "prefill",
    strict: bool = False,
    note: str | None = None,
    save: Path | None = None,
) -> None:
    """Prefill a text once and answer every question under every plan.

    Args:
        context: the document, or the file of a saved one.
        items: questions, each with the other fields of its line of JSON.
        specs: plans; the others are compared with the first.
        output: where answers go.
        model: keywords of ``LLM``.
        prompt: keywords of ``LLM.read``.
        sampling: how to choose tokens.
        max_new_tokens: most tokens of each answer.
        question_phase: as in ``Document.ask``.
        strict: fail if a sparse plan skipped nothing.
        note: a warning to print after all checks.
        save: file to save the document in, before the first question.
    """
    quiet = output.printed.quiet
    with ExitStack() as stack:
        progress = stack.enter_context(ProgressBar(quiet))
        from kvsift.plan.syntax import parse_unless_auto

        parsed, chosen = [*map(parse_unless_auto, specs)], sampling.sampling()  # before transformers is imported
        with collector_paused():
            from kvsift.api.llm import LLM

        progress.clear()  # a download draws bars of its own
        llm = LLM(plan=parsed[0], **model)
        plans = [*map(llm.plans.parse, parsed)]
        if again := next((plan for number, plan in enumerate(plans) if plan in plans[:number]), None):
            raise Conflict(f"--compare {again}: this plan answers already. Leave it out, or name another one.")
        if isinstance(context, Path):
            progress.loading("opening the document")
            document, stop = llm.open(context, progress=progress.reading), prompt.get("stop")
        else:
            document, stop = llm.read(context, progress=progress.reading, **prompt), None
        skips = sampling.skip_special_tokens
        options: Options = {"max_new_tokens": max_new_tokens, "sampling": chosen, "skip_special_tokens": skips}
        if stop is not None:
            options["stop"] = stop
        for item, plan in product(items, plans):
            document.check(item["question"], max_new_tokens, plan)
        if note and not quiet:
            print(f"kvsift: WARNING: {note}", file=sys.stderr)
        lines = stack.enter_context(files.lines_to(output.file)) if output.lines else None
        progress.loading("loading the model")
        if save is not None:
            document.save(save)
        printer = AnswerPrinter(llm, document, progress, output, len(items) * len(plans), streams=len(plans) == 1)
        columns = []
        for plan in plans:
            answers = []
            for item in items:
                is_baseline = plan.decode is None and len(plans) > 1  # what exact answers are compared with
                options["plan"], options["exact"] = plan, sampling.exact and not is_baseline
                answer = document.ask(
                    item["question"], on_text=printer.begin(item["question"]), question_phase=question_phase, **options
                )
                printer.end(answer)
                answers.append(answer)
                if lines is not None:
                    files.write_line(lines, item, answer)
            read = Reading(document.open_s or document.read_s, document.read_stats["phases"]["prefill"]["density"])
            columns.append(Column(plan, answers, read))
    _finish(llm, document, items, columns, output)
    for column in columns:
        column.check_skipped(strict)


class AnswerPrinter:
    """Prints answers while they are generated if there is one plan, else their progress alone.

    Args:
        llm: the model.
        document: the document of the questions.
        progress: shown between answers.
        output: where answers go.
        total: number of answers.
        streams: whether to print each answer while it is generated.
    """

    def __init__(
        self, llm: LLM, document: Document, progress: ProgressBar, output: Output, total: int, streams: bool
    ) -> None:
        self._llm, self._document, self._progress, self._quiet = llm, document, progress, output.printed.quiet
        self._streams = streams and not (output.printed.as_json or output.by_line)
        self._total, self._done = total, 0
        self._text, self._question = StrippedText(), ""

    def begin(self, question: str) -> Callable[[str], None] | None:
        """Begin the next question. Returns the callback for pieces of its answer; None if they are not shown."""
        self._text, self._question = StrippedText(), question
        if self._streams:
            return self._print
        return self._follow if sys.stderr.isatty() and not self._quiet else None

    def end(self, answer: Answer) -> None:
        """End the question with its complete answer."""
        if self._streams:
            if not self._text.text.strip():
                self._print_head()
                print("(nothing)", end="")
            mark = cut_mark(answer)
            print("" if self._quiet else f"{mark}\n", flush=True)
            if self._quiet and mark:
                print(mark.strip(), file=sys.stderr)
        self._done += 1
        if self._done < self._total:
            self._progress.answering(self._done, self._total)

    def _follow(self, piece: str) -> None:
        self._text.add(piece)
        self._progress.answering(self._done, self._total, self._text.text)

    def _print(self, piece: str) -> None:
        """Print a piece, without white space at both ends of the answer."""
        is_first = not self._text.text.strip()
        if new := self._text.add(piece):
            if is_first:
                self._print_head()
            print(plain(new), end="", flush=True)

    def _print_head(self) -> None:
        self._progress.clear()
        if self._quiet:
            return
        if not self._done:
            print_reading(self._llm, self._document)
        console().print(cell(self._question, "bold"))


def _finish(llm: LLM, document: Document, items: Sequence[Item], columns: Sequence[Column], output: Output) -> None:
    """Print or write JSON or tables after the last answer."""
    printed = output.printed
    if printed.as_json or (output.file is not None and not output.by_line):
        text = json.dumps(as_json(llm, document, items, columns), indent=2)
        if output.file is None or output.by_line:
            print(text)
        else:
            files.write_whole(output.file, text + "\n")
    if printed.as_json:
        return
    if len(columns) > 1 and not output.by_line:
        if not printed.quiet:
            print_reading(llm, document)
        print_answers([item["question"] for item in items], columns)
    if not printed.quiet:
        print_guard(columns, to_stderr=output.by_line)
        print_numbers([column.summary() for column in columns], printed.verbose, to_stderr=output.by_line)
        print_slower(columns, to_stderr=output.by_line)


def as_json(llm: LLM, document: Document, items: Sequence[Item], columns: Sequence[Column]) -> dict[str, Any]:
    """Return all numbers of a run: those of the first plan, and those of the others as ``compare``, a list if there are
    several."""
    from kvsift.tokenization.prompt import PromptFormat

    assert document.text is not None
    form = PromptFormat(llm.tokenizer, document.text.template, document.text.system)
    rows = []
    for column in columns:
        answers = [
            {**item, "prompt": form.text("{context}", item["question"]), **answer.as_dict()}
            for item, answer in zip(items, column.answers, strict=True)
        ]
        rows.append({**column.summary(), "answers": answers})
    run = {
        "model": llm.directory.name,
        "device": str(llm.device),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "document_tokens": document.num_tokens,
    }
    return {**rows[0], **run, "compare": rows[1:]}
