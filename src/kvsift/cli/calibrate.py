"""kvsift calibrate: files that methods need of a model: directions of its keys and queries, or layers that reuse."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsift.cli import files
from kvsift.cli import options as o
from kvsift.cli.numbers_table import print_rows
from kvsift.cli.printing import ProgressBar, plain
from kvsift.collector import collector_paused
from kvsift.errors import Conflict, UnusedOption

if TYPE_CHECKING:
    from kvsift.api.llm import LLM

MIN_RECOVERY = 0.85


@dataclass(frozen=True, eq=False, repr=False)
class LayerChoices:
    """Options of ``--layers``; None: the default."""

    anchors: Annotated[
        int | None,
        typer.Option("--anchors", min=1, help="With --layers: how many layers select; by default, as few as "
                     "--min-recovery allows."),
    ] = None  # fmt: skip
    min_recovery: Annotated[
        float | None,
        typer.Option("--min-recovery", min=0, max=1, help="With --layers: the least that a layer may recover with "
                     f"the selection of another, of what it would with its own; {MIN_RECOVERY}."),
    ] = None  # fmt: skip
    selected: Annotated[
        int | None, typer.Option("--selected", min=1, help="With --layers: tokens that a head selects; 128.")
    ] = None
    dense_layers: Annotated[
        str | None,
        typer.Option("--dense-layers", help="With --layers: layers that plans leave dense, or none; 0+1."),
    ] = None

    def check(self, layers: bool) -> None:
        """Refuse options that do not apply (``InputError``)."""
        given = [name for name, value in vars(self).items() if value is not None]
        if given and not layers:
            raise UnusedOption(f"--{given[0].replace('_', '-')} is an option of --layers; add that, or leave it out.")
        if self.anchors is not None and self.min_recovery is not None:
            raise Conflict("--anchors and --min-recovery both say how many layers select; give one of them.")


@o.expand
def calibrate(
    *,
    out: Annotated[
        Path, typer.Option("--out", "--output", help="File to write, for loki:calibration=FILE or, with --layers, "
                           "tidal_decode:anchors=FILE."),
    ],
    layers: Annotated[
        bool, typer.Option("--layers", help="Find layers that can reuse the selections of others instead.")
    ] = False,
    chosen: LayerChoices,
    model: o.ModelOption = None,
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", help="Text file, may be repeated; by default generated prose, or with --layers "
                     "generated contexts with questions."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="The most tokens to read.")] = 16384,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens of one context.")] = 4096,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
    threads: o.ThreadsOption = None,
    as_json: o.JsonOption = False,
) -> None:  # fmt: skip
    """Read texts with a model, and write the principal directions of its keys and queries, or which layers' selections
    serve which others."""
    chosen.check(layers)
    files.require_writable(out, "--out")
    texts = {str(path): files.read_text(path, "text") for path in text} if text else None
    o.use_threads(threads)
    with collector_paused():
        from kvsift.api.llm import LLM
    from kvsift.calibration.recipe import calibrate as run
    from kvsift.texts.calibration import CHARACTERS, prose_of

    llm = LLM(model, "dense", device=device, dtype=dtype)
    with ProgressBar() as bar, files.writing(out):
        show = partial(bar.working, "texts" if layers else "tokens")
        if layers:
            facts = calibrate_layers(llm, texts, out, tokens, length, chosen, show)
        else:
            sources = texts or {"prose": prose_of(CHARACTERS * tokens)}
            facts = run(llm, sources, out, tokens=tokens, length=length, progress=show)
    if as_json:
        print(json.dumps(facts, indent=2))
    elif layers:
        print_layers(facts)
    else:
        architecture, tokens = facts["model"].partition(",")[0], facts["recipe"]["tokens"]
        print(plain(f"{out}: {facts['layers']} layers of {architecture}, from {tokens:,} tokens of text"))


def calibrate_layers(
    llm: LLM, texts: Mapping[str, str] | None, out: Path, tokens: int, length: int, chosen: LayerChoices,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:  # fmt: skip
    """Compare the layers on texts, or on generated contexts, and write the anchors found."""
    from kvsift.calibration.layer_calibration import LayerOptions
    from kvsift.calibration.layer_calibration import calibrate_layers as run
    from kvsift.plan.syntax import read_layers
    from kvsift.texts.calibration import ends, task_texts

    defaults = LayerOptions()
    options = LayerOptions(
        selected=chosen.selected or defaults.selected,
        dense_layers=defaults.dense_layers if chosen.dense_layers is None else read_layers(chosen.dense_layers),
        anchors=chosen.anchors,
        min_recovery=MIN_RECOVERY if chosen.min_recovery is None else chosen.min_recovery,
    )
    if texts is None:
        decoded, sources = task_texts(llm.tokenizer, tokens, length)
    else:
        decoded, sources = ends(llm, texts, tokens, length), dict(texts)
    return run(llm, decoded, sources, out, options, progress=progress)


def print_layers(facts: Mapping[str, Any]) -> None:
    """Print what every number of anchors recovers, then the layers of the file."""
    numbers = [("anchors", "layers that select", "mean recovery", "least")]
    for choice in facts["choices"]:
        mark = " *" if choice["anchors"] == facts["anchors"] else ""
        numbers.append((f"{len(choice['anchors'])}{mark}", ", ".join(map(str, choice["anchors"])),
                        f"{choice['mean_recovery']:.3f}", f"{choice['least_recovery']:.3f}"))  # fmt: skip
    print("attention that layers recover")
    print_rows(numbers)
    if facts["reuse"]:
        layers = [("layer", "reuses layer", "KV heads", "recovery")]
        for layer, reuse in facts["reuse"].items():
            heads = " ".join(map(str, reuse["heads"]))
            layers.append((str(layer), str(reuse["anchor"]), heads, f"{reuse['recovery']:.3f}"))
        print("layers that reuse a selection")
        print_rows(layers)
    count, every = len(facts["anchors"]), len(facts["anchors"]) + len(facts["reuse"])
    queries = facts["recipe"]["queries"]
    print(plain(f"{facts['file']}: {count} of {every} layers select, from {queries:,} decoded tokens"))
