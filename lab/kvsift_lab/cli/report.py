"""kvsift report: results as one HTML page that needs no network, or as result folders of kvpress."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsift.cli import files
from kvsift.cli.printing import plain
from kvsift.errors import UnwritableFile


def report(
    context: typer.Context,
    results: Annotated[list[Path], typer.Argument(help="Results directories of kvsift eval.")],
    out: Annotated[Path, typer.Option("--out", "--output", help="The page, one self-contained HTML file.")] = Path(
        "report.html"
    ),
    kvpress: Annotated[
        Path | None, typer.Option("--kvpress", help="Write kvpress's result folders here instead of a page.")
    ] = None,
) -> None:
    """Render results: scores against visible tokens, depths, layers, times, recipe and machine."""
    from kvsift_lab.eval.results import load_result, result_paths

    loaded = [(path.stem, load_result(path)) for given in results for path in result_paths(given)]
    if kvpress is not None:
        from kvsift_lab.eval.kvpress import write_folders

        for folder in write_folders(loaded, kvpress):
            print(plain(str(folder)))
        return
    source = context.get_parameter_source("out")
    if out.exists() and source is not None and source.name == "DEFAULT":
        raise UnwritableFile(f"{out} exists. Give --out {out} to replace it, or another name.")
    files.require_writable(out, "--out")
    from kvsift_lab.eval.page import page

    files.write_whole(out, page(loaded))
    print(plain(str(out)))
