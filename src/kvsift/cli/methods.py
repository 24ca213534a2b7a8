"""kvsift methods: what can be named in a plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvsift.cli import options as o

if TYPE_CHECKING:
    from kvsift.methods.base import Method
    from kvsift.types import LayerShape


def methods(as_json: o.JsonOption = False) -> None:
    """List every method with its phases and knobs."""
    rows = method_rows()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "chooses", "phases", "unit", "keeps", "state", "knobs", "source", show_lines=True)
    for row in rows:
        knobs = " ".join(f"{key}={value}" for key, value in row["knobs"].items())
        state = f"{row['state_bytes_per_token']:,.0f} B"
        about = (row["name"], row["summary"], " ".join(row["phases"]), row["granularity"], row["keeps"], state)
        table.add_row(*about, knobs, row["source"])
    console = Console()
    console.print(table)
    console.print(state_note())
    console.print("Every method but dense also takes: " + " ".join(f"{k}={v}" for k, v in budget_knobs().items()))


def method_rows() -> list[dict[str, Any]]:
    """The catalogue with what each method says about itself, as it is by default."""
    from kvsift.methods import catalogue, method_class

    return [_row(name, entry.summary, method_class(name)()) for name, entry in catalogue().items()]


def _row(name: str, summary: str, method: Method) -> dict[str, Any]:
    from dataclasses import fields

    knobs = {f.name: f.default for f in fields(method)}
    keeps = "all" if method.keeps_all else "hides"
    return {
        "name": name,
        "summary": summary,
        "phases": list(method.phases),
        "granularity": method.granularity,
        "keeps": f"{keeps}; evict=true frees" if "evict" in knobs else keeps,
        "state_bytes_per_token": method.state_bytes_per_token(_example_layer()),
        "knobs": knobs,
        "source": method.source,
    }


def state_note() -> str:
    """What the numbers of ``state_bytes_per_token`` are."""
    shape = _example_layer()
    kv_bytes = 2 * 2 * shape.num_kv_heads * shape.head_dim
    return (
        f"State: bytes per token and layer beside keys and values, which take {kv_bytes:,} in a layer of "
        f"{shape.num_query_heads} query and {shape.num_kv_heads} KV heads of {shape.head_dim} numbers in 16 bits."
    )


def _example_layer() -> LayerShape:
    from kvsift.types import LayerShape

    return LayerShape(layer=2, num_query_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)


def budget_knobs() -> dict[str, Any]:
    """Keys of every budget with their defaults, as a plan spells them."""
    from dataclasses import fields

    from kvsift.runtime.budget import Budget
    from kvsift.runtime.spec import BUDGET_KEYS

    defaults = {f.name: getattr(Budget(), f.name) for f in fields(Budget)}
    return {
        key: "+".join(map(str, value)) if isinstance(value := defaults[name], tuple) else value
        for key, name in BUDGET_KEYS.items()
    }
