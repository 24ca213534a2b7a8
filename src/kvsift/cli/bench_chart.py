"""kvsift bench chart: draw a result that was measured before, on any machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvsift.cli import options as o
from kvsift.cli.bench import bench
from kvsift.errors import InputError


@bench.command("chart")
def bench_chart(
    result: Annotated[Path, typer.Argument(help="What kvsift bench attention --out wrote.")],
    output: Annotated[Path, typer.Option("--out", "--output", help="Draw here: .svg, or .png.")],
) -> None:
    """Draw attention over context length: microseconds with floors, and speed-up."""
    from kvsift.benchmarks.chart import attention_chart
    from kvsift.eval.packed import stored, unpacked

    o.require_writable(output, "--out")
    if output.suffix not in (".svg", ".png"):
        raise InputError(f"--out {output}: charts are drawn as .svg or .png.")
    try:
        found = stored(result)
        measured = json.loads(unpacked(found) if found.suffix == ".xz" else o.read_text(found, "result"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"the result {result} is not JSON: {error}") from None
    if not isinstance(measured, dict) or measured.get("kind") != "attention":
        raise InputError(f"the result {result} is none of kvsift bench attention.")
    o.write_whole(output, attention_chart(measured, output.suffix.removeprefix(".")))
