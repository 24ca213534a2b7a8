"""kvsift ask: questions about a long document, with the proof of how little was read."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsift.cli import options as o
from kvsift.cli.progress import prefill_progress

if TYPE_CHECKING:
    from kvsift.cli.report import Reading
    from kvsift.engine.llm import LLM, Document
    from kvsift.engine.result import Answer


def ask(
    context: Annotated[Path, typer.Option("--context", help="Text file to ask about.")],
    question: Annotated[list[str], typer.Option("--question", help="What to ask; may be given more than once.")],
    model: o.ModelOption = None,
    plan: o.PlanOption = "quest:budget=1024",
    compare: Annotated[str | None, typer.Option("--compare", help="Answer under this plan too, e.g. dense.")] = None,
    question_phase: Annotated[
        str, typer.Option("--question-phase", help="decode: the question's own tokens are sifted too (harder).")
    ] = "prefill",
    max_new_tokens: o.NewTokensOption = 64,
    temperature: o.TemperatureOption = 0.0,
    top_p: o.TopPOption = 1.0,
    seed: o.SeedOption = 0,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
    chunk_size: o.ChunkOption = None,
    probe_every: o.ProbeOption = 16,
    dense_below: o.DenseBelowOption = "auto",
    placement: o.PlacementOption = "device",
    threads: o.ThreadsOption = None,
    strict: o.StrictOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Ask questions about a long document.

    The document is read once; every question is answered from the same cache, under the plan and, with --compare,
    under another.
    """
    text = o.read_text(context, "context")
    o.use_threads(threads)
    from kvsift.cli.report import Reading, check_skipped, print_answers
    from kvsift.engine.llm import LLM
    from kvsift.engine.sampling import Sampling
    from kvsift.errors import unknown
    from kvsift.runtime.plan import PHASES
    from kvsift.runtime.spec import parse_plan

    plans = [parse_plan(o.read_plan(spec)) for spec in (plan, compare) if spec is not None]
    if question_phase not in PHASES:
        raise unknown("phase", question_phase, PHASES)
    sampling = Sampling(temperature, top_p, seed)
    llm = LLM(
        model, plans[0], device=device, dtype=dtype, chunk_size=chunk_size, probe_every=probe_every,
        dense_below=o.dense_below(dense_below), placement=placement,
    )  # fmt: skip
    with prefill_progress("reading") as progress:
        document = llm.read(text, progress=progress)
        for each, each_plan in product(question, plans):
            document.check(each, max_new_tokens, each_plan)
        answers: list[list[Answer]] = []  # one list per plan
        reads: list[Reading] = []
        for each_plan in plans:
            asked = [
                document.ask(
                    each,
                    plan=each_plan,
                    max_new_tokens=max_new_tokens,
                    sampling=sampling,
                    question_phase="decode" if question_phase == "decode" else "prefill",
                )
                for each in question
            ]
            answers.append(asked)
            reads.append(Reading(document.read_s, document.read_stats["phases"]["prefill"]["density"]))
    if as_json:
        print(json.dumps(_as_json(llm, document, question, answers, reads), indent=2))
    else:
        print_answers(llm, document, question, answers, reads)
    for each_plan, asked, read in zip(plans, answers, reads, strict=True):
        check_skipped(each_plan, asked, strict, read)


def _as_json(
    llm: LLM, document: Document, questions: list[str], answers: list[list[Answer]], reads: list[Reading]
) -> dict[str, Any]:
    from kvsift.cli.report import summary

    rows = [
        {**summary(asked, read), "answers": [{"question": q, **a.as_dict()} for q, a in zip(questions, asked)]}
        for asked, read in zip(answers, reads, strict=True)
    ]
    run = {
        "model": str(llm.directory.path.name),
        "device": str(llm.device),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "document_tokens": document.num_tokens,
    }
    return {**rows[0], **run, **({"compare": rows[1]} if len(rows) > 1 else {})}
