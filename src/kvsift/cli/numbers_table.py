"""Tables of plans for terminals of any width, and the table of numbers of runs: its rows, and how each is written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvsift.cli.printing import cell, console, plain

if TYPE_CHECKING:
    from rich.console import Console

MAIN_ROWS = 8
LONGEST = 24  # characters of a word, or of a part of a plan, that is not broken
PARTS = re.compile(r"[^\s:,]+[:,]*|[:,]+")  # of a plan, which may begin a line
EDGE = 3  # characters of an edge and the spaces beside it


def print_numbers(rows: Sequence[dict[str, Any]], verbose: bool, to_stderr: bool) -> None:
    """Print the table of numbers, a column per plan, without empty rows."""
    lines: dict[str, list[str]] = {}
    for name, show in {**MAIN, **MORE}.items():
        shown = [show(row) for row in rows]
        if any(shown):
            lines[name] = [text or "-" for text in shown]
    names = list(lines) if verbose else [name for name in MAIN if name in lines][:MAIN_ROWS]
    columns = [[row["plan"], *(lines[name][number] for name in names)] for number, row in enumerate(rows)]
    print_columns(console(to_stderr), ["", *names], columns)


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Print a table, the first row of which is its header and the first column its labels."""
    labels, *columns = zip(*rows)
    print_columns(console(), labels, columns)


def print_columns(
    out: Console, labels: Sequence[str], columns: Sequence[Sequence[str]], between_rows: bool = False
) -> None:
    """Print a table on a terminal of any width: nothing is left out, and neither words nor numbers are broken.

    As many columns as have room are side by side, then the next ones below, each time after the labels.

    Args:
        out: where to print.
        labels: the first column, with its header.
        columns: the others, each a header, which may be a plan, and a text for each label.
        between_rows: whether to draw lines between rows.
    """
    from rich.table import Column, Table

    for group in side_by_side(labels, columns, out.width):
        shown = [labels, *group]
        widths = _widths(shown, out.width)
        heads = [
            Column(cell(_broken(column[0], width)), width=width, overflow="fold")
            for column, width in zip(shown, widths)
        ]
        table = Table(*heads, show_lines=between_rows, show_header=any(column[0] for column in shown))
        for label, *texts in list(zip(*shown))[1:]:
            table.add_row(cell(_broken(label, widths[0])), *map(cell, texts))
        out.print(table)


def side_by_side(
    labels: Sequence[str], columns: Sequence[Sequence[str]], width: int
) -> Iterator[Sequence[Sequence[str]]]:
    """Yield as many columns as a table of this width has room for beside its labels, then the next ones."""
    group: list[Sequence[str]] = []
    for column in columns:
        wider = [labels, *group, column]
        if group and sum(map(_least, wider)) > _room(wider, width):
            yield group
            group = []
        group.append(column)
    if group:
        yield group


def _widths(columns: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the width of each column: what its words need, then the narrowest get what is left."""
    room, widths, most = _room(columns, width), list(map(_least, columns)), list(map(_most, columns))
    while sum(widths) > max(room, len(widths)):
        widths[widths.index(max(widths))] -= 1
    while sum(widths) < room and (growing := [index for index, own in enumerate(widths) if own < most[index]]):
        widths[min(growing, key=lambda index: widths[index])] += 1
    return widths


def _room(columns: Sequence[Sequence[str]], width: int) -> int:
    """Return the characters that the edges leave for texts."""
    return width - EDGE * len(columns) - 1


def _least(column: Sequence[str]) -> int:
    """Return the characters of the longest word of a column, of its header's longest part."""
    pieces = [*PARTS.findall(column[0]), *(word for text in column[1:] for word in plain(text).split())]
    return min(max(map(_length, pieces), default=1), LONGEST)


def _most(column: Sequence[str]) -> int:
    return max(_length(line) for text in column for line in plain(text).split("\n"))


def _length(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(plain(text))


def _broken(text: str, width: int) -> str:
    """Return a header or a label whose words, plans for instance, continue on the next line after a colon or comma."""
    words = []
    for word in text.split(" "):
        lines = [""]
        for part in PARTS.findall(word):
            if lines[-1] and _length(lines[-1] + part) > width:
                lines.append("")
            lines[-1] += part
        words.append("\n".join(lines))
    return " ".join(words)


def _visible(row: dict[str, Any]) -> str:
    tokens, density = row["sparse_layer_visible_tokens"], row["sparse_layer_density"]
    if tokens is None:  # no layer is sparse: every token is visible
        tokens, density = row["visible_tokens"], row["density"]
    return "" if tokens is None else f"{tokens:,.0f} ({_percent(density)})"


def _accepted(exact: dict[str, int]) -> str:
    pairs = (("drafts_accepted", "drafted"), ("repeats_accepted", "repeated"))
    return ", ".join(f"{exact.get(right, 0)} of {exact.get(tried, 0)}" for right, tried in pairs) if exact else ""


def _density(row: dict[str, Any]) -> str:
    dense = row["num_layers"] - row["num_sparse_layers"]
    of_layers = f", {dense} of {row['num_layers']} layers dense" if dense and row["num_sparse_layers"] else ""
    return _percent(row["density"]) + of_layers


def _bytes_read(row: dict[str, Any]) -> str:
    read, dense = row["kv_bytes_read"], row["kv_bytes_dense"]
    return f"{_bytes(read)} ({_percent(read / dense)} of dense)" if dense else ""


def _selection_time(row: dict[str, Any]) -> str:
    num_layers = max(len({layer["layer"] for layer in row["layers"]}), 1)
    steps = sum(phases["decode"]["queries"] for phases in row["phases"]) / num_layers
    return _milliseconds(row["select_s"] / steps) if steps and row["select_s"] else ""


def _index(layers: dict[int, list[dict[str, Any]]]) -> str:
    """Return how many layers, or KV heads, have each kind of index, and the recall of audits."""
    built = [part for rows in layers.values() for row in rows for part in row.get("indexes", ())]
    unit = "KV heads" if any("heads" in part for part in built) else "layers"
    kinds = Counter(kind for part in built for kind in part.get("heads", [part["kind"]]))
    texts = [f"{kind} in {count} {unit}" for kind, count in kinds.items()]
    shares = [share for rows in layers.values() for row in rows for share in row.get("audits", {}).get("found", ())]
    if shares:
        texts.append(f"{_percent(sum(shares) / len(shares))} of a scan's keys found in {len(shares)} audits")
    return ", ".join(texts)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f} s"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _bytes(amount: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if amount >= size:
            return f"{amount / size:.1f} {unit}"
    return f"{amount} B"


Show = Callable[[dict[str, Any]], str]

# The first eight that are not empty are shown, all of them under --verbose.
MAIN: dict[str, Show] = {
    "TTFT": lambda r: _seconds(r["ttft_s"]),
    "TTFT (document cached)": lambda r: _seconds(r["ttft_cached_s"] if r["read_s"] else None),
    "prefill density": lambda r: _percent(r["read_density"]) if (r["read_density"] or 1) < 1 else "",
    "TPOT": lambda r: _milliseconds(r["tpot_s"]),
    "exact: accepted drafts, repeats": lambda r: _accepted(r["exact"]),
    "visible tokens (sparse layers)": _visible,
    "density (all layers)": _density,
    "KV bytes read (with index)": _bytes_read,
    "attention mass recovered": lambda r: _percent(r["recovery"]),
    "attention estimated": lambda r: _percent(r["estimated_share"]),
    "KV cache": lambda r: _bytes(r["kv_bytes"]),
}
MORE: dict[str, Show] = {
    "top-10 token recall": lambda r: _percent(r["recall"]),
    "selection time per token": _selection_time,
    "index build time (in TTFT)": lambda r: _seconds(r["build_s"]) if r["build_s"] >= 0.005 else "",
    "prompt tokens": lambda r: f"{r['prompt_tokens']:,}",
    "generated tokens": lambda r: f"{r['generated_tokens']:,}",
    "finish reason": lambda r: ", ".join(f"{count} {reason}" for reason, count in r["finish_reasons"].items()),
    "decode path": lambda r: r["path"],
    "dense below": lambda r: f"{r['dense_below']:,} tokens" if r["dense_below"] else "",
    "host attention": lambda r: r["host"],
    "index": lambda r: _index(r["index"]),
    "peak memory of the process": lambda r: _bytes(r["peak_memory_bytes"]),
}
