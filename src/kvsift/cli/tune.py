"""kvsift tune: the plan that fits a model, a text and this machine."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsift.cli import files
from kvsift.cli import options as o
from kvsift.cli.numbers_table import print_rows
from kvsift.cli.printing import ProgressBar, plain
from kvsift.collector import collector_paused

if TYPE_CHECKING:
    from kvsift.api.llm import LLM

PIECES, SCORED = 16, 128  # texts, and tokens after each that are scored: 2,048 in all; of fewer, one decides
MOST_SCORED_CONTEXT = {"cpu": 4096, "cuda": 16_384}  # tokens before them: prefilling more takes longer than the rest
DEFAULT_CONTEXT, LEAST_CONTEXT = 32_768, 512  # tokens
FILE = "kvsift-plan.json"
PROBE_EVERY = 8  # steps, for a target of recovery


@o.expand
def tune(
    *,
    model: Annotated[
        str | None,
        typer.Argument(help="Hugging Face model directory, a GGUF file, or a model's name on huggingface.co; without "
                       "it, the embedded model.", show_default=False),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", help="Text file of the kind that will be asked about, may be repeated; by default "
                     "English prose, program text and generated questions."),
    ] = None,
    target: Annotated[
        str,
        typer.Option("--target", help="What the plan keeps: kl=0.02 (nats from dense, at most), agreement=0.97 (share "
                     "of the likeliest tokens) or recovery=0.95 (share of attention)."),
    ] = "kl=0.02",
    context: Annotated[
        int | None,
        typer.Option("--context", min=LEAST_CONTEXT, help="Cached tokens at which plans are timed; by default "
                     f"half of the model's positions, {DEFAULT_CONTEXT:,} at most."),
    ] = None,
    tpot: Annotated[
        float | None,
        typer.Option("--tpot", min=0.001, help="The most milliseconds per token. Where no plan that meets the target "
                     "is as fast, the one closest to dense of those that are is found."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option("--length", min=LEAST_CONTEXT, help="Tokens before those that are scored; by default as --context,"
                     f" on a CPU {MOST_SCORED_CONTEXT['cpu']:,} at most and on a GPU {MOST_SCORED_CONTEXT['cuda']:,},"
                     f" and less where memory is short: {PIECES} such texts are cached at once."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the places in the texts.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "--output", help="File for the plan, for instance kvsift-plan.json beside the model; by "
                     "default in the user's cache, where plan=auto finds it."),
    ] = None,
    device: o.DeviceOptions,
    threads: o.ThreadsOption = None,
    quiet: o.QuietOption = False,
    as_json: o.JsonOption = False,
) -> None:  # fmt: skip
    """Find the fastest plan whose predictions stay close to those of dense attention, on a text and on this machine.

    At least 2,048 tokens are predicted under each plan that comes into question, and the 90 % bound of what was
    measured has to meet the target. plan=auto then takes the plan that was found. An interrupted search goes on where
    it was stopped when the command is given again.
    """
    files.require_writable(out, "--out", text or ())
    texts = {str(path): files.read_text(path, "text") for path in text} if text else None
    o.use_threads(threads)
    with collector_paused():
        from kvsift.api.llm import LLM
    from kvsift.calibration.tune import Notebook, Target, Tuner, digest
    from kvsift.checkpoint import fingerprint
    from kvsift.engine.provenance import versions_and_machine
    from kvsift.plan.syntax import parse_plan
    from kvsift.plan.tuned_plan import TunedPlan, default_path, read, write
    from kvsift.texts.calibration import mixed, windows

    wanted = Target.of(target)
    probes = PROBE_EVERY if wanted.measure == "recovery" else 0
    llm = LLM(model, "dense", dense_below=0, probe_every=probes, **device.keywords())
    half = (llm.directory.max_positions or 2 * DEFAULT_CONTEXT) // 2
    asked = context or min(max(half, LEAST_CONTEXT), DEFAULT_CONTEXT)
    llm.check([[0] * asked], 2 * SCORED)
    before = min(asked, length or _scored_context(llm, asked))
    if texts is None:
        pieces = mixed(llm, before, SCORED, PIECES, seed)
    else:
        pieces = windows(llm, texts, before, SCORED, PIECES, seed)
    made_for = fingerprint(llm.directory.path)
    path = out or default_path(made_for, llm.device.type)
    with files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    recipe = {
        "texts": sorted(texts or {"prose, program text and questions": ""}), "seed": seed, "context": asked,
        "scored_context": min(piece.start for piece in pieces), "dtype": str(llm.dtype).removeprefix("torch."),
        **versions_and_machine(llm.device),
    }  # fmt: skip
    notebook = Notebook(path.with_suffix(".measured.json"), {"pieces": digest(pieces), "model": made_for, **recipe})
    with ProgressBar(quiet, "loading the model") as progress:
        llm.load()
        tuner = Tuner(llm, pieces, asked, notebook, path.with_suffix(".anchors.json"), progress.working)
        found = tuner.search(wanted, None if tpot is None else tpot / 1e3)
    report = {key: value for key, value in {**found, **recipe}.items() if key != "plan"}
    with files.writing(path):
        write(path, TunedPlan(parse_plan(found["plan"]), llm.directory.name, made_for, llm.device.type, report))
    tuner.remove_anchors()  # the file of the plan has them inside
    notebook.remove()
    chosen, found["plan"] = found["plan"], str(read(path).plan)
    for each in found["candidates"]:
        each["plan"] = found["plan"] if each["plan"] == chosen else each["plan"]
    if as_json:
        print(json.dumps({**found, **recipe, "file": str(path)}, indent=2))
    else:
        _print(found, path, out is None, llm.directory.name)


def _scored_context(llm: "LLM", timed: int) -> int:
    """Tokens before those that are scored, of as many texts as fit in memory beside a document of ``timed`` tokens and
    the weights."""
    from kvsift.engine.memory import available_bytes, predict_bytes

    before, free = MOST_SCORED_CONTEXT[llm.device.type], available_bytes(llm.device)
    while before > LEAST_CONTEXT and free is not None:
        cached = timed + PIECES * (before + SCORED)
        need = predict_bytes(  # prompts are prefilled densely
            llm.directory, llm.device, llm.dtype, cached, llm.chunk_size, llm.place, num_seqs=PIECES + 1,
            captured=llm.fast_path.enabled,
        )  # fmt: skip
        if need <= free:
            break
        before //= 2
    return before


def _print(found: Mapping[str, Any], path: Path, is_cached: bool, name: str) -> None:
    """Print the plans that no other beats in both time and distance, and what was found."""
    measure = found["target"].partition("=")[0]
    rows = [("plan", "ms", measure, "90 % bounds", "agreement", "tokens")]
    for each in _front(found["candidates"], found["plan"], measure):
        low, high = each.get(f"{measure}_interval", (0.0, 0.0))
        mark = " *" if each["plan"] == found["plan"] else ""
        rows.append((
            f"{each['plan']}{mark}", f"{1e3 * each['tpot_s']:.2f}", f"{each.get(measure, 0.0):.4f}",
            f"{low:.4f} to {high:.4f}" if "tokens" in each else "", f"{each.get('agreement', 1.0):.3f}",
            f"{each['tokens']:,}" if "tokens" in each else "",
        ))  # fmt: skip
    print_rows(rows)
    faster = found["dense_tpot_s"] / found["tpot_s"]
    if found["plan"] == "dense":
        print(plain(f"No plan that was tried meets {found['target']} on this text; dense does."))
    elif not found["met"]:
        print(plain(f"{found['plan']} does not meet {found['target']}: no plan that does is fast enough."))
    if found["plan"] != "dense" and faster < 1:
        print(plain(f"At {found['context']:,} tokens dense decoding takes {faster:.2f} of its time on this machine."))
    use = "plan=auto takes it" if is_cached or path.name == FILE else f"plan=auto takes it as {FILE} beside the model"
    print(plain(f"{found['plan']} for {name} is in {path}; {use}."))


def _front(candidates: Sequence[dict[str, Any]], chosen: str, measure: str) -> list[dict[str, Any]]:
    """The scored candidates of which no other is both faster and closer, dense and the chosen one, by their times."""
    sign, best, front = 1 if measure == "kl" else -1, math.inf, []
    for each in sorted(candidates, key=lambda each: each["tpot_s"]):
        distance = sign * each[measure] if measure in each else math.inf
        if distance < best or each["plan"] in ("dense", chosen):
            best = min(best, distance)
            front.append(each)
    return front
